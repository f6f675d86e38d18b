"""Reading state dicts: of this library in any of its formats, of ``torch.optim.AdamW`` and ``Adam``, and of other
libraries (:mod:`lowbit.loaders`).

Everything is checked and converted before anything of the optimizer is changed.
"""

import copy
import logging

import torch

from lowbit import loaders
from lowbit.distributed import take
from lowbit.options import check_group
from lowbit.plan import here, plan, real
from lowbit.state import convert, found_layout

VERSION = 1  # of the formats; in every param group of a state dict as ``format_version``

# Options that say how this optimizer keeps state, and torch's that say how it computes: not taken from a state dict.
_OWN = {"params", "param_names", "state", "weights", "min_numel", "format_version"}
_TORCH = {"amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}

logger = logging.getLogger("lowbit")


def read(optimizer, state_dict):
    """``(options of each group, {parameter: (layout, state)})`` of a state dict, in the optimizer's own formats."""
    saved_groups, saved_states = parts(state_dict)
    own = optimizer.param_groups
    if len(saved_groups) != len(own):
        raise ValueError(f"the state dict has {len(saved_groups)} param groups, the optimizer {len(own)}")
    groups, states, converted = [], {}, {}
    for number, (saved, group) in enumerate(zip(saved_groups, own, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"param group {number} of the state dict has {len(saved['params'])} parameters, "
                f"that of the optimizer {len(group['params'])}"
            )
        groups.append(_options(saved, group, number))
        for key, p in zip(saved["params"], group["params"], strict=True):
            if saved_states.get(key):
                source, target, state = _state(saved_states[key], saved, p, group, f"parameter {key!r}")
                states[p] = (target, state)
                if source != target:
                    change = (source.format.name, target.format.name)
                    converted[change] = converted.get(change, 0) + 1
    for (source, target), count in converted.items():
        logger.info("lowbit: state of %d parameters converted from %s to %s", count, source, target)
    return groups, states


def parts(state_dict):
    """``(param groups, states)`` of a state dict; raises ``ValueError`` that says what was found instead."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"expected an optimizer's state dict, found a {type(state_dict).__name__}")
    if not {"state", "param_groups"} <= state_dict.keys():
        found = ", ".join(map(str, list(state_dict)[:4])) or "nothing"
        raise ValueError(f"expected an optimizer's state dict with 'state' and 'param_groups', found {found}")
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise ValueError("expected 'param_groups' to be a list of dicts with 'params', as state_dict() writes it")
    if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
        raise ValueError("expected 'state' to be a dict of dicts of tensors, as state_dict() writes it")
    for group in groups:
        if group.get("format_version", VERSION) > VERSION:
            raise ValueError(
                f"the state dict is of format version {group['format_version']}, this lowbit reads up to {VERSION}: "
                "upgrade lowbit"
            )
        if group.get("amsgrad"):
            raise ValueError("the state dict comes from amsgrad=True, whose third moment has no place here")
    return groups, states


def _options(saved, group, number):
    options = {
        name: copy.deepcopy(value) for name, value in saved.items() if name not in _OWN | _TORCH | loaders.OPTIONS
    }
    check_group({**group, **options}, f"param group {number} of the state dict")
    return options


def _state(saved, saved_group, p, group, name):
    """``(layout found, layout planned, state)`` of one parameter, on its device."""
    saved = loaders.loaded(saved, saved_group, p, name)
    missing = {"step", "exp_avg", "exp_avg_sq"} - saved.keys()
    if missing:
        raise ValueError(f"the state of {name} has no {sorted(missing)}, found {sorted(saved)}")
    target = plan(p, group)
    tensors = {key: _tensor(value, key, p) for key, value in saved.items()}
    plain = here(p)
    for key in ("exp_avg", "exp_avg_sq"):  # floating-point moments of any library are as good as ours in fp32
        x = tensors[key]
        if x.dtype in (torch.float16, torch.float64) and x.shape == plain.shape:
            tensors[key] = x.to(torch.float32)
    source = found_layout(target, tensors)
    if source is None:
        found = ", ".join(f"{key} {tuple(x.shape)} {x.dtype}" for key, x in tensors.items())
        raise ValueError(f"the state of {name}, of shape {tuple(p.shape)}, is of no format that lowbit reads: {found}")
    state = tensors if source == target else convert(source, target, tensors)
    # in one order in every process: torch gathers a sharded state tensor after tensor
    return source, target, {key: state[key] for key in ("step", *(key for key, _, _ in target.tensors()))}


def _tensor(value, key, p):
    """A tensor of its own, real, on the parameter's device; ``step`` is an fp32 scalar on the CPU."""
    if key == "step":
        if not isinstance(value, (int, float)) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            raise ValueError(f"expected 'step' to be a number or a tensor of one element, found {value!r}")
        return torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(()).clone()
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"expected a tensor for {key!r}, found a {type(value).__name__}")
    return real(take(value.detach(), p)).to(p.device, copy=True).contiguous()
