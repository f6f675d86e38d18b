"""The weight modes: exhaustive over mantissas, and against a plain cast."""

import pytest
import torch
from cases import HARD_BITS, NEAREST, NOT_FINITE_BITS, from_bits, randn, same_bits

from lowbit.ops import in_torch
from lowbit.state import low_bits_between
from lowbit.weights import MODES, WEIGHTS, weight_mode

BF16 = torch.bfloat16


def encode(name, w, r=NEAREST, dtype=BF16):
    r = torch.full(w.shape, r, dtype=torch.int32) if isinstance(r, int) else r
    return in_torch(weight_mode(name, dtype).encode)(w, r)


def decode(name, p, low, dtype=BF16):
    return in_torch(weight_mode(name, dtype).decode)(p, low)


def binade(exponent, sign, part):
    """A quarter of all mantissas of a binade (biased ``exponent``) and sign, ``[blocks, 32]``."""
    b = torch.arange(part << 21, (part + 1) << 21, dtype=torch.int32) | exponent << 23
    return (b | (-(1 << 31) if sign else 0)).view(torch.float32).view(-1, 32)


def half_ulp(p):
    """Half of the distance from the bf16 ``p`` to the next one away from zero, in fp64."""
    exponent = torch.frexp(p.double().abs().clamp(min=2.0**-126)).exponent - 1
    return torch.ldexp(torch.ones(p.shape, dtype=torch.float64), exponent - 8)


# every mantissa of one binade, with both signs, in the middle; of the lowest (subnormals) and the highest, one sign
@pytest.mark.parametrize("exponent, sign", ((127, 0), (127, 1), (0, 0), (1, 1), (254, 0)))
def test_every_mantissa(exponent, sign):
    for part in range(4):
        w = binade(exponent, sign, part)
        p, low = encode("32bit", w)
        assert (p.dtype, low.dtype) == (BF16, torch.int16)
        assert same_bits(decode("32bit", p, low), w)
        assert_nearest(p, w)
        p, low = encode("24bit", w)
        assert (p.dtype, low.dtype) == (BF16, torch.int8)
        kept = decode("24bit", p, low)
        finite = kept.isfinite()
        # a bf16 ulp is 2^16 of fp32's, so ulp/512 is 2^7 of them: as integers, whatever the exponent
        assert ((kept.view(torch.int32) - w.view(torch.int32)).abs() <= 128).all()
        assert (w[~finite].view(torch.int32) >= 0x7F7FFF80).all()  # the nearest upper 24 bits are those of infinity
        assert_nearest(p[finite], kept[finite])


def assert_nearest(p, w):
    """The bf16 ``p`` is the nearest to ``w``, or infinite where the nearest is."""
    inside = p.isfinite()
    error = (p.double() - w.double()).abs()
    assert (error[inside] <= half_ulp(w.to(BF16))[inside]).all()
    assert same_bits(p[~inside], w[~inside].to(BF16))


def test_24bit_is_dithered_below_its_last_bit():
    w = from_bits(range(0x3F800000, 0x3F800000 + 256)).view(8, 32)
    total = torch.zeros(8, 32, dtype=torch.float64)
    for i in range(256):
        total += decode("24bit", *encode("24bit", w, ((i - 128) << 24) + (1 << 23))).double()
    assert torch.equal(total / 256, w.double())


@pytest.mark.parametrize("mode", ("nearest", "stochastic", "24bit", "32bit"))
@pytest.mark.parametrize("r", (NEAREST, 0, -1, 0x7FFFFFFF))
def test_not_finite_stays_so(mode, r):
    """Every NaN that arithmetic gives stays one, whatever its payload and the bits; infinities keep their sign."""
    payloads = torch.cat((torch.arange(0, 1 << 22, 509), (1 << 22) - 1 - torch.arange(512))).to(torch.int32)
    nan = payloads | 0x7FC00000
    nan = torch.cat((nan, nan | -(1 << 31)))
    nan = nan[: len(nan) // 32 * 32].view(torch.float32).view(-1, 32)
    assert nan.isnan().all()
    p, low = encode(mode, nan, r)
    assert p.isnan().all() and decode(mode, p, low).isnan().all()
    inf = from_bits([0x7F800000, 0xFF800000] * 16).view(1, 32)
    p, low = encode(mode, inf, r)
    assert same_bits(p, inf.to(BF16)) and same_bits(decode(mode, p, low), inf)


def test_every_nan_of_16_bits_stays_one():
    every = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = every.view(torch.float32)
    x = x[x.isnan()].repeat(32)[: 2 * 127 * 32].view(-1, 32) * 1.0  # arithmetic makes signalling NaNs quiet ones
    for r in (0, -1, NEAREST):
        assert encode("stochastic", x, r)[0].isnan().all()
        assert encode("stochastic", x, r, torch.float16)[0].isnan().all()


def test_hard_values_of_32bit():
    w = from_bits((*HARD_BITS, 0x7F800000, 0xFF800000, 0))[None]
    assert same_bits(decode("32bit", *encode("32bit", w)), w)


@pytest.mark.parametrize("dtype", (BF16, torch.float16))
def test_nearest_is_a_cast(dtype):
    w = torch.cat((from_bits(HARD_BITS), randn(10000) * 2 ** (randn(10000, seed=1) * 8)))[: 312 * 32].view(-1, 32)
    p, low = encode("nearest", w, 12345, dtype)
    assert not isinstance(low, torch.Tensor) and same_bits(p, w.to(dtype))
    assert same_bits(decode("nearest", p, None, dtype), w.to(dtype).float())


@pytest.mark.parametrize("dtype, bits", ((BF16, 16), (torch.float16, 13)))
def test_stochastic_is_unbiased(dtype, bits):
    """The mean over evenly spaced rounding bits is the weight, down to the subnormals and across binades."""
    scales = torch.tensor([1.0, -3.7e-2, 700.0, 1e-4, -6.1e-5, 3e-6, 1e-7, 2e-8])
    w = (scales[:, None] * (1 + torch.arange(32) / 33)).float()
    total = torch.zeros(8, 32, dtype=torch.float64)
    low = torch.full((8, 32), torch.inf, dtype=torch.float64)
    high = -low
    count = 1 << 9
    for i in range(count):
        p = encode("stochastic", w, ((i - count // 2) << 23) + (1 << 22), dtype)[0].double()
        total, low, high = total + p, low.minimum(p), high.maximum(p)
    # the grid is even from zero to the lowest normal value, and has 2^(23 - bits) steps a binade above
    lowest = {BF16: 2.0**-126, torch.float16: 2.0**-14}[dtype]
    step = torch.ldexp(torch.ones(w.shape), torch.frexp(w.abs().clamp(min=lowest)).exponent - 1 + bits - 23).double()
    assert ((total / count - w.double()).abs() <= step * 1.01 / count).all()
    assert ((high - low) <= step).all()  # two neighbours, no third


def test_fp16_overflows_like_a_cast():
    w = torch.tensor([65536.0, -65536.0, 1e6, -3e38, torch.inf, -torch.inf, 65504.0, -65504.0] * 4)[None]
    for r in (0, -1, NEAREST):
        p = encode("stochastic", w, r, torch.float16)[0]
        assert same_bits(p, w.to(torch.float16))


def test_fp16_keeps_every_fp16():
    """All 65536 values, subnormals and signed zeros among them, are kept by any rounding bits."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 32)
    nan = every.isnan()
    for r in (0, -1, NEAREST, 12345):
        p = encode("stochastic", every.float(), r, torch.float16)[0]
        assert same_bits(p[~nan], every[~nan]) and p[nan].isnan().all()


def test_fp32_weights_are_exact_in_every_mode():
    w = from_bits((*HARD_BITS, *NOT_FINITE_BITS))[None]
    for mode in MODES:
        kept = weight_mode(mode, torch.float32)
        assert kept.low is None and same_bits(in_torch(kept.encode)(w, w.view(torch.int32))[0], w)


def test_the_table():
    assert weight_mode("auto", torch.float32).name == "nearest"
    assert weight_mode("auto", BF16).name == weight_mode("auto", torch.float16).name == "stochastic"
    extra = {mode: weight_mode(mode, BF16).bytes_per_param for mode in MODES}
    assert extra == {"auto": 0, "nearest": 0, "stochastic": 0, "24bit": 1, "32bit": 2}
    assert ("24bit", torch.float16) not in WEIGHTS


def test_low_bits_between_modes():
    """24-bit low parts widen exactly, narrow by at most half their last bit, and start at zero."""
    w = randn(64, 32)
    p, low16 = encode("32bit", w)
    low8 = low_bits_between(low16, torch.int8, p, low16.shape)
    narrowed = decode("24bit", p, low8)
    # half of the last bit is 128; 256 where the low part is at the end of int8 and cannot round up
    error = (narrowed.view(torch.int32) - w.view(torch.int32)).abs()
    assert (error <= torch.where(low16 >= 0x7F80, 255, 128)).all()
    wide = low_bits_between(low8, torch.int16, p, low16.shape)
    assert same_bits(decode("32bit", p, wide), narrowed)
    assert torch.equal(low_bits_between(None, torch.int8, p, p.shape), torch.zeros(64, 32, dtype=torch.int8))
    assert low_bits_between(low8, torch.int8, p, p.shape) is low8
