"""A run in progress, what a checkpoint saves of it, and what it has measured in the end."""

import copy
import math
from dataclasses import dataclass, field

import torch

from lowbit.finetune import processes
from lowbit.finetune.diagnostics import Diagnostics
from lowbit.finetune.errors import UserError
from lowbit.finetune.timing import Throughput


@dataclass(frozen=True)
class TrainResult:
    """What a run of :func:`train` measured. Times in seconds, memory in bytes."""

    steps: int
    losses: list  # (step from 1 on, mean loss a target token of the step's examples before the step)
    tokens_per_second: float | None  # unpadded, without the first ``steps_not_timed`` steps
    padded_tokens_per_second: float | None  # what the model computed on in the same time
    steps_not_timed: int
    model_first_step: float | None  # the first forward and backward pass of a step, what it compiles included
    model_step: float | None  # median of those after the first
    optimizer_first_step: float | None  # the first call of ``optimizer.step()``, what it compiles included
    optimizer_step: float | None  # median of the calls after the first
    max_memory: int  # of the process that took most
    reserved_memory: int | None  # what torch's allocator took of a GPU; None on a CPU
    memory: dict  # what this process's own peak consists of
    state_bytes_per_param: float
    curves: dict  # name -> [[step, value]]: ``seconds`` of training, ``grad_norm`` before clipping, and diagnostics


@dataclass
class Training:
    """A run in progress: what ``on_step`` sees after each step, and what a checkpoint saves."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    total: int
    step: int = 0
    losses: list = field(default_factory=list)
    curves: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)  # losses of the last steps, still on the device
    norms: list = field(default_factory=list)  # (step, norm of its gradient), still on the device
    throughput: Throughput | None = None
    diagnostics: Diagnostics | None = None

    @property
    def loss(self):
        """The latest mean loss that has been read from the device; None before the first."""
        return self.losses[-1][1] if self.losses else None

    @property
    def lr(self):
        """The learning rate of the latest step, of the first param group."""
        return float(self.schedule.base_lrs[0]) * self.schedule.lr_lambdas[0](self.step - 1)

    def measurements(self):
        """``{name: value}`` of the curves at this step; empty if it is none at which they were read."""
        found = {name: points[-1][1] for name, points in self.curves.items() if points[-1][0] == self.step}
        return found if "seconds" in found else {}

    def measure(self):
        """Read the losses, the time, and what the diagnostics find: what is done every ``log_every`` steps."""
        self.read_losses()
        self._add("seconds", self.throughput.seconds())
        if self.diagnostics:
            with self.throughput.pause():
                for name, value in self.diagnostics.measure().items():
                    self._add(name, value)

    def _add(self, name, value):
        self.curves.setdefault(name, []).append([self.step, value])

    def read_losses(self):
        """Read the losses and norms since the last time; raises :class:`UserError` if a loss is not finite."""
        if self.pending:
            count, (steps, norms) = len(self.pending), zip(*self.norms, strict=True) if self.norms else ((), ())
            read = torch.stack([x.to(torch.float32) for x in (*self.pending, *norms)]).tolist()
            values = read[:count]
            first = self.step - count + 1
            self.losses.extend((first + i, value) for i, value in enumerate(values))
            if steps:
                pairs = zip(steps, read[count:], strict=True)
                self.curves.setdefault("grad_norm", []).extend([step, norm] for step, norm in pairs)
            self.pending.clear()
            self.norms.clear()
            for step, value in self.losses[-len(values) :]:
                if not math.isfinite(value):
                    raise UserError(f"the loss became {value} at step {step}: lower --lr or lengthen --warmup")

    def state_dict(self):
        """What a resumed run needs besides the model: optimizer, schedule, progress, random state.

        The optimizer's state is whole only in a run of one process.
        """
        self.read_losses()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "losses": self.losses,
            "curves": self.curves,
            "seconds": self.throughput.seconds(),
            "diagnostics": self.diagnostics.state_dict() if self.diagnostics else None,
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def load_state_dict(self, state):
        """Go on where :meth:`state_dict` was taken; the optimizer's state may also be a folder of shards."""
        processes.load_optimizer(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        self.losses = [tuple(pair) for pair in state["losses"]]
        self.curves = copy.deepcopy(state.get("curves", {}))  # older checkpoints have none
        if self.diagnostics:
            self.diagnostics.load_state_dict(state.get("diagnostics"))
        if processes.count() > 1:
            torch.manual_seed(hash((torch.initial_seed(), self.step)))  # random numbers for each process, not of one
            return
        torch.set_rng_state(state["rng"]["cpu"])
        if state["rng"]["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["rng"]["cuda"])
