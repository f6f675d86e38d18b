"""The scripts in ``benchmarks``."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def run(name, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests run beside it, and threads that wait spin
    command = [sys.executable, FOLDER / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("name", ["step.py", "laws.py", "estimates.py", "counters.py", "pretraining.py"])
def test_a_script_starts(name):
    done = run(name, "--help")
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr


def test_steps_go_on_with_a_report_of_the_same_machine_and_versions(tmp_path):
    path = tmp_path / "step.json"
    small = ("--shapes", "resnet-101", "--repeats", 1, "--seconds", 1, "--json", path)
    first = run("step.py", *small, "--optimizers", "torch-fused")
    assert first.returncode == 0, first.stderr
    report = json.loads(path.read_text())
    (row,) = report["results"]
    assert row["name"] == "torch-fused" and row["params"] == 44_549_160  # of torchvision's resnet101
    assert row["state_bytes"] == pytest.approx(4, abs=0.01)  # two moments in bf16
    second = run("step.py", *small, "--optimizers", "torch-fused", "torch-foreach")
    assert second.returncode == 0 and second.stdout.count("torch-f") == 1  # what is there is not measured again
    rows = json.loads(path.read_text())["results"]
    assert rows[0] == row and [each["name"] for each in rows] == ["torch-fused", "torch-foreach"]
    again = run("step.py", *small, "--optimizers", "torch-fused", "--again")
    rows = json.loads(path.read_text())["results"]
    assert again.returncode == 0 and [each["name"] for each in rows] == ["torch-foreach", "torch-fused"]
    assert rows[1]["first_step_s"] != row["first_step_s"]
    path.write_text(json.dumps(report | {"versions": report["versions"] | {"torch": "2.0"}}))
    refused = run("step.py", *small)
    assert refused.returncode == 1 and "give another --json" in refused.stderr


def test_pretraining_shows_rows_that_move_without_a_gradient(tmp_path):
    path = tmp_path / "found.json"
    done = run(
        "pretraining.py", "--optimizers", "torch,8bit,4bit,flashoptim-bf16", "--seeds", 1, "--steps", 60,
        "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert "error" in results["flashoptim-bf16"]  # no CUDA, or not installed
    found = {name: result["summary"] for name, result in results.items() if "summary" in result}
    assert found["torch"]["rare_rows"] == [1.0, None] and found["torch"]["stuck"][0] == 0.0
    for name, allowed in (("torch", 1.0), ("8bit", 1.2), ("4bit", 2.0)):
        mean = {key: value for key, (value, _) in found[name].items()}
        assert mean["unmet_farthest"] == 0.0  # no gradient, no step
        assert mean["update"] <= allowed * found["torch"]["update"][0] and 0.8 < mean["rare_rows"] < 1.2
        assert 0 < mean["rare_farthest"] < 60 and 2 < mean["held_out_loss"] < 8


def test_llama2_7b_folder_is_its_shape_and_trains(tmp_path, cli):
    data = tiny.write_json(tmp_path / "data.json", tiny.records())
    assert run("llama2_7b.py", tmp_path / "m", "--data", data).returncode == 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "m"))
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616 and len(shapes) == 291
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 2}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | small))
    status, _, error = cli(
        "bench", "--recipe", "llama2-7b-alpaca", "--model", tmp_path / "m", "--from-scratch", "--data", data,
        "--steps", 2, "--eval-data", "none", "--tasks", "", "--held-out", 0, "--optimizers", "8bit,lpmm-4bit",
        "--no-compile", "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0, error
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert rows[1]["result"]["losses"][0][1] == pytest.approx(math.log(32000), abs=0.1)  # of random weights
    assert rows[1]["result"]["held_out_loss"] is None and "no bf16 weights" in rows[2]["reason"]
