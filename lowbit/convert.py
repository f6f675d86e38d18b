"""State dicts from one format to another, without the model or a GPU, and what they hold."""

import logging

import torch

from lowbit.distributed import whole
from lowbit.optimizers import AdamW
from lowbit.state import decode_parameter

TARGETS = ("8bit", "fp8", "4bit", "12bit", "bf16", "fp32", "torch")
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
    if not is_optimizer(state_dict):
        raise ValueError("expected an optimizer's state dict with 'state' and 'param_groups'")
    groups = state_dict["param_groups"]
    states = {key: _plain(state) for key, state in state_dict["state"].items()}
    keys = [key for group in groups for key in group["params"]]
    if like is not None and not isinstance(like, dict):
        like = list(like)
        if len(like) != len(keys):
            raise ValueError(f"the state dict has {len(keys)} parameters, 'like' has {len(like)}")
        like = dict(zip(keys, like, strict=True))
    params = {key: _stand_in(states.get(key, {}), (like or {}).get(key), key) for key in keys}
    format = "fp32" if to == "torch" else to
    own = [
        {
            "params": [params[key] for key in group["params"]],
            "min_numel": group.get("min_numel", 4096),
            "weights": _mode(states.get(key) for key in group["params"]),
        }
        for group in groups
    ]
    optimizer = AdamW(own, state=format)
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
    state = {**state, **next((x for x in state.values() if isinstance(x, dict)), {})}
    packed = {"exp_avg_scale", "exp_avg_sq_scale"} <= state.keys()
    for name in ("weight_low", "exp_avg", "state1", "exp_avg::quantized"):
        x = state.get(name)
        if isinstance(x, torch.Tensor) and not (name == "exp_avg" and packed and _is_4bit(state)):
            return x.shape
    return None if packed else torch.Size(())


def _is_4bit(state):
    return state["exp_avg_scale"].dtype == torch.float32


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


def describe(state_dict):
    """What an optimizer's state dict holds: a list of rows, one for each kind of state.

    A row has ``kind``, ``tensors`` (parameters), ``bytes``, ``steps`` (lowest, highest), and for each moment whose
    codes this library knows ``zero`` and ``top``, the shares of its lowest and highest codes.
    """
    rows = {}
    for state in state_dict["state"].values():
        row = rows.setdefault(_kind(state), {"tensors": 0, "bytes": 0, "steps": [], "codes": {}})
        row["tensors"] += 1
        row["bytes"] += sum(_bytes(x) for x in state.values())
        if "step" in state:
            row["steps"].append(int(state["step"]))
        for name, (count, zero, top) in _codes(state).items():
            old = row["codes"].get(name, (0, 0, 0))
            row["codes"][name] = (old[0] + count, old[1] + zero, old[2] + top)
    return [
        {
            "kind": kind, "tensors": row["tensors"], "bytes": row["bytes"],
            "steps": (min(row["steps"], default=0), max(row["steps"], default=0)),
            "zero": {name: zero / max(count, 1) for name, (count, zero, _) in row["codes"].items()},
            "top": {name: top / max(count, 1) for name, (count, _, top) in row["codes"].items()},
        }
        for kind, row in rows.items()
    ]  # fmt: skip


def _bytes(x):
    if isinstance(x, dict):
        return sum(map(_bytes, x.values()))
    if hasattr(x, "__tensor_flatten__"):
        return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) and x.ndim else 0


def _kind(state):
    m = state.get("exp_avg")
    if "exp_avg_scale" in state:
        name = "4bit" if _is_4bit(state) else "8bit" if m.shape == state["exp_avg_sq"].shape else "12bit"
    elif any(isinstance(x, dict) for x in state.values()) or "state1" in state:
        name = "bitsandbytes"
    elif any("::" in key for key in state):
        name = "FlashOptim"
    elif hasattr(m, "__tensor_flatten__"):
        name = f"torchao {type(m).__name__}"
    else:
        name = str(m.dtype).removeprefix("torch.") if isinstance(m, torch.Tensor) else "unknown"
    low = state.get("weight_low")
    return name if low is None else f"{name}+{'24bit' if low.dtype == torch.int8 else '32bit'}"


def _codes(state):
    """For each moment in codes of this library: how many, how many of the lowest, how many of the highest."""
    if "exp_avg_scale" not in state:
        return {}
    kind = _kind(state).split("+")[0]
    masks = {"8bit": ((0x7F, 0x7E), (0xFF, 0xFF)), "12bit": ((0x7F, 0x7E), (15, 15)), "4bit": ((7, 7), (15, 15))}[kind]
    found = {}
    for (name, half), (mask, top) in zip((("exp_avg", kind == "4bit"), ("exp_avg_sq", kind != "8bit")), masks):
        codes = state[name].flatten()
        codes = torch.cat((codes & 15, codes >> 4)) if half else codes
        codes = codes & mask
        found[name] = (codes.numel(), int((codes == 0).sum()), int((codes == top).sum()))
    return found
