"""What a low-bit optimizer does to its moments, measured from outside.

Each scenario drives a real optimizer over a real fp32 parameter and reads nothing but the parameter, so that any
library can be measured. The parameter is put back to zero before every step: with lr 1 and no weight decay, what a step
leaves in it is the update itself. Two settings then show the moments:

- with eps far above sqrt(v), the update is m / (1 - beta1^t) / eps;
- with beta1 = 0, the update is g / sqrt(v / (1 - beta2^t)), which shows v.

A scenario takes ``make(params, lr=, betas=, eps=) -> optimizer`` (weight decay 0) and a device, and returns named
numbers. Gradients are drawn on the CPU with fixed seeds; the moments to compare with are float64. Where half of a block
is treated in one way and half in another, it is every other element, which is half of a block of any size.
"""

import math

import torch

SHAPE = (32, 256)  # large enough to be quantized by all libraries, whole blocks in all of them
HUGE_EPS = 1e6  # far above sqrt(v) of any scenario that reads m
GRADIENT = 1e-4  # typical size of a gradient in fine-tuning; eps is felt where v is lost
DRIFT = 0.1  # of a gradient that does not change from step to step, in units of its noise


class Probe:
    """An optimizer over one parameter that is zero before every step."""

    def __init__(self, make, shape, device, betas=(0.9, 0.999), eps=1e-8):
        self.parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
        self.optimizer = make([self.parameter], lr=1.0, betas=betas, eps=eps)

    def update(self, gradient):
        """What one step subtracts, in units of lr, in float64 on the CPU."""
        with torch.no_grad():
            self.parameter.zero_()
        self.parameter.grad = gradient.to(self.parameter)
        self.optimizer.step()
        return -self.parameter.detach().cpu().double()


class Reference:
    """Adam's moments in float64 (Kingma and Ba, https://arxiv.org/abs/1412.6980)."""

    def __init__(self, shape, betas=(0.9, 0.999), eps=1e-8):
        self.betas, self.eps, self.steps = betas, eps, 0
        self.m = torch.zeros(shape, dtype=torch.float64)
        self.v = torch.zeros(shape, dtype=torch.float64)

    def update(self, gradient):
        """Take a gradient in; return the update in units of lr."""
        g, (beta1, beta2) = gradient.double(), self.betas
        self.steps += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m, v = self.m / (1 - beta1**self.steps), self.v / (1 - beta2**self.steps)
        return m / (v.sqrt() + self.eps)


def rms(x):
    """Root of the mean square."""
    return x.square().mean().sqrt().item()


def noise(shape, steps, seed=0):
    """``steps`` tensors of N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator)


def spread_gradients(shape, spread, steps, seed=0):
    """Gradients of a scale and a drift of each element's own, the scales spread by ``spread`` decades (standard
    deviation) inside a block; each step 2 % of the elements, others every time, are 10x."""
    generator = torch.Generator().manual_seed(seed)
    scale = GRADIENT * 10 ** (spread * torch.randn(shape, generator=generator))
    drift = DRIFT * torch.randn(shape, generator=generator)
    for z in noise(shape, steps, seed + 1):
        outlier = torch.rand(shape, generator=generator) < 0.02
        yield scale * (z * torch.where(outlier, 10.0, 1.0) + drift)


def direction(make, device="cpu", *, spread, beta2, steps=600, shape=SHAPE):
    """Errors of the update in a run of :func:`spread_gradients`, relative to float64 moments, and its largest update.

    ``dir`` is the RMS error of the updates of the last half, ``acc`` that of their sum over the run.
    """
    betas = (0.9, beta2)
    probe, reference = Probe(make, shape, device, betas), Reference(shape, betas)
    error = power = largest = exact_largest = 0.0
    total = exact_total = torch.zeros(shape, dtype=torch.float64)
    for step, gradient in enumerate(spread_gradients(shape, spread, steps)):
        update, exact = probe.update(gradient), reference.update(gradient)
        total, exact_total = total + update, exact_total + exact
        largest, exact_largest = max(largest, update.abs().max().item()), max(exact_largest, exact.abs().max().item())
        if step >= steps // 2:
            error, power = error + rms(update - exact) ** 2, power + rms(exact) ** 2
    return {
        "dir": math.sqrt(error / power),
        "acc": rms(total - exact_total) / rms(exact_total),
        "largest": largest,
        "exact largest": exact_largest,
    }


def directions(make, device="cpu", *, shape=SHAPE):
    """:func:`direction` at each spread and beta2: ``dir 0.3 0.999`` and so on; the largest update is of all runs."""
    found = {"largest": 0.0, "exact largest": 0.0}
    for beta2 in (0.999, 0.95):
        for spread in (0.3, 0.8):
            run = direction(make, device, spread=spread, beta2=beta2, shape=shape)
            found |= {f"{key} {spread} {beta2}": run[key] for key in ("dir", "acc")}
            found |= {key: max(found[key], run[key]) for key in ("largest", "exact largest")}
    return found


def shrink(make, device="cpu", *, beta2=0.999, before=600, after=2000, shape=SHAPE):
    """Half of a block's gradients shrink 10x: sqrt(v exact / v) in that half ``after`` steps later, from mean v."""
    betas = (0.0, beta2)
    probe, reference = Probe(make, shape, device, betas, 1e-15), Reference(shape, betas, 1e-15)
    v = exact = 0.0
    for step, z in enumerate(noise(shape, before + after)):
        gradient = z.clone()
        if step >= before:
            gradient[..., ::2] *= 0.1
        seen = (gradient / probe.update(gradient)).square() * (1 - beta2 ** (step + 1))
        reference.update(gradient)
        if step >= before + after - 20:
            v, exact = v + seen[..., ::2].mean().item(), exact + reference.v[..., ::2].mean().item()
    return {"ratio": math.sqrt(exact / v)}


def stop(make, device="cpu", *, beta1, before=200, after=200, shape=SHAPE):
    """The gradients of half of a block stop: mean |m| left in that half, as a part of what it was."""
    probe = Probe(make, shape, device, (beta1, 0.999), HUGE_EPS)
    start = left = math.nan
    for step, z in enumerate(noise(shape, before + after)):
        gradient = z.clone()
        if step >= before:
            gradient[..., ::2] = 0.0
        m = probe.update(gradient)[..., ::2].abs().mean().item() * (1 - beta1 ** (step + 1))
        start, left = (m, left) if step < before else (start, m)
    return {"left": left / start}


def turn(make, device="cpu", *, before=100, steps=500, shape=SHAPE):
    """Constant gradients of 1; half of a block's turn to -1: the mean of m in each half ``steps`` later."""
    probe = Probe(make, shape, device, eps=HUGE_EPS)
    gradient = torch.ones(shape)
    for step in range(before + steps):
        if step == before:
            gradient[..., 1::2] = -1.0
        m = probe.update(gradient) * HUGE_EPS
    stayed, turned = m[..., ::2].mean().item(), m[..., 1::2].mean().item()
    return {"stayed": stayed, "turned": turned}


def tiny(make, device="cpu", *, size, steps=200, shape=SHAPE):
    """Gradients of RMS ``size``, eps 1e-15: mean |update| over the exact one in the last half of the run."""
    probe, reference = Probe(make, shape, device, eps=1e-15), Reference(shape, eps=1e-15)
    found = exact = 0.0
    for step, z in enumerate(noise(shape, steps)):
        update, exact_update = probe.update(z * size), reference.update(z * size)
        if step >= steps // 2:
            found, exact = found + update.abs().mean().item(), exact + exact_update.abs().mean().item()
    return {"ratio": found / exact}


def rare(make, device="cpu", *, lr=1e-3, steps=20, shape=SHAPE):
    """One gradient of 100, every 256th, among noise of 1e-4: how far the parameter is after ``steps``."""
    parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
    optimizer = make([parameter], lr=lr, betas=(0.9, 0.999), eps=1e-8)
    for z in noise(shape, steps):
        gradient = z * 1e-4
        gradient.view(-1)[::256] = 100.0
        parameter.grad = gradient.to(parameter)
        optimizer.step()
    moved = parameter.detach().cpu().double().abs()
    return {"max": moved.max().item(), "mean": moved.mean().item()}
