"""Options: read back as the user put them, checked in every group, honoured or refused."""

import inspect
import json

import pytest
import torch
from cases import OPTIMIZERS, STATES, parameter, randn, run, same_bits

import lowbit


@pytest.mark.parametrize("state", STATES)
def test_lr_at_any_time(state):
    """What the user puts is what is used and what is read back, float or tensor, and it is plain enough for JSON."""
    p, q = parameter(64, 64), parameter(64, 64)
    optimizer, other = lowbit.AdamW([p], 1e-3, state=state), lowbit.AdamW([q], 1e-3, state=state)
    for step, lr in enumerate((1e-4, torch.tensor(3e-3), 2, 0.5)):
        optimizer.param_groups[0]["lr"] = lr
        other.param_groups[0]["lr"] = float(lr)
        run(optimizer, [p], 1, first=step)
        run(other, [q], 1, first=step)
        assert optimizer.param_groups[0]["lr"] is lr
    assert same_bits(p, q)
    text = json.dumps({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})
    assert json.loads(text)["lr"] == 0.5
    json.dumps(optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize("backend", ("eager", "compiled"))
def test_tensor_lr_of_the_user_is_left_alone(backend):
    lr = torch.tensor(1e-2)
    p = parameter(4, 4)
    optimizer = lowbit.AdamW([p], lr, backend=backend)
    run(optimizer, [p], 3)
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == torch.tensor(1e-2).item()


def test_hooks_and_defaults():
    calls = []
    p = parameter(4, 4)
    optimizer = lowbit.AdamW8bit([p], lr=0.5, betas=(0.8, 0.9), weight_decay=0.25)
    assert optimizer.defaults["lr"] == 0.5 and optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["state"] == "8bit" and optimizer.defaults["weight_decay"] == 0.25
    assert optimizer.param_groups[0]["eps"] == 1e-8
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    run(optimizer, [p], 1)
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert calls == ["pre", "post", "save", "saved", "load", "loaded"]
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_groups_are_the_users():
    """Their number, order, options and dicts; named parameters keep their names."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(4, 2)})
    groups = [
        {"params": list(model["b"].named_parameters()), "lr": 0.1, "state": "4bit", "name": "head"},
        {"params": list(model["a"].named_parameters()), "weight_decay": 0.0},
    ]
    before = [dict(group) for group in groups]
    optimizer = lowbit.AdamW(groups, lr=1e-3)
    late = {"params": [("late", parameter(2, 2))], "seed": 5}
    kept = dict(late)
    optimizer.add_param_group(late)
    assert groups == before and late == kept
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-3, 1e-3]
    assert [group["state"] for group in optimizer.param_groups] == ["4bit", "8bit", "8bit"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.0, 1e-2]
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.param_groups[0]["name"] == "head" and optimizer.param_groups[2]["seed"] == 5
    assert optimizer.param_groups[0]["params"][0] is model["b"].weight
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", model["a"].weight)]})
    assert len(optimizer.param_groups) == 3


def test_options_of_a_group_may_change_between_steps():
    """State moves into the new format, and the run goes on from it."""
    p = parameter(64, 64, dtype=torch.bfloat16)
    optimizer = lowbit.AdamW([p], state="fp32", weights="nearest")
    run(optimizer, [p], 5)
    m, v = lowbit.decode(optimizer, p)
    optimizer.param_groups[0].update(state="8bit", weights="24bit", lr=0.0, weight_decay=0.0)
    p.grad = None
    optimizer.step()
    run(optimizer, [p], 1, first=5)
    assert optimizer.state[p]["exp_avg"].dtype == torch.uint8 and optimizer.state[p]["weight_low"].dtype == torch.int8
    assert optimizer.state[p]["step"].item() == 6
    g = randn(64, 64, seed=5000).bfloat16().float()
    new_m, new_v = lowbit.decode(optimizer, p)
    # encoded to nearest once, half a code in 8, and dithered once, a code in 8
    expected = 0.9 * m + 0.1 * g
    assert ((new_m - expected).abs() <= m.abs() / 16 + (expected.abs() + m.abs() / 16) / 8 + 1e-5).all()
    torch.testing.assert_close(new_v, 0.999 * v + 0.001 * g * g, rtol=0.2, atol=0)


@pytest.mark.parametrize("ours", OPTIMIZERS)
def test_signatures_are_torchs(ours):
    """Positional arguments, defaults and the rest of torch's signature, so that replacing the import is enough."""
    torchs, options = OPTIMIZERS[ours]
    p, q = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    mine, reference = ours([p]), torchs([q])
    for name in ("lr", "betas", "eps", "weight_decay", "maximize"):
        assert mine.defaults[name] == reference.defaults[name], name
    assert mine.param_groups[0]["state"] == options.get("state", "8bit")
    positional = ours([p], 0.5, (0.1, 0.2), 1e-3, 0.25, False).defaults
    assert [positional[name] for name in ("lr", "betas", "eps", "weight_decay")] == [0.5, (0.1, 0.2), 1e-3, 0.25]
    accepted = {"maximize": True, "foreach": False, "capturable": True, "differentiable": False, "fused": None}
    assert ours([p], **accepted).defaults["maximize"] is True
    names = list(inspect.signature(torchs).parameters)
    known = set(inspect.signature(lowbit.AdamW).parameters)
    assert set(names) - known <= {"decoupled_weight_decay"}
    with pytest.raises(TypeError):
        ours([p], nonsense=1)


@pytest.mark.parametrize("ours", OPTIMIZERS)
@pytest.mark.parametrize("option", ("amsgrad", "foreach", "differentiable"))
def test_what_is_not_supported_is_refused_with_the_reason(ours, option):
    with pytest.raises(ValueError, match=f"{option}=True is not supported: ."):
        ours([parameter(2)], **{option: True})


WRONG = (
    ({"lr": -1e-3}, "lr of .* is -0.001"),
    ({"lr": float("nan")}, "lr of .* is nan"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, "lr of .* tensor of 2 elements"),
    ({"lr": torch.tensor(-1.0)}, "lr of"),
    ({"betas": (0.9, 1.0)}, "betas of"),
    ({"betas": (-0.1, 0.9)}, "betas of"),
    ({"betas": (0.9,)}, "betas of"),
    ({"betas": (float("nan"), 0.9)}, "betas of"),
    ({"eps": -1e-8}, "eps of"),
    ({"weight_decay": -0.1}, "weight_decay of"),
    ({"state": "8bits"}, "unknown state='8bits' .* choose one of 8bit, fp8, 4bit"),
    ({"weights": "exact"}, "unknown weights='exact' .* choose one of auto, nearest"),
)


@pytest.mark.parametrize("options, message", WRONG)
def test_wrong_options_are_refused_in_every_group(options, message):
    with pytest.raises(ValueError, match=message):
        lowbit.AdamW([parameter(2, 2)], **options)
    groups = [{"params": [parameter(2, 2)]}, {"params": [parameter(2, 2)], **options}]
    with pytest.raises(ValueError, match=message) as raised:
        lowbit.AdamW(groups)
    assert "param group 1" in str(raised.value)
    optimizer = lowbit.AdamW([parameter(2, 2)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(2, 2)], **options})
    assert len(optimizer.param_groups) == 1


def test_contradictions_are_refused():
    p = parameter(2, 2)
    with pytest.raises(ValueError, match="fused=True asks for backend='compiled'"):
        lowbit.AdamW([p], fused=True, backend="eager")
    with pytest.raises(ValueError, match="bf16_stochastic_round=True contradicts weights='24bit'"):
        lowbit.AdamW([p], bf16_stochastic_round=True, weights="24bit")
    with pytest.raises(ValueError, match="unknown backend 'gpu'"):
        lowbit.AdamW([p], backend="gpu")
    with pytest.raises(ValueError, match="empty parameter list"):
        lowbit.AdamW([])
    with pytest.raises(TypeError):
        lowbit.AdamW(p)


def test_torchaos_name_for_stochastic_rounding():
    for value, mode in ((True, "stochastic"), (False, "nearest")):
        assert lowbit.AdamW8bit([parameter(2)], bf16_stochastic_round=value).defaults["weights"] == mode


@pytest.mark.parametrize("dtype", (torch.float64, torch.complex128))
def test_dtypes_that_are_not_kept_name_the_parameter(dtype):
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    with pytest.raises(TypeError, match=r"parameter 1 of group 0, of shape \(2, 2\)"):
        lowbit.AdamW([parameter(2), p])
    with pytest.raises(TypeError, match="parameter 'w'"):
        lowbit.AdamW([("v", parameter(2)), ("w", p)])


def test_low_bits_of_fp16_are_refused():
    with pytest.raises(ValueError, match=r"24bit.*float16.*use weights='auto'"):
        lowbit.AdamW([parameter(2, 2, dtype=torch.float16)], weights="24bit")


@pytest.mark.parametrize("options", ({"betas": (1.0, 0.9)}, {"state": "2bit"}, {"lr": -1.0}))
def test_a_group_changed_to_nonsense_is_refused_before_anything_moves(options):
    """Set between steps, as a scheduler would: an error, and not a step of nonsense."""
    p = parameter(64, 64)
    optimizer = lowbit.AdamW([p])
    run(optimizer, [p], 1)
    optimizer.param_groups[0].update(options)
    before = p.clone()
    with pytest.raises(ValueError, match="param group 0"):
        run(optimizer, [p], 1, first=1)
    assert same_bits(p, before) and optimizer.state[p]["step"].item() == 1
