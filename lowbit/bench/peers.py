"""The optimizers that can be named: ours by format, and others in a table.

A peer is a row: a function of ``(params, lr, betas, eps, weight_decay, seed)`` that imports what it needs.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lowbit.finetune.errors import UserError


@dataclass(frozen=True)
class Peer:
    """How to build an optimizer, and the weights it trains."""

    build: Callable  # (params, lr, betas, eps, weight_decay, seed) -> torch.optim.Optimizer
    fp32_weights: bool = False  # weights in fp32, computing in --dtype under autocast


def torch_adamw(params, lr, betas, eps, weight_decay, seed):
    """``torch.optim.AdamW(fused=True)``."""
    import torch

    return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def other(module, name, install, **own):
    """An AdamW of another library, imported when it is built, with ``own`` options, its best ones for bf16 weights."""

    def build(params, lr, betas, eps, weight_decay, seed):
        try:
            optimizer = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise UserError(f"{module} can't be imported ({error}): pip install {install}") from None
        return optimizer(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **own)

    return Peer(build)


PEERS = {
    "torch": Peer(torch_adamw),
    "torch-fp32": Peer(torch_adamw, fp32_weights=True),
    "bitsandbytes-8bit": other("bitsandbytes.optim", "AdamW8bit", "bitsandbytes"),
    "torchao-8bit": other("torchao.optim", "AdamW8bit", "torchao", bf16_stochastic_round=True),
    "torchao-4bit": other("torchao.optim", "AdamW4bit", "torchao", bf16_stochastic_round=True),
    "torchao-fp8": other("torchao.optim", "AdamWFp8", "torchao", bf16_stochastic_round=True),
    "flashoptim": other("flashoptim", "FlashAdamW", "flashoptim", master_weight_bits=24),
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

    return Peer(build)


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
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise UserError("--optimizers is empty: give names separated by commas, as in torch,8bit")
    for name in found:
        find(name)
    return found
