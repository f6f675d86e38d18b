"""State dicts: bit-equal resume, other optimizers' and other formats' states, and what does not fit."""

import copy
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import KEPT, STATES, assert_same_state, parameter, randn, run, same_bits, through_a_file

import lowbit

BF16 = torch.bfloat16
SHAPES = ((64, 64), (65, 70), (70,), (4, 5, 230))


def make(state, mode, dtype, **options):
    """Parameters of several shapes in two groups, and their optimizer."""
    ps = [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)]
    groups = [{"params": ps[:2]}, {"params": ps[2:], "lr": 3e-3, "betas": (0.8, 0.95)}]
    return ps, lowbit.AdamW(groups, lr=1e-2, state=state, weights=mode, weight_decay=0.1, **options)


def saved(ps, optimizer):
    return through_a_file({"model": [p.detach() for p in ps], "optimizer": optimizer.state_dict()})


def assert_equal_runs(ps, optimizer, qs, other):
    for p, q in zip(ps, qs, strict=True):
        assert same_bits(p, q)
        assert_same_state(optimizer.state[p], other.state[q])


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode, dtype", KEPT)
def test_resume_is_bit_equal(state, mode, dtype):
    """n steps, save, load into a new optimizer, n steps = 2n steps; the second has another seed until it loads."""
    ps, whole = make(state, mode, dtype, seed=7)
    run(whole, ps, 3)
    file = saved(ps, whole)
    run(whole, ps, 3, first=3)
    qs, resumed = make(state, mode, dtype, seed=1)
    for q, weights in zip(qs, file["model"], strict=True):
        q.data.copy_(weights)
    resumed.load_state_dict(file["optimizer"])
    run(resumed, qs, 3, first=3)
    assert_equal_runs(ps, whole, qs, resumed)
    for a, b in zip(whole.param_groups, resumed.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


def continue_in_this_process(source, target):
    """The second half of a run: what :func:`test_resume_in_a_new_process` starts."""
    file = torch.load(source, weights_only=True)
    ps, optimizer = make("4bit", "24bit", BF16)
    for p, weights in zip(ps, file["model"], strict=True):
        p.data.copy_(weights)
    optimizer.load_state_dict(file["optimizer"])
    run(optimizer, ps, 3, first=3)
    torch.save({"model": [p.detach() for p in ps], "optimizer": optimizer.state_dict()}, target)


def test_resume_in_a_new_process(tmp_path):
    ps, whole = make("4bit", "24bit", BF16)
    run(whole, ps, 3)
    torch.save({"model": [p.detach() for p in ps], "optimizer": whole.state_dict()}, tmp_path / "half.pt")
    run(whole, ps, 3, first=3)
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; import test_resume as t; t.continue_in_this_process(*sys.argv[2:])"
    )
    arguments = [str(Path(__file__).parent), str(tmp_path / "half.pt"), str(tmp_path / "end.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=120)
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    for number, p in enumerate(ps):
        assert same_bits(p, end["model"][number])
        assert_same_state(whole.state[p], end["optimizer"]["state"][number])


def test_state_dict_is_plain(tmp_path):
    """Tensors and plain values only: through safetensors and back, and the run goes on bit-equal."""
    from safetensors.torch import load_file, save_file

    ps, whole = make("8bit", "24bit", BF16)
    run(whole, ps, 2)
    state = whole.state_dict()
    flat = {f"{key}/{name}": x for key, tensors in state["state"].items() for name, x in tensors.items()}
    assert all(type(x) is torch.Tensor for x in flat.values())
    plain = (int, float, str, bool, type(None))
    for group in state["param_groups"]:
        for value in group.values():
            assert isinstance(value, plain) or all(isinstance(x, plain) for x in value)
    save_file(flat, tmp_path / "state.safetensors")
    states = {}
    for name, x in load_file(tmp_path / "state.safetensors").items():
        key, part = name.split("/")
        states.setdefault(int(key), {})[part] = x
    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
    other = lowbit.AdamW([{"params": qs[:2]}, {"params": qs[2:]}], weights="24bit")
    other.load_state_dict({"state": states, "param_groups": state["param_groups"]})
    run(whole, ps, 2, first=2)
    run(other, qs, 2, first=2)
    assert_equal_runs(ps, whole, qs, other)


def test_loaded_state_is_the_optimizers_own():
    """Later steps, and a scheduler's writes into a tensor lr, reach neither the loaded dict nor its optimizer."""
    p, q = parameter(64, 64), parameter(64, 64)
    first, second = lowbit.AdamW([p], torch.tensor(1e-2)), lowbit.AdamW([q], torch.tensor(1.0))
    run(first, [p], 2)
    state = first.state_dict()
    before = copy.deepcopy(state)
    second.load_state_dict(state)
    run(second, [q], 2)
    second.param_groups[0]["lr"].fill_(5.0)
    assert_same_state(state["state"][0], before["state"][0])
    assert state["param_groups"] == before["param_groups"]
    assert first.param_groups[0]["lr"].item() == before["param_groups"][0]["lr"].item()


@pytest.mark.parametrize("torchs", (torch.optim.AdamW, torch.optim.Adam))
@pytest.mark.parametrize("state", STATES)
def test_from_torch(torchs, state):
    """A float32 checkpoint into a bf16 model: moments to nearest in the format, never in the parameter's dtype."""
    q = parameter(64, 70)
    source = torchs([q, parameter(5)], lr=2e-3, betas=(0.8, 0.99))
    run(source, [q], 5)
    p = parameter(64, 70, dtype=BF16)
    optimizer = lowbit.AdamW([p, parameter(5, dtype=BF16)], state=state)
    optimizer.load_state_dict(through_a_file(source.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 2e-3 and optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    assert optimizer.param_groups[0]["state"] == state and optimizer.state[p]["step"].item() == 5
    assert_within(state, lowbit.decode(optimizer, p), (source.state[q]["exp_avg"], source.state[q]["exp_avg_sq"]))
    g = randn(64, 70, seed=77)
    p.grad, q.grad = g.to(BF16), g
    optimizer.step()
    assert p.isfinite().all() and optimizer.state[p]["step"].item() == 6


# Half a code, relative, by mantissa bits: m of 8bit and 12bit 3 and bf16 7; v of 8bit 3, of 4bit and 12bit 1.
M_ERROR = {"8bit": 2**-4, "12bit": 2**-4, "bf16": 2**-8, "fp32": 0.0}
V_ERROR = {"8bit": 2**-4, "12bit": 2**-2, "4bit": 2**-2, "bf16": 2**-8, "fp32": 0.0}


def blocks(x):
    """Largest magnitude of each element's block, in its place."""
    rows = x.reshape(x.shape[0], -1)
    whole = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 32)).view(rows.shape[0], -1, 32)
    return whole.abs().amax(-1).repeat_interleave(32, 1)[:, : rows.shape[1]].reshape(x.shape)


def assert_within(state, found, exact):
    """Moments within the rounding to nearest of a format, and below its lowest code within that."""
    (m, v), (m_exact, v_exact) = found, exact
    top = blocks(m_exact)
    if state == "4bit":  # (c/7)²: half of the widest cell, 13/49 of the largest; the lowest is 1/49
        assert ((m - m_exact).abs() <= top * (6.5 / 49 + 1e-6)).all()
    else:
        floor = top * 2.0**-17 if state in ("8bit", "12bit") else 0.0  # E4M3's subnormals
        assert ((m - m_exact).abs() <= m_exact.abs() * (M_ERROR[state] + 1e-6 * (M_ERROR[state] > 0)) + floor).all()
    lowest = {"8bit": 2.0**-31, "4bit": 2.0**-6, "12bit": 2.0**-6}.get(state, 0.0) * blocks(v_exact)
    assert ((v - v_exact).abs() <= v_exact * V_ERROR[state] + lowest).all()


@pytest.mark.parametrize("source, target", itertools.permutations(STATES, 2))
def test_between_formats(source, target):
    """A state dict of any format into any other: within the target's rounding of what the source held."""
    ps, first = make(source, "24bit", BF16)
    run(first, ps, 3)
    qs, second = make(target, "32bit", BF16)
    second.load_state_dict(through_a_file(first.state_dict()))
    for p, q in zip(ps, qs, strict=True):
        vector = p.dim() == 1
        assert_within("fp32" if vector else target, lowbit.decode(second, q), lowbit.decode(first, p))
        low8, low16 = first.state[p]["weight_low"], second.state[q]["weight_low"]
        assert torch.equal(low16.int(), low8.int() << 8)
        assert second.state[q]["step"].item() == 3
    assert all(group["state"] == target and group["weights"] == "32bit" for group in second.param_groups)
    run(second, qs, 1, first=3)


def test_a_conversion_is_logged(caplog):
    ps, first = make("fp32", "auto", BF16)
    run(first, ps, 1)
    with caplog.at_level("INFO", logger="lowbit"):
        make("4bit", "auto", BF16)[1].load_state_dict(first.state_dict())
    assert "3 parameters converted from fp32 to 4bit" in caplog.text


def damaged(change):
    """A state dict of the right optimizer, changed."""
    ps, optimizer = make("8bit", "24bit", BF16)
    run(optimizer, ps, 2)
    state = copy.deepcopy(optimizer.state_dict())
    return change(state) or state


def without(*path):
    """A change that takes one entry out of a state dict."""

    def change(state):
        for key in path[:-1]:
            state = state[key]
        state.pop(path[-1])

    return change


def replaced(name, value):
    return lambda state: state["state"][1].update({name: value})


def group(**options):
    return lambda state: state["param_groups"][1].update(options)


DAMAGES = {
    "not a dict": (lambda state: [1, 2], "expected an optimizer's state dict, found a list"),
    "another file": (lambda state: {"model": 1, "epoch": 2}, "with 'state' and 'param_groups', found model, epoch"),
    "empty": (lambda state: {"nothing": 0}, "expected an optimizer's state dict"),
    "fewer groups": (without("param_groups", -1), "has 1 param groups, the optimizer 2"),
    "fewer parameters": (
        without("param_groups", 1, "params", -1),
        "group 1 .* has 1 parameters",
    ),
    "no second moment": (without("state", 1, "exp_avg_sq"), "has no .*exp_avg_sq"),
    "no scale": (without("state", 1, "exp_avg_scale"), r"of shape \(65, 70\), is of no format that lowbit reads"),
    "another shape": (replaced("exp_avg", torch.zeros(3, 3)), r"is of no format .*exp_avg \(3, 3\)"),
    "another dtype": (replaced("exp_avg_sq", torch.zeros(65, 70, dtype=torch.int64)), "is of no format"),
    "low bits of another shape": (replaced("weight_low", torch.zeros(3, dtype=torch.int8)), "is of no format"),
    "low bits of another dtype": (replaced("weight_low", torch.zeros(65, 70)), "is of no format"),
    "a step that is no number": (replaced("step", "many"), "step"),
    "no tensor": (replaced("exp_avg", "text"), "expected a tensor for 'exp_avg', found a str"),
    "state is no dict": (lambda state: state["state"].update({1: [1, 2]}), "state"),
    "states are no dict": (lambda state: {**state, "state": 3}, "state"),
    "groups are no dicts": (lambda state: {**state, "param_groups": [1, 2]}, "param"),
    "groups are no list": (lambda state: {**state, "param_groups": 5}, "param_groups"),
    "groups without parameters": (without("param_groups", 0, "params"), "params"),
    "nonsense lr": (group(lr="fast"), "lr"),
    "negative lr": (group(lr=-1.0), "lr of param group 1 of the state dict"),
    "betas of one": (group(betas=(0.9, 1.0)), "betas of param group 1 of the state dict"),
    "amsgrad": (group(amsgrad=True), "amsgrad"),
    "a later version": (group(format_version=999), "format version 999.*upgrade lowbit"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_changes_nothing(damage):
    change, message = DAMAGES[damage]
    state = damaged(change)
    ps, optimizer = make("8bit", "24bit", BF16)
    run(optimizer, ps, 1)
    groups = [dict(group) for group in optimizer.param_groups]
    before = [{name: x.clone() for name, x in optimizer.state[p].items()} for p in ps]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups == groups
    for p, kept in zip(ps, before, strict=True):
        assert_same_state(optimizer.state[p], kept)


def test_a_fresh_optimizers_state_dict_loads():
    """Before any step there is no state; loading it empties what was there."""
    ps, optimizer = make("8bit", "auto", BF16)
    fresh = make("8bit", "auto", BF16)[1].state_dict()
    run(optimizer, ps, 1)
    optimizer.load_state_dict(fresh)
    assert not optimizer.state
    qs, other = make("8bit", "auto", BF16)
    for p, q in zip(ps, qs, strict=True):
        q.data.copy_(p.data)
    run(optimizer, ps, 2)
    run(other, qs, 2)
    assert_equal_runs(ps, optimizer, qs, other)
