"""From a parameter and its group to the layout of its state: format, rows, blocks, shapes."""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from lowbit.codecs import FORMATS, Format
from lowbit.distributed import Part, local, part
from lowbit.ops import BLOCK
from lowbit.weights import WEIGHTS, WeightMode, weight_mode


@dataclass(frozen=True)
class Layout:
    """How one parameter and its state are kept.

    A parameter is seen as ``rows = shape[0]`` rows of ``row_len`` elements; a row is cut into blocks of 32, the last
    of which may be shorter. Codes and scales keep the rows as their first dimension.
    """

    shape: torch.Size
    dtype: torch.dtype
    format: Format
    weights: WeightMode
    stride: int | None = None  # elements from row to row of the whole, where columns are sharded

    @property
    def numel(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self):
        """First dimension; 1 for a 0-dim parameter."""
        return self.shape[0] if self.shape else 1

    @property
    def row_len(self):
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def grid(self):
        """The parameter as ``[rows, width]`` to be cut into tiles: one row where blocks are consecutive in memory."""
        whole_blocks = self.row_len % BLOCK == 0 or not self.format.blocked
        return (1, self.numel) if whole_blocks and self.stride is None else (self.rows, self.row_len)

    def codes_shape(self, codec):
        """Shape of a code tensor: the parameter's, or ``[rows, bytes]`` where two codes share a byte."""
        return (self.rows, -(-self.row_len // 2)) if codec.bits == 4 else tuple(self.shape)

    @property
    def scale_shape(self):
        """Shape of a scale tensor, ``[rows, blocks of a row]``."""
        return (self.rows, -(-self.row_len // BLOCK))

    def tensors(self):
        """Name, shape and dtype of every state tensor but ``step``, in their order in the state."""
        for name, codec in (("exp_avg", self.format.m), ("exp_avg_sq", self.format.v)):
            yield name, self.codes_shape(codec), codec.codes
            if codec.scale:
                yield name + "_scale", self.scale_shape, codec.scale
        if self.weights.low:
            yield "weight_low", tuple(self.shape), self.weights.low

    def with_format(self, format, low):
        """The same parameter in another state format and with ``weight_low`` of another dtype, or none; None if no
        weight mode keeps such low bits.
        """
        mode = next((mode for mode in WEIGHTS.values() if mode.low == low), None)
        return mode and replace(self, format=format, weights=mode)

    def as_fp32(self):
        """The same parameter with its moments in fp32."""
        return replace(self, format=FORMATS["fp32"])

    def whole(self, shape):
        """The layout of the whole parameter that this one's is a shard of."""
        return replace(self, shape=shape, stride=None)

    @property
    def nbytes(self):
        """Bytes of state, ``step`` not counted."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.tensors())


@functools.lru_cache(maxsize=65536)
def layout(shape, dtype, state, weights, min_numel, shard=None):
    """The layout of a parameter of a *global* shape, or of a ``shard`` of it, under a group's options.

    Vectors and small tensors (norms, biases) keep fp32 state: under 0.01 % of a 7B model, and the most sensitive. So
    does a parameter whose columns are sharded unevenly or inside blocks.
    """
    shard = shard or Part(shape, shape, (0, 0))
    plain = len(shape) < 2 or math.prod(shape) < min_numel
    stride = None
    if shard.columns > 1:
        stride, width = math.prod(shape[1:]), math.prod(shape[1:]) // shard.columns
        plain = plain or shape[1] % shard.columns != 0 or width % BLOCK != 0
    return Layout(shard.shape, dtype, FORMATS["fp32" if plain else state], weight_mode(weights, dtype), stride)


def real(x):
    """A complex tensor as a real one with a last dimension of 2, others as they are."""
    return torch.view_as_real(x) if x.is_complex() else x


def plan(p, group):
    """The layout of parameter ``p`` in its param group, of a DTensor that of this process's part."""
    p = real(p)
    return layout(p.shape, p.dtype, group["state"], group["weights"], group["min_numel"], part(p))


def here(p):
    """What of a parameter or gradient this process steps: real, local."""
    return real(local(p))


def pieces(rows, width, limit):
    """Cut ``[rows, width]`` into (first row, last row, first column, last column) of about ``limit`` elements.

    Columns are cut at multiples of 32. A piece is whole rows, or part of one row with the odd tail on its own.
    """
    if rows == 1 or width >= limit:
        whole = width - width % BLOCK
        for row in range(rows):
            for column in range(0, whole, limit):
                yield row, row + 1, column, min(column + limit, whole)
            if whole < width:
                yield row, row + 1, whole, width
    else:
        step = max(1, limit // width)
        for row in range(0, rows, step):
            yield row, min(row + step, rows), 0, width


def cut(x, piece, unit):
    """The part of ``x`` ``[rows, …]`` under a piece; ``unit`` is the number of its columns for a block of 32."""
    row, last_row, column, last_column = piece
    return x[row:last_row, column * unit // BLOCK : -(-last_column * unit // BLOCK)]


def tiled(x, unit):
    """A cut as ``[blocks, unit]``: a view where its rows are whole blocks, else a padded copy."""
    blocks = -(-x.shape[1] // unit)
    short = blocks * unit - x.shape[1]
    return pad(x, (0, short)).view(-1, unit) if short else x.view(-1, unit)


def untiled(tiles, shape):
    """Inverse of :func:`tiled`: back to ``[rows, columns]``, the padding dropped."""
    return tiles.view(shape[0], -1)[:, : shape[1]]
