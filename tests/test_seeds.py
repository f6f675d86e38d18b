"""Several seeds: one line an optimizer, mean and deviation by hand, the paired test by its closed form."""

import json
import math
from dataclasses import replace

import pytest
import tiny
from test_bench import finished

from lowbit.bench import bench, report, statistics
from lowbit.finetune.options import BenchOptions

LOSSES = {"torch": (2.0, 2.5), "8bit": (1.9, 2.2), "4bit": (2.25, None)}  # of seeds 7 and 8


def row(name, seed, loss):
    if loss is None:
        return {"optimizer": name, "seed": seed, "status": "failed", "reason": "no memory", "result": {}}
    result = {"held_out_loss": loss, "mc2": loss / 10, "state_bytes_per_param": 4.0}
    return {"optimizer": name, "seed": seed, "status": "ok", "reason": None, "result": result}


def several():
    rows = [row("not fine-tuned", 7, 3.0)]
    rows += [row(name, seed, losses[i]) for i, seed in enumerate((7, 8)) for name, losses in LOSSES.items()]
    options = finished()["options"] | {"seeds": 2}
    return finished() | {"rows": rows, "options": options}


def test_mean_and_deviation_by_hand():
    before, torch, ours, other = statistics.grouped(several())
    assert [group.optimizer for group in (torch, ours, other)] == list(LOSSES)
    assert torch.mean("held_out_loss") == 2.25 and torch.sd("held_out_loss") == pytest.approx(math.sqrt(0.125))
    assert before.sd("held_out_loss") is None and torch.mean("mc1") is None
    assert other.status == "ok" and other.reason == "no memory" and other.results.keys() == {7}
    assert statistics.reference([before, torch, ours]) is torch


def test_paired_test_by_closed_forms():
    groups = statistics.grouped(several())
    found = statistics.difference(groups[2], groups[1], "held_out_loss")
    assert found.mean == pytest.approx(-0.2) and found.sd == pytest.approx(math.sqrt(0.02)) and found.seeds == 2
    t = -0.2 / math.sqrt(0.02 / 2)
    assert found.p == pytest.approx(1 - 2 / math.pi * math.atan(abs(t)))  # Student's with one degree of freedom
    t = 2.0 / math.sqrt(1 / 3)  # differences 1, 2, 3: two degrees of freedom
    assert statistics.paired_p([1.0, 2.0, 3.0]) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert statistics.paired_p([0.0, 0.0]) == 1.0 and statistics.paired_p([0.5, 0.5]) == 0.0
    one = statistics.difference(groups[3], groups[1], "held_out_loss")
    assert (one.mean, one.sd, one.p, one.seeds) == (0.25, None, None, 1)
    assert statistics.difference(groups[3], groups[1], "mc1") is None


def test_report_of_several_seeds():
    lines = report.markdown(several()).splitlines()
    assert lines[0].endswith(", 2 seeds")
    assert "| torch | 4.00 | 2.2500 ± 0.3536 | 0.225 ± 0.035 |" in lines
    assert "| 4bit | 4.00 | 2.2500 | 0.225 |" in lines
    place = lines.index("## Against torch")
    assert lines[place + 4 : place + 6] == [
        "| 8bit | 2 | -0.2000 ± 0.1414, 0.3 | - | -0.020 ± 0.014, 0.3 |",
        "| 4bit | 0 | - | - | - |",
    ]
    assert report.failures(several()) == ["4bit, seed 8 failed: no memory"]
    assert "## Against" not in report.markdown(finished())


def test_each_seed_is_a_run(tmp_path, cli):
    setting, out = tiny.write_all(tmp_path), tmp_path / "out"
    options = [*setting, "--steps", "3", "--optimizers", "torch,8bit", "--out", str(out)]
    assert cli("bench", *options, "--seeds", "2", "--seed", "5")[0] == 0
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [(r["optimizer"], r["seed"]) for r in rows] == bench_keys(5, 2)
    losses = {(r["optimizer"], r["seed"]): r["result"].get("losses") for r in rows}
    assert losses["torch", 5][0] == losses["8bit", 5][0] != losses["torch", 6][0]
    assert len({r["result"]["held_out_examples"] for r in rows}) == 1
    times = {key: r["result"].get("tokens_per_second") for key, r in zip(losses, rows, strict=True)}
    assert cli("bench", *options, "--seeds", "3", "--seed", "5", "--resume")[0] == 0
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [(r["optimizer"], r["seed"]) for r in rows] == bench_keys(5, 3)
    assert all(r["result"].get("tokens_per_second") == times[r["optimizer"], r["seed"]] for r in rows[:5])


def bench_keys(seed, seeds):
    jobs = bench.jobs(["torch", "8bit"], replace(BenchOptions(), seed=seed, seeds=seeds))
    return [(name or "not fine-tuned", number) for name, number in jobs]
