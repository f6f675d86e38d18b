"""Words of several codes at a time: the assembly of NVIDIA's GPUs, read on a CPU, against torch's words."""

import numpy
import ptx
import pytest
import torch

from lowbit import packed
from lowbit.ops import TORCH

ROWS = 64


def words(seed, low=-(2**31), high=2**31):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (ROWS, 32), generator=generator).to(torch.int32)


def codes(columns):
    return torch.arange(ROWS * columns).mul(37).remainder(256).to(torch.uint8).view(ROWS, columns)


def registers(x):
    """Unsigned 32-bit registers of a tensor's elements, four bytes in each where they are bytes."""
    return numpy.ascontiguousarray(x.numpy()).view(numpy.uint32).ravel().tolist()


def tensor(values, dtype, shape):
    return torch.from_numpy(numpy.array(values, dtype=numpy.uint32)).view(dtype).view(shape)


@pytest.mark.parametrize("name", ["pack", "pack_top"])
def test_two_codes_a_byte(name):
    x = words(1, -(2**6), 2**6) if name == "pack" else words(2)
    low, high = registers(x[:, 0::2]), registers(x[:, 1::2])
    found = []
    for i in range(0, len(low), 4):
        found += ptx.run(getattr(packed, name), 1, low[i : i + 4] + high[i : i + 4])
    assert torch.equal(tensor(found, torch.uint8, (ROWS, 16)), TORCH[name](x))


@pytest.mark.parametrize("name", ["signed_byte", "saturated_byte"])
def test_a_byte_of_each(name):
    x = words(3, 0, 2**27) if name == "signed_byte" else words(4)
    given = (x, words(5)) if name == "signed_byte" else (x,)
    columns = [registers(y) for y in given]
    found = []
    for i in range(0, x.numel(), 4):
        found += ptx.run(getattr(packed, name), 1, [y for column in columns for y in column[i : i + 4]])
    assert torch.equal(tensor(found, torch.uint8, (ROWS, 32)), TORCH[name](*given))


@pytest.mark.parametrize("name, dtype", [("e3m1_bits", torch.int32), ("square4_values", torch.float32)])
def test_values_of_two_codes_a_byte(name, dtype):
    x = codes(16)
    low, high = [], []
    for word in registers(x):
        found = ptx.run(getattr(packed, name), 8, [word])
        low, high = low + found[:4], high + found[4:]
    low, high = (tensor(y, dtype, (ROWS, 16)) for y in (low, high))
    assert torch.equal(torch.stack((low, high), dim=-1).view(ROWS, 32), TORCH[name](x))


def test_values_of_a_code_a_byte():
    x = codes(32)
    found = []
    for word in registers(x):
        found += ptx.run(packed.e4m3_values, 4, [word])
    finite = (x & 0x7F) != 0x7F  # the code that is not used
    assert torch.equal(tensor(found, torch.float32, (ROWS, 32))[finite], TORCH["e4m3_values"](x)[finite])
