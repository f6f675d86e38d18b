"""Optimizer state of other libraries, saved by those libraries: the next step is theirs."""

import warnings

import bitsandbytes
import pytest
import torch
import torchao.optim
from cases import parameter, randn, run, through_a_file

import lowbit
from lowbit.loaders import BITSANDBYTES

SHAPES = ((70, 128), (4096, 2), (300,), (64, 3, 128), (4096, 3))
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PEERS = {
    "torchao-8bit": torchao.optim.AdamW8bit,
    "torchao-4bit": torchao.optim.AdamW4bit,
    "torchao-fp8": torchao.optim.AdamWFp8,
    "bitsandbytes-8bit": bitsandbytes.optim.AdamW8bit,
    "bitsandbytes-32bit": bitsandbytes.optim.AdamW,
}
# of an update: that of the weights of 1 in fp32, and as in the laws of the dynamics
ROUNDING = {"fp32": 2e-5, "8bit": 0.12, "12bit": 0.35, "4bit": 0.6}


@pytest.fixture(scope="module", params=PEERS)
def trained(request):
    """``(weights, state dict, updates of the peer's next step)`` after five steps; torchao's step without compiling."""
    ps = [parameter(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    optimizer = PEERS[request.param](ps, **OPTIONS)
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(optimizer, ps, 5)
        before, saved = [p.detach().clone() for p in ps], through_a_file(optimizer.state_dict())
        run(optimizer, ps, 1, first=5)
    return before, saved, [p.detach() - old for p, old in zip(ps, before, strict=True)]


def next_step(before, saved, state):
    """Parameters and optimizer after loading, and the updates of the next step."""
    qs = [torch.nn.Parameter(x.clone()) for x in before]
    optimizer = lowbit.AdamW(qs, lr=1.0, state=state)
    optimizer.load_state_dict(saved)
    run(optimizer, qs, 1, first=5)
    return qs, optimizer, [q.detach() - x for q, x in zip(qs, before, strict=True)]


@pytest.mark.parametrize("state", ROUNDING)
def test_the_next_step_is_the_other_librarys(trained, state):
    before, saved, theirs = trained
    qs, optimizer, ours = next_step(before, saved, state)
    assert optimizer.param_groups[0].keys() == lowbit.AdamW(qs).param_groups[0].keys()
    for q, mine, other in zip(qs, ours, theirs, strict=True):
        rounding = ROUNDING["fp32" if optimizer.state[q]["exp_avg"].dtype == torch.float32 else state]
        assert (mine - other).norm() <= rounding * other.norm()
        assert optimizer.state[q]["step"].item() == 6
    run(optimizer, qs, 3, first=6)
    assert all(q.isfinite().all() for q in qs)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("block", [256, 2048])
def test_bitsandbytes_blocks_of_both_sizes(block, wrapped):
    p = parameter(37, 301)
    moments = {1: randn(37, 301, seed=1), 2: randn(37, 301, seed=2).square()}
    state, expected = {"step": 7}, {}
    for number, x in moments.items():
        code = bitsandbytes.functional.create_dynamic_map(signed=number == 1)
        q, how = bitsandbytes.functional.quantize_blockwise(x, code=code, blocksize=block)
        state |= {f"state{number}": q, f"qmap{number}": code, f"absmax{number}": how.absmax}
        expected[number] = bitsandbytes.functional.dequantize_blockwise(q, how)
    state = {"step": state.pop("step"), BITSANDBYTES: state} if wrapped else state
    optimizer = lowbit.AdamW([p], state="fp32")
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [{**OPTIONS, "params": [0]}]})
    for found, number in zip(lowbit.decode(optimizer, p), (1, 2), strict=True):
        torch.testing.assert_close(found, expected[number], rtol=1e-6, atol=0)


def flash(exp_avg, exp_avg_sq, dtype):
    """FlashOptim's compressed state of a parameter, by the formulas of its paper."""
    m, root = exp_avg.view(-1, 32), exp_avg_sq.sqrt().view(-1, 32)
    m_scale, v_scale = m.abs().amax(1, keepdim=True), root.amax(1, keepdim=True)
    x = m / m_scale
    return {
        "step": torch.tensor(5.0),
        "exp_avg::quantized": (2 * x / (1 + x.abs()) * 127 + 0.5).floor().to(torch.int8).view(exp_avg.shape),
        "exp_avg::scales": m_scale.view(-1).half().view(dtype),
        "exp_avg_sq::quantized": (root / v_scale * 255 + 0.5).floor().to(torch.uint8).view(exp_avg.shape),
        "exp_avg_sq::scales": v_scale.view(-1).half().view(dtype),
    }


@pytest.mark.parametrize("weights, width, dtype", [("24bit", 3, torch.int8), ("32bit", 4, torch.int16)])
def test_flashoptims_state_and_its_wide_weights(weights, width, dtype):
    exact = randn(64, 96, seed=1)
    p = torch.nn.Parameter(exact.bfloat16())
    ulp = torch.exp2(torch.floor(torch.log2(p.detach().float().abs())) - 7)
    errors = ((exact - p.detach().float()) / (ulp / 2) * torch.iinfo(dtype).max).round().to(dtype)
    m, v = randn(64, 96, seed=2), randn(64, 96, seed=3).square()
    state = flash(m, v, torch.bfloat16)
    state["error_bits"] = errors.to(torch.bfloat16) if width == 3 else errors.view(torch.bfloat16)
    group = {**OPTIONS, "master_bytewidth": width, "quantize": True, "params": [0]}
    optimizer = lowbit.AdamW([p], state="fp32", weights=weights)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    found_m, found_v = lowbit.decode(optimizer, p)
    assert ((found_m - m).view(-1, 32).abs() <= 0.0085 * m.view(-1, 32).abs().amax(1, keepdim=True)).all()
    root = v.sqrt().view(-1, 32)
    assert ((found_v.sqrt().view(-1, 32) - root).abs() <= 0.0025 * root.amax(1, keepdim=True)).all()
    low = optimizer.state[p]["weight_low"]
    w = p.detach().float().view(torch.int32) + (low.to(torch.int32) << (8 if width == 3 else 0))
    assert ((w.view(torch.float32) - exact).abs() <= ulp / (200 if width == 3 else 60000)).all()


BROKEN = {
    "one moment": ({"step": 1, "state1": torch.zeros(8, 8)}, "one moment"),
    "one scale": ({"step": 1, "state1": torch.zeros(8, 8), "state2": torch.zeros(8, 8), "max1": 1}, "block_wise=False"),
    "strange blocks": (
        {
            "step": 1,
            **{f"state{i}": torch.zeros(8, 100, dtype=torch.uint8) for i in (1, 2)},
            **{f"qmap{i}": torch.zeros(256) for i in (1, 2)},
            **{f"absmax{i}": torch.zeros(7) for i in (1, 2)},
        },
        "7 scales for 800 elements",
    ),
    "no moment": ({"step": 1, "error_bits": torch.zeros(8, 8)}, "exp_avg"),
    "other shape": ({"step": 1, "state1": torch.zeros(8, 9), "state2": torch.zeros(8, 9)}, "no format"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_has_no_place_here_changes_nothing(case):
    state, message = BROKEN[case]
    p = parameter(8, 8)
    optimizer = lowbit.AdamW([p])
    run(optimizer, [p], 1)
    before = optimizer.state[p]["exp_avg"].clone()
    group = {**OPTIONS, "params": [0], "master_bytewidth": 3}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert torch.equal(optimizer.state[p]["exp_avg"], before) and optimizer.param_groups[0]["lr"] == 1e-3
