"""State of one parameter: allocate it, encode it, decode it, convert it between any two layouts.

State is a dict of plain tensors under flat names: ``step`` (fp32 scalar on the CPU, as in torch.optim), ``exp_avg``,
``exp_avg_scale``, ``exp_avg_sq``, ``exp_avg_sq_scale``, ``weight_low`` as the layout needs.
"""

import torch

from lowbit.codecs import FORMATS
from lowbit.distributed import local_state, place
from lowbit.ops import BLOCK, in_torch
from lowbit.plan import plan, tiled, untiled
from lowbit.weights import low_bits_between

NEAREST = -0x80000000  # dither bits that round to nearest


def allocate(layout, device):
    """State before the first step: all moments zero."""
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for name, shape, dtype in layout.tensors():
        state[name] = torch.zeros(shape, dtype=dtype, device=device)
    return state


def _moments(layout):
    return (("exp_avg", layout.format.m), ("exp_avg_sq", layout.format.v))


def decode(layout, state):
    """``exp_avg`` and ``exp_avg_sq`` in fp32, of the parameter's shape."""
    rows, width = layout.grid
    decoded = []
    for name, codec in _moments(layout):
        if layout.numel == 0:
            decoded.append(torch.zeros(layout.shape, device=state[name].device))
            continue
        codes = tiled(state[name].reshape(rows, -1), codec.unit)
        scale = state[name + "_scale"].reshape(-1, 1) if codec.scale else None
        x = in_torch(codec.decode)(codes, scale, 1.0)
        decoded.append(untiled(x, (rows, width)).reshape(layout.shape).clone())
    return tuple(decoded)


def encode(layout, exp_avg, exp_avg_sq):
    """State tensors of a layout from fp32 moments, rounded to nearest, without ``step`` and ``weight_low``."""
    rows, width = layout.grid
    state = {}
    for (name, codec), x in zip(_moments(layout), (exp_avg, exp_avg_sq), strict=True):
        shape = layout.codes_shape(codec)
        if layout.numel == 0:
            state[name] = torch.zeros(shape, dtype=codec.codes, device=x.device)
            if codec.scale:
                state[name + "_scale"] = torch.zeros(layout.scale_shape, dtype=codec.scale, device=x.device)
            continue
        tiles = tiled(x.to(torch.float32).reshape(rows, width), BLOCK)
        codes, scale = in_torch(codec.encode)(tiles, torch.full_like(tiles, NEAREST, dtype=torch.int32))
        columns = -(-width * codec.unit // BLOCK)
        state[name] = untiled(codes, (rows, columns)).reshape(shape).clone()
        if codec.scale:
            state[name + "_scale"] = scale.reshape(layout.scale_shape).clone()
    return state


def convert(source, target, state):
    """State of one layout as state of another, each value within the target's rounding; the same tensors if equal."""
    new = {"step": state["step"]}
    if source.format == target.format:
        kept = [name for name, _, _ in target.tensors() if name != "weight_low"]
        new.update({name: state[name] for name in kept})
    else:
        new.update(encode(target, *decode(source, state)))
    if target.weights.low:
        new["weight_low"] = low_bits_between(state.get("weight_low"), target.weights.low, new["exp_avg"], target.shape)
    return new


def found_layout(p_layout, state):
    """The layout that saved tensors are in, judged by their names, shapes and dtypes; None if by no row of the table.

    ``p_layout`` is the parameter's own layout, and the first that is tried: where rows have one element, 8-bit and
    4-bit codes have the same shape.
    """
    found = {name: (tuple(x.shape), x.dtype) for name, x in state.items() if name != "step"}
    low = state["weight_low"].dtype if "weight_low" in state else None
    for format in (p_layout.format, *FORMATS.values()):
        candidate = p_layout.with_format(format, low)
        if candidate and found == {name: (shape, dtype) for name, shape, dtype in candidate.tensors()}:
            return candidate
    return None


def decode_parameter(optimizer, p):
    """``(exp_avg, exp_avg_sq)`` of parameter ``p`` in fp32, of its shape; zeros before its first step.

    Raises ``ValueError`` if the optimizer does not have the parameter.
    """
    for group in optimizer.param_groups:
        if any(p is other for other in group["params"]):
            planned = plan(p, group)
            state = local_state(optimizer.state.get(p) or allocate(planned, p.device))
            moments = decode(found_layout(planned, state), state)
            placed = place(p, planned.as_fp32(), dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True)))
            moments = tuple(placed.values())
            return tuple(torch.view_as_complex(x) for x in moments) if p.is_complex() else moments
    raise ValueError(f"the optimizer has no parameter of shape {tuple(p.shape)} that is this one")
