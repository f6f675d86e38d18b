"""The reference backend: torch operations on pieces of a parameter small enough to stay in cache.

A piece is brought into tiles of ``[blocks, 32]``, stepped in place by :func:`updater`, and, where it had to be padded,
written back. The compiled backend is the same with the updater under ``torch.compile`` and larger pieces.
"""

import functools

import torch

from lowbit.ops import BLOCK, in_torch
from lowbit.plan import cut, pieces, tiled, untiled
from lowbit.tile import step_tile

CPU_PIECE = 1 << 19  # elements; fp32 temporaries of 2 MB stay in cache, and hide what a torch operation costs
DEVICE_PIECE = 1 << 24  # on a GPU enough to hide launches, and a bound on temporary memory


@functools.cache
def lanes(device):
    """0 … 31 on a device."""
    return torch.arange(BLOCK, dtype=torch.int32, device=device)


@functools.cache
def keep_freed_memory():
    """Let temporaries reuse memory instead of faulting it in anew, which takes longer than the arithmetic.

    glibc gives freed memory back to the system above a threshold that follows the largest block ever freed, up to
    32 MB (mallopt(3), M_MMAP_THRESHOLD): free one such block, whose pages are never touched.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


@functools.cache
def updater(rule, format, weights):
    """``update(p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, dither, scalars)``, in place on tiles."""
    tile = in_torch(step_tile)
    functions = [
        in_torch(f)
        for f in (
            rule, format.m.decode, format.m.encode, format.v.decode, format.v.encode, weights.decode, weights.encode
        )
    ]  # fmt: skip

    def update(p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, dither, scalars):
        old = (p, low, m_codes, m_scale, v_codes, v_scale)
        new = tile(p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, dither, *scalars, *functions)
        for target, value in zip(old, new, strict=True):
            if target is not None:
                target.copy_(value)

    return update


def step_parameter(update, limit, layout, p, g, state, offset, dither, scalars):
    """One parameter one step on, in place.

    ``p`` and ``g`` are real tensors of the layout's shape with any strides; ``offset`` is the number of the first
    element plus the parameter's own offset, ``dither`` and ``scalars`` are those of the step.
    """
    if not layout.numel:
        return
    keep_freed_memory()
    rows, width = layout.grid
    work = p.reshape(rows, width) if p.is_contiguous() else p.contiguous().view(rows, width)
    tensors = [work, state.get("weight_low"), g.reshape(rows, width)]
    tensors += [state.get(name) for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")]
    tensors = [x if x is None else x.view(rows, -1) for x in tensors]
    units = (BLOCK, BLOCK, BLOCK, layout.format.m.unit, 1, layout.format.v.unit, 1)
    for piece in pieces(rows, width, limit):
        step_piece(update, piece, layout.stride or width, tensors, units, offset, dither, scalars)
    if not p.is_contiguous():
        p.copy_(work.view(p.shape))


def step_piece(update, piece, stride, tensors, units, offset, dither, scalars):
    """One piece one step on; the numbers of elements grow by ``stride`` from row to row."""
    cuts = [x if x is None else cut(x, piece, unit) for x, unit in zip(tensors, units, strict=True)]
    tiles = [x if x is None else tiled(x, unit) for x, unit in zip(cuts, units, strict=True)]
    row, last_row, column, last_column = piece
    device = tensors[0].device
    starts = torch.arange(column, last_column, BLOCK, dtype=torch.int64, device=device)
    if last_row - row > 1:
        starts = starts + torch.arange(last_row - row, device=device)[:, None] * stride
    first = (starts + (row * stride + offset)).to(torch.int32).view(-1, 1)
    update(*tiles, first, lanes(device), dither, scalars)
    for x, tile in zip(cuts, tiles, strict=True):
        if x is not None and tile.data_ptr() != x.data_ptr():
            x.copy_(untiled(tile, x.shape))
