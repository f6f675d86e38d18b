"""What the tests are crossed with: formats, weight modes, dtypes, shapes, and values that are hard."""

import io

import torch

import lowbit

STATES = ("8bit", "4bit", "12bit", "bf16", "fp32")
BF16_WEIGHTS = ("nearest", "stochastic", "24bit", "32bit")
FP16_WEIGHTS = ("nearest", "stochastic")

# (weight mode, parameter dtype): every row that is a way of its own
KEPT = (
    ("auto", torch.float32),
    *((mode, torch.bfloat16) for mode in BF16_WEIGHTS),
    *((mode, torch.float16) for mode in FP16_WEIGHTS),
)

OPTIMIZERS = {
    lowbit.AdamW: (torch.optim.AdamW, {}),
    lowbit.AdamW8bit: (torch.optim.AdamW, {"state": "8bit"}),
    lowbit.AdamW4bit: (torch.optim.AdamW, {"state": "4bit"}),
    lowbit.AdamWFp8: (torch.optim.AdamW, {"state": "fp8"}),
    lowbit.Adam: (torch.optim.Adam, {}),
    lowbit.Adam8bit: (torch.optim.Adam, {"state": "8bit"}),
    lowbit.Adam4bit: (torch.optim.Adam, {"state": "4bit"}),
    lowbit.AdamFp8: (torch.optim.Adam, {"state": "fp8"}),
}

SHAPES = ((), (0,), (1,), (5,), (0, 7), (3, 0), (1, 1), (7, 1), (64, 64), (33, 70), (130, 31), (4, 3, 5, 7))

# fp32 bits: zeros, the lowest and highest subnormals and normals, infinities, NaNs of several payloads
HARD_BITS = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00000002, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000,
    0x00800001, 0x0C000000, 0x33800000, 0x33800001, 0x38800000, 0x387FC000, 0x3F7FFFFF, 0x3F800000, 0xBF800000,
    0x3F808000, 0x3F807FFF, 0x3F818000, 0x477FE000, 0x477FE001, 0x477FEFFF, 0x477FF000, 0x47800000, 0xC7800000,
    0x7E800000, 0x7F000000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF,
)  # fmt: skip
NOT_FINITE_BITS = (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)

NEAREST = -0x80000000  # dither bits that round to nearest


def signed(bits):
    """Unsigned 32-bit integers as an int32 tensor."""
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32)


def from_bits(bits):
    """fp32 values of unsigned 32-bit integers."""
    return signed(bits).view(torch.float32)


def random_bits(count, seed=0):
    """``count`` random int32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32)


def randn(*shape, seed=0, dtype=torch.float32):
    """Normal values from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameter(*shape, seed=0, dtype=torch.float32):
    """A parameter of normal values."""
    return torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))


def run(optimizer, parameters, steps, first=0, scale=1.0):
    """Steps with gradients that are the same for the same step number, parameter number and shape."""
    for step in range(first, first + steps):
        for number, p in enumerate(parameters):
            g = randn(*p.shape, seed=1000 * step + number, dtype=torch.float32)
            p.grad = (g * scale).to(p.dtype)
        optimizer.step()


def same_bits(a, b):
    """Whether two tensors are of one dtype and shape and the same bit for bit, NaNs included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(words), b.detach().contiguous().view(words))


def assert_same_state(a, b):
    """Two dicts of state tensors, equal bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert same_bits(a[name], b[name]), name


def through_a_file(value):
    """Saved and loaded, with no code in the file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
