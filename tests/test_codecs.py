"""The state formats against decoders written from their definitions, code by code."""

import math

import numpy
import pytest
import torch
from cases import NEAREST, from_bits, randn
from hypothesis import given
from hypothesis import strategies as st

from lowbit.codecs import BF16, E3M1, E4M3, E5M3, FORMATS, FP32, SQUARE4
from lowbit.ops import TORCH, in_torch

EXPONENTS = (1, 2, 24, 50, 96, 127, 160, 200, 222)


def ocp_e4m3(code):
    """OCP 8-bit floating point E4M3 (bias 7), by its definition."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e4m3_value(code, scale):
    """The largest binade, of 2^8, is at the block's exponent; its exponent byte is biased by 127 like fp32's."""
    return ocp_e4m3(code) / 2.0**8 * 2.0 ** (scale - 127)


def e5m3_value(code, scale):
    """1.mmm times two to the exponent of the lowest code and the code's own; exponent 0 of fp32 is its subnormals."""
    exponent, mantissa = (code >> 3) + scale, code & 7
    return mantissa / 8 * 2.0**-126 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 127)


def e3m1_value(code, scale):
    """1.m times two to the exponent of the lowest code and the code's own."""
    exponent, mantissa = (code >> 1) + scale, code & 1
    return mantissa / 2 * 2.0**-126 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 127)


def square4_value(code, scale):
    """Sign and (c/7)² of the block's largest magnitude."""
    return (-1.0 if code & 8 else 1.0) * ((code & 7) / 7) ** 2 * scale


# name: (codec, value of a code by the definition, all codes, largest code, scales)
CODECS = {
    "e4m3": (E4M3, e4m3_value, [c for c in range(256) if c & 0x7F != 0x7F], 0x7E, (*EXPONENTS, 253)),
    "e5m3": (E5M3, e5m3_value, list(range(256)), 0xFF, (0, *EXPONENTS, 223)),
    "e3m1": (E3M1, e3m1_value, list(range(16)), 0xF, (0, *EXPONENTS, 247)),
    "square4": (SQUARE4, square4_value, list(range(16)), 7, (1e-35, 1e-20, 0.3, 1.0, 3.3, 1e20, 3e38)),
}


@pytest.mark.parametrize("name", CODECS)
def test_the_table_tells_the_lowest_and_the_largest_magnitude(name):
    codec, value, codes, *_ = CODECS[name]
    magnitudes = {code & codec.magnitude: abs(value(code, 1)) for code in codes}
    assert min(magnitudes, key=magnitudes.get) == 0 and max(magnitudes, key=magnitudes.get) == codec.largest


def test_the_root_on_cpus_is_correctly_rounded():
    """Against numpy's, which is the processor's: all mantissas of two binades, hard cases, subnormals."""
    bits = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32)
    hard = torch.tensor([0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, -0x80000000], dtype=torch.int32)
    for x in (
        bits.view(torch.float32),
        hard.view(torch.float32),
        torch.arange(1 << 20, dtype=torch.int32).view(torch.float32),
    ):
        found = TORCH["sqrt"](x)
        assert torch.equal(found.view(torch.int32), torch.from_numpy(numpy.sqrt(x.numpy())).view(torch.int32))


def stored(codec, codes):
    """Codes ``[blocks, 32]`` as the codec keeps them."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8) if codec.bits == 4 else codes.to(torch.uint8)


def beside_the_largest(codec, codes, largest, scale):
    """A block for each code: the code at several places, the largest code first and last."""
    blocks = torch.tensor(codes)[:, None].repeat(1, 32)
    blocks[:, 0] = blocks[:, 31] = largest
    return stored(codec, blocks), torch.full((len(codes), 1), scale, dtype=codec.scale)


def encode(codec, x, r=NEAREST):
    r = torch.full(x.shape, r, dtype=torch.int32) if isinstance(r, int) else r
    return in_torch(codec.encode)(x, r)


def decode(codec, codes, scale):
    return in_torch(codec.decode)(codes, scale, 1.0)


@pytest.mark.parametrize("name", CODECS)
def test_every_code_has_the_value_of_its_definition(name):
    codec, value, codes, largest, scales = CODECS[name]
    for scale in scales:
        x = decode(codec, *beside_the_largest(codec, codes, largest, scale))[:, 1:31]
        exact_scale = float(torch.tensor(scale, dtype=codec.scale))
        for got, code in zip(x, codes, strict=True):
            expected = torch.tensor(value(code, exact_scale), dtype=torch.float64).float()
            tolerance = 3e-7 if name == "square4" else 0.0  # its value is three fp32 products
            torch.testing.assert_close(got, expected.expand(30), rtol=tolerance, atol=1e-45 if tolerance else 0.0)
            assert math.copysign(1, got[0]) == math.copysign(1, expected)


@pytest.mark.parametrize("name", CODECS)
def test_every_code_survives_decode_and_encode(name):
    codec, _, codes, largest, scales = CODECS[name]
    for scale in scales:
        before = beside_the_largest(codec, codes, largest, scale)
        after = encode(codec, decode(codec, *before))
        assert torch.equal(after[0], before[0]), (name, scale)
        if name == "square4":
            torch.testing.assert_close(after[1], before[1], rtol=2e-7, atol=0)
        else:
            assert torch.equal(after[1], before[1]), (name, scale)


@pytest.mark.parametrize("name", ("e4m3", "e5m3", "e3m1"))
def test_every_code_survives_any_rounding_bits(name):
    """A value on the grid has nothing to round."""
    codec, _, codes, largest, _ = CODECS[name]
    before = beside_the_largest(codec, codes, largest, 127)
    for r in (0, -1, 1, 0x7FFFFFFF, 12345):
        after = encode(codec, decode(codec, *before), r)
        assert torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])


def test_values_without_blocks():
    assert same(decode(FP32, *encode(FP32, randn(4, 32))), randn(4, 32))
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()].view(-1, 2)
    for r in (NEAREST, 0, -1, 12345):
        codes, scale = encode(BF16, every.float(), r)
        assert not isinstance(scale, torch.Tensor) and same(codes.view(torch.int16), every.view(torch.int16))


def same(a, b):
    return torch.equal(a, b)


def neighbours(codec, value, codes, scale):
    """The sorted finite values of a block's codes, without sign."""
    return torch.tensor(sorted({abs(value(c, scale)) for c in codes}), dtype=torch.float64)


@pytest.mark.parametrize("name", ("e4m3", "e5m3", "e3m1"))
def test_nearest_is_the_nearest_value(name):
    """Of a block of values that spread over many binades; the lowest code of v is the value of all below it."""
    codec, value, codes, _, _ = CODECS[name]
    spread = (2.0 ** (randn(200, 32, seed=3) * 4)).double()
    x = (spread * (1 if name != "e4m3" else randn(200, 32, seed=4).sign())).float()
    x[:, 0] = x[:, 0].abs()
    stored_codes, scale = encode(codec, x)
    got = decode(codec, stored_codes, scale).double()
    for row in range(200):
        grid = neighbours(codec, value, codes, int(scale[row]))
        distance = (grid[None] - x[row].abs().double()[:, None]).abs().amin(dim=1)
        assert torch.equal((got[row] - x[row].double()).abs(), distance)
        assert grid[-1] >= x[row].abs().max()  # there is always a code to round up to


def test_square4_to_nearest():
    """Nearest in value, but up only from 0.96 of the lowest cell."""
    x = torch.linspace(0, 1, 31 * 400 + 1)[:-1].view(400, 31)
    x = torch.cat((torch.ones(400, 1), x), dim=1)
    got = decode(SQUARE4, *encode(SQUARE4, x)) * 49
    grid = torch.arange(8.0) ** 2
    edges = (grid[1:] + grid[:-1]) / 2
    edges[0] = 0.96  # the middle of the 0.08 in which the lowest cell rounds up
    expected = grid[torch.bucketize(x * 49, edges, right=True)]
    far = ((x * 49)[..., None] - edges).abs().amin(dim=-1) > 1e-4  # not at an edge, where fp32 decides
    torch.testing.assert_close(got[far], expected[far], rtol=1e-6, atol=1e-6)


def dithered_mean(codec, values, largest, count):
    """Mean of decode(encode(x)) over ``count`` evenly spaced rounding bits, of each value beside a largest one."""
    x = values.repeat_interleave(31).view(-1, 31)
    x = torch.cat((torch.full((len(values), 1), largest), x), dim=1)
    total = torch.zeros(len(values), dtype=torch.float64)
    for start in range(0, count, 31):
        r = (torch.arange(start, start + 32, dtype=torch.int64) - 1) * ((1 << 32) // count) + (1 << 31) // count
        r = (r % (1 << 32) - ((r % (1 << 32)) >> 31 << 32)).to(torch.int32).expand(len(values), 32)
        total += decode(codec, *encode(codec, x, r.contiguous()))[:, 1:].double().sum(dim=1)
    return total / count


COUNT = 31 * 128


@pytest.mark.parametrize("name", CODECS)
def test_dither_is_unbiased_in_value(name):
    """The mean over even rounding bits is the value, within the coarsest step of those bits."""
    codec, value, codes, largest, _ = CODECS[name]
    top = value(largest, 127 if name != "square4" else 1.0)
    grid = neighbours(codec, value, codes, 127 if name != "square4" else 1.0).float()
    low = 1 if name == "square4" else 0  # its lowest cell rounds deterministically
    cells = torch.stack((grid[low:-1], grid[low + 1 :]))
    fractions = torch.tensor([0.02, 0.3, 0.5, 0.77, 0.99])
    values = (cells[0][:, None] + (cells[1] - cells[0])[:, None] * fractions).flatten()
    widths = (cells[1] - cells[0])[:, None].expand(-1, 5).flatten().double()
    mean = dithered_mean(codec, values, top, COUNT)
    assert ((mean - values.double()).abs() <= widths * (1.01 / COUNT) + top * 1e-7).all()


def test_dither_of_bf16_is_unbiased():
    x = (1 + torch.tensor([0.1, 0.25, 0.5, 0.9]) / 128)[:, None].expand(4, 4096).contiguous()
    r = ((torch.arange(4096) - 2048) << 20).to(torch.int32).expand(4, 4096)
    mean = decode(BF16, *encode(BF16, x, r.contiguous())).double().mean(dim=1)
    assert ((mean - x[:, 0].double()).abs() <= 1 / 128 / 4096).all()


def test_values_near_the_top_can_round_up():
    """Between the largest code of an exponent and its binade's end, the exponent moves up and the mean stays right."""
    for codec, z in ((E4M3, 1.75), (E5M3, 1.875), (E3M1, 1.5)):
        for x in (z, math.nextafter(z, 2) + 2e-7, (z + 2) / 2, 1.9999):
            r = ((torch.arange(32) - 16) << 27).to(torch.int32).expand(1, 32).contiguous()
            got = decode(codec, *encode(codec, torch.full((1, 32), x), r)).double().mean()
            assert abs(got - x) <= 2 * 2.0 ** -(3 if codec is not E3M1 else 1) / 32 + 1e-6


@pytest.mark.parametrize("name", CODECS)
@given(exponent=st.integers(-100, 100), seed=st.integers(0, 1000))
def test_error_is_below_one_code(name, exponent, seed):
    """Whatever the rounding bits, a value stays between its two neighbours on the grid."""
    codec, value, codes, _, _ = CODECS[name]
    x = randn(1, 32, seed=seed) * 2.0**exponent
    x = x if name in ("e4m3", "square4") else x.abs()
    r = torch.randint(-(1 << 31), 1 << 31, (1, 32), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    stored_codes, scale = encode(codec, x, r)
    got = decode(codec, stored_codes, scale)
    grid = neighbours(codec, value, codes, float(scale))
    magnitude = x.abs().double().clamp(min=float(grid[0]))[0]
    above = grid[torch.searchsorted(grid, magnitude * (1 - 1e-6)).clamp(max=len(grid) - 1)]
    below = grid[(torch.searchsorted(grid, magnitude * (1 + 1e-6), right=True) - 1).clamp(min=0)]
    assert (got[0].abs().double() <= above * (1 + 1e-6)).all()
    assert (got[0].abs().double() >= below * (1 - 1e-6)).all()
    assert (torch.signbit(got) == torch.signbit(x)).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("odd", (0x7F800000, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF))
def test_a_value_not_finite_leaves_its_neighbours_alone(name, odd):
    codec = CODECS[name][0]
    x = randn(3, 32).abs()
    damaged = x.clone()
    damaged[1, 5] = from_bits([odd])[0]
    clean = x.clone()
    clean[1, 5] = 0.0
    (got, scale), (expected, expected_scale) = encode(codec, damaged), encode(codec, clean)
    others = torch.ones(3, 32, dtype=torch.bool)
    others[1, 5] = False
    assert torch.equal(scale, expected_scale)
    assert torch.equal(decode(codec, got, scale)[others], decode(codec, expected, expected_scale)[others])
    assert decode(codec, got, scale).isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name):
    codec = CODECS[name][0]
    for r in (0, -1, NEAREST, 0x7FFFFFFF):
        codes, scale = encode(codec, torch.zeros(2, 32), r)
        assert torch.equal(decode(codec, codes, scale), torch.zeros(2, 32))


def test_v_never_rounds_to_zero():
    """A small second moment beside a large one is kept at the lowest code, which is not zero."""
    x = torch.full((1, 32), 1e-12)
    x[0, 0] = 1.0
    for codec in (E5M3, E3M1):
        for r in (0, -1, NEAREST):
            assert (decode(codec, *encode(codec, x, r)) > 0).all()


def test_sizes_of_the_formats():
    sizes = {name: format.bytes_per_param for name, format in FORMATS.items()}
    blocks = 1 / 32
    assert sizes == {
        "8bit": 2 + 2 * blocks,
        "fp8": 2 + 2 * blocks,
        "4bit": 1 + 5 * blocks,
        "12bit": 1.5 + 2 * blocks,
        "bf16": 4,
        "fp32": 8,
    }
