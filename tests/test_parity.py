"""Formulas through Triton (its interpreter where there is no GPU) against the same formulas through torch."""

import pytest
import torch
import triton
import triton.language as tl
from cases import HARD_BITS, KEPT, NOT_FINITE_BITS, STATES, from_bits, randn, random_bits, same_bits

from lowbit import rules
from lowbit.codecs import BF16 as BF16_CODEC
from lowbit.codecs import E3M1, E4M3, E5M3, FORMATS, SQUARE4
from lowbit.dither import m_bits, v_bits, w_bits
from lowbit.ops import in_torch
from lowbit.tile import step_tile
from lowbit.weights import weight_mode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = 64  # of a tile
pytestmark = [
    pytest.mark.usefixtures("exact_bf16_casts"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter, of infinities and NaNs
]


@triton.jit
def tile_of(pointer, UNIT: tl.constexpr, BLOCKS: tl.constexpr):
    """Addresses of a tile ``[BLOCKS, UNIT]``."""
    return pointer + tl.arange(0, BLOCKS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]


@triton.jit
def encode_kernel(
    x, r, codes, scale, ENCODE: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr
):
    """``ENCODE`` of one tile."""
    new_codes, new_scale = ENCODE(tl.load(tile_of(x, 32, BLOCKS)), tl.load(tile_of(r, 32, BLOCKS)))
    tl.store(tile_of(codes, UNIT, BLOCKS), new_codes)
    if SCALED:
        tl.store(tile_of(scale, 1, BLOCKS), new_scale)


@triton.jit
def decode_kernel(
    codes, scale, x, DECODE: tl.constexpr, UNIT: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr
):
    """``DECODE`` of one tile."""
    old_scale = tl.load(tile_of(scale, 1, BLOCKS)) if SCALED else None
    tl.store(tile_of(x, 32, BLOCKS), DECODE(tl.load(tile_of(codes, UNIT, BLOCKS)), old_scale, 0.9))


@triton.jit
def weights_kernel(w, r, p, low, ENCODE: tl.constexpr, LOW: tl.constexpr, BLOCKS: tl.constexpr):
    """``ENCODE`` of one tile of weights."""
    new_p, new_low = ENCODE(tl.load(tile_of(w, 32, BLOCKS)), tl.load(tile_of(r, 32, BLOCKS)))
    tl.store(tile_of(p, 32, BLOCKS), new_p)
    if LOW:
        tl.store(tile_of(low, 32, BLOCKS), new_low)


@triton.jit
def step_kernel(
    p, low, g, m, m_scale, v, v_scale, first, dither,
    beta1, beta2, rest1, rest2, bias2, eps, decay, factor,
    RULE: tl.constexpr, M_DECODE: tl.constexpr, M_ENCODE: tl.constexpr, V_DECODE: tl.constexpr,
    V_ENCODE: tl.constexpr, W_DECODE: tl.constexpr, W_ENCODE: tl.constexpr, M_UNIT: tl.constexpr,
    V_UNIT: tl.constexpr, SCALED: tl.constexpr, LOW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """``step_tile`` on one tile, in place."""
    old_low = tl.load(tile_of(low, 32, BLOCKS)) if LOW else None
    old_m_scale = tl.load(tile_of(m_scale, 1, BLOCKS)) if SCALED else None
    old_v_scale = tl.load(tile_of(v_scale, 1, BLOCKS)) if SCALED else None
    new_p, new_low, new_m, new_m_scale, new_v, new_v_scale = step_tile(
        tl.load(tile_of(p, 32, BLOCKS)), old_low, tl.load(tile_of(g, 32, BLOCKS)),
        tl.load(tile_of(m, M_UNIT, BLOCKS)), old_m_scale, tl.load(tile_of(v, V_UNIT, BLOCKS)), old_v_scale,
        tl.load(tile_of(first, 1, BLOCKS)), tl.arange(0, 32)[None, :], dither,
        beta1, beta2, rest1, rest2, bias2, eps, decay, factor,
        RULE, M_DECODE, M_ENCODE, V_DECODE, V_ENCODE, W_DECODE, W_ENCODE,
    )  # fmt: skip
    tl.store(tile_of(p, 32, BLOCKS), new_p)
    tl.store(tile_of(m, M_UNIT, BLOCKS), new_m)
    tl.store(tile_of(v, V_UNIT, BLOCKS), new_v)
    if LOW:
        tl.store(tile_of(low, 32, BLOCKS), new_low)
    if SCALED:
        tl.store(tile_of(m_scale, 1, BLOCKS), new_m_scale)
        tl.store(tile_of(v_scale, 1, BLOCKS), new_v_scale)


def values(signed=True, approximated=False):
    """``[BLOCKS, 32]`` fp32: usual values, spread ones, blocks with hard and not finite ones, any bits, tiny, zeros.

    On a GPU NaNs are those of its arithmetic, and for what is ``approximated`` values are of the first two kinds: its
    root and quotient take subnormals as zero.
    """
    usual = randn(16, 32)
    spread = randn(16, 32, seed=1) * 2 ** (randn(16, 32, seed=2) * 20)
    if DEVICE != "cpu" and approximated:
        x = torch.cat((usual, spread, randn(16, 32, seed=3), randn(16, 32, seed=4) * 1e-3))
        return (x if signed else x.abs()).to(DEVICE)
    hard = from_bits((HARD_BITS + NOT_FINITE_BITS) * 8)[: 8 * 32].view(8, 32)
    any_bits = random_bits(8 * 32).view(torch.float32).view(8, 32)
    tiny = randn(8, 32, seed=3) * torch.tensor([1e-30, 1e-36, 9e-37, 1e-38, 1e-40, 1e-43, 3e-45, 2e38])[:, None]
    zeros = torch.zeros(8, 32)
    zeros[1:, ::5] = from_bits((0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x00800000, 0x3F800000))[:, None]
    x = torch.cat((usual, spread, hard, any_bits, tiny, zeros))
    if DEVICE != "cpu":
        x = torch.where(x.isnan(), from_bits([0x7FFFFFFF]), x)
    return (x if signed else x.abs()).to(DEVICE)


def bits(seed=5):
    r = random_bits(BLOCKS * 32, seed).view(BLOCKS, 32)
    r[::4] = torch.tensor([0, -1, -(1 << 31), (1 << 31) - 1] * 8, dtype=torch.int32)
    return r.to(DEVICE)


def assert_same(got, expected, what):
    """Bit for bit in the interpreter, NaNs as such; on a GPU floats are close, and one code in 10^4 may differ.

    There multiply-adds are fused, root and quotient approximate.
    """
    floats = expected.is_floating_point()
    if DEVICE != "cpu" and floats:
        rtol = {2: 2**-7, 4: 1e-5}[expected.element_size()]
        torch.testing.assert_close(
            got, expected, rtol=rtol, atol=1e-8, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
        return
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    differs = got.view(words) != expected.view(words)
    if floats:
        differs &= ~(got.isnan() & expected.isnan())
    allowed = 0 if DEVICE == "cpu" else -(-got.numel() // 10000)
    places = differs.nonzero()[:5].tolist()
    assert differs.sum() <= allowed, f"{what}: {int(differs.sum())} differ, at {places}"


@pytest.mark.parametrize("name", ("E4M3", "E5M3", "E3M1", "SQUARE4", "BF16"))
def test_codecs(name):
    codec = {"E4M3": E4M3, "E5M3": E5M3, "E3M1": E3M1, "SQUARE4": SQUARE4, "BF16": BF16_CODEC}[name]
    x, r = values(name in ("E4M3", "SQUARE4", "BF16"), approximated=name == "SQUARE4"), bits()
    expected, expected_scale = in_torch(codec.encode)(x, r)
    codes = torch.zeros_like(expected)
    scale = torch.zeros(BLOCKS, 1, dtype=codec.scale or torch.uint8, device=DEVICE)
    scaled = codec.scale is not None
    encode_kernel[(1,)](x, r, codes, scale, codec.encode, codec.unit, scaled, BLOCKS)
    assert_same(codes, expected, "codes")
    if scaled:
        assert_same(scale, expected_scale, "scales")
    decoded = torch.zeros_like(x)
    decode_kernel[(1,)](expected, scale, decoded, codec.decode, codec.unit, scaled, BLOCKS)
    assert_same(decoded, in_torch(codec.decode)(expected, expected_scale, 0.9), "decoded")


@pytest.mark.parametrize("mode, dtype", [(mode, dtype) for mode, dtype in KEPT if dtype != torch.float32])
def test_weights(mode, dtype):
    kept = weight_mode(mode, dtype)
    w, r = values(), bits()
    expected, expected_low = in_torch(kept.encode)(w, r)
    p = torch.zeros_like(expected)
    low = torch.zeros(BLOCKS, 32, dtype=kept.low or torch.uint8, device=DEVICE)
    weights_kernel[(1,)](w, r, p, low, kept.encode, kept.low is not None, BLOCKS)
    assert_same(p, expected, "parameter")
    if kept.low:
        assert_same(low, expected_low, "low part")


def tile_arguments(state, mode, dtype):
    """Weights, gradients and moments of all kinds for ``step_tile``, as ``[p, low, g, m, m_scale, v, v_scale]``."""
    format, kept = FORMATS[state], weight_mode(mode, dtype)
    p, low = in_torch(kept.encode)(values(approximated=True), bits(1))
    roll = torch.roll(values(approximated=True), 7, 0)
    m, m_scale = in_torch(format.m.encode)(torch.roll(values(approximated=True), 3, 1), bits(2))
    v, v_scale = in_torch(format.v.encode)(torch.roll(values(False, approximated=True), 11, 1), bits(3))
    arguments = (p, low, roll.to(dtype), m, m_scale, v, v_scale)
    return [x if isinstance(x, torch.Tensor) else None for x in arguments], format, kept


STEPS = [(rules.adamw, state, *kept) for state in STATES for kept in KEPT]
STEPS += [(rules.adam, "8bit", "24bit", torch.bfloat16), (rules.adam, "4bit", "auto", torch.float32)]


@pytest.mark.parametrize("rule, state, mode, dtype", STEPS)
def test_step_tile(rule, state, mode, dtype):
    arguments, format, kept = tile_arguments(state, mode, dtype)
    per_step, bias2 = (1 - 0.9**3) / 1e-3, (1 - 0.999**3) ** -0.5
    scalars = torch.tensor([0.9, 0.999, 0.1, 0.001, bias2 * per_step, 1e-8 * per_step, 0.1, 1.0]).tolist()
    first = (torch.arange(BLOCKS, dtype=torch.int32, device=DEVICE) * 32 + 1234567)[:, None]
    dither = 987654321
    functions = (rule, format.m.decode, format.m.encode, format.v.decode, format.v.encode, kept.decode, kept.encode)
    lanes = torch.arange(32, dtype=torch.int32, device=DEVICE)
    expected = in_torch(step_tile)(*arguments, first, lanes, dither, *scalars, *map(in_torch, functions))
    p, low, g, m, m_scale, v, v_scale = (None if x is None else x.clone() for x in arguments)
    step_kernel[(1,)](
        p, low, g, m, m_scale, v, v_scale, first, dither, *scalars, *functions, format.m.unit, format.v.unit,
        format.blocked, kept.low is not None, BLOCKS,
    )  # fmt: skip
    # where there is no scale or low part, the formulas say so by no tensor
    assert [x is not None for x in (p, low, m, m_scale, v, v_scale)] == [isinstance(x, torch.Tensor) for x in expected]
    names, found = ("p", "low", "m", "m_scale", "v", "v_scale"), (p, low, m, m_scale, v, v_scale)
    if DEVICE != "cpu" and kept.low:  # an ulp of fp32 moves many low parts
        weights = [in_torch(kept.decode)(*x[:2]) for x in (found, expected)]
        torch.testing.assert_close(*weights, rtol=2**-14, atol=1e-8)
        names, found, expected = names[2:], found[2:], expected[2:]
    for name, got, wanted in zip(names, found, expected, strict=True):
        if got is not None:
            assert_same(got, wanted, name)


def test_dither_bits():
    """Each stream is frac(hash(element) + step * phi) in 32-bit integers: as Python computes it."""
    first = torch.tensor([[0], [32], [2**31 - 32], [-5]], dtype=torch.int32)
    lanes = torch.arange(32, dtype=torch.int32)
    constants = {m_bits: 0x9E3779B1, v_bits: 0x85EBCA77, w_bits: 0xC2B2AE3D}
    for function, constant in constants.items():
        got = in_torch(function)(first, lanes, 0x12345678)
        for row, element in enumerate((0, 32, 2**31 - 32, -5)):
            wanted = [((element + lane) * constant + 0x12345678) % 2**32 for lane in range(32)]
            assert [x % 2**32 for x in got[row].tolist()] == wanted
    assert same_bits(in_torch(m_bits)(first, lanes, 1) - in_torch(m_bits)(first, lanes, 0), torch.ones_like(got))
