"""Properties that hold for any shape, dtype, format and weight mode, against AdamW in float64.

What a format may be off by, derived from its codes. One rounding moves a value by less than a code: a relative
``2^-mantissa bits`` above the lowest codes, and a part of the block's largest value (its *floor*) below them. Every
step rounds anew and the moments decay, so m is off by at most the sum over steps of beta1^k of the roundings, and so
is v.
"""

import math

import torch
from cases import BF16_WEIGHTS, FP16_WEIGHTS, STATES, randn, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowbit
from lowbit.ops import BLOCK

# (relative error of one rounding, floor as a part of the block's largest value) of m and of v
M = {"fp32": (2**-22, 0), "bf16": (2**-7, 0), "8bit": (2**-3, 2**-16), "12bit": (2**-3, 2**-16), "4bit": (0, 13 / 49)}
V = {"fp32": (2**-22, 0), "bf16": (2**-7, 0), "8bit": (2**-3, 2**-30), "12bit": (2**-1, 2**-6), "4bit": (2**-1, 2**-6)}

# Bits of a weight that are kept: a rounding moves it by less than 2^(1 - bits) of itself.
KEPT_BITS = {("24bit", torch.bfloat16): 16, ("32bit", torch.bfloat16): 24}
PLAIN_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(0, 70), st.integers(0, 100)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40)),
)
kept = st.one_of(
    st.just(("auto", torch.float32)),
    st.tuples(st.sampled_from(BF16_WEIGHTS), st.just(torch.bfloat16)),
    st.tuples(st.sampled_from(FP16_WEIGHTS), st.just(torch.float16)),
)
BETAS = (0.9, 0.99)


def block_max(x):
    """The largest magnitude of each element's block, in the element's place."""
    if not x.numel():
        return x
    rows = x.reshape(x.shape[0] if x.dim() else 1, -1)
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).view(rows.shape[0], -1, BLOCK)
    return padded.abs().amax(-1).repeat_interleave(BLOCK, 1)[:, : rows.shape[1]].reshape(x.shape)


class Reference:
    """AdamW in float64 on one parameter, and how far low-bit moments may be from its own."""

    def __init__(self, p, state, blocked):
        self.p, self.state, self.blocked = p.detach().double(), state if blocked else "fp32", blocked
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.m_error, self.v_error = torch.zeros_like(self.p), torch.zeros_like(self.p)

    def moments(self, g):
        """One step of the moments and of their bounds."""
        g = g.double()
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g
        self.m_error = self.rounding(self.m, self.m_error * BETAS[0], *M[self.state])
        self.v_error = self.rounding(self.v, self.v_error * BETAS[1], *V[self.state])

    @staticmethod
    def rounding(x, error, relative, floor):
        """The bound after one more rounding: of what is there, which is itself off by ``error``."""
        largest = x.abs() + error
        return error + relative * largest + floor * block_max(largest) * 1.0001 + 1e-36


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes, state=st.sampled_from(STATES), kept=kept, seed=st.integers(0, 1 << 16),
    scale=st.integers(-12, 8), small=st.booleans(),
)  # fmt: skip
def test_moments_stay_within_the_format(shape, state, kept, seed, scale, small):
    """Any gradients at any scale, three steps: m and v are float64's within the derived bound, element by element."""
    mode, dtype = kept
    p = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    min_numel = 4096 if small else 0
    optimizer = lowbit.AdamW([p], lr=0.0, betas=BETAS, state=state, weights=mode, min_numel=min_numel, seed=seed)
    low_bit = len(shape) >= 2 and math.prod(shape) >= max(min_numel, 1)
    reference = Reference(p, state, low_bit)
    start = p.detach().clone()
    for step in range(3):
        # magnitudes that spread over a few binades in a block; with a scale that bf16 and fp32 hold, fp16 as far
        spread = randn(*shape, seed=seed + step) * 2 ** (randn(*shape, seed=seed + 100 + step) * 2)
        p.grad = (spread * 2.0 ** (scale if dtype != torch.float16 else scale % 6)).to(dtype)
        optimizer.step()
        reference.moments(p.grad)
    m, v = (x.double() for x in lowbit.decode(optimizer, p))
    assert m.shape == v.shape == p.shape
    assert ((m - reference.m).abs() <= reference.m_error).all()
    assert ((v - reference.v).abs() <= reference.v_error).all()
    assert (v >= 0).all()
    assert same_bits(p, start)  # with lr 0 nothing moves, whatever the rounding
    if low_bit and state not in ("fp32", "bf16"):
        assert (v[reference.v > 0] > 0).all()  # v that rounds to zero would divide by almost nothing


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, state=st.sampled_from(STATES), kept=kept, seed=st.integers(0, 1 << 16), lr=st.floats(1e-4, 0.1))
def test_weights_take_the_whole_update(shape, state, kept, seed, lr):
    """The first step is float64's within one rounding of the weight: the update is taken before state is rounded."""
    mode, dtype = kept
    p = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    exact = p.detach().double()
    optimizer = lowbit.AdamW(
        [p], lr=lr, betas=BETAS, weight_decay=0.5, state=state, weights=mode, min_numel=0, seed=seed
    )
    g = randn(*shape, seed=seed + 1).to(dtype)
    p.grad = g.clone()
    optimizer.step()
    g = g.double()
    exact = exact - lr * (g / (g.abs() + 1e-8) + 0.5 * exact)
    low = optimizer.state[p].get("weight_low") if p.numel() else None
    if low is None:
        whole, bits = p.detach().double(), PLAIN_BITS[dtype]
    else:
        wide = low.int() << (8 if mode == "24bit" else 0)
        whole, bits = (p.detach().float().view(torch.int32) + wide).view(torch.float32).double(), KEPT_BITS[mode, dtype]
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # fp16's subnormals have steps of this
    bound = exact.abs() * 2.0 ** (1 - bits) + smallest + 2e-6 * lr + 2**-23 * (exact.abs() + 1) * (lr + 2**-1)
    assert ((whole - exact).abs() <= bound).all()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, state=st.sampled_from(STATES), kept=kept, seed=st.integers(0, 1 << 16), steps=st.integers(1, 5))
def test_zero_gradients_move_nothing(shape, state, kept, seed, steps):
    mode, dtype = kept
    p = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    start = p.detach().clone()
    optimizer = lowbit.AdamW([p], lr=1.0, weight_decay=0.0, state=state, weights=mode, min_numel=0, seed=seed)
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        optimizer.step()
    assert same_bits(p, start)
    for x in lowbit.decode(optimizer, p):
        assert torch.equal(x, torch.zeros(shape))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes, state=st.sampled_from(STATES), kept=kept, seed=st.integers(0, 1 << 16), power=st.integers(-6, 6))
def test_updates_do_not_depend_on_the_scale_of_gradients(shape, state, kept, seed, power):
    """Gradients times a power of two, eps 0: all that is kept scales by it exactly, and weights move as before."""
    mode, dtype = kept
    results = []
    for factor in (1.0, 2.0**power):
        p = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
        optimizer = lowbit.AdamW([p], lr=1e-2, eps=1e-30, state=state, weights=mode, min_numel=0)
        for step in range(3):
            sign = randn(*shape, seed=seed + step).sign()
            p.grad = (sign * 2.0 ** (randn(*shape, seed=seed + step + 9).round() % 4) * factor).to(dtype)
            optimizer.step()
        results.append((p, *lowbit.decode(optimizer, p)))
    (p, m, v), (q, m_scaled, v_scaled) = results
    assert same_bits(p, q)
    assert torch.equal(m * 2.0**power, m_scaled) and torch.equal(v * 4.0**power, v_scaled)
