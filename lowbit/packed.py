"""More vocabulary of formulas: codes, of which several share a register on NVIDIA's GPUs.

There each word is a few instructions for four codes at a time; elsewhere it is the same arithmetic code by code.
"""

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
def pack(codes):
    """int32 ``[blocks, 32]``, limited to 0 … 15, to bytes ``[blocks, 16]``; an even element takes the low half."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], 16, 2]))
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
def unpack(codes):
    """Bytes ``[blocks, 16]`` to four-bit codes ``[blocks, 32]`` as int32."""
    b = codes.to(tl.int32)
    return tl.reshape(tl.join(b & 15, b >> 4), [codes.shape[0], 32])


# --- torch's words ---


def _e4m3_values(codes):
    b = codes.view(torch.int8).to(torch.int32)
    return ((b << 20) & -0x78100000).view(torch.float32) * 5.192296858534828e33  # 2^112, fp32's bias less fp16's


def _pack(codes):
    codes = codes.clamp(0, 15)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def _unpack(codes):
    b = codes.to(torch.int32)
    return torch.stack((b & 15, b >> 4), dim=-1).reshape(codes.shape[0], BLOCK)


TORCH.update(
    e4m3_values=_e4m3_values,
    saturated_byte=lambda x: (x >> 20).clamp_(0, 255).to(torch.uint8),
    pack=_pack,
    unpack=_unpack,
)
