"""State dicts from one format to another, without the model or a GPU."""

import logging

import torch

from lowbit.checkpoint import parts
from lowbit.codecs import FORMATS
from lowbit.distributed import whole
from lowbit.optimizers import AdamW
from lowbit.state import decode_parameter

TARGETS = (*FORMATS, "torch")
_FOR_TORCH = {  # what torch.optim.AdamW wants in a group, and what it has where nobody said otherwise
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip

logger = logging.getLogger("lowbit")


def convert(state_dict, to, like=None):
    """An optimizer's state dict, of this or another library, in format ``to``; the argument is left alone.

    ``to`` is a state format, or ``torch`` for a state dict of ``torch.optim.AdamW`` in fp32. ``like`` gives the
    parameters' shapes, a list of parameters (or anything with a ``shape``) in the optimizer's order or a dict by the
    keys of the state dict; only 4-bit codes, two of which share a byte, don't tell them. Raises ``ValueError`` where
    that is missing, where the state dict is of no known kind, or where ``to`` is unknown.
    """
    if to not in TARGETS:
        raise ValueError(f"to={to!r} is none of {', '.join(TARGETS)}")
    groups, states = parts(state_dict)
    states = {key: _plain(state) for key, state in states.items()}
    keys = [key for group in groups for key in group["params"]]
    if like is not None and not isinstance(like, dict):
        like = list(like)
        if len(like) != len(keys):
            raise ValueError(f"the state dict has {len(keys)} parameters, 'like' has {len(like)}")
        like = dict(zip(keys, like, strict=True))
    params = {key: _stand_in(states.get(key, {}), (like or {}).get(key), key) for key in keys}
    own = [
        {
            **{name: group[name] for name in ("min_numel",) if name in group},
            "params": [params[key] for key in group["params"]],
            "weights": _mode(states.get(key) for key in group["params"]),
        }
        for group in groups
    ]
    optimizer = AdamW(own, state="fp32" if to == "torch" else to)
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    if to == "torch":
        return _for_torch(optimizer, groups, params)
    new = optimizer.state_dict()
    names = dict(enumerate(keys))
    for group, old in zip(new["param_groups"], groups, strict=True):
        group["params"] = list(old["params"])
        group.update({name: old[name] for name in ("param_names",) if name in old})
    return {"state": {names[i]: state for i, state in new["state"].items()}, "param_groups": new["param_groups"]}


def is_optimizer(tree):
    """Whether this is an optimizer's state dict."""
    return isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys()


def each(tree, change, path=()):
    """A tree of dicts and lists with ``change(path, state_dict)`` in the place of every optimizer's state dict."""
    if is_optimizer(tree):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: each(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(each(value, change, (*path, i)) for i, value in enumerate(tree))
    return tree


def _plain(state):
    """State without DTensors, and without FlashOptim's errors of weights, which mean nothing without the weights."""
    if "error_bits" in state:
        logger.warning("lowbit: the low bits of weights are left out: load the original state dict to keep them")
    return {key: whole(x) if isinstance(x, torch.Tensor) else x for key, x in state.items() if key != "error_bits"}


def _stand_in(state, like, key):
    """A parameter of the right shape; its values are never touched, and so take no memory."""
    dtype = torch.bfloat16 if "weight_low" in state else torch.float32
    shape = _shape(state) if like is None else like.shape
    if shape is None:
        raise ValueError(
            f"the 4-bit codes of parameter {key!r} do not tell its shape: give like=, or --model on the command line"
        )
    return torch.empty(shape, dtype=dtype)


def _shape(state):
    """The parameter's shape, as its state tells it; None if that is 4-bit codes alone."""
    state = {**state, **next((x for x in state.values() if isinstance(x, dict)), {})}  # of bitsandbytes
    format = format_of(state)
    packed = format is not None and format.m.bits == 4
    for name in ("weight_low", "state1", "exp_avg::quantized", *(() if packed else ("exp_avg",))):
        if name in state:
            return state[name].shape
    return None if packed else torch.Size(())


def format_of(state):
    """The row of the table of formats that a state with scales is in, by dtypes and shapes; None without scales."""
    if "exp_avg_scale" not in state:
        return None
    if state["exp_avg_scale"].dtype == FORMATS["4bit"].m.scale:
        return FORMATS["4bit"]
    return FORMATS["8bit" if state["exp_avg"].shape == state["exp_avg_sq"].shape else "12bit"]


def _mode(states):
    """The weight mode that keeps the low bits of a group's states."""
    dtypes = {state["weight_low"].dtype for state in states if state and "weight_low" in state}
    return "32bit" if torch.int16 in dtypes else "24bit" if dtypes else "auto"


def _for_torch(optimizer, groups, params):
    state = {}
    for group in groups:
        for key in group["params"]:
            if params[key] in optimizer.state:
                moments = decode_parameter(optimizer, params[key])
                step = optimizer.state[params[key]]["step"].clone()
                state[key] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    new = [{name: group.get(name, default) for name, default in _FOR_TORCH.items()} for group in groups]
    for group, old in zip(new, groups, strict=True):
        group["params"] = list(old["params"])
        group.update({name: old[name] for name in ("param_names", "initial_lr") if name in old})
    return {"state": state, "param_groups": new}
