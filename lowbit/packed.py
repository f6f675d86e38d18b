"""More vocabulary of formulas: codes, of which several share a register on NVIDIA's GPUs.

There each word is a few instructions for four codes at a time; elsewhere it is the same arithmetic code by code.
"""

import functools

import torch

from lowbit.ops import APPROXIMATE, BLOCK, TORCH, jit, tl


@jit
def e4m3_values(codes):
    """E4M3 codes ``[blocks, 32]`` as fp32, in units of 2^8: seven bits up they are the fp16 of that value."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;  .reg .b16 low, high;
            shl.b32 a, $4, 7;  and.b32 a, a, 0x3F803F80;
            shl.b32 b, $4, 8;  lop3.b32 a, b, 0x80008000, a, 0xEA;
            mov.b32 {low, high}, a;  cvt.f32.f16 $0, low;  cvt.f32.f16 $2, high;
            shr.u32 b, $4, 1;  and.b32 b, b, 0x3F803F80;  lop3.b32 b, $4, 0x80008000, b, 0xEA;
            mov.b32 {low, high}, b;  cvt.f32.f16 $1, low;  cvt.f32.f16 $3, high;
            }""",
            "=f,=f,=f,=f,r", [codes], tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        b = codes.to(tl.int32)
        return (((b << 7) & 0x3F80) | ((b << 8) & 0x8000)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def saturated_byte(x):
    """Bits 20 and up of int32 ``x``, limited to 0 … 255, as a byte."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            shr.s32 a, $1, 20;  shr.s32 b, $2, 20;  shr.s32 c, $3, 20;  shr.s32 d, $4, 20;
            cvt.pack.sat.u8.s32.b32 c, d, c, 0;  cvt.pack.sat.u8.s32.b32 $0, b, a, c;
            }""",
            "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return tl.minimum(tl.maximum(x >> 20, 0), 255).to(tl.uint8)


@jit
def signed_byte(x, b):
    """Bits 20 to 26 of int32 ``x`` under the sign bit of ``b``, as a byte."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            shl.b32 a, $1, 4;  shl.b32 b, $2, 4;  shl.b32 c, $3, 4;  shl.b32 d, $4, 4;
            lop3.b32 a, a, $5, 0x80000000, 0xD8;  lop3.b32 b, b, $6, 0x80000000, 0xD8;
            lop3.b32 c, c, $7, 0x80000000, 0xD8;  lop3.b32 d, d, $8, 0x80000000, 0xD8;
            prmt.b32 a, a, b, 0x0073;  prmt.b32 c, c, d, 0x0073;  prmt.b32 $0, a, c, 0x5410;
            }""",
            "=r,r,r,r,r,r,r,r,r", [x, b], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (((x >> 20) & 0x7F) | ((b >> 24) & 0x80)).to(tl.uint8)


@jit
def interleave(low, high):
    """Two ``[blocks, 16]`` as ``[blocks, 32]``, of which ``low`` are the even elements."""
    return tl.reshape(tl.join(low, high), [low.shape[0], 32])


@jit
def deinterleave(x):
    """Inverse of :func:`interleave`."""
    return tl.split(tl.reshape(x, [x.shape[0], 16, 2]))


@jit
def pack(codes):
    """int32 ``[blocks, 32]``, limited to 0 … 15, to bytes ``[blocks, 16]``; an even element takes the low half."""
    low, high = deinterleave(codes)
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            cvt.pack.sat.u4.s32.b32 a, $8, $4, 0;  cvt.pack.sat.u4.s32.b32 a, $7, $3, a;
            cvt.pack.sat.u4.s32.b32 a, $6, $2, a;  cvt.pack.sat.u4.s32.b32 $0, $5, $1, a;
            }""",
            "=r,r,r,r,r,r,r,r,r", [low, high], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = tl.minimum(tl.maximum(low, 0), 15), tl.minimum(tl.maximum(high, 0), 15)
        return (low | (high << 4)).to(tl.uint8)


@jit
def pack_top(x):
    """The upper four bits of int32 ``[blocks, 32]`` to bytes ``[blocks, 16]``, in the order of :func:`pack`."""
    low, high = deinterleave(x)
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            shr.u32 a, $8, 28;  shf.l.wrap.b32 a, $4, a, 4;  shf.l.wrap.b32 a, $7, a, 4;
            shf.l.wrap.b32 a, $3, a, 4;  shf.l.wrap.b32 a, $6, a, 4;  shf.l.wrap.b32 a, $2, a, 4;
            shf.l.wrap.b32 a, $5, a, 4;  shf.l.wrap.b32 $0, $1, a, 4;
            }""",
            "=r,r,r,r,r,r,r,r,r", [low, high], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (((low >> 28) & 15) | ((high >> 24) & 0xF0)).to(tl.uint8)


@jit
def e3m1_bits(codes):
    """Bytes ``[blocks, 16]`` to four-bit codes ``[blocks, 32]`` at their place in the bits of fp32, as int32."""
    if APPROXIMATE:
        low, high = tl.inline_asm_elementwise(
            """{
            shl.b32 $0, $8, 22;  shl.b32 $4, $8, 18;  shl.b32 $1, $8, 14;  shl.b32 $5, $8, 10;
            shl.b32 $2, $8, 6;  shl.b32 $6, $8, 2;  shr.u32 $3, $8, 2;  shr.u32 $7, $8, 6;
            and.b32 $0, $0, 0x03C00000;  and.b32 $1, $1, 0x03C00000;  and.b32 $2, $2, 0x03C00000;
            and.b32 $3, $3, 0x03C00000;  and.b32 $4, $4, 0x03C00000;  and.b32 $5, $5, 0x03C00000;
            and.b32 $6, $6, 0x03C00000;  and.b32 $7, $7, 0x03C00000;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [codes], (tl.int32, tl.int32), is_pure=True, pack=4,
        )  # fmt: skip
        return interleave(low, high)
    else:
        b = codes.to(tl.int32)
        return interleave((b & 15) << 22, (b >> 4) << 22)


@jit
def square4_values(codes):
    """Bytes ``[blocks, 16]`` of signed three-bit codes c to fp32 ``[blocks, 32]``, ± c²: fp16 from two tables of bytes.

    A selector of ``prmt`` with its upper bit set repeats a byte's sign, which makes the signs.
    """
    if APPROXIMATE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, n, h, l, g, a, b;  .reg .b16 x, y;
            and.b32 s, $8, 0x77777777;  and.b32 n, $8, 0x88888888;
            prmt.b32 h, 0x48443C00, 0x52504E4C, s;  prmt.b32 l, 0x80000000, 0x20804000, s;
            prmt.b32 g, 0x80, 0, n;  shl.b32 g, g, 1;  lop3.b32 h, g, 0x80808080, h, 0xEA;
            prmt.b32 a, l, h, 0x5140;  prmt.b32 b, l, h, 0x7362;
            mov.b32 {x, y}, a;  cvt.f32.f16 $0, x;  cvt.f32.f16 $4, y;
            mov.b32 {x, y}, b;  cvt.f32.f16 $1, x;  cvt.f32.f16 $5, y;
            shr.u32 s, s, 16;  shr.u32 n, n, 16;
            prmt.b32 h, 0x48443C00, 0x52504E4C, s;  prmt.b32 l, 0x80000000, 0x20804000, s;
            prmt.b32 g, 0x80, 0, n;  shl.b32 g, g, 1;  lop3.b32 h, g, 0x80808080, h, 0xEA;
            prmt.b32 a, l, h, 0x5140;  prmt.b32 b, l, h, 0x7362;
            mov.b32 {x, y}, a;  cvt.f32.f16 $2, x;  cvt.f32.f16 $6, y;
            mov.b32 {x, y}, b;  cvt.f32.f16 $3, x;  cvt.f32.f16 $7, y;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [codes], (tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
        return interleave(low, high)
    else:
        b = codes.to(tl.int32)
        b = interleave(b & 15, b >> 4)
        c = (b & 7).to(tl.float32)
        return tl.where(b > 7, -c, c) * c


# --- torch's words ---


def _e4m3_values(codes):
    b = codes.view(torch.int8).to(torch.int32)
    return ((b << 20) & -0x78100000).view(torch.float32) * 5.192296858534828e33  # 2^112, fp32's bias less fp16's


def _signed_byte(x, b):
    return (x >> 20).to(torch.uint8).bitwise_and_(0x7F).bitwise_or_((b >> 24).to(torch.uint8).bitwise_and_(0x80))


def _pack(codes):
    codes = codes.clamp(0, 15)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def _pack_top(x):
    return (((x[:, 0::2] >> 28) & 15) | ((x[:, 1::2] >> 24) & 0xF0)).to(torch.uint8)


def _unpack(codes):
    b = codes.to(torch.int32)
    return torch.stack((b & 15, b >> 4), dim=-1).reshape(codes.shape[0], BLOCK)


def _squares(codes):
    b = _unpack(codes)
    c = (b & 7).to(torch.float32)
    return torch.where(b > 7, -c, c) * c


def _square4_values(codes):
    if torch.compiler.is_compiling():
        return _squares(codes)
    pairs = torch.nn.functional.embedding(codes.to(torch.int32), _square4_pairs(codes.device))
    return pairs.view(codes.shape[0], BLOCK)


@functools.cache
def _square4_pairs(device):
    """The two values of every byte, ``[256, 2]``."""
    return _squares(torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)).view(256, 2)


TORCH.update(
    e4m3_values=_e4m3_values,
    saturated_byte=lambda x: (x >> 20).clamp_(0, 255).to(torch.uint8),
    signed_byte=_signed_byte,
    pack=_pack,
    pack_top=_pack_top,
    e3m1_bits=lambda codes: _unpack(codes) << 22,
    square4_values=_square4_values,
)
