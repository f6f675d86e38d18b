"""The step of one tile, the same source for torch and Triton: decode, apply the rule, encode."""

from lowbit.dither import m_bits, v_bits, w_bits
from lowbit.ops import constexpr, jit, tl, to_float  # noqa: F401  the interpreter looks for tl here


@jit
def step_tile(
    p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, dither,
    beta1, beta2, rest1, rest2, bias2, eps, decay, factor,
    RULE: constexpr, M_DECODE: constexpr, M_ENCODE: constexpr, V_DECODE: constexpr, V_ENCODE: constexpr,
    W_DECODE: constexpr, W_ENCODE: constexpr,
):  # fmt: skip
    """Parameter, gradient and state of ``[blocks, 32]`` elements one step on.

    ``first`` ``[blocks, 1]`` holds the number of each block's first element in its tensor plus the parameter's offset,
    ``lanes`` is 0 … 31, ``dither`` the step's offset (:mod:`lowbit.dither`), the others are :func:`rules.scalars`.
    """
    w = W_DECODE(p, low)
    m = M_DECODE(m_codes, m_scale, beta1)
    v = V_DECODE(v_codes, v_scale, beta2)
    w, m, v = RULE(w, to_float(g), m, v, rest1, rest2, bias2, eps, decay, factor)
    m_codes, m_scale = M_ENCODE(m, m_bits(first, lanes, dither))
    v_codes, v_scale = V_ENCODE(v, v_bits(first, lanes, dither))
    p, low = W_ENCODE(w, w_bits(first, lanes, dither))
    return p, low, m_codes, m_scale, v_codes, v_scale
