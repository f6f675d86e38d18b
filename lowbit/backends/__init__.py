"""Where the step of a parameter runs: which backend serves a device, and the call into it."""

import logging

import torch

from lowbit.backends import compiled, eager
from lowbit.distributed import local_state
from lowbit.dither import step_offset
from lowbit.ops import in_torch, tl
from lowbit.plan import here
from lowbit.rules import scalars

BACKENDS = ("auto", "eager", "compiled", "triton")
logger = logging.getLogger("lowbit")


class Backend:
    """The steps of an optimizer's parameters, each on its own device.

    ``auto`` takes the Triton kernel on GPUs; on a CPU it compiles where a C++ compiler is present and the model is
    large enough to repay the compilation, and where compiling fails it says so once and goes on with the eager backend.
    """

    def __init__(self, name):
        self.name = name
        self.chosen = {}  # device type -> "eager" or "compiled"

    def choose(self, device, numel):
        """``triton``, ``compiled`` or ``eager`` for a device that holds ``numel`` parameter elements."""
        if device.type not in self.chosen:
            self.chosen[device.type] = self._auto(device.type, numel) if self.name == "auto" else self.name
        return self.chosen[device.type]

    def _auto(self, device_type, numel):
        if device_type != "cpu":
            if tl is not None and device_type in ("cuda", "xpu"):
                return "triton"
            logger.warning("lowbit: no Triton for %s, so the step runs as plain torch operations", device_type)
            return "eager"
        return "compiled" if numel >= compiled.WORTH_COMPILING and compiled.available("cpu") else "eager"

    def step(self, kind, rule, layout, p, g, state, offset, scalars):
        """One parameter one step on, in place; ``scalars`` is the :class:`Scalars` of its group and step."""
        p, g, state = here(p), here(g), local_state(state)
        if kind == "compiled" and layout.numel >= 64:  # a single block would be compiled as a case of its own
            update = compiled.updater(rule, layout.format, layout.weights, (p.dtype, g.dtype))
            try:
                dither, values = scalars.on(p.device)
                limit = compiled.CPU_PIECE if p.device.type == "cpu" else compiled.DEVICE_PIECE
                eager.step_parameter(update, limit, layout, p, g, state, offset, dither, values)
                return
            except torch._dynamo.exc.TorchDynamoException as error:
                if self.name != "auto":
                    raise
                self.chosen[p.device.type] = "eager"
                logger.warning("lowbit: torch.compile failed, the eager backend serves instead: %s", error)
        update = eager.updater(rule, layout.format, layout.weights)
        limit = eager.CPU_PIECE if p.device.type == "cpu" else eager.DEVICE_PIECE
        eager.step_parameter(update, limit, layout, p, g, state, offset, scalars.dither, scalars.values)


class Scalars:
    """The scalars of one group at one step, rounded to fp32: as numbers, and as tensors on each device that asks."""

    def __init__(self, group, step, decoupled, grad_scale=None):
        beta1, beta2 = group["betas"]
        factor = (-1.0 if group["maximize"] else 1.0) / (1.0 if grad_scale is None else float(grad_scale))
        given = (step, group["lr"], beta1, beta2, group["eps"], group["weight_decay"], factor)
        given = torch.tensor([float(x) for x in given], dtype=torch.float64, device="cpu")
        self._tensor = torch.stack(in_torch(scalars)(*given, decoupled)).to(torch.float32)
        self.values = self._tensor.tolist()
        self.dither = step_offset(step)
        self._on = {}

    def on(self, device):
        """``(dither, values)`` as an int32 and an fp32 tensor on a device, copied there once."""
        if device not in self._on:
            dither = torch.tensor([self.dither], dtype=torch.int32, device="cpu")
            self._on[device] = tuple(x.to(device, non_blocking=True) for x in (dither, self._tensor))
        return self._on[device]
