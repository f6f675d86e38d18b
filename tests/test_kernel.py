"""The Triton backend, in Triton's interpreter where there is no GPU: the eager backend is its reference, bit by bit."""

import pytest
import torch
from cases import same_bits

import lowbit
from lowbit.ops import in_torch
from lowbit.weights import WEIGHTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((65, 32), (5, 40), (2, 3, 33), (7, 1), (3,), (), (0, 5))  # whole chunk and tail, ragged, small, empty
MODES = [(mode, dtype) for mode, dtype in WEIGHTS if dtype != torch.float32 or mode == "nearest"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter


def parameters(dtype, device):
    torch.manual_seed(1)
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES] + [torch.randn(12, 8).to(dtype).t()]
    return [torch.nn.Parameter(x.to(device)) for x in tensors]


def gradient(p, step):
    torch.manual_seed(step)
    return torch.randn(p.shape).to(p.dtype)


def assert_equal(reference, found):
    """Bit-equal on a CPU; on a GPU floats are close, and at most one code in 10^4 differs, and of few one.

    There multiply-adds are fused, root and quotient approximate.
    """
    if DEVICE == "cpu":
        assert same_bits(reference, found)
    elif reference.is_floating_point():
        torch.testing.assert_close(found.cpu(), reference, rtol=2**-7 if reference.itemsize == 2 else 1e-5, atol=1e-7)
    else:
        assert (reference != found.cpu()).sum() <= 1e-4 * reference.numel() + 1


def both(dtype, **options):
    ps, qs = parameters(dtype, "cpu"), parameters(dtype, DEVICE)
    options = {"lr": 1e-2, "min_numel": 0, **options}
    return ps, lowbit.AdamW(ps, backend="eager", **options), qs, lowbit.AdamW(qs, backend="triton", **options)


def compare(ps, a, qs, b):
    for p, q in zip(ps, qs, strict=True):
        assert a.state[p].keys() == b.state[q].keys()
        for name, x in a.state[p].items():
            if DEVICE == "cpu" or name != "weight_low":
                assert_equal(x, b.state[q][name])
            else:  # an ulp of fp32 moves many low parts: the weights that they are part of
                decode = in_torch(a._layouts[p].weights.decode)
                found, expected = decode(q.detach(), b.state[q][name]).cpu(), decode(p.detach(), x)
                torch.testing.assert_close(found, expected, rtol=2**-15 if x.itemsize == 1 else 1e-5, atol=1e-7)
        assert p.stride() == q.stride()
        if DEVICE == "cpu":
            assert same_bits(p.detach(), q.detach())
        else:
            torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=2**-7, atol=1e-6)


def run(dtype, **options):
    ps, a, qs, b = both(dtype, **options)
    for step in range(2):
        for p, q in zip(ps, qs, strict=True):
            p.grad = gradient(p, step)
            q.grad = p.grad.to(DEVICE, copy=True)  # at a new address each step
        if step:
            ps[4].grad = qs[4].grad = None
        for group in (*a.param_groups, *b.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        a.step(), b.step()
    compare(ps, a, qs, b)


@pytest.mark.parametrize("mode, dtype", MODES, ids=str)
@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_equal_to_eager(state, mode, dtype):
    run(dtype, state=state, weights=mode)


@pytest.mark.parametrize("state", ["12bit", "bf16", "fp32"])
def test_other_formats_equal_to_eager(state):
    run(torch.bfloat16, state=state)


def test_maximize_and_adam():
    run(torch.bfloat16, maximize=True, weight_decay=0.1)


def test_overflow_found_by_a_grad_scaler_skips_the_whole_step():
    ps, a, qs, b = both(torch.bfloat16)
    for step, (found, scale) in enumerate(((0.0, 4.0), (1.0, 4.0), (2.0, 4.0), (0.0, 0.5))):
        for optimizer, params, device in ((a, ps, "cpu"), (b, qs, DEVICE)):
            for p in params:
                p.grad = (gradient(p.cpu(), step) * scale).to(device).to(p.dtype)
            optimizer.grad_scale = torch.tensor([scale], device=device)
            optimizer.found_inf = torch.tensor([found], device=device)
            before = [p.detach().clone() for p in params]
            optimizer.step()
            if found:
                assert all(same_bits(x.cpu(), p.detach().cpu()) for x, p in zip(before, params, strict=True))
    compare(ps, a, qs, b)
    assert a.state[ps[0]]["step"].item() == 2


def test_state_moved_by_the_user_is_followed():
    ps, a, qs, b = both(torch.bfloat16)
    for step in range(2):
        for p, q in zip(ps, qs, strict=True):
            p.grad = gradient(p, step)
            q.grad = p.grad.to(DEVICE, copy=True)
        for state in b.state.values():
            for name in state:
                state[name] = state[name].clone()
        a.step(), b.step()
    compare(ps, a, qs, b)


def test_gradients_at_new_addresses_do_not_build_the_tables_anew():
    ps, qs = (parameters(torch.bfloat16, device)[:5] for device in ("cpu", DEVICE))
    a, b = (lowbit.AdamW(x, backend=name, min_numel=0) for x, name in ((ps, "eager"), (qs, "triton")))
    tables, kept = [], []  # kept, so that the next gradients are elsewhere
    for step in range(3):
        for p, q in zip(ps, qs, strict=True):
            p.grad = gradient(p, step)
            q.grad = p.grad.to(DEVICE, copy=True)
        kept.append([q.grad for q in qs])
        a.step(), b.step()
        tables.append(b._tables[qs[0].device])
    assert tables[0] is tables[1] is tables[2]
    assert len({x.data_ptr() for grads in kept for x in grads}) == 15
    compare(ps, a, qs, b)
