"""Checks of the options that users give, with errors that name what to change."""

import numbers
import operator

import torch

from lowbit.codecs import FORMATS
from lowbit.plan import real
from lowbit.weights import DTYPES, MODES, WEIGHTS

REFUSED = {
    "amsgrad": "it needs a third moment, which no format here keeps; use amsgrad=False",
    "foreach": "there is one implementation, already over many tensors at once; leave foreach unset",
    "differentiable": "rounding state to codes has no gradient; use differentiable=False",
}


def refuse(**options):
    """Raise ``ValueError`` with the reason for the first option that is asked for and can't be honoured."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported: {REFUSED[name]}")


def backend_for(backend, fused):
    """torch's ``fused`` in terms of backends: True is one fused pass over memory, False is plain torch operations."""
    if fused is None:
        return backend
    wanted = "compiled" if fused else "eager"
    if backend not in ("auto", wanted):
        raise ValueError(f"fused={fused!r} asks for backend={wanted!r}, but backend={backend!r} was given: drop one")
    return "auto" if fused else "eager"


def weights_for(weights, bf16_stochastic_round):
    """torchao's ``bf16_stochastic_round`` in terms of weight modes."""
    if bf16_stochastic_round is None:
        return weights
    wanted = "stochastic" if bf16_stochastic_round else "nearest"
    if weights not in ("auto", wanted):
        raise ValueError(f"bf16_stochastic_round={bf16_stochastic_round!r} contradicts weights={weights!r}: drop one")
    return wanted


settings = operator.itemgetter(
    "lr", "betas", "eps", "weight_decay", "maximize", "state", "weights", "min_numel", "seed"
)  # of a group


def check_group(group, where):
    """Raise ``ValueError`` if an option of a group (or of the defaults) is out of range."""
    _check_number(group["lr"], "lr", where)
    _check_number(group["eps"], "eps", where)
    _check_number(group["weight_decay"], "weight_decay", where)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_rate(beta) for beta in betas):
        raise ValueError(f"betas of {where} are {betas}: give two numbers in [0, 1)")
    for option, known in (("state", tuple(FORMATS)), ("weights", MODES)):
        if not isinstance(group[option], str) or group[option] not in known:
            raise ValueError(f"unknown {option}={group[option]!r} in {where}: choose one of {', '.join(known)}")


def _is_rate(beta):
    return isinstance(beta, (float, numbers.Real, torch.Tensor)) and 0.0 <= float(beta) < 1.0


def _check_number(value, name, where):
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} of {where} is a tensor of {value.numel()} elements: give one number")
        if value.device.type != "cpu":
            return  # to look at it would wait for the device
    elif not isinstance(value, (float, numbers.Real)):  # most are floats, of which the abstract class takes its time
        raise ValueError(f"{name} of {where} is {value!r}: it must be a number or a tensor of one element")
    if not 0.0 <= float(value) < float("inf"):
        raise ValueError(f"{name} of {where} is {value}: it must be a finite number, at least 0")


def parameter_name(group, group_number, p):
    """How to call a parameter in an error: by its name where the user gave named parameters."""
    place = next(i for i, other in enumerate(group["params"]) if other is p)
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} of group {group_number}, of shape {tuple(p.shape)}"


def check_parameters(group, group_number):
    """Raise ``TypeError`` or ``ValueError`` for a parameter that can't be kept as the group asks."""
    for p in group["params"]:
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"{parameter_name(group, group_number, p)} belongs to FullyShardedDataParallel, which flattens "
                "parameters across the blocks of low-bit state: use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        dtype = real(p).dtype
        if dtype not in DTYPES:
            raise TypeError(
                f"{parameter_name(group, group_number, p)} is {p.dtype}: lowbit optimizes float32, bfloat16, float16 "
                "and complex64 parameters; convert it, or give it to a torch.optim optimizer"
            )
        mode = group["weights"]
        if mode != "auto" and (mode, dtype) not in WEIGHTS:
            raise ValueError(
                f"weights={mode!r} keeps the low bits of bfloat16 parameters, but "
                f"{parameter_name(group, group_number, p)} is {dtype}: use weights='auto' for its group"
            )
