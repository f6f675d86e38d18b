"""From a parameter to its layout and pieces: shapes, memory formats, gradients of every kind."""

import copy
import itertools

import pytest
import torch
from cases import KEPT, SHAPES, STATES, assert_same_state, parameter, randn, run, same_bits

import lowbit
from lowbit.backends import eager
from lowbit.codecs import FORMATS
from lowbit.dither import parameter_offset, step_offset
from lowbit.plan import layout, pieces
from lowbit.state import allocate
from lowbit.weights import weight_mode

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "rows, width", ((1, 0), (1, 1), (1, 31), (1, 33), (1, 1000), (7, 5), (7, 64), (3, 1000), (2, 999))
)
@pytest.mark.parametrize("limit", (32, 64, 256))
def test_pieces_cover_every_element_once(rows, width, limit):
    seen = torch.zeros(rows, width, dtype=torch.int32)
    for row, last_row, column, last_column in pieces(rows, width, limit):
        assert column % 32 == 0
        assert (last_row - row) * (last_column - column) <= limit
        seen[row:last_row, column:last_column] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def test_pieces_of_huge_tensors():
    """Numbers above 2^31 stay right: no element is missed and none is taken twice."""
    rows, width, limit = 1, (1 << 33) + 40, 1 << 24
    cuts = list(pieces(rows, width, limit))
    assert cuts[0][2] == 0 and cuts[-1][3] == width
    assert all(a[3] == b[2] for a, b in itertools.pairwise(cuts))


def test_which_format_a_parameter_gets():
    """Matrices of ``min_numel`` elements and more take the group's format, vectors and small ones fp32."""

    def name(*shape, state="4bit", min_numel=4096):
        return layout(torch.Size(shape), BF16, state, "auto", min_numel).format.name

    assert name(64, 64) == name(4096, 1) == name(2, 2, 1024) == "4bit"
    assert name(63, 65) == name(1 << 20) == name() == name(0, 8) == "fp32"
    assert name(63, 65, min_numel=4095) == name(1, 1, min_numel=0) == "4bit"
    assert name(64, 64, state="fp8") == "8bit"


def test_shapes_of_state():
    """Codes and scales keep the rows as their first dimension; a block never crosses a row."""

    def shapes(state, *shape, weights="24bit"):
        found = layout(torch.Size(shape), BF16, state, weights, 0).tensors()
        return {name: (tuple(shape), dtype) for name, shape, dtype in found}

    u8 = torch.uint8
    assert shapes("8bit", 5, 70) == {
        "exp_avg": ((5, 70), u8), "exp_avg_scale": ((5, 3), u8),
        "exp_avg_sq": ((5, 70), u8), "exp_avg_sq_scale": ((5, 3), u8), "weight_low": ((5, 70), torch.int8),
    }  # fmt: skip
    assert shapes("4bit", 5, 3, 3, weights="32bit") == {
        "exp_avg": ((5, 5), u8), "exp_avg_scale": ((5, 1), torch.float32),
        "exp_avg_sq": ((5, 5), u8), "exp_avg_sq_scale": ((5, 1), u8), "weight_low": ((5, 3, 3), torch.int16),
    }  # fmt: skip
    assert shapes("bf16", 5, 70, weights="auto") == {"exp_avg": ((5, 70), BF16), "exp_avg_sq": ((5, 70), BF16)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state", STATES)
def test_every_shape_steps(state, shape):
    """Ragged, empty, 0-dim: the first step is lr a weight, moments are right within the format, state is as planned."""
    p = parameter(*shape, dtype=BF16)
    optimizer = lowbit.AdamW([p], lr=0.125, state=state, weights="32bit", min_numel=0, weight_decay=0.0)
    before = p.detach().clone()
    p.grad = torch.where(randn(*shape, seed=2) > 0, 1.0, -1.0).to(BF16)
    optimizer.step()
    assert p.shape == shape
    # the first step of Adam is lr times the sign of the gradient
    torch.testing.assert_close(p.float(), before.float() - 0.125 * p.grad.float(), rtol=2**-8, atol=1e-6)
    planned = layout(p.shape, p.dtype, state, "32bit", 0)
    assert {"step"} | {name for name, *_ in planned.tensors()} == set(optimizer.state[p])
    for name, wanted, dtype in planned.tensors():
        assert optimizer.state[p][name].shape == wanted and optimizer.state[p][name].dtype == dtype
    m, v = lowbit.decode(optimizer, p)
    torch.testing.assert_close(m, 0.1 * p.grad.float(), rtol=2**-3, atol=0)
    torch.testing.assert_close(v, torch.full(shape, 0.001), rtol=2**-1, atol=0)


@pytest.mark.parametrize("shape", ((64, 64), (33, 70), (3, 1000), (1000,), (5, 7, 11)), ids=str)
@pytest.mark.parametrize("state", ("8bit", "4bit", "bf16"))
def test_pieces_do_not_matter(state, shape):
    """Cut into pieces of any size, the same bits: a dither bit belongs to an element, not to its place in a piece."""
    results = []
    for limit in (64, 256, 1 << 20):
        p = randn(*shape, dtype=BF16)
        kept = layout(p.shape, BF16, state, "24bit", 0)
        kept = kept.with_format(FORMATS[state], torch.int8)
        tensors = allocate(kept, "cpu")
        update = eager.updater(lowbit.AdamW.rule, kept.format, kept.weights)
        for step in (1, 2, 3):
            scalars = (0.9, 0.999, 0.1, 0.001, 1e2, 1e-6, 1e-4, 1.0)
            g = randn(*shape, seed=step, dtype=BF16)
            eager.step_parameter(
                update, limit, kept, p, g, tensors, parameter_offset(0, 3), step_offset(step), scalars
            )  # fmt: skip
        results.append({"p": p, **tensors})
    assert_same_state(results[0], results[2])
    assert_same_state(results[1], results[2])


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode, dtype", KEPT)
def test_transposed_parameters(state, mode, dtype):
    """``nn.Parameter(x.t())``: stepped as its contiguous copy, and the base still sees every step."""
    base = randn(65, 96, dtype=dtype)
    p, q = torch.nn.Parameter(base.t()), torch.nn.Parameter(base.t().contiguous())
    first, second = lowbit.AdamW([p], state=state, weights=mode), lowbit.AdamW([q], state=state, weights=mode)
    strides = p.stride()
    for _ in range(2):
        run(first, [p], 1)
        run(second, [q], 1)
    assert same_bits(p.contiguous(), q) and p.stride() == strides
    assert same_bits(base.t().contiguous(), q) and base.data_ptr() == p.data_ptr()
    assert_same_state(first.state[p], second.state[q])


def test_channels_last_and_strided_views():
    conv = torch.nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(conv).to(memory_format=torch.contiguous_format)
    whole = randn(64, 128)
    part = torch.nn.Parameter(whole[:, ::2])
    rest = whole[:, 1::2].clone()
    alone = torch.nn.Parameter(part.detach().clone())
    first = lowbit.AdamW([conv.weight, part], lr=1e-2)
    second = lowbit.AdamW([plain.weight, alone], lr=1e-2)
    for step in range(3):
        run(first, [conv.weight, part], 1, first=step)
        run(second, [plain.weight, alone], 1, first=step)
        conv.weight.grad = None
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert same_bits(conv.weight, plain.weight) and same_bits(part, alone)
    assert torch.equal(whole[:, ::2], alone) and torch.equal(whole[:, 1::2], rest)
    for ours, theirs in ((conv.weight, plain.weight), (part, alone)):
        assert_same_state(first.state[ours], second.state[theirs])


def test_parameters_that_share_memory_with_others():
    """Views of one flat buffer: each moves its own part, and nothing beside it."""
    flat = randn(10000)
    before = flat.clone()
    p, q = torch.nn.Parameter(flat[3:4099].view(64, 64)), torch.nn.Parameter(flat[5000:9160].view(64, 65))
    optimizer = lowbit.AdamW([p, q], lr=1e-2)
    run(optimizer, [p, q], 2)
    outside = torch.ones(10000, dtype=torch.bool)
    outside[3:4099] = outside[5000:9160] = False
    assert torch.equal(flat[outside], before[outside])
    assert torch.equal(flat[3:4099].view(64, 64), p) and (flat[~outside] != before[~outside]).float().mean() > 0.99


def test_sparse_gradients_name_the_parameter():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(100, 64, sparse=True), "out": torch.nn.Linear(64, 64)})
    optimizer = lowbit.AdamW(model.named_parameters())
    before = [p.clone() for p in model.parameters()]
    model["out"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=r"'embed.weight' is sparse.*sparse=False"):
        optimizer.step()
    assert all(same_bits(p, q) for p, q in zip(model.parameters(), before, strict=True)) and not optimizer.state
    unnamed = torch.nn.Embedding(100, 64, sparse=True)
    optimizer = lowbit.AdamW(unnamed.parameters())
    unnamed(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0, of shape \(100, 64\) is sparse"):
        optimizer.step()


@pytest.mark.parametrize("maximize", (False, True))
def test_complex_is_torchs(maximize):
    start = torch.complex(randn(8, 9), randn(8, 9, seed=1))
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.to(torch.complex128))
    optimizer = lowbit.AdamW([p], lr=1e-2, maximize=maximize, state="fp32")
    expected = torch.optim.AdamW([q], lr=1e-2, maximize=maximize)
    for step in range(10):
        g = torch.complex(randn(8, 9, seed=2 * step), randn(8, 9, seed=2 * step + 1))
        p.grad, q.grad = g, g.to(torch.complex128)
        optimizer.step()
        expected.step()
    torch.testing.assert_close(p.detach().to(torch.complex128), q.detach(), rtol=1e-5, atol=1e-6)
    m, v = lowbit.decode(optimizer, p)
    assert m.is_complex() and m.shape == p.shape
    torch.testing.assert_close(m.to(torch.complex128), expected.state[q]["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v.to(torch.complex128), expected.state[q]["exp_avg_sq"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode, dtype", [kept for kept in KEPT if kept[1] != torch.float32])
@pytest.mark.parametrize("state", STATES)
def test_a_gradient_not_finite_damages_its_element_only(state, mode, dtype):
    """NaN, infinite, and NaNs of every 16-bit payload: they alone become NaN, and stay it."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    odd = every[~every.isfinite()][::5]
    p, q = parameter(64, 96, dtype=dtype), parameter(64, 96, dtype=dtype)
    damaged, clean = lowbit.AdamW([p], state=state, weights=mode), lowbit.AdamW([q], state=state, weights=mode)
    place = torch.zeros(64 * 96, dtype=torch.bool)
    place[torch.arange(len(odd)) * 7 % (64 * 96)] = True
    odd = odd.repeat(2)[: int(place.sum())]
    place = place.view(64, 96)
    for step in range(3):
        g = randn(64, 96, seed=step).to(dtype)
        p.grad, q.grad = g.clone(), g.clone()
        q.grad[place] = 0
        p.grad[place] = odd if step == 0 else 0
        damaged.step()
        clean.step()
    assert p[place].isnan().all() and not p[~place].isnan().any()
    if state in ("bf16", "fp32"):  # no blocks
        assert same_bits(p[~place], q[~place])


def test_init_states_allocates_what_the_step_uses():
    p, frozen = parameter(64, 64, dtype=BF16), parameter(64, 64).requires_grad_(False)
    optimizer = lowbit.AdamW([p, frozen], weights="24bit")
    optimizer.init_states()
    addresses = {name: x.data_ptr() for name, x in optimizer.state[p].items()}
    assert frozen not in optimizer.state and all(not x.any() for x in optimizer.state[p].values())
    run(optimizer, [p], 2)
    assert {name: x.data_ptr() for name, x in optimizer.state[p].items()} == addresses
    assert weight_mode("24bit", BF16).low == optimizer.state[p]["weight_low"].dtype


def test_decode_before_the_first_step_and_of_a_stranger():
    p = parameter(64, 70)
    optimizer = lowbit.AdamW([p], state="4bit")
    for x in lowbit.decode(optimizer, p):
        assert torch.equal(x, torch.zeros(64, 70))
    assert p not in optimizer.state
    with pytest.raises(ValueError, match="no parameter of shape"):
        lowbit.decode(optimizer, parameter(64, 70))
