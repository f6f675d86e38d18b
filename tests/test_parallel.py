"""``lowbit bench --parallel`` and ``--fresh-caches``: which workers run when, where, and what is left of them."""

import io
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lowbit.bench import bench as runs
from lowbit.bench import job, report
from lowbit.finetune.options import BenchOptions

WORKER = """
import json, os, sys, time
begin = time.monotonic()
work = json.load(open(sys.argv[1]))
print(json.dumps({"event": "progress", "stage": "training", "done": 3, "total": 9, "loss": None}), flush=True)
time.sleep(SECONDS)
names = ("CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")
result = {"held_out_loss": 1.0 + work["options"]["seed"], "tokens_per_second": 5.0, "max_memory": 7,
          "losses": [[1, 2.0]],
          "curves": {"seconds": [[1, 9.0]], "grad_norm": [[1, 3.0]]}, "environment": [os.environ.get(n) for n in names]}
if result["environment"][1]:
    os.makedirs(result["environment"][1], exist_ok=True)
print(json.dumps({"event": "result", **result, "span": [begin, time.monotonic()]}))
"""


def bench(out, monkeypatch, seconds=0.3, **options):
    """The report of a run whose workers sleep."""
    monkeypatch.setattr(job, "WORKER", (sys.executable, "-c", WORKER.replace("SECONDS", str(seconds))))
    options = replace(BenchOptions(), optimizers="torch,8bit,4bit", seeds=2, seed=1, out=str(out), **options)
    status = runs.bench(options, Console(file=io.StringIO()))
    return status, json.loads((out / "report.json").read_text())


def at_once(rows):
    """The largest number of workers that ran at a time."""
    spans = [row["result"]["span"] for row in rows]
    return max(sum(begin <= start < end for begin, end in spans) for start, _ in spans)


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_so_many_run_at_once_and_the_rows_keep_their_order(tmp_path, monkeypatch, parallel):
    status, found = bench(tmp_path, monkeypatch, parallel=parallel, device="cpu")
    assert status == 0 and found["complete"]
    keys = [(row["optimizer"], row["seed"]) for row in found["rows"]]
    assert keys == [("not fine-tuned", 1), *((name, seed) for seed in (1, 2) for name in ("torch", "8bit", "4bit"))]
    assert [row["result"]["held_out_loss"] for row in found["rows"]] == [1.0 + seed for _, seed in keys]
    assert at_once(found["rows"]) == parallel
    first, *others = (row["result"]["span"] for row in found["rows"])
    assert all(first[1] < begin for begin, _ in others)  # the model before runs alone


def test_times_of_runs_on_one_device_are_left_out(tmp_path, monkeypatch):
    _, alone = bench(tmp_path / "1", monkeypatch, seconds=0, device="cpu")
    _, crowd = bench(tmp_path / "2", monkeypatch, seconds=0, device="cpu", parallel=2)
    for found, times in ((alone, True), (crowd, False)):
        result = found["rows"][1]["result"]
        assert ("tokens_per_second" in result) == ("seconds" in result["curves"]) == times
        assert result["max_memory"] == 7 and result["curves"]["grad_norm"] == [[1, 3.0]]
        assert ("times say nothing" in report.markdown(found)) != times


@pytest.mark.parametrize(
    ("parallel", "mine", "threads"), [(1, None, None), (2, None, "3"), (9, None, "1"), (2, "5", "5")]
)
def test_runs_at_once_share_the_cores(tmp_path, monkeypatch, parallel, mine, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if mine:
        monkeypatch.setenv("OMP_NUM_THREADS", mine)
    _, found = bench(tmp_path, monkeypatch, seconds=0, device="cpu", parallel=parallel)
    assert {row["result"]["environment"][3] for row in found["rows"]} == {threads}


def test_runs_are_spread_over_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "visible_gpus", lambda options: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    _, found = bench(tmp_path, monkeypatch, parallel=2)
    rows = found["rows"][1:]
    assert {row["result"]["environment"][0] for row in rows} == {"3", "5"}
    for gpu in ("3", "5"):
        assert at_once([row for row in rows if row["result"]["environment"][0] == gpu]) == 1
    assert all("tokens_per_second" in row["result"] for row in rows)  # each has a GPU of its own


@pytest.mark.parametrize("fresh", [True, False])
def test_fresh_caches_are_new_for_each_run_and_deleted(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    _, found = bench(tmp_path / "out", monkeypatch, seconds=0, fresh_caches=fresh)
    caches = [row["result"]["environment"][1] for row in found["rows"]]
    assert len(set(caches)) == (len(caches) if fresh else 1)
    assert all(Path(cache).exists() != fresh for cache in caches)


def test_ctrl_c_stops_all_that_run_and_resume_goes_on(tmp_path, monkeypatch):
    def write(folder, found, write=report.write):
        write(folder, found)
        if len(found["rows"]) == 4 and all(row["status"] == "ok" for row in found["rows"]):  # all of seed 1
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    monkeypatch.setattr(report, "write", write)
    status, stopped = bench(tmp_path, monkeypatch, "60 * (work['options']['seed'] > 1)", device="cpu", parallel=2)
    assert status == 130 and not stopped["complete"]
    rows = stopped["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["interrupted"] * 2
    assert {(row["optimizer"], row["seed"]) for row in rows[4:]} <= {("torch", 2), ("8bit", 2), ("4bit", 2)}
    assert {row["reason"] for row in rows[4:]} <= {"in training, 3 of 9", "in the start"}
    monkeypatch.undo()
    status, found = bench(tmp_path, monkeypatch, seconds=0, device="cpu", parallel=2, resume=True)
    assert status == 0 and found["complete"] and [row["status"] for row in found["rows"]] == ["ok"] * 7
    assert found["rows"][:4] == rows[:4]
