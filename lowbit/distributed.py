"""Sharded parameters: which part of one this process holds, and its state as DTensors placed like it.

State tensors keep the parameter's rows, and blocks lie inside rows, so the placements of a parameter are those of its
state and torch's own machinery (FSDP2, distributed checkpoints) shards and reshards both. An update depends on the
numbers of elements in the whole parameter, never on how it is cut.
"""

import functools
import math
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """The part of a parameter that this process holds: ``shape`` of ``whole``, from ``offset`` in its two dimensions.

    ``columns`` is the number of shards that dimension 1 is cut into.
    """

    whole: torch.Size
    shape: torch.Size
    offset: tuple[int, int]
    columns: int = 1

    @property
    def start(self):
        """Number of the first element in the whole parameter."""
        row, column = self.offset
        return row * math.prod(self.whole[1:]) + column * math.prod(self.whole[2:])


def is_dtensor(x):
    """Whether ``x`` is a DTensor; there is none before its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x):
    """The tensor of this process: of a DTensor its local part, of another tensor itself."""
    return x.to_local() if is_dtensor(x) else x


def whole(x):
    """The whole of a tensor: of a DTensor gathered from all its processes, which all must call."""
    return x.detach().full_tensor() if is_dtensor(x) else x.detach()


def local_state(state):
    """A parameter's state as plain tensors, those of this process."""
    return {name: local(x) for name, x in state.items()}


def part(p):
    """The :class:`Part` of a parameter; raises ``ValueError`` for a placement that state can't follow."""
    if not is_dtensor(p):
        return Part(p.shape, p.shape, (0, 0))
    return _part(p.shape, p.device_mesh, tuple(p.placements))


@functools.lru_cache(maxsize=65536)
def _part(whole, mesh, placements):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    columns = 1
    for dim, placement in enumerate(placements):
        sharded = placement.is_shard()
        if not (placement.is_replicate() or (sharded and placement.dim in (0, 1))):
            raise ValueError(
                f"a parameter of shape {tuple(whole)} is placed as {placement} on dimension {dim} of its mesh: lowbit "
                "follows Replicate(), Shard(0) and Shard(1)"
            )
        if sharded and placement.dim == 1:
            columns *= mesh.size(dim)
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    return Part(whole, torch.Size(shape), (*offset, 0, 0)[:2], columns)


def place(p, layout, tensors):
    """State tensors of this process as the parameter's state: DTensors with its placements, if it is one."""
    if not is_dtensor(p):
        return tensors
    from torch.distributed.tensor import DTensor

    shapes = {name: torch.Size(shape) for name, shape, _ in layout.whole(p.shape).tensors()}
    return {
        name: x if name == "step" else DTensor.from_local(
            x, p.device_mesh, p.placements, run_check=False, shape=shapes[name], stride=_strides(shapes[name])
        )
        for name, x in tensors.items()
    }  # fmt: skip


def _strides(shape):
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def take(x, p):
    """The part of a state tensor ``x`` that belongs to this process's part of ``p``, whatever ``x`` is placed like."""
    if is_dtensor(x):
        same = is_dtensor(p) and x.device_mesh == p.device_mesh and tuple(x.placements) == tuple(p.placements)
        if same:
            return x.to_local()
        x = whole(x)
    if is_dtensor(p):
        found = part(p)
        if x.ndim and p.ndim and x.shape[0] != p.shape[0]:
            raise ValueError(
                f"expected the whole state of a parameter of {p.shape[0]} rows, found a tensor of {x.shape[0]} rows: "
                "save and load sharded state by torch.distributed.checkpoint"
            )
        for dim in range(min(2, x.ndim, p.ndim)):
            size, full = x.shape[dim], max(found.whole[dim], 1)  # rows, or columns of a scale or of packed codes
            x = x.narrow(dim, found.offset[dim] * size // full, found.shape[dim] * size // full)
    return x


def align_gradient(p):
    """Bring a gradient that is placed otherwise than its parameter, as partial sums are, to the parameter's places."""
    if is_dtensor(p.grad) and p.grad.placements != p.placements:
        p.grad = p.grad.redistribute(placements=p.placements)
