"""``lowbit estimate``: memory and the optimizer's time on GPUs that need not be there.

Weights, gradients and state are counted; activations are those of one forward and backward pass of the largest batch,
run on tensors without data (torch's FakeTensorMode) while the bytes of all that are alive are followed.
"""

import math
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lowbit.bench import peers
from lowbit.finetune import processes
from lowbit.finetune.data import collate, load_split, padded_length, tokenize
from lowbit.finetune.errors import UserError
from lowbit.finetune.model import cast, skeleton
from lowbit.finetune.options import resolve
from lowbit.finetune.train import Order, logits_at, prepared


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU, the optimizer's seconds a step there.

    ``activations`` are all else that is alive when most is: activations, temporaries, gathered weights.
    """

    optimizer: str
    weights: float
    gradients: float  # alive when most is
    state: float
    activations: float
    step: float

    @property
    def peak(self):
        """All of it."""
        return self.weights + self.gradients + self.state + self.activations


class Live(TorchDispatchMode):
    """Follows the bytes of storages that are alive: ``now``, ``peak``, and the gradients' share of the peak.

    Storages of the ``others`` do not count, as those of weights, of which operations return views.
    """

    def __init__(self, others=()):
        super().__init__()
        self.now = self.peak = self.gradients = self.gradients_at_peak = 0
        self.known = {x.untyped_storage()._cdata for x in others}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        if self.now > self.peak:
            self.peak, self.gradients_at_peak = self.now, self.gradients

        def gone():
            self.known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)

    def count_gradient(self, p):
        """A hook that a parameter's gradient calls when it is there."""
        self.gradients += p.nbytes


def largest_batch(examples, options, pad_id):
    """The micro-batch of the first epoch that has most tokens, padding included, on the CPU."""
    order = Order(examples, options)
    batches = [micro for step in range(len(order.steps)) for micro in order[step]]

    def tokens(indices):
        return len(indices) * padded_length([order.examples[i] for i in indices])

    return collate([order.examples[i] for i in max(batches, key=tokens)], pad_id, "cpu")


def passes(model, batch, options, autocast):
    """``(gradients, all else)`` in bytes where most is alive in a forward and backward pass; ``model`` is fake."""
    labels = batch["labels"][:, 1:]
    rows, columns = (labels != -100).nonzero(as_tuple=True)
    live = Live([*model.parameters(), *model.buffers()])
    hooks = [p.register_post_accumulate_grad_hook(live.count_gradient) for p in model.parameters() if p.requires_grad]
    mode = next(model.parameters()).fake_mode
    ids, rows, columns, targets = (
        mode.from_tensor(x) for x in (batch["input_ids"], rows, columns, labels[rows, columns])
    )
    with mode, prepared(model, options), live:
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            logits = logits_at(model, rows, columns, input_ids=ids)
            loss = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
        del logits
        loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return live.gradients_at_peak, live.peak - live.gradients_at_peak


def estimate(options):
    """An :class:`Estimate` for each optimizer of :class:`EstimateOptions`, after :func:`resolve`."""
    if options.gpus % options.replicas:
        raise UserError(f"--replicas is {options.replicas}: give a number that divides --gpus {options.gpus}")
    dtype = getattr(torch, options.dtype)
    shards = options.gpus // options.replicas
    found, rows, batch = {}, [], None
    for name in peers.names(options.optimizers):
        peer = peers.find(name)
        wide = peer.fp32_weights and dtype != torch.float32
        if wide not in found:
            with FakeTensorMode():
                model, tokenizer = skeleton(options.model)
                cast(model, torch.float32 if wide else dtype)
            batch = batch or _batch(tokenizer, options)
            found[wide] = (model, *passes(model, batch, options, dtype if wide else None))
        model, gradients, activations = found[wide]
        parameters = [p for p in model.parameters() if p.requires_grad]
        weights = sum(p.nbytes for p in model.parameters())
        state = peer.state_bytes(parameters)
        moved = 3 * sum(p.nbytes for p in parameters) + 2 * state
        whole = _gathered(model) if shards > 1 else 0
        rows.append(
            Estimate(
                name, weights / shards, gradients / shards, state / shards, activations + whole,
                moved / shards / (options.bandwidth * 1e9),
            )
        )  # fmt: skip
    return rows


def _batch(tokenizer, options):
    train, _ = load_split(options.data, options.held_out)
    examples = tokenize(train, tokenizer, options.max_length, options.train_on_all)
    if not examples:
        raise UserError("there is no example to train on: give more records to --data, or a larger --max-length")
    batch = largest_batch(examples, options, tokenizer.pad_token_id or 0)
    rows = math.ceil(len(batch["input_ids"]) / options.gpus)  # those of the process that has most
    return {name: x[:rows] for name, x in batch.items()}


def _gathered(model):
    """Bytes that FSDP2 gathers beside the shards: the root's weights, two layers' weights, gradients of both."""
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in processes.layers(model)] or [0]
    root = sum(p.nbytes for p in model.parameters()) - sum(layers)
    return 2 * root + 4 * max(layers)


def command(options, console):
    """``lowbit estimate``: print the table."""
    from rich.table import Table

    options = resolve(options)
    gib = 2**30
    table = Table(title=f"{options.model}, one of {options.gpus} GPUs, GiB; {options.bandwidth:g} GB/s")
    table.add_column("optimizer")
    for header in ("weights", "gradients", "state", "activations", "peak", "step, ms"):
        table.add_column(header, justify="right")
    for row in estimate(options):
        sizes = (row.weights, row.gradients, row.state, row.activations, row.peak)
        table.add_row(row.optimizer, *(f"{size / gib:.2f}" for size in sizes), f"{row.step * 1e3:.2f}")
    console.print(table)
