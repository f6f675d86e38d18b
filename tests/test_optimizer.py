"""lowbit as a ``torch.optim.Optimizer``: what a user does with one, against torch's own AdamW and Adam."""

import copy
import pickle

import pytest
import torch
from cases import BF16_WEIGHTS, STATES, assert_same_state, parameter, randn, run, same_bits
from torch.optim import lr_scheduler

import lowbit

OPTIONS = (
    {},
    {"maximize": True},
    {"weight_decay": 0.3},
    {"weight_decay": 0.0},
    {"eps": 1e-3},
    {"betas": (0.5, 0.7)},
    {"betas": (0.0, 0.0)},
    {"lr": 0.0},
    {"lr": torch.tensor(2e-2)},
    {"lr": 0.1, "betas": (0.95, 0.98), "eps": 1e-15, "weight_decay": 0.1, "maximize": True},
)


@pytest.mark.parametrize("ours, torchs", ((lowbit.AdamW, torch.optim.AdamW), (lowbit.Adam, torch.optim.Adam)))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fp32_state_is_torchs_in_float64(ours, torchs, options):
    p, reference = parameter(9, 11), parameter(9, 11, dtype=torch.float64)
    reference.data.copy_(p.data)
    optimizer, expected = ours([p], state="fp32", **options), torchs([reference], **options)
    for step in range(50):
        g = randn(9, 11, seed=step)
        p.grad, reference.grad = g.clone(), g.double()
        optimizer.step()
        expected.step()
    lr = float(options.get("lr", 1e-3))
    # an fp32 rounding a step of the weight, and of an update a few; 50 steps of up to some lr each
    torch.testing.assert_close(p.double(), reference, rtol=50 * 2**-24, atol=50 * (2**-24 + lr * 2e-6))
    m, v = lowbit.decode(optimizer, p)
    state = expected.state[reference]
    torch.testing.assert_close(m.double(), state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v.double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-7)
    assert optimizer.state[p]["step"].item() == 50


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 10)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "onecycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=16),
    "sequential": sequential,
    "plateau": plateau,
}


@pytest.mark.parametrize("lr", (1e-2, torch.tensor(1e-2)), ids=("float", "tensor"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers(schedule, lr):
    histories, parameters = [], []
    for make in (lambda ps: lowbit.AdamW(ps, copy.deepcopy(lr), state="fp32"), None):
        p, q = parameter(5, 7), parameter(6, 4, seed=1)
        groups = [{"params": [p]}, {"params": [q], "weight_decay": 0.1}]
        optimizer = make(groups) if make else torch.optim.AdamW(groups, copy.deepcopy(lr))
        scheduler = SCHEDULES[schedule](optimizer)
        history = []
        for step in range(15):
            run(optimizer, (p, q), 1, first=step)
            scheduler.step(*([1.0] if schedule == "plateau" else []))
            history.append([(float(group["lr"]), *map(float, group["betas"])) for group in optimizer.param_groups])
        histories.append(history)
        parameters.append((p, q))
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
    assert histories[0] == histories[1]
    assert len({group[0][0] for group in histories[0]}) > 2
    for ours, torchs in zip(*parameters, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


def test_closure_runs_under_grad_mode():
    p = parameter(3, 3)
    optimizer = lowbit.AdamW([p], state="fp32")

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    before = float((p * p).sum())
    with torch.no_grad():
        assert float(optimizer.step(closure)) == pytest.approx(before)
    assert float((p * p).sum()) < before and p.grad is not None
    assert optimizer.step() is None and optimizer.step(closure=None) is None
    optimizer.zero_grad()
    assert p.grad is None
    run(optimizer, [p], 1)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad, torch.zeros(3, 3))


def test_each_parameter_counts_its_own_steps():
    """A parameter that misses gradients is where it would be had it only seen the steps it had; frozen ones stay."""
    p, q, frozen = parameter(64, 64), parameter(64, 64, seed=1), parameter(64, 64, seed=2).requires_grad_(False)
    optimizer = lowbit.AdamW([p, q, frozen], lr=1e-2)
    before = frozen.clone()
    alone = parameter(64, 64, seed=1)
    # q is parameter number 1: the same place here, so that its dither is the same
    other = lowbit.AdamW([parameter(64, 64), alone], lr=1e-2)
    for step in range(6):
        p.grad = randn(64, 64, seed=step)
        q.grad = randn(64, 64, seed=50 + step) if step % 2 else None
        alone.grad = randn(64, 64, seed=50 + step) if step % 2 else None
        optimizer.step()
        if step % 2:
            other.step()
    assert optimizer.state[p]["step"].item() == 6 and optimizer.state[q]["step"].item() == 3
    assert same_bits(q, alone) and same_bits(frozen, before) and frozen not in optimizer.state
    assert_same_state(optimizer.state[q], other.state[alone])


def test_tied_parameters_step_once():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(10, 8), "head": torch.nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    twin = parameter(10, 8)
    twin.data.copy_(model["embed"].weight.data)
    optimizer, other = lowbit.AdamW(model.parameters(), state="fp32"), torch.optim.AdamW([twin])
    for x, e, h in ((model, model["embed"].weight, model["head"].weight), (None, twin, twin)):
        tokens = torch.arange(10)
        (torch.nn.functional.embedding(tokens, e) @ h.T).square().sum().backward()
        (optimizer if x else other).step()
    assert len(optimizer.param_groups[0]["params"]) == 1
    torch.testing.assert_close(model["head"].weight, twin)


def test_two_optimizers_in_one_process():
    p, q = parameter(64, 64), parameter(64, 64)
    first, second = lowbit.AdamW8bit([p], 1e-2), lowbit.AdamW4bit([q], 1e-3)
    for step in range(4):
        run(first, [p], 1, first=step)
        run(second, [q], 1, first=step)
    alone = parameter(64, 64)
    run(lowbit.AdamW8bit([alone], 1e-2), [alone], 4)
    assert same_bits(p, alone) and not same_bits(p, q)


def test_default_dtype_does_not_reach_state():
    """A step counter in bf16 would stop at 256."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = parameter(64, 64)
        optimizer = lowbit.AdamW([p])
        p.grad = randn(64, 64)
        for _ in range(300):
            optimizer.step()
        clone = parameter(64, 64)
        loaded = lowbit.AdamW([clone])
        loaded.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    other = parameter(64, 64)
    expected = lowbit.AdamW([other])
    other.grad = randn(64, 64)
    for _ in range(300):
        expected.step()
    assert optimizer.state[p]["step"].item() == 300 and optimizer.state[p]["step"].dtype == torch.float32
    assert_same_state(optimizer.state[p], expected.state[other])
    assert_same_state(loaded.state[clone], expected.state[other])
    assert same_bits(p, other)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("p_dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_another_dtype(dtype, p_dtype):
    """The gradient is taken at its value, not rounded to the parameter's dtype first."""
    g = randn(64, 64, seed=9).to(dtype)
    results = []
    for gradient in (g, g.float()):
        p = parameter(64, 64, dtype=p_dtype)
        optimizer = lowbit.AdamW([p])
        p.grad = torch.zeros_like(p)
        p.grad.data = gradient  # as FSDP and other wrappers put it, past autograd's check
        optimizer.step()
        results.append((p, optimizer.state[p]))
    assert same_bits(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])


@pytest.mark.parametrize("state", STATES)
def test_gradients_at_new_addresses(state):
    """Their addresses and strides are of no account, and they are left as they were."""
    p, q = parameter(64, 65), parameter(64, 65)
    first, second = lowbit.AdamW([p], state=state), lowbit.AdamW([q], state=state)
    buffer = torch.empty(64, 65)
    for step in range(3):
        g = randn(64, 65, seed=step)
        p.grad = buffer.copy_(g)
        q.grad = torch.cat((g.T, g.T))[65:].clone().T
        first.step()
        second.step()
        assert torch.equal(q.grad, g) and torch.equal(p.grad, g)
    assert same_bits(p, q)
    assert_same_state(first.state[p], second.state[q])


@pytest.mark.parametrize("weights", BF16_WEIGHTS)
@pytest.mark.parametrize("state", STATES)
def test_no_random_generator(state, weights):
    """Whatever the generator's seed, the same bits; and the user's stream of random numbers is where he left it."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        p = parameter(64, 64, dtype=torch.bfloat16)
        optimizer = lowbit.AdamW([p], state=state, weights=weights)
        run(optimizer, [p], 3)
        assert torch.equal(torch.random.get_rng_state(), before)
        results.append((p, optimizer.state[p]))
    assert same_bits(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])


def test_seed_and_place_change_the_dither():
    """Other seeds and other places in the optimizer round otherwise; the same ones round alike."""

    def weights_of(seed, place):
        ps = [parameter(64, 64, dtype=torch.bfloat16) for _ in range(2)]
        optimizer = lowbit.AdamW(ps, seed=seed)
        for p in ps:
            p.grad = randn(64, 64, seed=3).bfloat16()
        optimizer.step()
        return ps[place]

    assert same_bits(weights_of(0, 0), weights_of(0, 0))
    for other in (weights_of(1, 0), weights_of(0, 1)):
        assert (other != weights_of(0, 0)).sum() > 100 and not same_bits(other, weights_of(0, 0))
        torch.testing.assert_close(other, weights_of(0, 0), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("state", STATES)
def test_grad_scaler_skips_the_step_whole(state):
    """An infinite gradient: parameters and state of all parameters untouched, the scale halved."""
    ps = [parameter(64, 64, seed=i, dtype=torch.float32) for i in range(2)]
    optimizer = lowbit.AdamW(ps, lr=1e-2, state=state)
    plain = [parameter(64, 64, seed=i) for i in range(2)]
    other = lowbit.AdamW(plain, lr=1e-2, state=state)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        gradients = [randn(64, 64, seed=10 * step + i) for i in range(2)]
        scaler.scale(torch.zeros(()))
        for p, q, g in zip(ps, plain, gradients, strict=True):
            p.grad, q.grad = g * scaler.get_scale(), g
        if step == 2:
            ps[1].grad[3, 3] = torch.inf
            before = [(p.clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in ps]
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            for p, (kept, state_before) in zip(ps, before, strict=True):
                assert same_bits(p, kept)
                assert_same_state(optimizer.state[p], state_before)
            assert scaler.get_scale() == 512.0
        else:
            other.step()
    for p, q in zip(ps, plain, strict=True):
        assert same_bits(p, q)
        assert_same_state(optimizer.state[p], other.state[q])


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))), ids=("deepcopy", "pickle"))
@pytest.mark.parametrize("state", STATES)
def test_copies_go_on_alike(copied, state):
    p = parameter(64, 64, dtype=torch.bfloat16)
    optimizer = lowbit.AdamW([p], state=state, weights="24bit", seed=3)
    run(optimizer, [p], 2)
    twin = copied(optimizer)
    q = twin.param_groups[0]["params"][0]
    assert q is not p and type(twin) is type(optimizer)
    for one, x in ((optimizer, p), (twin, q)):
        run(one, [x], 2, first=2)
    assert same_bits(p, q)
    assert_same_state(optimizer.state[p], twin.state[q])
