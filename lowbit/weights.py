"""The weight modes: how an updated fp32 weight goes back into the parameter, and the table that lists them.

A bf16 weight has 8 bits: an update below 1/256 of the weight is lost when rounded to nearest, and most of a fine-tune's
updates are. Dithered rounding keeps their sum right at no cost in memory; a low part beside the parameter keeps them
exactly. ``encode(w, r) -> (p, low)`` and ``decode(p, low) -> w`` work on fp32 tiles like the codecs.
"""

from dataclasses import dataclass

import torch

from lowbit.codecs import bf16_encode
from lowbit.ops import (
    bf16_from_bits,
    bits,
    fp16_from_bits,
    from_bits,
    jit,
    minimum,
    quiet,
    tl,  # noqa: F401  Triton's interpreter looks for it in the module of a formula
    to_bf16,
    to_float,
    to_fp16,
    to_int,
    to_int8,
    to_int16,
    top_bits,
    where,
)


@jit
def plain_decode(p, low):
    """The parameter alone is the weight."""
    return to_float(p)


@jit
def fp32_nearest(w, r):
    """fp32 weights are kept as they are."""
    return w, 0


@jit
def bf16_nearest(w, r):
    """To the nearest bf16, ties to even."""
    return to_bf16(w), 0


@jit
def fp16_nearest(w, r):
    """To the nearest fp16, ties to even."""
    return to_fp16(w), 0


@jit
def fp16_stochastic(w, r):
    """fp32 to fp16, dithered.

    Multiplying by 2^-112 puts fp16's exponents onto fp32's lowest, so that the subnormals are the format's too.
    Above 65504 the result is infinite, like a cast.
    """
    b = bits(w)
    y = bits(from_bits(b & 0x7FFFFFFF) * 1.925929944387236e-34)
    code = minimum((y + top_bits(r, 13)) >> 13, 0x7C00)
    return fp16_from_bits(where(w != w, 0x7E00, code) | ((b >> 16) & 0x8000)), 0


@jit
def low8_encode(w, r):
    """bf16 and the next 8 bits as int8: the upper 24 bits of fp32, dithered below the last.

    The upper half is rounded to nearest and the low part is signed, so the parameter alone is the best bf16.
    """
    b = quiet(bits(w)) + top_bits(r, 8)
    return bf16_from_bits(b + 0x8000), to_int8(b >> 8)


@jit
def low8_decode(p, low):
    """Inverse of :func:`low8_encode`."""
    return from_bits(bits(to_float(p)) + (to_int(low) << 8))


@jit
def low16_encode(w, r):
    """bf16 and the low half as int16: bit-exact fp32."""
    b = quiet(bits(w))
    return bf16_from_bits(b + 0x8000), to_int16(b)


@jit
def low16_decode(p, low):
    """Inverse of :func:`low16_encode`."""
    return from_bits(bits(to_float(p)) + to_int(low))


@dataclass(frozen=True)
class WeightMode:
    """A row of the table: how a weight of one dtype is kept in one mode."""

    name: str
    encode: object
    decode: object
    low: torch.dtype | None = None  # dtype of the state tensor ``weight_low``

    @property
    def bytes_per_param(self):
        """Bytes an element beside the parameter."""
        return self.low.itemsize if self.low else 0


_EXACT = WeightMode("nearest", fp32_nearest, plain_decode)

# A mode says how to keep more of a weight than its dtype holds; fp32 holds all of it, in every mode.
WEIGHTS = {
    ("nearest", torch.float32): _EXACT,
    ("stochastic", torch.float32): _EXACT,
    ("24bit", torch.float32): _EXACT,
    ("32bit", torch.float32): _EXACT,
    ("nearest", torch.bfloat16): WeightMode("nearest", bf16_nearest, plain_decode),
    ("stochastic", torch.bfloat16): WeightMode("stochastic", bf16_encode, plain_decode),
    ("24bit", torch.bfloat16): WeightMode("24bit", low8_encode, low8_decode, torch.int8),
    ("32bit", torch.bfloat16): WeightMode("32bit", low16_encode, low16_decode, torch.int16),
    ("nearest", torch.float16): WeightMode("nearest", fp16_nearest, plain_decode),
    ("stochastic", torch.float16): WeightMode("stochastic", fp16_stochastic, plain_decode),
}
MODES = ("auto", "nearest", "stochastic", "24bit", "32bit")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_mode(name, dtype):
    """The row for a mode and a parameter's dtype; ``auto`` is ``nearest`` for fp32 and ``stochastic`` for 16 bits."""
    return WEIGHTS[("stochastic" if name == "auto" else name, dtype)]


def low_bits_between(low, dtype, like, shape):
    """``weight_low`` in another dtype, the parameter unchanged; zeros where there was none.

    int8 holds bits 8 to 15 below the parameter's last, int16 holds bits 0 to 15.
    """
    if low is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if low.dtype == dtype:
        return low
    wide = low.to(torch.int32)
    return (wide << 8).to(dtype) if dtype == torch.int16 else ((wide + 128) >> 8).clamp(max=127).to(dtype)
