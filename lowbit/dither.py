"""Rounding bits from a counter.

The bits of an element at a step are ``frac(h(seed, parameter, element) + step * phi)`` in 32-bit integers, phi the
golden ratio: over the steps of one element the most even sequence there is (an additive recurrence, Weyl 1916), so
rounding is unbiased like with random numbers and its sum strays less. No generator and no state: the same on every
replica, at any sharding, on any backend, after a resume. ``element`` is the index in the whole, unsharded tensor.
"""

import hashlib

from lowbit.ops import jit, tl  # noqa: F401  Triton's interpreter looks for tl in the module of a formula

PHI = 0x9E3779B9  # 2^32 over the golden ratio; all 32 bits count


@jit
def m_bits(first, lanes, step):
    """Bits for ``exp_avg`` ``[blocks, 32]``, from the numbers of each block's first element ``[blocks, 1]`` and 0 … 31.

    Each stream multiplies by an odd constant of its own, so that roundings do not agree.
    """
    return (first * -1640531535 + step) + lanes * -1640531535  # 0x9E3779B1


@jit
def v_bits(first, lanes, step):
    """Bits for ``exp_avg_sq``."""
    return (first * -2048144777 + step) + lanes * -2048144777  # 0x85EBCA77


@jit
def w_bits(first, lanes, step):
    """Bits for the weight."""
    return (first * -1028477379 + step) + lanes * -1028477379  # 0xC2B2AE3D


def signed32(x):
    """An integer modulo 2^32 as a signed 32-bit value."""
    return (x + 0x80000000) % 0x100000000 - 0x80000000


def parameter_offset(seed, index):
    """What to add to the element numbers of parameter number ``index``: 32 hashed bits, signed."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return signed32(int.from_bytes(digest, "little"))


def step_offset(step):
    """``step * phi`` modulo 2^32, signed: the same for every stream and parameter."""
    return signed32(step * PHI)
