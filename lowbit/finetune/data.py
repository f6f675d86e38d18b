"""Instruction data: records in Alpaca's format, the Alpaca prompt, tokens, batches."""

import logging
import random
from dataclasses import dataclass
from functools import cached_property

import torch

from lowbit.finetune.errors import UserError
from lowbit.finetune.sources import read

IGNORED = -100  # label of a token that has no loss
MEGABATCH = 50  # batches sorted by length together: https://github.com/huggingface/transformers (LengthGroupedSampler)
SPLIT_SEED = 2024  # of the records set aside, which are the same for every --seed
MULTIPLE = 8  # padded lengths are multiples of it

# https://github.com/tatsu-lab/stanford_alpaca/blob/main/train.py
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
PROMPT_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A record as tokens; ``labels`` are ``input_ids`` where a token has a loss and -100 elsewhere.

    ``lengths`` are those of the records in it, where :func:`lowbit.finetune.packing.pack` joined several.
    """

    input_ids: list[int]
    labels: list[int]
    lengths: tuple[int, ...] | None = None

    @cached_property
    def targets(self):
        """Number of tokens that count in the loss: the labels after the first, which nothing predicts."""
        return sum(label != IGNORED for label in self.labels[1:])


def load_records(spec):
    """Records ``{"instruction", "input", "output"}``, all strings, of a data source.

    Args:
        spec: ``builtin``; a .json, .jsonl or .parquet file; a folder of such files, or one that ``datasets`` saved;
            a dataset's id on the Hugging Face Hub (its split ``train``).

    Raises:
        UserError: nothing there, unreadable, empty, or a record that is not in Alpaca's format, with its number.
    """
    records = [_record(row, where) for row, where in read(str(spec))]
    if not records:
        raise UserError(f"{spec} holds no records: give data with at least one")
    return records


def _record(row, where):
    """The three strings of a row; ``where`` names it in errors. ``input`` may be missing or null."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is not an object: give records with instruction, input and output")
    for name in ("instruction", "output"):
        if row.get(name) is None:
            raise UserError(f"{where} has no '{name}': every record needs instruction and output")
    record = {name: row.get(name) for name in ("instruction", "input", "output")}
    record["input"] = "" if record["input"] is None else record["input"]
    for name, value in record.items():
        if not isinstance(value, str):
            raise UserError(f"{where} has a '{name}' of type {type(value).__name__}: make it a string")
    return record


def load_split(name, held_out):
    """``(train, held_out)`` of :func:`load_records`; at most a tenth is set aside."""
    records = load_records(name)
    return split(records, min(held_out, len(records) // 10))


def split(records, held_out):
    """``(train, held_out)``: ``held_out`` records set aside at random, the same in every run; both keep their order."""
    if not 0 <= held_out < len(records):
        raise UserError(f"--held-out {held_out} of {len(records)} records leaves none to train on: lower it")
    chosen = set(random.Random(SPLIT_SEED).sample(range(len(records)), held_out))
    return (
        [record for i, record in enumerate(records) if i not in chosen],
        [record for i, record in enumerate(records) if i in chosen],
    )


def prompt(record):
    """The Alpaca prompt of a record, up to where the response begins."""
    return (PROMPT_WITH_INPUT if record["input"] else PROMPT_WITHOUT_INPUT).format_map(record)


def tokenize(records, tokenizer, max_length, train_on_all=False):
    """Records as :class:`Example`, the loss on the response and the end token.

    Prompt and response are tokenized apart, so the border is where a user of the model puts it. What goes beyond
    ``max_length`` tokens is cut; an example that loses its whole response is dropped, and the log says how many were.

    Args:
        train_on_all: take the loss on the prompt too.
    """
    prompts = tokenizer([prompt(record) for record in records])["input_ids"] if records else []
    outputs = [record["output"] for record in records]
    responses = tokenizer(outputs, add_special_tokens=False)["input_ids"] if records else []
    end = tokenizer.eos_token_id
    examples = []
    for head, response in zip(prompts, responses):
        head = head[:-1] if head and head[-1] == end else head  # some tokenizers end every text
        ids = [*head, *response, end][:max_length]
        if len(ids) > len(head):
            examples.append(Example(ids, ids if train_on_all else [IGNORED] * len(head) + ids[len(head) :]))
    if len(examples) < len(records):
        dropped = len(records) - len(examples)
        logger.warning("%d of %d records dropped: the prompt alone fills %d tokens", dropped, len(records), max_length)
    return examples


def batches(examples, batch_size, seed, epoch, group_by_length=True):
    """The batches of an epoch, lists of indices in an order that depends on ``(seed, epoch)`` alone.

    With ``group_by_length``, a random order is cut into stretches of 50 batches, each sorted by length, and the
    batches are shuffled: little padding, and still random. The last batch of the shuffle may be short.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(examples), generator=generator).tolist()
    if not group_by_length:
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    stretch, grouped = batch_size * MEGABATCH, []
    for start in range(0, len(order), stretch):
        part = sorted(order[start : start + stretch], key=lambda i: len(examples[i].input_ids), reverse=True)
        grouped += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [grouped[i] for i in torch.randperm(len(grouped), generator=generator).tolist()]


def padded_length(examples):
    """Tokens of a row in a batch of examples: the most that one has, up to a multiple of 8."""
    length = max(len(example.input_ids) for example in examples)
    return length + -length % MULTIPLE


def collate(examples, pad_id, device):
    """Examples as int64 tensors ``input_ids`` and ``labels`` of shape [examples, length].

    Padded on the right with ``pad_id`` and -100, to a multiple of 8. There is no ``attention_mask``: a causal model
    sees no padding from the left of it, and transformers reads a mask on the CPU, for which a GPU is waited for. Packed
    examples have ``position_ids`` too: from 0 for each record and for the padding, by which transformers keeps them
    apart.
    """
    length = padded_length(examples)
    rows = {"input_ids": [], "labels": []}
    for example in examples:
        padding = length - len(example.input_ids)
        rows["input_ids"].append(example.input_ids + [pad_id] * padding)
        rows["labels"].append(example.labels + [IGNORED] * padding)
    if examples[0].lengths:
        rows["position_ids"] = [_positions(example.lengths, length) for example in examples]
    return {name: torch.tensor(values, device=device) for name, values in rows.items()}


def _positions(lengths, length):
    """Positions of packed records of these lengths and of the padding up to ``length``."""
    return [i for count in (*lengths, length - sum(lengths)) for i in range(count)]
