"""The optimizers that can be named: ours by format, and others in a table.

A peer is a row: a function of ``(params, lr, betas, eps, weight_decay, seed)`` that imports what it needs.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lowbit.finetune.errors import UserError
from lowbit.finetune.options import listed


@dataclass(frozen=True)
class Peer:
    """How to build an optimizer, and the weights it trains."""

    build: Callable  # (params, lr, betas, eps, weight_decay, seed) -> torch.optim.Optimizer
    fp32_weights: bool = False  # weights in fp32, computing in --dtype under autocast
    state_bytes: Callable | None = None  # of parameters: the bytes of their state


def torch_adamw(params, lr, betas, eps, weight_decay, seed):
    """``torch.optim.AdamW(fused=True)``."""
    import torch

    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def twice(params):
    """Bytes of two moments in the parameters' dtype."""
    return sum(2 * p.nbytes for p in params)


def blocks(bits, size, small=None, more=0.0):
    """Bytes of two moments of ``bits`` bits with an fp32 scale each for a block of ``size`` elements.

    Parameters of fewer than 4096 elements keep ``small`` bytes an element; None is two moments in their own dtype, also
    where there is no whole number of blocks. ``more`` is kept beside the moments of the others.
    """

    def kept(p):
        if p.numel() < 4096 or (small is None and p.numel() % size):
            return p.numel() * (2 * p.element_size() if small is None else small)
        return p.numel() * (bits / 4 + more) + 8 * -(-p.numel() // size)

    return lambda params: sum(map(kept, params))


def other(module, name, install, state_bytes=None, **own):
    """An AdamW of another library, imported when it is built, with ``own`` options, its best ones for bf16 weights."""

    def build(params, lr, betas, eps, weight_decay, seed):
        try:
            optimizer = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise UserError(f"{module} can't be imported ({error}): pip install {install}") from None
        return optimizer(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **own)

    return Peer(build, state_bytes=state_bytes)


def lpmm_4bit(params, lr, betas, eps, weight_decay, seed):
    """``lpmm.optim.AdamW`` of https://github.com/thu-ml/low-bit-optimizers, which has no bf16 weights (issues 4, 5)."""
    import torch

    params = list(params)
    if any(p.dtype == torch.bfloat16 for p in params):
        raise UserError("lpmm has no bf16 weights: leave it out, or give --dtype float32")
    install = "git+https://github.com/thu-ml/low-bit-optimizers"
    return other("lpmm.optim", "AdamW", install, fused=True).build(params, lr, betas, eps, weight_decay, seed)


PEERS = {
    "torch": Peer(torch_adamw, state_bytes=twice),
    "torch-fp32": Peer(torch_adamw, fp32_weights=True, state_bytes=twice),
    "bitsandbytes-8bit": other("bitsandbytes.optim", "AdamW8bit", "bitsandbytes", blocks(8, 256, 8)),
    "torchao-8bit": other("torchao.optim", "AdamW8bit", "torchao", blocks(8, 256), bf16_stochastic_round=True),
    "torchao-4bit": other("torchao.optim", "AdamW4bit", "torchao", blocks(4, 128), bf16_stochastic_round=True),
    "torchao-fp8": other("torchao.optim", "AdamWFp8", "torchao", blocks(8, 256), bf16_stochastic_round=True),
    "flashoptim": other(
        "flashoptim", "FlashAdamW", "flashoptim", blocks(8, 64, 3.125, more=1.0), master_weight_bits=24
    ),
    "flashoptim-bf16": other("flashoptim", "FlashAdamW", "flashoptim", blocks(8, 64, 2.125), master_weight_bits=None),
    "torchao-8bit-nearest": other("torchao.optim", "AdamW8bit", "torchao", blocks(8, 256)),
    "lpmm-4bit": Peer(lpmm_4bit, state_bytes=blocks(4, 128)),
}


def ours(name):
    """``state`` or ``state+weights``, as in ``8bit+24bit``, of :class:`lowbit.AdamW`; None if it names neither."""
    from lowbit.codecs import FORMATS
    from lowbit.weights import MODES

    state, plus, weights = name.partition("+")
    weights = weights if plus else "auto"
    if state not in FORMATS or weights not in MODES:
        return None

    def build(params, lr, betas, eps, weight_decay, seed):
        import lowbit

        return lowbit.AdamW(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, seed=seed, state=state, weights=weights
        )

    def state_bytes(params):
        return build(params, 1e-3, (0.9, 0.999), 1e-8, 0.0, 0).summary().bytes

    return Peer(build, state_bytes=state_bytes)


def find(name):
    """The :class:`Peer` of a name; raises :class:`UserError` that lists the names there are."""
    peer = PEERS.get(name) or ours(name)
    if peer is None:
        from lowbit.codecs import FORMATS
        from lowbit.weights import MODES

        known = ", ".join([*PEERS, *FORMATS])
        modes = ", ".join("+" + mode for mode in MODES if mode != "auto")
        raise UserError(f"unknown optimizer {name!r}: choose from {known}, the latter also with {modes}")
    return peer


def names(text):
    """The names in a list separated by commas, each checked, in order and once."""
    found = listed(text)
    if not found:
        raise UserError("--optimizers is empty: give names separated by commas, as in torch,8bit")
    for name in found:
        find(name)
    return found
