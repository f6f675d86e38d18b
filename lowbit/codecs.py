"""The state formats: how ``exp_avg`` (m) and ``exp_avg_sq`` (v) are kept, and the one table that lists them.

A block of 32 neighbours shares a scale. In the 8-bit formats a value keeps a few exponent and mantissa bits below the
exponent of its block, as in OCP Microscaling (https://www.opencompute.org, "OCP Microscaling Formats (MX)"), and the
scale is that exponent, biased like fp32's, in one byte. Encoding is an add and a shift of fp32 bits.

``encode(x, r) -> (codes, scale)`` rounds fp32 values with the uniform 32-bit integers ``r`` (:mod:`lowbit.dither`):
adding random bits below the last kept bit and cutting off is exactly unbiased in value.
``decode(codes, scale, factor)`` is its inverse on codes, times ``factor``, which costs nothing where it can join the
block's scale. Where a format has no scale, 0 stands for it. A value that is infinite or NaN leaves its neighbours
alone.
"""

from dataclasses import dataclass

import torch

from lowbit.ops import (
    absolute,
    bf16_from_bits,
    bits,
    copy_sign,
    divide,
    finite_max,
    from_bits,
    jit,
    maximum,
    minimum,
    quiet,
    saturate,
    sqrt,
    tl,  # noqa: F401  Triton's interpreter looks for it in the module of a formula
    to_float,
    to_int,
    to_uint8,
    top_bits,
    where,
)
from lowbit.packed import (
    e3m1_bits,
    e4m3_values,
    pack,
    pack_top,
    saturated_byte,
    signed_byte,
    square4_values,
)


@jit
def e4m3_encode(x, r):
    """Sign, 4 exponent and 3 mantissa bits, with subnormals and zero; 0x7F, NaN in OCP E4M3, is not used.

    Multiplying by a power of two puts the top binade at biased exponent 15, so that the kept bits are bits 20 to 26 and
    fp32's own subnormals are the format's. The block's exponent is that of 8/7 of its largest value (the fp32 below
    8/7: the largest code keeps its place), for that code is 7/8 of a binade's end, and what is above never rounds up.
    """
    b = bits(x)
    e = minimum(bits(from_bits(finite_max(b, True)) * 1.1428570747375488) >> 23, 253)
    # two factors: one alone, 2^(15-e), leaves the range of fp32 for a block of values above 2^15
    y = bits(absolute(x) * from_bits((254 - e) << 23) * 1.925929944387236e-34)
    return signed_byte(minimum(y, 0x07E00000) + top_bits(r, 20), b), to_uint8(e)


@jit
def e4m3_decode(codes, scale, factor):
    """Inverse of :func:`e4m3_encode`."""
    return e4m3_values(codes) * (from_bits(to_int(scale) << 23) * factor)


@jit
def e5m3_encode(x, r):
    """5 exponent and 3 mantissa bits of a value that is never negative. The scale is the exponent of the lowest code.

    The lowest code is not zero: v that rounds to zero would divide the next update by almost nothing. Infinity takes
    the largest code.
    """
    b = bits(x)
    low = maximum(minimum(bits(from_bits(finite_max(b, False)) * 1.0666666030883789) >> 23, 254) - 31, 0)
    return saturated_byte(b + top_bits(r, 20) - (low << 23)), to_uint8(low)


@jit
def e5m3_decode(codes, scale, factor):
    """Inverse of :func:`e5m3_encode`."""
    return from_bits((to_int(codes) << 20) + (to_int(scale) << 23)) * factor


@jit
def e3m1_encode(x, r):
    """3 exponent bits and 1 mantissa bit, two codes a byte; otherwise as :func:`e5m3_encode`."""
    b = bits(x)
    low = maximum(minimum(bits(from_bits(finite_max(b, False)) * 1.3333332538604736) >> 23, 254) - 7, 0)
    return pack((b + top_bits(r, 22) - (low << 23)) >> 22), to_uint8(low)


@jit
def e3m1_decode(codes, scale, factor):
    """Inverse of :func:`e3m1_encode`."""
    return from_bits(e3m1_bits(codes) + (to_int(scale) << 23)) * factor


@jit
def square4_encode(x, r):
    """Sign and a 3-bit code c, value (c/7)² of the block's largest magnitude, which is kept in fp32.

    With t = 49 |x| / max and u uniform, floor(sqrt(t - u(1-u)) + u) is sqrt(t) rounded up with the probability that
    makes the *value* unbiased. The lowest cell rounds up in its last 0.08 only: dithered all over, a tiny m would jump
    to code 1 beside a tiny v and explode; to nearest, or at any fixed threshold below beta1, m would never decay. There
    12.5 t - 11.5 takes the place of t, which is the smaller of the two in that cell alone.

    Computed in eighths, from w = 1 + u/8, so that the code is the top three bits of a mantissa.
    """
    b = bits(x)
    top = from_bits(finite_max(b, True))
    t = absolute(x) * where(top > 1e-36, divide(0.765625, top), 0.0)  # 1/top is infinite for the smallest subnormals
    w = from_bits(top_bits(r, 20) + 0x3F800002)  # two ulps more: the largest magnitude keeps the largest code
    d = w - 1.0625
    y = sqrt(saturate((d * d - 0.00390625) + minimum(t, t * 12.5 - 0.1796875))) + w
    return pack_top(copy_sign(minimum(bits(y), 0x3FFFFFFF) << 8, b)), top


@jit
def square4_decode(codes, scale, factor):
    """Inverse of :func:`square4_encode`."""
    return square4_values(codes) * (scale * 0.02040816326530612 * factor)


@jit
def bf16_encode(x, r):
    """fp32 to bf16, dithered; no scale."""
    return bf16_from_bits(quiet(bits(x)) + top_bits(r, 16)), 0


@jit
def bf16_decode(codes, scale, factor):
    """bf16 to fp32."""
    return to_float(codes) * factor


@jit
def fp32_encode(x, r):
    """fp32 as it is; no scale."""
    return x, 0


@jit
def fp32_decode(codes, scale, factor):
    """fp32 as it is."""
    return codes * factor


@dataclass(frozen=True)
class Codec:
    """How one tensor of state is kept."""

    encode: object
    decode: object
    bits: int  # of a code; 4-bit codes are kept two a byte
    codes: torch.dtype
    scale: torch.dtype | None  # one a block of 32, or no scale and no blocks
    magnitude: int = 0  # of a code: its bits without the sign
    largest: int = 0  # magnitude of the largest code; 0 is the lowest

    @property
    def unit(self):
        """Columns of the code tensor for a block of 32 elements."""
        return 16 if self.bits == 4 else 32

    @property
    def bytes_per_param(self):
        """Bytes an element, its share of the scale included."""
        return self.bits / 8 + (self.scale.itemsize / 32 if self.scale else 0)


@dataclass(frozen=True)
class Format:
    """A row of the table: how m (``exp_avg``) and v (``exp_avg_sq``) are kept."""

    name: str
    m: Codec
    v: Codec

    @property
    def blocked(self):
        """Whether rows are cut into blocks with a scale each."""
        return self.m.scale is not None

    @property
    def bytes_per_param(self):
        """Bytes of state an element, where rows are whole blocks."""
        return self.m.bytes_per_param + self.v.bytes_per_param


E4M3 = Codec(e4m3_encode, e4m3_decode, 8, torch.uint8, torch.uint8, 0x7F, 0x7E)
E5M3 = Codec(e5m3_encode, e5m3_decode, 8, torch.uint8, torch.uint8, 0xFF, 0xFF)
SQUARE4 = Codec(square4_encode, square4_decode, 4, torch.uint8, torch.float32, 7, 7)
E3M1 = Codec(e3m1_encode, e3m1_decode, 4, torch.uint8, torch.uint8, 15, 15)
BF16 = Codec(bf16_encode, bf16_decode, 16, torch.bfloat16, None)
FP32 = Codec(fp32_encode, fp32_decode, 32, torch.float32, None)

FORMATS = {
    "8bit": Format("8bit", E4M3, E5M3),
    "fp8": Format("8bit", E4M3, E5M3),  # the 8-bit m is OCP FP8: another name, one format
    "4bit": Format("4bit", SQUARE4, E3M1),
    "12bit": Format("12bit", E4M3, E3M1),
    "bf16": Format("bf16", BF16, BF16),
    "fp32": Format("fp32", FP32, FP32),
}
