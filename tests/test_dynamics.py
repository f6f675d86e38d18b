"""The laws of the dynamics, for the eager backend: what a low-bit optimizer may do to its moments and its weights."""

import sys
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit.codecs import BF16, E3M1, E4M3, E5M3, FORMATS, SQUARE4, Codec
from lowbit.dither import m_bits, step_offset
from lowbit.ops import in_torch
from lowbit.weights import WEIGHTS, weight_mode

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from limits import LAWS, ours

SHAPE = (16, 256)  # the smallest parameter that is quantized
MODES_BY_DTYPE = [pytest.param(*row, id=f"{row[0]}-{row[1]}".replace("torch.", "")) for row in WEIGHTS]


def law_id(law):
    """The scenario, its options and its number."""
    return "-".join([law.scenario.__name__, *map(str, law.options.values()), law.key.replace(" ", "-")])


@pytest.fixture(scope="module")
def measured():
    """What the scenarios found, by format: laws of one scenario share its run."""
    return {state: {} for state in ("8bit", "4bit", "12bit")}


@pytest.mark.parametrize("law", LAWS, ids=law_id)
@pytest.mark.parametrize("state", ["8bit", "4bit", "12bit"])
def test_law(state, law, measured):
    found = law.measure(ours(state, "eager"), "cpu", SHAPE, measured[state])
    low, high = law.limits(state, found)
    assert low <= found[law.key] <= high


def optimizer_over(p, **options):
    return lowbit.AdamW([p], **{"weight_decay": 0.0, "backend": "eager", **options})


def run(p, gradient, steps, **options):
    """``steps`` steps of one gradient; the optimizer."""
    optimizer = optimizer_over(p, **options)
    p.grad = gradient.to(p.dtype)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def weight(optimizer, p):
    """The weight in float64, low bits included."""
    mode = weight_mode(optimizer.param_groups[0]["weights"], p.dtype)
    low = optimizer.state[p].get("weight_low")
    return in_torch(mode.decode)(p.detach(), low).double()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("state", FORMATS)
def test_a_bad_gradient_element_damages_only_itself(state, bad):
    """Where the clean gradient is zero the element cannot shape its block, so all others must agree to the bit."""
    torch.manual_seed(0)
    start, gradients = torch.randn(SHAPE), torch.randn(5, *SHAPE)
    gradients[:, 3, 40] = 0.0
    others = torch.ones(SHAPE, dtype=torch.bool)
    others[3, 40] = False
    found = []
    for value in (0.0, bad):
        p = torch.nn.Parameter(start.clone())
        optimizer = optimizer_over(p, state=state, lr=1e-3)
        for step, gradient in enumerate(gradients):
            p.grad = gradient.clone()
            if step == 4:
                p.grad[3, 40] = value
            optimizer.step()
        found.append((p, *lowbit.decode(optimizer, p)))
    for clean, damaged in zip(*found):
        assert torch.equal(clean[others], damaged[others])
    p.grad = gradients[0].clone()
    for _ in range(20):
        optimizer.step()
    for x in (p, *lowbit.decode(optimizer, p)):
        assert x[others].isfinite().all()


@pytest.mark.parametrize("mode, dtype", MODES_BY_DTYPE)
@pytest.mark.parametrize("state", FORMATS)
def test_zero_gradients_from_the_start_move_nothing(state, mode, dtype):
    torch.manual_seed(0)
    start = (torch.randn(65, 100) * 10 ** torch.empty(65, 100).uniform_(-4, 2)).to(dtype)
    p = torch.nn.Parameter(start.clone())
    run(p, torch.zeros(65, 100), 10, state=state, weights=mode, lr=1.0)
    assert torch.equal(p, start)


KEPT = ["stochastic", "24bit", "32bit"]


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("state", ["8bit", "4bit", "12bit", "bf16", "fp32"])
def test_small_updates_reach_bf16_weights(state, mode):
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = run(p, torch.ones(64, 64), 500, state=state, weights=mode, lr=1e-5)
    assert weight(optimizer, p).mean().item() == pytest.approx(0.995, abs=0.002)
    assert (weight(optimizer, p) - 0.995).abs().max() <= 2**-7 if mode == "stochastic" else 2**-15


def test_small_updates_are_lost_to_nearest_rounding():
    """Torch's way, as an option: half an ulp below 1 is 2^-9, 200 of these updates."""
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    run(p, torch.ones(64, 64), 500, weights="nearest", lr=1e-5)
    assert (p == 1.0).all()


@pytest.mark.parametrize("mode", KEPT)
def test_small_weight_decay_reaches_bf16_weights(mode):
    torch.manual_seed(0)
    start = torch.empty(64, 64).uniform_(1, 2).to(torch.bfloat16)
    p = torch.nn.Parameter(start.clone())
    optimizer = run(p, torch.zeros(64, 64), 2000, weights=mode, lr=1e-4, weight_decay=0.01)
    kept = weight(optimizer, p).sum() / start.double().sum()
    assert kept.item() == pytest.approx((1 - 1e-6) ** 2000, abs=2e-4)


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_second_moment_of_a_bf16_norm(state):
    """It keeps fp32 state; in bf16 v would stop at 0.25, where an addition of 0.1 % is less than half an ulp."""
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = run(p, torch.ones(64), 2000, state=state, betas=(0.9, 0.999), lr=1e-6)
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
    assert lowbit.decode(optimizer, p)[1].mean().item() == pytest.approx(1 - 0.999**2000, abs=1e-4)


@pytest.mark.parametrize("lr", [2e-5, 7e-5])
def test_bf16_weights_follow_a_steady_drift(lr):
    """The updates of 4000 steps are known exactly: a constant gradient's are all lr. Random rounding is 4.7 ulp off."""
    torch.manual_seed(0)
    start = torch.empty(64, 64).uniform_(1.5, 1.9).to(torch.bfloat16)
    exact, ulp = start.double() - 4000 * lr, 2**-7
    p = torch.nn.Parameter(start.clone())
    optimizer = run(p, torch.ones(64, 64), 4000, state="fp32", weights="stochastic", lr=lr)
    assert ((weight(optimizer, p) - exact) / ulp).square().mean().sqrt().item() <= 1.6


STEPS = 4096


def mean_over_dither(row, x):
    """What blocks ``x`` ``[blocks, 32]`` become on average over the dither of :data:`STEPS` steps."""
    first, lanes = torch.arange(len(x), dtype=torch.int32)[:, None] * 32, torch.arange(32, dtype=torch.int32)
    total = torch.zeros(x.shape, dtype=torch.float64)
    factor = (1.0,) if isinstance(row, Codec) else ()
    for step in range(STEPS):
        r = in_torch(m_bits)(first, lanes, step_offset(step))
        total += in_torch(row.decode)(*in_torch(row.encode)(x, r), *factor).double()
    return total / STEPS


@pytest.mark.parametrize(
    "row, smallest, cell",
    [
        pytest.param(E4M3, 2**-13, 1 / 8, id="e4m3"),
        pytest.param(E5M3, 2**-28, 1 / 8, id="e5m3"),
        pytest.param(E3M1, 2**-5, 1 / 2, id="e3m1"),
        pytest.param(SQUARE4, 1 / 49, 3, id="square4"),
        pytest.param(BF16, 2**-28, 2**-7, id="bf16"),
        *[
            pytest.param(WEIGHTS["stochastic", dtype], 2**-10, cell, id=f"weights-{dtype}".replace("torch.", ""))
            for dtype, cell in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10))
        ],
        pytest.param(WEIGHTS["24bit", torch.bfloat16], 2**-10, 2**-15, id="weights-24bit"),
    ],
)
def test_dither_is_unbiased(row, smallest, cell):
    """The mean over an even sequence strays by about log(n) / n of a cell; ``cell`` is one's size, relative to a value.

    Values lie between ``smallest`` and 1 times their block's largest: below, E4M3 has its subnormals, and the 4-bit
    formats their lowest cells, which are not meant to be unbiased.
    """
    torch.manual_seed(0)
    x = smallest ** torch.rand(16, 32, dtype=torch.float64)
    x[:, 0] = 1.0
    x = (x * 10 ** torch.empty(16, 1).uniform_(-1, 3)).float()
    found = mean_over_dither(row, x)
    assert ((found / x.double() - 1).abs().max() / cell).item() < 20 / STEPS


@pytest.mark.parametrize("part, expected", [(0.0, 0.0), (0.5, 0.0), (0.91, 0.0), (0.94, 0.25), (0.98, 0.75)])
def test_lowest_cell_of_4bit_m_rounds_up_in_its_last_part_only(part, expected):
    """Never below 0.92 of the way from zero to code 1, 1/49 of the block's largest; from there on ever more often."""
    x = torch.full((1, 32), part / 49)
    x[0, 0] = 1.0
    found = 49 * mean_over_dither(SQUARE4, x)[0, 1:]
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=0, atol=20 / STEPS if expected else 1e-6)


@pytest.mark.parametrize("beta1", [0.9, 0.95, 0.99])
def test_4bit_m_of_a_stopped_gradient_does_not_freeze_beside_a_steady_one(beta1):
    """The block's largest does not move, so no cell does: m must leave the lowest code all the same."""
    p = torch.nn.Parameter(torch.zeros(128, 32))
    optimizer = lowbit.AdamW4bit([p], lr=0.0, betas=(beta1, 0.999), backend="eager", min_numel=0)
    p.grad = torch.ones_like(p)
    for step in range(1500):
        if step == 100:
            p.grad[:, 16:] = 0.0
        optimizer.step()
    m, _ = lowbit.decode(optimizer, p)
    assert m[:, 16:].abs().max() == 0.0 and m[:, :16].min() > 0.9
