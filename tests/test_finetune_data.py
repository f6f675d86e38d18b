"""Instruction data: sources and their errors, the Alpaca prompt, labels, batches, padding."""

import json
import logging

import pytest
import torch

from lowbit.finetune.data import Example, batches, collate, load_records, prompt, split, tokenize
from lowbit.finetune.errors import UserError

RECORDS = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hello\nthere"},
]


class Letters:
    """A tokenizer of one token a character, with a beginning (1) and an end (2) of text."""

    eos_token_id = 2

    def __init__(self, ends=False):
        self.ends = ends

    def __call__(self, texts, add_special_tokens=True):
        rows = [[ord(letter) for letter in text] for text in texts]
        if add_special_tokens:
            rows = [[1, *row, *([2] if self.ends else [])] for row in rows]
        return {"input_ids": rows}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_file_format_gives_the_same_records(tmp_path):
    import datasets

    lines = "\n".join(json.dumps(record) for record in RECORDS) + "\n"
    sources = [
        write(tmp_path / "a.json", json.dumps(RECORDS)),
        write(tmp_path / "b.jsonl", "\n" + lines),
        write(tmp_path / "lines.json", lines),
    ]
    datasets.Dataset.from_list(RECORDS).to_parquet(tmp_path / "c.parquet")
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(RECORDS)).save_to_disk(tmp_path / "splits")
    for source in [*sources, tmp_path / "c.parquet", tmp_path / "saved", tmp_path / "splits"]:
        assert load_records(source) == RECORDS, source
    assert load_records(tmp_path) == RECORDS * 4  # the folder's files by name


def test_a_missing_input_is_empty_and_other_keys_are_left_out(tmp_path):
    rows = [
        {"instruction": "a", "output": "b", "category": "c"},
        {"instruction": "a", "input": None, "output": "\N{SNOWMAN}"},
    ]
    assert load_records(write(tmp_path / "x.json", json.dumps(rows))) == [
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "input": "", "output": "\N{SNOWMAN}"},
    ]


BAD = {
    "no output": ("x.json", json.dumps([RECORDS[0], {"instruction": "a"}]), "record 2 has no 'output'"),
    "no instruction": ("x.json", json.dumps([{"output": "a"}]), "record 1 has no 'instruction'"),
    "null output": ("x.json", json.dumps([{"instruction": "a", "output": None}]), "record 1 has no 'output'"),
    "number": ("x.json", json.dumps([{"instruction": "a", "output": 3}]), "'output' of type int"),
    "not an object": ("x.json", '["a"]', "record 1 is not an object"),
    "line of jsonl": ("x.jsonl", '{"instruction": "a", "output": "b"}\n{"instruction": "a"}', "line 2 has no 'output'"),
    "wrong json": ("x.json", '[\n {"instruction" "a"}]', "line 2, column 17"),
    "wrong jsonl": ("x.jsonl", '{"instruction": "a", "output": "b"}\n{"instr', "line 2, column 2"),
    "empty list": ("x.json", "[]", "holds no records"),
    "empty file": ("x.jsonl", "", "holds no records"),
    "a number": ("x.json", "3", "not a list of records"),
    "not parquet": ("x.parquet", "hello", "not a parquet file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_named_in_one_line(tmp_path, case):
    name, text, message = BAD[case]
    path = write(tmp_path / name, text)
    with pytest.raises(UserError) as error:
        load_records(path)
    assert message in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


def test_places_without_data(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'[{"instruction": "\xe9"}]')
    for source, message in [
        (tmp_path / "none.json", "no such file"),
        (tmp_path / "none", "no such file"),
        (tmp_path / "latin.json", "not UTF-8"),
    ]:
        with pytest.raises(UserError, match=message):
            load_records(source)
    (tmp_path / "latin.json").unlink()
    with pytest.raises(UserError, match=r"holds no .json"):
        load_records(tmp_path)


def test_split_is_always_the_same_and_loses_nothing():
    records = [{"instruction": str(i)} for i in range(100)]
    train, held_out = split(records, 10)
    assert (train, held_out) == split(records, 10) and held_out != records[:10] != records[-10:]
    assert len(held_out) == 10 and sorted(train + held_out, key=lambda r: int(r["instruction"])) == records
    with pytest.raises(UserError, match="--held-out 100 of 100"):
        split(records, 100)


def test_the_prompt_is_alpacas():
    assert prompt(RECORDS[0]) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n"
        "### Response:"
    )
    assert prompt(RECORDS[1]) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nGreet.\n\n### Response:"
    )
    braces = {"instruction": "{input}", "input": "{0}", "output": ""}
    assert "{input}" in prompt(braces) and "{0}" in prompt(braces)


@pytest.mark.parametrize("ends", [False, True])
def test_the_loss_is_on_response_and_end_alone(ends):
    example = tokenize(RECORDS, Letters(ends), 1000)[1]
    text = prompt(RECORDS[1]) + "Hello\nthere"
    assert example.input_ids == [1, *map(ord, text), 2]
    response = [*map(ord, "Hello\nthere"), 2]
    assert example.labels == [-100] * (len(example.input_ids) - len(response)) + response
    assert example.targets == len(response)
    whole = tokenize(RECORDS, Letters(ends), 1000, train_on_all=True)[1]
    assert whole.labels == whole.input_ids == example.input_ids
    assert whole.targets == len(whole.input_ids) - 1  # nothing predicts the first token


def test_long_examples_are_cut_and_dropped_only_without_a_response(caplog):
    records = [RECORDS[1], {"instruction": "x" * 500, "input": "", "output": "lost"}]
    border = 1 + len(prompt(RECORDS[1]))
    with caplog.at_level(logging.WARNING):
        (kept,) = tokenize(records, Letters(), border + 3)
    assert kept.targets == 3 and len(kept.input_ids) == border + 3
    assert "1 of 2 records dropped" in caplog.text
    assert tokenize([RECORDS[1]], Letters(), border) == []
    assert tokenize([], Letters(), 8) == []


def sized(lengths):
    return [Example([5] * n, [5] * n) for n in lengths]


@pytest.mark.parametrize("grouped", [False, True])
def test_batches_hold_every_example_once_in_an_order_of_seed_and_epoch(grouped):
    examples = sized(1 + i * 7919 % 97 for i in range(1003))
    order = batches(examples, 4, 3, 0, grouped)
    torch.rand(5)
    assert order == batches(examples, 4, 3, 0, grouped)
    assert order != batches(examples, 4, 3, 1, grouped) and order != batches(examples, 4, 4, 0, grouped)
    assert sorted(i for batch in order for i in batch) == list(range(1003))
    assert sorted(map(len, order)) == [3] + [4] * 250


def test_grouping_by_length_saves_padding_and_stays_random():
    examples = sized(1 + i * 7919 % 97 for i in range(1000))

    def padding(order):
        return sum(max(len(examples[i].input_ids) for i in b) * len(b) for b in order) / (1000 * 49)

    grouped = batches(examples, 4, 0, 0)
    assert padding(grouped) < 1.05 < 1.5 < padding(batches(examples, 4, 0, 0, group_by_length=False))
    lengths = torch.tensor([float(len(examples[b[0]].input_ids)) for b in grouped])
    assert abs(torch.corrcoef(torch.stack([lengths, torch.arange(250.0)]))[0, 1]) < 0.2


def test_collate_pads_on_the_right_to_a_multiple_of_8():
    batch = collate([Example([4, 5, 6], [-100, 5, 6]), Example([7] * 9, [7] * 9)], 2, "cpu")
    assert batch["input_ids"].tolist() == [[4, 5, 6] + [2] * 13, [7] * 9 + [2] * 7]
    assert batch["labels"].tolist() == [[-100, 5, 6] + [-100] * 13, [7] * 9 + [-100] * 7]
    assert set(batch) == {"input_ids", "labels"}
    assert collate(sized([8]), 0, "cpu")["input_ids"].shape == (1, 8)
