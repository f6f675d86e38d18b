"""The command line: ``lowbit finetune`` end to end, and bad input."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
import tiny
import torch

import lowbit
from lowbit.finetune.options import BenchOptions, FinetuneOptions


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return tiny.write_all(tmp_path_factory.mktemp("tiny"))


def test_version(cli):
    assert cli("--version") == (0, f"lowbit {lowbit.__version__}\n", "")


@pytest.mark.parametrize("command, options", [("bench", BenchOptions), ("finetune", FinetuneOptions)])
def test_help_has_every_option(cli, monkeypatch, command, options):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert all(f"--{field.name.replace('_', '-')}" in out for field in fields(options))


def test_without_the_extra_one_line_says_what_to_install():
    program = (
        "import importlib.util as u, sys; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'typer' else find(name, *rest)\n"
        "from lowbit.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "lowbit: typer missing: pip install 'lowbit[finetune]'\n")


def test_importing_lowbit_or_its_cli_does_not_import_transformers():
    program = "import sys, lowbit, lowbit.cli; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("optimizer", ["8bit", "8bit+24bit", "torch-fp32"])
def test_resume_ends_where_an_uninterrupted_run_does(cli, setting, tmp_path, monkeypatch, optimizer):
    options = ["finetune", *setting, "--optimizer", optimizer, "--save-every", 2]
    code, out, _ = cli(*options, "--out", tmp_path / "whole")
    assert code == 0 and str(tmp_path / "whole" / "step-000004") in out
    assert "held_out_loss" in out and "mc1" in out and "mc2" in out

    take_step = torch.optim.lr_scheduler.LRScheduler.step
    taken = []

    def die(self, *arguments):
        taken.append(self)
        if len(taken) > 4:  # the first is of its construction
            raise KeyboardInterrupt
        return take_step(self, *arguments)

    monkeypatch.setattr(torch.optim.lr_scheduler.LRScheduler, "step", die)
    code, _, err = cli(*options, "--out", tmp_path / "cut")
    assert code == 130 and "--resume" in err
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["step-000002"]
    monkeypatch.setattr(torch.optim.lr_scheduler.LRScheduler, "step", take_step)

    code, *_ = cli(*options, "--out", tmp_path / "cut", "--resume")
    assert code == 0
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["step-000004"]
    whole, cut = (tmp_path / name / "step-000004" for name in ("whole", "cut"))
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    a, b = (torch.load(path / "training.pt", weights_only=True) for path in (whole, cut))
    assert a["losses"] == b["losses"] and len(a["losses"]) == 4
    states = a["optimizer"]["state"], b["optimizer"]["state"]
    assert all(torch.equal(x, states[1][key][name]) for key in states[0] for name, x in states[0][key].items())


def test_resume_refuses_other_options_and_other_data(cli, setting, tmp_path):
    options = ["finetune", *setting, "--eval-data", "none", "--out", tmp_path / "out"]
    assert cli(*options, "--resume")[0] == 2
    assert cli(*options)[0] == 0
    code, _, err = cli(*options)
    assert code == 2 and "--resume" in err
    code, _, err = cli(*options, "--resume", "--optimizer", "4bit", "--lr", "0.1")
    assert code == 2 and "--lr 0.01 (now 0.1)" in err and "--optimizer 8bit (now 4bit)" in err
    data = tiny.write_json(tmp_path / "data.json", tiny.records())
    options[options.index("--data") + 1] = data
    options[-1] = tmp_path / "other"
    assert cli(*options)[0] == 0
    tiny.write_json(tmp_path / "data.json", tiny.records()[:-1])
    code, _, err = cli(*options, "--resume")
    assert code == 2 and "the training data are not those of" in err
    (tmp_path / "other" / "step-000004" / "training.pt").write_bytes(b"PK broken")
    tiny.write_json(tmp_path / "data.json", tiny.records())
    code, _, err = cli(*options, "--resume")
    assert code == 2 and "training.pt can't be read" in err


RECORD = {"instruction": "Say.", "input": "", "output": "Said."}
BAD = {
    "data missing": (["--data", "{tmp}/nothing.json"], None, "nothing.json"),
    "data no JSON": (["--data", "{tmp}/x.json"], '[{"instruction": "a",\n oops}]', "x.json"),
    "data empty": (["--data", "{tmp}/x.json"], "[]", "x.json"),
    "no output": (["--data", "{tmp}/x.json"], json.dumps([RECORD, {"instruction": "Say."}]), "output"),
    "no text": (["--data", "{tmp}/x.json"], json.dumps([{**RECORD, "output": 3}]), "output"),
    "eval data missing": (["--eval-data", "{tmp}/nothing.json"], None, "nothing.json"),
    "eval data other": (["--eval-data", "{tmp}/x.json"], json.dumps([RECORD]), "x.json"),
    "model missing": (["--model", "{tmp}/nothing"], None, "nothing"),
    "model no causal LM": (["--model", "{tmp}/t5"], None, "t5"),
    "optimizer": (["--optimizer", "9bit"], None, "'9bit'"),
    "weight mode": (["--optimizer", "8bit+7bit"], None, "'8bit+7bit'"),
    "lr": (["--lr", "-1"], None, "--lr is -1.0: give a number above 0"),
    "lr nan": (["--lr", "nan"], None, "--lr is nan"),
    "steps": (["--steps", "0"], None, "--steps is 0: give at least 1"),
    "steps and epochs": (["--epochs", "1"], None, "--epochs and --steps"),
    "schedule": (["--schedule", "step"], None, "--schedule is step: give one of cosine, linear, constant"),
    "dtype": (["--dtype", "int4"], None, "--dtype is int4"),
    "device": (["--device", "gpu"], None, "--device gpu"),
    "beta2": (["--beta2", "1"], None, "--beta2 is 1.0"),
    "diverges": (["--lr", "1e38", "--clip", "0", "--schedule", "constant", "--warmup", "0"], None, "lower --lr"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_it(cli, setting, tmp_path, case):
    arguments, text, named = BAD[case]
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5", "architectures": ["T5Model"]}')
    arguments = [x.format(tmp=tmp_path) for x in arguments]
    code, _, err = cli("finetune", *setting, "--out", tmp_path / "out", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("lowbit: ")]
    assert code == 2 and len(lines) == 1 and named in lines[0], err
    assert "Traceback" not in err


def test_out_of_memory_says_what_to_change(cli, setting, tmp_path, monkeypatch):
    from lowbit.finetune import train

    def allocate(*arguments):
        return torch.empty(1 << 60)

    monkeypatch.setattr(train, "gradients", allocate)
    code, _, err = cli("finetune", *setting, "--out", tmp_path / "out")
    assert code == 2 and "out of memory: lower --batch-size" in err
