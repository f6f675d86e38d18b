"""A reader of the few PTX instructions in :mod:`lowbit.packed`, on Python integers: the words of NVIDIA's GPUs without
one. After https://docs.nvidia.com/cuda/parallel-thread-execution/."""

import inspect
import re
import struct

MASK = 0xFFFFFFFF


def signed(x):
    return x - (1 << 32) if x & 0x80000000 else x


def saturated(x, low, high):
    return min(max(signed(x), low), high)


def lop3(a, b, c, table):
    found = 0
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found & MASK


def prmt(a, b, selector):
    source = (a | b << 32).to_bytes(8, "little")
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source[nibble & 7]
        found |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * i
    return found


def from_fp16(x):
    return struct.unpack("<I", struct.pack("<f", struct.unpack("<e", struct.pack("<H", x))[0]))[0]


OPERATIONS = {
    "shl.b32": lambda a, n: a << n & MASK,
    "shr.u32": lambda a, n: a >> n,
    "shr.s32": lambda a, n: signed(a) >> n & MASK,
    "and.b32": lambda a, b: a & b,
    "mov.b32": lambda a: a,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "shf.l.wrap.b32": lambda low, high, n: ((high << 32 | low) << n) >> 32 & MASK,
    "cvt.f32.f16": from_fp16,
    "cvt.pack.sat.u8.s32.b32": lambda a, b, c: (c << 16 | saturated(a, 0, 255) << 8 | saturated(b, 0, 255)) & MASK,
    "cvt.pack.sat.u4.s32.b32": lambda a, b, c: (c << 8 | saturated(a, 0, 15) << 4 | saturated(b, 0, 15)) & MASK,
}


def program(word):
    """The assembly of a word, as (operation, [operands]) in order."""
    text = re.search(r'"""\{(.*?)\}"""', inspect.getsource(getattr(word, "fn", word)).split("inline_asm", 1)[1], re.S)[
        1
    ]
    lines = [line.strip() for line in text.split(";")]
    return [line.split(None, 1) for line in lines if line and not line.startswith(".reg")]


def run(word, outputs, inputs):
    """Registers ``$0`` … ``$(outputs - 1)`` after the assembly of a word; ``inputs`` are the registers behind them."""
    registers = {f"${outputs + i}": x & MASK for i, x in enumerate(inputs)}

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for operation, rest in program(word):
        pair = re.match(r"\{(\w+), (\w+)\}, (\S+)", rest)
        if pair:  # mov.b32 {low, high}, a
            registers[pair[1]], registers[pair[2]] = value(pair[3]) & 0xFFFF, value(pair[3]) >> 16
            continue
        target, *operands = [name.strip() for name in rest.split(",")]
        registers[target] = OPERATIONS[operation](*map(value, operands))
    return [registers[f"${i}"] for i in range(outputs)]
