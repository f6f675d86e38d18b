"""Several examples in one row of a batch, which do not attend to each other."""

import inspect
from bisect import bisect_left, insort

import torch

from lowbit.finetune.data import IGNORED, Example
from lowbit.finetune.errors import UserError


def pack(examples, max_length, seed):
    """Examples joined to rows of at most ``max_length`` tokens, as :class:`Example` with ``lengths``.

    Greedily: in a random order that depends on ``seed``, each goes into the fullest row that has room for it, or
    begins a new one. An example is never cut; its first token, which nothing predicts, has no loss.

    Args:
        examples: of at most ``max_length`` tokens each.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, room = [], []  # room: (tokens free, row), sorted
    for i in torch.randperm(len(examples), generator=generator).tolist():
        need = len(examples[i].input_ids)
        place = bisect_left(room, (need, 0))
        free, row = room.pop(place) if place < len(room) else (max_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(examples[i])
        insort(room, (free - need, row))
    return [_joined(row) for row in rows]


def _joined(examples):
    return Example(
        [token for example in examples for token in example.input_ids],
        [label for example in examples for label in [IGNORED, *example.labels[1:]]],
        tuple(len(example.input_ids) for example in examples),
    )


def check_apart(model):
    """Raise :class:`UserError` if ``model`` lets an example see what is packed before it.

    The gradient of the second example's logits by the first one's embeddings must be zero. All processes call it.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(f"--packing: {type(model).__name__} takes no positions of tokens: leave --packing off")
    length, embeddings = 4, []

    def keep(module, args, output):
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    embedding = model.get_input_embeddings()
    ids = torch.arange(2 * length, device=next(model.parameters()).device).expand(2, -1) % embedding.num_embeddings
    positions = torch.arange(length, device=ids.device).repeat(2).expand(2, -1)
    hook = embedding.register_forward_hook(keep)
    try:
        logits = model(input_ids=ids, position_ids=positions).logits
    finally:
        hook.remove()
    (gradient,) = torch.autograd.grad(logits[:, length:].float().square().sum(), embeddings)
    if gradient[:, :length].any():
        raise UserError(
            f"--packing: {type(model).__name__} lets packed examples attend to each other: leave --packing off, or "
            "update transformers (4.53 and later keep them apart)"
        )
