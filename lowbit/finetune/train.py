"""The training loop: steps of micro-batches, a schedule, and what is measured on the way."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowbit.distributed import local, whole
from lowbit.finetune import processes
from lowbit.finetune.data import IGNORED, batches, collate, padded_length
from lowbit.finetune.diagnostics import Diagnostics
from lowbit.finetune.errors import UserError
from lowbit.finetune.memory import parts, peak_bytes, reserved_bytes, reset_peak, state_bytes
from lowbit.finetune.model import logits_at
from lowbit.finetune.options import TrainConfig
from lowbit.finetune.packing import check_apart, pack
from lowbit.finetune.peak import Recorder
from lowbit.finetune.progress import Training, TrainResult
from lowbit.finetune.timing import StepTimer, Throughput

__all__ = ["TrainConfig", "TrainResult", "Training", "train"]

HF_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


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
    inputs = {name: x.to(device, non_blocking=True) for name, x in batch.items() if name != "labels"}
    logits = logits_at(model, rows, columns, **inputs)  # [targets, vocabulary]
    return F.cross_entropy(logits.float(), targets, reduction="sum")


@contextmanager
def prepared(model, config):
    """The model in training mode, its layers compiled and checkpointed as configured; as it was afterwards.

    Checkpoints go around compiled layers. Those of transformers 5.25 are within a layer's ``forward``, where
    torch.compile gives up on the layer without a word.
    """
    layers = processes.layers(model) if config.compile or config.checkpointing else ()
    for layer in layers:
        if config.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if config.checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    model.train()
    try:
        yield
    finally:
        model.eval()
        for layer in layers:
            del layer.forward


class Order:
    """The examples of each step, packed if configured: ``order[step]`` is a list of micro-batches of indices."""

    def __init__(self, examples, config):
        self.examples = pack(examples, config.max_length, config.seed) if config.packing else examples
        self.config = config
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

    def largest(self, begin):
        """The step after ``begin`` that has most tokens with padding, in its epoch; None where there is none."""
        after = range(begin + 1, min(self.total, (begin // len(self.steps) + 1) * len(self.steps)))
        return max(after, key=lambda step: self.tokens(self[step])[1], default=None)

    def tokens(self, micro_batches):
        """``(tokens, tokens with padding)`` of a step, over all processes."""
        parts = [[self.examples[i] for i in part] for micro in micro_batches for part in processes.shares(micro)]
        tokens = sum(len(example.input_ids) for part in parts for example in part)
        return tokens, sum(len(part) * padded_length(part) for part in parts if part)


def gradients(model, examples, micro_batches, pad_id, device, autocast, forward=nullcontext):
    """Add the gradient of the mean loss a target token, over all micro-batches; returns that loss on the device.

    Each of several processes adds its part of every micro-batch. FSDP2 takes the mean of their gradients. Forward
    passes are in a context that ``forward()`` gives.
    """
    targets = max(1, sum(examples[i].targets for indices in micro_batches for i in indices))
    total = torch.zeros((), device=device)
    for indices in micro_batches:
        micro = [examples[i] for i in processes.share(indices)] or [_silent(examples[indices[0]])]
        with forward(), torch.autocast(device.type, autocast) if autocast else nullcontext():
            loss = loss_sum(model, collate(micro, pad_id, "cpu"), device) / targets
        (loss * processes.count()).backward()
        total += loss.detach()
    return processes.add_up(total)


def _silent(example):
    """An example without a loss: all processes have to take part in a micro-batch that has not one for each."""
    return replace(example, labels=[IGNORED] * len(example.input_ids))


def clip(parameters, largest):
    """Scale gradients to a norm of at most ``largest``, unless that is 0; returns their norm before, on the device."""
    if largest:
        norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return whole(norm)


def take_steps(run, order, pad_id, device, autocast, recorder, on_step):
    """The steps from ``run.step`` to the last; returns :class:`StepTimer` of gradients and of ``optimizer.step()``."""
    config, parameters = order.config, [p for p in run.model.parameters() if p.requires_grad]
    passes, steps = StepTimer(device), StepTimer(device)
    while run.step < run.total:
        micro_batches = order[run.step]
        with recorder.recording(run.step, parameters):
            with passes():
                loss = gradients(
                    run.model, order.examples, micro_batches, pad_id, device, autocast, recorder.forward
                )  # fmt: skip
            run.pending.append(loss)
            reported = (run.step + 1) % config.log_every == 0 or run.step + 1 == run.total
            if config.clip or reported:  # it reads all gradients
                run.norms.append((run.step + 1, clip(parameters, config.clip)))
            if run.diagnostics:
                with run.throughput.pause(short=True):
                    run.diagnostics.observe()
            with steps():
                run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        run.step += 1
        run.throughput.add(*order.tokens(micro_batches))
        if reported:
            run.measure()
        if on_step:
            on_step(run)
    return passes, steps


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
    if config.packing:
        check_apart(model)
    order = Order(examples, config)
    torch.manual_seed(config.seed + processes.rank())  # for dropout, where a model has it
    run = Training(model, optimizer, schedule_for(optimizer, config, order.total), order.total)
    run.diagnostics = Diagnostics(optimizer) if config.diagnostics else None
    if resume:
        run.load_state_dict(resume)
    skip = min(5, (run.total - run.step) // 2)  # warm-up: compilation, caches, allocators
    before = (resume or {}).get("seconds", 0.0)
    run.throughput = Throughput(skip, device, before, latest=(run.total - run.step) // 2)
    recorder = Recorder(device, order.largest(run.step))
    reset_peak(device)
    with prepared(model, config):
        passes, steps = take_steps(run, order, pad_id, device, autocast, recorder, on_step)
    rate, padded = run.throughput.rates()
    kept = sum(local(p).numel() for p in model.parameters() if p.requires_grad)
    peak = peak_bytes(device)
    return TrainResult(
        steps=run.step, losses=run.losses, curves=run.curves,
        tokens_per_second=rate, padded_tokens_per_second=padded, steps_not_timed=run.throughput.skip,
        model_first_step=passes.first, model_step=passes.median(),
        optimizer_first_step=steps.first, optimizer_step=steps.median(),
        max_memory=max(processes.gather(peak)), reserved_memory=max(processes.gather(reserved_bytes(device))) or None,
        memory=parts(model, optimizer, peak, recorder.found),
        state_bytes_per_param=state_bytes(optimizer) / max(1, kept),
    )  # fmt: skip
