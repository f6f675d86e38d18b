"""The training loop: steps of micro-batches, a schedule, and what is measured on the way."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from lowbit.distributed import local
from lowbit.finetune import processes
from lowbit.finetune.data import IGNORED, Example, batches, collate
from lowbit.finetune.errors import UserError
from lowbit.finetune.memory import parts, peak_bytes, reset_peak, state_bytes
from lowbit.finetune.model import logits_at
from lowbit.finetune.options import TrainConfig
from lowbit.finetune.timing import StepTimer, Throughput

__all__ = ["TrainConfig", "TrainResult", "Training", "train"]

HF_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@dataclass(frozen=True)
class TrainResult:
    """What a run of :func:`train` measured. Times in seconds, memory in bytes."""

    steps: int
    losses: list  # (step from 1 on, mean loss a target token of the step's examples before the step)
    tokens_per_second: float | None  # unpadded, without the first ``steps_not_timed`` steps
    steps_not_timed: int
    optimizer_first_step: float | None  # the first call of ``optimizer.step()``, what it compiles included
    optimizer_step: float | None  # median of the calls after the first
    max_memory: int  # of the process that took most
    memory: dict  # what this process's own peak consists of
    state_bytes_per_param: float


def schedule_for(optimizer, config, total):
    """The learning-rate schedule of ``total`` steps, stepped once after each; warm-up is linear from 0."""
    from transformers import get_scheduler

    warmup = math.ceil(config.warmup * total) if config.warmup < 1 else int(config.warmup)
    return get_scheduler(
        HF_SCHEDULES[config.schedule], optimizer, num_warmup_steps=min(warmup, total), num_training_steps=total
    )


def loss_sum(model, batch, device):
    """Summed negative log-likelihood of the target tokens, in fp32; ``batch`` is on the CPU.

    Positions of targets are found before the batch is moved, so that a GPU is not waited for.
    """
    labels = batch["labels"][:, 1:]
    where = (labels != -100).nonzero(as_tuple=True)
    targets = labels[where].to(device, non_blocking=True)
    rows, columns = (x.to(device, non_blocking=True) for x in where)
    inputs = {name: batch[name].to(device, non_blocking=True) for name in ("input_ids", "attention_mask")}
    logits = logits_at(model, rows, columns, **inputs)  # [targets, vocabulary]
    return F.cross_entropy(logits.float(), targets, reduction="sum")


@dataclass
class Training:
    """A run in progress: what ``on_step`` sees after each step, and what a checkpoint saves."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    total: int
    step: int = 0
    losses: list = field(default_factory=list)
    pending: list = field(default_factory=list)  # losses of the last steps, still on the device
    throughput: Throughput | None = None

    @property
    def loss(self):
        """The latest mean loss that has been read from the device; None before the first."""
        return self.losses[-1][1] if self.losses else None

    def read_losses(self):
        """Read the losses of the steps since the last time; raises :class:`UserError` if one is not finite."""
        if self.pending:
            values = torch.stack(self.pending).tolist()
            first = self.step - len(values) + 1
            self.losses.extend((first + i, value) for i, value in enumerate(values))
            self.pending.clear()
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
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def load_state_dict(self, state):
        """Go on where :meth:`state_dict` was taken; the optimizer's state may also be a folder of shards."""
        processes.load_optimizer(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        self.losses = [tuple(pair) for pair in state["losses"]]
        if processes.count() > 1:
            torch.manual_seed(hash((torch.initial_seed(), self.step)))  # random numbers for each process, not of one
            return
        torch.set_rng_state(state["rng"]["cpu"])
        if state["rng"]["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["rng"]["cuda"])


@contextmanager
def prepared(model, config):
    """The model in training mode, its layers compiled and checkpointed as configured; as it was afterwards."""
    layers = processes.layers(model)
    if config.compile:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.checkpointing:
        _checkpointing(model, "enable")({"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        if config.checkpointing:
            _checkpointing(model, "disable")()
        if config.compile:
            for layer in layers:
                del layer.forward


def _checkpointing(model, what):
    """transformers' method, which was renamed in 5."""
    return getattr(model, f"activation_checkpointing_{what}", None) or getattr(model, f"gradient_checkpointing_{what}")


class Order:
    """The examples of each step: ``order[step]`` is a list of micro-batches of indices."""

    def __init__(self, examples, config):
        self.examples, self.config = examples, config
        self.epoch, self.steps = None, []
        self._load(0)
        self.total = config.steps or max(1, math.ceil(config.epochs * len(self.steps)))

    def _load(self, epoch):
        if epoch != self.epoch:
            c = self.config
            self.steps = batches(self.examples, c.batch_size * c.grad_accum, c.seed, epoch, c.group_by_length)
            self.epoch = epoch

    def __getitem__(self, step):
        epoch, place = divmod(step, len(self.steps))
        self._load(epoch)
        indices = self.steps[place]
        return [indices[i : i + self.config.batch_size] for i in range(0, len(indices), self.config.batch_size)]


def gradients(model, examples, micro_batches, pad_id, device, autocast):
    """Add the gradient of the mean loss a target token, over all micro-batches; returns that loss on the device.

    Each of several processes adds its part of every micro-batch. FSDP2 takes the mean of their gradients.
    """
    targets = max(1, sum(examples[i].targets for indices in micro_batches for i in indices))
    total = torch.zeros((), device=device)
    for indices in micro_batches:
        micro = [examples[i] for i in processes.share(indices)] or [_silent(examples[indices[0]])]
        with torch.autocast(device.type, autocast) if autocast else nullcontext():
            loss = loss_sum(model, collate(micro, pad_id, "cpu"), device) / targets
        (loss * processes.count()).backward()
        total += loss.detach()
    return processes.add_up(total)


def _silent(example):
    """An example without a loss: all processes have to take part in a micro-batch that has not one for each."""
    return Example(example.input_ids, [IGNORED] * len(example.input_ids))


def take_steps(run, order, pad_id, device, autocast, timer, on_step):
    """The steps from ``run.step`` to the last."""
    config, parameters = order.config, [p for p in run.model.parameters() if p.requires_grad]
    while run.step < run.total:
        micro_batches = order[run.step]
        run.pending.append(gradients(run.model, order.examples, micro_batches, pad_id, device, autocast))
        if config.clip:
            torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        with timer():
            run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        run.step += 1
        run.throughput.add(sum(len(order.examples[i].input_ids) for indices in micro_batches for i in indices))
        if run.step % config.log_every == 0 or run.step == run.total:
            run.read_losses()
        if on_step:
            on_step(run)


def train(model, optimizer, examples, pad_id, config, *, autocast=None, on_step=None, resume=None):
    """Train ``model`` in place with ``optimizer`` and return a :class:`TrainResult`.

    Args:
        examples: list of :class:`lowbit.finetune.data.Example`, at least one.
        config: a :class:`TrainConfig` without None but for ``epochs`` or ``steps``.
        autocast: dtype to compute in where it isn't that of the weights.
        on_step: called with the :class:`Training` after every step.
        resume: a :meth:`Training.state_dict` to go on from.

    Raises:
        UserError: no examples, or a loss that isn't finite.
    """
    if not examples:
        raise UserError("there is no example to train on: give more records to --data, or a larger --max-length")
    device = next(model.parameters()).device
    order = Order(examples, config)
    torch.manual_seed(config.seed + processes.rank())  # for dropout, where a model has it
    run = Training(model, optimizer, schedule_for(optimizer, config, order.total), order.total)
    if resume:
        run.load_state_dict(resume)
    skip = min(5, (run.total - run.step) // 2)  # warm-up: compilation, caches, allocators
    run.throughput = Throughput(skip, device)
    timer = StepTimer(device)
    reset_peak(device)
    with prepared(model, config):
        take_steps(run, order, pad_id, device, autocast, timer, on_step)
    rate = run.throughput.rate()
    kept = sum(local(p).numel() for p in model.parameters() if p.requires_grad)
    peak = peak_bytes(device)
    return TrainResult(
        run.step, run.losses, rate, skip, timer.first, timer.median(), max(processes.gather(peak)),
        parts(model, optimizer, peak), state_bytes(optimizer) / max(1, kept),
    )  # fmt: skip
