"""The public optimizers: a signature, a docstring, one line each."""

from lowbit import rules
from lowbit.optimizer import Optimizer
from lowbit.options import backend_for, refuse, weights_for


class AdamW(Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101) with state in any format of the table; replaces ``torch.optim.AdamW``.

    Args:
        params: parameters, named parameters or param groups, float32, bfloat16, float16 or complex64. A group may carry
            any of the options below as its own, as in ``dict(params=embedding, state="fp32")``.
        lr: learning rate, a float or a tensor of one element.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        capturable: as in torch; on a GPU a CUDA graph can capture every step after the first, either way. A learning
            rate that is to change between replays is a tensor on the GPU.
        fused: as in torch; True takes the compiled step where the machine has one, False plain torch operations.
        state: format of the moments: ``8bit`` (= ``fp8``, 2.06 bytes a parameter), ``12bit`` (1.56), ``4bit`` (1.16),
            ``bf16`` (4) or ``fp32`` (8). Vectors and tensors below ``min_numel`` elements keep fp32.
        weights: how 16-bit weights take an update smaller than their last bit: ``stochastic`` (dithered, the default
            for 16-bit weights), ``24bit`` and ``32bit`` (low bits kept beside bfloat16 weights, 1 and 2 bytes a
            parameter), ``nearest`` (torch's way; small updates are lost). fp32 weights need none of it.
        min_numel: tensors with fewer elements, counted before sharding, keep fp32 state.
        seed: of the dither that rounds state and weights. No random generator is used.
        backend: ``auto`` (the kernel on GPUs; on a CPU compiled for large models, else eager), ``triton``,
            ``compiled`` or ``eager``.
        bf16_stochastic_round: torchao's name: True is ``weights="stochastic"``, False ``weights="nearest"``.

    Raises:
        ValueError: an option out of range, unknown, or not supported (``amsgrad``, ``foreach``,
            ``differentiable``), with the reason.
        TypeError: a parameter of another dtype.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, *, maximize=False,
        foreach=None, capturable=False, differentiable=False, fused=None, state="8bit", weights="auto", min_numel=4096,
        seed=0, backend="auto", bf16_stochastic_round=None,
    ):  # fmt: skip
        refuse(amsgrad=amsgrad, foreach=foreach, differentiable=differentiable)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, state=state,
            weights=weights_for(weights, bf16_stochastic_round), min_numel=min_numel, seed=seed,
            backend=backend_for(backend, fused),
        )  # fmt: skip


class AdamW8bit(AdamW):
    """:class:`AdamW` with 8-bit state, 2.06 bytes a parameter; replaces bitsandbytes' and torchao's ``AdamW8bit``."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state": "8bit", **options})


class AdamW4bit(AdamW):
    """:class:`AdamW` with 4-bit state, 1.16 bytes a parameter; replaces torchao's ``AdamW4bit``."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state": "4bit", **options})


class AdamWFp8(AdamW):
    """:class:`AdamW` with FP8 state: the 8-bit format, whose first moment is OCP FP8 E4M3. Needs no FP8 hardware."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state": "fp8", **options})


class Adam(AdamW):
    """Adam (https://arxiv.org/abs/1412.6980): :class:`AdamW` with weight decay as an L2 term of the gradient."""

    rule = rules.adam
    decoupled = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class Adam8bit(Adam):
    """:class:`Adam` with 8-bit state, 2.06 bytes a parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state": "8bit", **options})


class Adam4bit(Adam):
    """:class:`Adam` with 4-bit state, 1.16 bytes a parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state": "4bit", **options})


class AdamFp8(Adam):
    """:class:`Adam` with FP8 state, as :class:`AdamWFp8`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, **options):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **{"state": "fp8", **options})
