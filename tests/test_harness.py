"""lm-evaluation-harness: its TruthfulQA against ours on the same questions, and what can be wrong with --tasks."""

import json
import math
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
import tiny
import torch

from lowbit.bench.worker import run_job
from lowbit.finetune import harness
from lowbit.finetune.errors import UserError
from lowbit.finetune.evaluation import load_questions, multiple_choice
from lowbit.finetune.model import load_model
from lowbit.finetune.options import BenchOptions, resolve

TRUTHFULQA = Path(lm_eval.tasks.__file__).parent / "truthfulqa"
TASK = """\
include: {original}
task: local_{name}
tag: null
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    validation: {data}
"""
COUNT = 30


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of lm-eval's own truthfulqa_mc1 and truthfulqa_mc2, with the first built-in questions as their data."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    place = tmp_path / "tasks"
    place.mkdir()
    rows = [
        {"question": q.question, "mc1_targets": targets(q.mc1), "mc2_targets": targets(q.mc2)}
        for q in load_questions("builtin")[:COUNT]
    ]
    (place / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("mc1", "mc2"):
        text = TASK.format(original=TRUTHFULQA / f"truthfulqa_{name}.yaml", name=name, data=place / "questions.jsonl")
        (place / f"{name}.yaml").write_text(text)
    return place


def targets(answers):
    return {"choices": list(answers), "labels": list(answers.values())}


@pytest.mark.parametrize("name, dtype", [("tiny", "float32"), ("tiny", "bfloat16"), ("builtin", "float32")])
def test_our_truthfulqa_is_lm_evals(tmp_path, folder, name, dtype):
    where = tiny.write_model(tmp_path / "model") if name == "tiny" else name
    model, tokenizer = load_model(where, dtype=getattr(torch, dtype))
    theirs = harness.run(harness.find(str(folder)), model, tokenizer, batch_size=8)
    ours = multiple_choice(model, tokenizer, load_questions("builtin")[:COUNT])
    assert theirs.keys() == {"local_mc1", "local_mc2"} and 0 < ours["mc1"] < 1
    for score in ("mc1", "mc2"):
        assert ours[score] == pytest.approx(theirs[f"local_{score}"]["acc"], abs=1e-3), score
    share = ours["mc1"]
    assert theirs["local_mc1"]["acc_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (COUNT - 1)))


def test_a_run_of_the_benchmark_has_them_by_task(tmp_path, folder):
    options = resolve(
        BenchOptions(
            model=tiny.write_model(tmp_path / "model"), tasks=f"{folder / 'mc2.yaml'}, {folder / 'mc1.yaml'}",
            eval_limit=5, held_out=0, device="cpu",
        )
    )  # fmt: skip
    result = run_job(options, None, lambda *args, **values: None)
    assert list(result["tasks"]) == ["local_mc2", "local_mc1"]
    for score in ("mc1", "mc2"):  # of the same first five questions
        assert result["tasks"][f"local_{score}"]["acc"] == pytest.approx(result[score], abs=1e-3)
    assert json.loads(json.dumps(result)) == result


def test_finetune_prints_them(tmp_path, folder, cli):
    out = ["--out", tmp_path / "out", "--steps", "1", "--optimizer", "torch", "--eval-limit", "2"]
    status, text, error = cli("finetune", *tiny.write_all(tmp_path), *out, "--tasks", folder / "mc2.yaml")
    assert status == 0, error
    assert "\nlocal_mc2: acc 0." in text and "  acc_stderr 0." in text


def test_names_are_lm_evals_and_near_ones_are_listed():
    assert harness.find("") is None and harness.find(" , ") is None
    assert harness.find("truthfulqa_mc2,mmlu, truthfulqa_mc2").names == ["truthfulqa_mc2", "mmlu"]
    with pytest.raises(
        UserError,
        match=r"no task 'truthfulqa_mc3', and there is no such file: did you mean truthfulqa_mc[12], truthfulqa_mc[12]",
    ):
        harness.find("truthfulqa_mc2,truthfulqa_mc3")
    with pytest.raises(UserError, match="no task '#', and there is no such file: `lm-eval ls tasks` lists them"):
        harness.find("#")


def test_files_that_are_not_there(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"--tasks .*gone.yaml: there is no such file"):
        harness.find(str(tmp_path / "gone.yaml"))
    with pytest.raises(UserError, match=r"no .yaml file there defines a task"):
        harness.find(str(empty))
    (folder / "questions.jsonl").unlink()
    model, tokenizer = load_model(tiny.write_model(tmp_path / "model"))
    with pytest.raises(UserError, match=r"--tasks local_mc1,local_mc2: FileNotFoundError: .*questions.jsonl"):
        harness.run(harness.find(str(folder)), model, tokenizer, batch_size=8)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'lowbit\[eval\]'"):
        harness.find("truthfulqa_mc2")
