"""``lowbit bench``: peers, report, worker processes, failures, Ctrl-C."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tiny
import torch
from rich.console import Console

import lowbit
from lowbit.bench import bench as runs
from lowbit.bench import job, peers, report, worker
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import BenchOptions


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return tiny.write_all(tmp_path_factory.mktemp("tiny"))


def options_of(setting, **more):
    """The arguments of the command line as :class:`BenchOptions`."""
    return tiny.options_of(BenchOptions, setting, **more)


@pytest.mark.parametrize(
    "name, state, weights",
    [
        ("8bit", "8bit", "auto"), ("fp8", "fp8", "auto"), ("4bit+nearest", "4bit", "nearest"),
        ("8bit+24bit", "8bit", "24bit"), ("12bit+32bit", "12bit", "32bit"), ("bf16", "bf16", "auto"),
    ],
)  # fmt: skip
def test_our_names_are_state_and_weights(name, state, weights):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = peers.find(name).build([p], 1e-3, (0.8, 0.9), 1e-6, 0.1, 5)
    expected = {
        "state": state, "weights": weights, "lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "seed": 5
    }  # fmt: skip
    assert isinstance(optimizer, lowbit.AdamW)
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


def test_torch_is_fused_adamw():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = peers.find("torch").build([p], 1e-3, (0.8, 0.9), 1e-6, 0.1, 5)
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW and group["fused"] and group["betas"] == (0.8, 0.9)
    assert (group["lr"], group["eps"], group["weight_decay"]) == (1e-3, 1e-6, 0.1)


@pytest.mark.parametrize("text", ["9bit", "8bit+", "8bit+fp32", "torch+24bit", "+24bit", "torch,,nine"])
def test_unknown_names_are_refused_with_those_there_are(text):
    others = "torch, torch-fp32, bitsandbytes-8bit, torchao-8bit, torchao-4bit, torchao-fp8, flashoptim"
    others += ", flashoptim-bf16, torchao-8bit-nearest, lpmm-4bit"
    with pytest.raises(UserError, match=rf"unknown optimizer .* choose from {others}, 8bit, fp8, 4bit"):
        peers.names(text)


@pytest.mark.parametrize("name", ["bitsandbytes-8bit", "torchao-8bit", "torchao-4bit", "torchao-fp8", "flashoptim"])
def test_another_library_that_is_missing_is_named(name, monkeypatch):
    package = name.split("-")[0]
    for module in ("bitsandbytes", "bitsandbytes.optim", "torchao", "torchao.optim", "flashoptim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"^{package}[.\w]* can't be imported .*: pip install {package}$"):
        peers.find(name).build([torch.nn.Parameter(torch.ones(4))], 1e-3, (0.9, 0.999), 1e-8, 0.0, 0)


def test_names_are_split_and_kept_once():
    assert peers.names(" torch, 8bit,torch ,") == ["torch", "8bit"]
    with pytest.raises(UserError, match="--optimizers is empty"):
        peers.names(" , ")


ROWS = [
    {"optimizer": "not fine-tuned", "status": "ok", "reason": None, "result": {"held_out_loss": 8.25, "mc2": 0.5}},
    {
        "optimizer": "8bit", "status": "ok", "reason": None,
        "result": {
            "max_memory": 3 * 2**30, "reserved_memory": 4 * 2**30,
            "memory": {"weights": 2**30, "gradients": 2**29, "state": 2**28, "rest": 5 * 2**28},
            "state_bytes_per_param": 2.0625, "tokens_per_second": 12345.6, "padded_tokens_per_second": 14e3,
            "mc1": 0.25, "held_out_loss": 1.69951, "mc2": 0.40625, "optimizer_first_step": 1.25, "optimizer_step": 0.25,
            "model_first_step": 61.0, "model_step": 1.0, "steps_not_timed": 5, "steps": 40,
            "losses": [(step, 8.0 / step) for step in range(1, 41)], "held_out_examples": 500, "questions": 817,
        },
    },
    {"optimizer": "a|b", "status": "failed", "reason": "out of memory: lower --batch-size", "result": {}},
]  # fmt: skip


def finished(**options):
    options = {"model": "m", "data": "d", "steps": 40, "epochs": None, "batch_size": 4, "grad_accum": 2, "lr": 1e-4}
    return {
        "complete": True, "options": {**options, "train_on_all": False}, "machine": {"cpu": "x", "gpu": None},
        "versions": {"torch": "2"}, "rows": ROWS,
    }  # fmt: skip


def test_table_of_the_report():
    lines = report.markdown(finished()).splitlines()
    assert lines[0] == "# m on d, 40 steps of batch 8, lr 0.0001"
    assert lines[2:7] == [
        "| optimizer | max memory (MiB) | reserved (MiB) | state (B/param) | tokens/s | padded tokens/s "
        "| held-out loss | mc1 | mc2 | model compile (s) | step compile (s) | step (ms) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| not fine-tuned | - | - | - | - | - | 8.2500 | - | 0.500 | - | - | - |",
        "| 8bit | 3,072 | 4,096 | 2.06 | 12,346 | 14,000 | 1.6995 | 0.250 | 0.406 | 60.0 | 1.00 | 250.0 |",
        "| a\\|b | failed: out of memory: lower --batch-size |  |  |  |  |  |  |  |  |  |  |",
    ]
    text = "\n".join(lines)
    assert "largest resident memory" in text and "without padding" in text and "the first 5 steps" in text
    assert "in 500 records" in text and "817 questions" in text and "Not complete" not in text
    on_gpu = report.markdown(finished() | {"machine": {"gpu": "H200"}, "complete": False})
    assert "tensors took on the GPU" in on_gpu and "Not complete" in on_gpu


def test_columns_and_notes_of_what_was_not_measured_are_left_out():
    result = {"max_memory": 2**30, "state_bytes_per_param": 2.0, "tokens_per_second": 7.0, "held_out_examples": 0}
    text = report.markdown(
        finished() | {"rows": [{"optimizer": "a", "status": "ok", "reason": None, "result": result}]}
    )
    assert text.splitlines()[2] == "| optimizer | max memory (MiB) | state (B/param) | tokens/s |"
    assert not any(word in text for word in ("reserved", "held-out loss", "mc1", "| - |"))
    failed = report.markdown(finished() | {"rows": ROWS[2:]}).splitlines()
    assert failed[4] == "| a\\|b | failed: out of memory: lower --batch-size |"


def test_the_table_fits_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.terminal_table(finished() | {"rows": [dict(ROWS[1], optimizer="8bit+nearest")]}))
    text = console.export_text()
    assert "…" not in text and "12,346" in text and "compile" in text


def test_files_of_the_report(tmp_path):
    report.write(tmp_path, finished())
    names = {"report.json", "report.md", "report.html", "loss.png", "memory.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "report.json").read_text())["rows"][1]["result"]["losses"][3] == [4, 2.0]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith("png"))


def test_what_the_memory_consists_of():
    lines = report.markdown(finished() | {"machine": {"gpu": "H200"}}).splitlines()
    place = lines.index("## Memory (MiB)")
    assert lines[place + 2 : place + 5] == [
        "| optimizer | weights | gradients | optimizer state | temporaries, activations included |",
        "|---|--:|--:|--:|--:|",
        "| 8bit | 1,024 | 512 | 256 | 1,280 |",
    ]
    assert "the rest of the process" in report.markdown(finished())
    memory = {"weights": 2**30, "gradients": 0, "state": 2**28, "activations": 2**30, "rest": 2**20}
    recorded = dict(ROWS[1], optimizer="4bit", result=ROWS[1]["result"] | {"memory": memory})
    both = finished() | {"machine": {"gpu": "H200"}, "rows": [ROWS[1], recorded]}
    lines = report.markdown(both).splitlines()
    place = lines.index("## Memory (MiB)")
    assert lines[place + 2].endswith("| optimizer state | activations | temporaries |")
    assert lines[place + 4 : place + 6] == [
        "| 8bit | 1,024 | 512 | 256 | 0 | 1,280 |",
        "| 4bit | 1,024 | 0 | 256 | 1,024 | 1 |",
    ]


def test_tasks_of_lm_eval():
    result = {"tasks": {"arc": {"acc": 0.25, "acc_stderr": 0.125}, "words": {"ppl": 3.0}}}
    rows = [{"optimizer": "8bit", "seed": seed, "status": "ok", "reason": None, "result": result} for seed in (1, 2)]
    rows[1] = rows[1] | {"result": {"tasks": {"arc": {"acc": 0.75, "acc_stderr": 0.375}}}}
    lines = report.markdown(finished() | {"rows": rows}).splitlines()
    place = lines.index("## Tasks of lm-eval")
    assert lines[place + 2] == "| optimizer | arc |" and lines[place + 4] == "| 8bit | 0.5000 ± 0.2500 |"


def test_smoothing_keeps_a_constant_and_weighs_the_past():
    assert report.smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert report.smoothed([0.0, 1.0])[1] == pytest.approx(0.1 / (0.1 + 0.09))


def run_job(setting, optimizer, **more):
    events = []
    result = worker.run_job(
        options_of(setting, **more), optimizer, lambda event, **values: events.append({"event": event, **values})
    )
    return result, events


def test_a_job_trains_and_says_how_far_it_is(setting):
    before, _ = run_job(setting, None)
    result, events = run_job(setting, "8bit")
    assert "losses" not in before and before["held_out_examples"] == 4 and before["train_examples"] == 36
    assert before["questions"] == 3 and before["held_out_loss"] == pytest.approx(math.log(257), abs=0.5)
    assert [step for step, _ in result["losses"]] == [1, 2, 3, 4] and result["steps"] == 4
    assert result["held_out_loss"] < before["held_out_loss"] - 0.1
    assert 0 <= result["mc1"] <= 1 and 0 <= result["mc2"] <= 1
    assert result["tokens_per_second"] > 0 and result["max_memory"] == sum(result["memory"].values()) > 2**26
    assert result["memory"]["weights"] == result["memory"]["gradients"] == 2 * before["parameters"]
    assert result["memory"]["state"] == pytest.approx(result["state_bytes_per_param"] * before["parameters"])
    training = [event for event in events if event.get("stage") == "training"]
    assert [(event["done"], event["total"]) for event in training] == [(i, 4) for i in (1, 2, 3, 4)]
    json.dumps([result, events])


def test_every_optimizer_starts_from_the_same_weights_and_sees_the_same_batches(setting):
    first = {name: run_job(setting, name, eval_data="none", steps=1)[0]["losses"][0][1] for name in ("torch", "8bit")}
    wide = run_job(setting, "torch-fp32", eval_data="none", steps=1)[0]
    assert first["torch"] == first["8bit"] == pytest.approx(wide["losses"][0][1], rel=1e-3)
    assert wide["state_bytes_per_param"] == pytest.approx(8, abs=0.01)


BROKEN = """
import sys
from lowbit.bench import peers, worker
def build(*arguments):
    raise RuntimeError("no such kernel\\nat all")
peers.PEERS["broken"] = peers.Peer(build)
sys.exit(worker.main(sys.argv[1]))
"""


def test_a_failing_optimizer_is_a_row_and_the_others_go_on(setting, tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "broken", peers.Peer(None))
    monkeypatch.setattr(job, "WORKER", (sys.executable, "-c", BROKEN))
    console = Console(file=io.StringIO(), width=120)
    options = options_of(setting, optimizers="broken,8bit", out=str(tmp_path / "out"))
    assert runs.bench(options, console) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {row["optimizer"]: row for row in found["rows"]}
    assert list(rows) == ["not fine-tuned", "broken", "8bit"] and found["complete"]
    assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("failed", "RuntimeError: no such kernel")
    assert rows["8bit"]["result"]["held_out_loss"] < rows["not fine-tuned"]["result"]["held_out_loss"]
    assert found["machine"]["cores"] and found["versions"]["torch"] == torch.__version__
    shown = console.file.getvalue()
    assert "not fine-tuned" in shown and "broken failed: RuntimeError: no such kernel" in shown
    assert "at all" in (tmp_path / "out" / "jobs" / "broken.log").read_text()
    with pytest.raises(UserError, match="is there already: give another --out, or add --overwrite"):
        runs.bench(options, console)


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by the system, most likely out of memory"),
        ("raise SystemExit(3)", "the worker ended with status 3: see"),
    ],
)
def test_a_worker_that_dies_is_a_row(setting, tmp_path, monkeypatch, code, reason):
    monkeypatch.setattr(job, "WORKER", (sys.executable, "-c", code))
    options = options_of(setting, optimizers="8bit", out=str(tmp_path))
    assert runs.bench(options, Console(file=io.StringIO())) == 1
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["failed", "failed"] and rows[1]["reason"].startswith(reason)


def test_data_that_no_optimizer_can_use_end_the_run(setting, tmp_path):
    command = [sys.executable, "-m", "lowbit", "bench", *setting, "--data", "nothing.json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nothing.json" in done.stderr
    assert not (tmp_path / "report.json").exists()


def test_ctrl_c_leaves_the_report_of_what_was_done(setting, tmp_path):
    command = [sys.executable, "-m", "lowbit", "bench", *setting, "--steps", "100000", "--out", str(tmp_path)]
    command += ["--optimizers", "8bit,4bit"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "jobs" / "8bit.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    child = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["optimizer"] for row in found["rows"]] == ["not fine-tuned", "8bit"] and not found["complete"]
    assert found["rows"][0]["status"] == "ok" and found["rows"][1]["status"] == "interrupted"
    assert "Interrupted" in out and "Traceback" not in err
    assert child and not any(each.is_running() for each in child)


def test_the_default_run_on_the_builtin_model(tmp_path):
    command = [sys.executable, "-m", "lowbit", "bench", "--steps", "3", "--optimizers", "8bit", "--eval-limit", "4"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["optimizer"] for row in rows] == ["not fine-tuned", "8bit"]
    assert rows[1]["result"]["held_out_loss"] < rows[0]["result"]["held_out_loss"]
    assert rows[1]["result"]["questions"] == 4 and len(rows[1]["result"]["losses"]) == 3
    assert "not fine-tuned" in done.stdout and "8bit" in done.stdout
