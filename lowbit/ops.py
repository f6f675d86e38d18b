"""The vocabulary in which rules, codecs and weight roundings are written.

Each word exists twice, once for Triton and once for torch. A formula is written once, as a ``@jit`` function over these
words: Triton compiles it as it stands, and :func:`in_torch` binds the same code object to torch's words. So the two
backends cannot drift apart, and the eager one is the reference of the other.

Tensors in formulas are tiles of shape ``[blocks, 32]`` (a scale is ``[blocks, 1]``), fp32 values or int32 bits.
"""

import builtins
import functools
import math
import os
import types

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with torch on GPUs; without it every formula serves torch alone
    triton = tl = None

constexpr = tl.constexpr if tl is not None else bool
# NVIDIA's approximate root and reciprocal: Triton's exact ones take a dozen instructions each. The interpreter and
# other GPUs take the portable, correctly rounded form.
_interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
INTERPRETED = constexpr(_interpreted)
APPROXIMATE = constexpr(torch.version.cuda is not None and not _interpreted)
BLOCK = 32  # elements that share a scale


def jit(fn):
    """``triton.jit``, or the function itself where there is no Triton."""
    return triton.jit(fn) if triton is not None else fn


# --- Triton's words. Jit-wrapped also where a tl builtin would do: a bare alias fails in Triton's interpreter. ---


@jit
def bits(x):
    """The bits of fp32 ``x`` as int32."""
    return x.to(tl.int32, bitcast=True)


@jit
def from_bits(b):
    """The fp32 value of int32 bits ``b``."""
    return b.to(tl.float32, bitcast=True)


@jit
def to_float(x):
    """Any float as fp32."""
    if APPROXIMATE and x.dtype == tl.bfloat16:  # one instruction each
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16;  and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x], tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@jit
def to_int(x):
    """Any integer as int32, by value."""
    return x.to(tl.int32)


@jit
def to_uint8(x):
    """The low byte of int32 ``x``."""
    return x.to(tl.uint8)


@jit
def to_int8(x):
    """The low byte of int32 ``x`` as int8."""
    return x.to(tl.int8)


@jit
def to_int16(x):
    """The low half of int32 ``x`` as int16."""
    return x.to(tl.int16)


@jit
def to_bf16(x):
    """fp32 rounded to the nearest bf16, ties to even."""
    if INTERPRETED:  # the interpreter's own cast cuts off
        b = x.to(tl.int32, bitcast=True)
        b = tl.where(x != x, 0x7FC00000, b + 0x7FFF + ((b >> 16) & 1))
        return (b >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@jit
def to_fp16(x):
    """fp32 rounded to the nearest fp16, ties to even."""
    return x.to(tl.float16)


@jit
def bf16_from_bits(b):
    """The bf16 whose 16 bits are the upper half of int32 ``b``."""
    return (b >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@jit
def fp16_from_bits(b):
    """The fp16 whose 16 bits are the lower half of int32 ``b``."""
    return b.to(tl.int16).to(tl.float16, bitcast=True)


@jit
def top_bits(r, count: constexpr):
    """The upper ``count`` bits of int32 ``r``, as an integer from 0."""
    return (r.to(tl.uint32, bitcast=True) >> (32 - count)).to(tl.int32, bitcast=True)


@jit
def where(condition, a, b):
    """``a`` where the condition holds, else ``b``."""
    return tl.where(condition, a, b)


@jit
def minimum(a, b):
    """The smaller of two numbers."""
    return tl.minimum(a, b)


@jit
def maximum(a, b):
    """The larger of two int32."""
    return tl.maximum(a, b)


@jit
def sqrt(x):
    """Square root of fp32, correctly rounded, or within an ulp where the hardware has a quick one."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.sqrt_rn(x)


@jit
def divide(a, b):
    """Quotient of fp32, correctly rounded, or within two ulp where the hardware has a quick reciprocal."""
    if APPROXIMATE:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], tl.float32, is_pure=True, pack=1)
        return a * r
    else:
        return tl.div_rn(a, b)


@jit
def absolute(x):
    """Magnitude of fp32."""
    return tl.abs(x)


@jit
def copy_sign(x, b):
    """int32 ``x`` with the top bit of ``b`` for its own."""
    return (x & 0x7FFFFFFF) | (b & -0x80000000)


@jit
def saturate(x):
    """fp32 limited to 0 … 1; NaN becomes 0."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise("cvt.sat.f32.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.where(x > 0.0, tl.where(x < 1.0, x, 1.0), 0.0)


@jit
def exp(x):
    """Exponential, of float64."""
    return tl.exp(x)


@jit
def log(x):
    """Natural logarithm, of float64."""
    return tl.log(x)


@jit
def quiet(b):
    """Bits of fp32 with every NaN the first quiet one, to which small integers can be added."""
    if APPROXIMATE:  # the only NaN of NVIDIA's arithmetic is 0x7FFFFFFF
        return tl.minimum(b, 0x7FC00000)
    else:
        return tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, b)


@jit
def finite_max(b, SIGNED: constexpr):
    """Bits of the largest finite magnitude of each block ``[blocks, 1]``, from bits ``[blocks, 32]`` of fp32.

    Adding an exponent step carries infinities and NaNs, and nothing else, past the integers' end, from where they lose
    to all others. Doubling drops the sign, if values are ``SIGNED``.
    """
    if SIGNED:
        largest = tl.max(((b << 1) + 0x01000000).to(tl.uint32, bitcast=True), axis=1, keep_dims=True)
        return ((tl.maximum(largest, 0x01000000) - 0x01000000) >> 1).to(tl.int32, bitcast=True)
    else:
        return tl.maximum(tl.max(b + 0x00800000, axis=1, keep_dims=True), 0x00800000) - 0x00800000


# --- torch's words ---


def _plain(x):
    """Whether this is the eager backend on a CPU, which may look at values, and ``x`` sums up to a finite number."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and math.isfinite(x.sum().item())


def _bf16_from_bits(b):
    if torch.compiler.is_compiling():  # inductor moves 16-bit integers element by element
        return (b & -65536).view(torch.float32).to(torch.bfloat16)
    return (b >> 16).to(torch.int16).view(torch.bfloat16)


def _quiet(b):
    x = b.view(torch.float32)
    return b if _plain(x) else b.masked_fill(x.isnan(), 0x7FC00000)


def _finite_max(b, signed):
    x = b.view(torch.float32)
    if torch.compiler.is_compiling():  # inductor reduces fp32 vectors in registers, but int32 ones element by element
        x = (b & 0x7FFFFFFF if signed else b).view(torch.float32)
        return torch.where(x < float("inf"), x, 0.0).amax(dim=1, keepdim=True).view(torch.int32)
    largest = (x.abs() if signed else x).amax(dim=1, keepdim=True)
    if _plain(largest):
        return largest.view(torch.int32)
    b = b & 0x7FFFFFFF if signed else b
    return (b + 0x00800000).amax(dim=1, keepdim=True).clamp_(min=0x00800000).sub_(0x00800000)


def _sqrt(x):
    # torch's own on CPUs may be MKL's, an ulp off in a fifth of all values; compiled code uses the processor's.
    # This one is exact too: no root of an fp32 is closer to the middle of two than the float64 roundings add up to.
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.sqrt(x)
    return x.double().rsqrt_().reciprocal_().float()


TORCH = {
    "bits": lambda x: x.view(torch.int32),
    "from_bits": lambda b: b.view(torch.float32),
    "to_float": lambda x: x.to(torch.float32),
    "to_int": lambda x: x.to(torch.int32),
    "to_uint8": lambda x: x.to(torch.uint8),
    "to_int8": lambda x: x.to(torch.int8),
    "to_int16": lambda x: x.to(torch.int16),
    "to_bf16": lambda x: x.to(torch.bfloat16),
    "to_fp16": lambda x: x.to(torch.float16),
    "bf16_from_bits": _bf16_from_bits,
    "fp16_from_bits": lambda b: b.to(torch.int16).view(torch.float16),
    "where": torch.where,
    "minimum": lambda a, b: a.clamp(max=b) if isinstance(b, int) else torch.minimum(a, b),
    "maximum": lambda a, b: a.clamp(min=b) if isinstance(b, int) else torch.maximum(a, b),
    "sqrt": _sqrt,
    "divide": lambda a, b: a / b,
    "exp": torch.exp,
    "log": torch.log,
    "quiet": _quiet,
    "finite_max": _finite_max,
    "top_bits": lambda r, count: (r >> (32 - count)).bitwise_and_((1 << count) - 1),
    "absolute": torch.abs,
    "copy_sign": lambda x, b: (x & 0x7FFFFFFF) | (b & -0x80000000),
    "saturate": lambda x: x.clamp(0.0, 1.0) if _plain(x) else torch.where(x > 0, x, 0.0).clamp_(max=1.0),
}


@functools.cache
def in_torch(function):
    """The torch form of a ``@jit`` formula: the same code object, bound to torch's words.

    Formulas that it calls are bound too. The new globals carry no ``__name__``: ``torch.compile`` would look the words
    up in the module of that name, where they are Triton's.
    """
    plain = getattr(function, "fn", function)
    words = {"__builtins__": builtins}
    for name in plain.__code__.co_names:
        if name in TORCH:
            words[name] = TORCH[name]
        elif name in plain.__globals__:
            value = plain.__globals__[name]
            words[name] = in_torch(value) if callable(value) else getattr(value, "value", value)
    bound = types.FunctionType(plain.__code__, words, plain.__name__, plain.__defaults__, plain.__closure__)
    bound.__doc__ = plain.__doc__
    return bound
