"""``lowbit bench --resume``: killed anywhere, it goes on with what is not done, and ends with the same table."""

import json
import subprocess
import sys
import time

import psutil
import pytest
import tiny

QUALITY = ("losses", "held_out_loss", "mc1", "mc2", "state_bytes_per_param", "train_examples", "steps")
NAMES = ["not fine-tuned", "torch", "8bit"]


def command(setting, out, *more):
    options = ["--steps", "40", "--save-every", "2", "--optimizers", "torch,8bit", "--out", str(out)]
    return [sys.executable, "-m", "lowbit", "bench", *setting, *options, *more]


def rows(out):
    found = json.loads((out / "report.json").read_text())
    return found["complete"], {row["optimizer"]: row for row in found["rows"]}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return tiny.write_all(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(setting, tmp_path_factory):
    """Rows of the run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert subprocess.run(command(setting, out), capture_output=True, timeout=300).returncode == 0
    return rows(out)[1]


def kill_at(process, checkpoint):
    """Kill a process and all it started, once a checkpoint is there."""
    deadline = time.monotonic() + 120
    while not list(checkpoint.glob("step-*[0-9]")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.kill()
    process.wait()


def test_killed_and_resumed_gives_the_same_table(setting, whole, tmp_path):
    out = tmp_path / "out"
    for name, more in (("torch", ()), ("8bit", ("--resume",))):
        process = subprocess.Popen(command(setting, out, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        kill_at(process, out / "jobs" / f"{name}-checkpoints")
    complete, found = rows(out)
    assert not complete and list(found) == NAMES[:2]
    before = found["torch"]["result"]["tokens_per_second"]
    done = subprocess.run(command(setting, out, "--resume"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    complete, found = rows(out)
    assert complete and list(found) == NAMES
    assert found["torch"]["result"]["tokens_per_second"] == before  # it was not run again
    for name in NAMES:
        for key in QUALITY:
            assert found[name]["result"].get(key) == whole[name]["result"].get(key), (name, key)
    assert not list((out / "jobs").glob("*-checkpoints"))  # what is done needs none


def test_other_options_are_refused(setting, whole, tmp_path, cli):
    out = tmp_path / "out"
    out.mkdir()
    status, _, error = cli(*command(setting, out, "--steps", "1", "--optimizers", "8bit", "--resume")[3:])
    assert status == 0, error  # nothing to resume: a new run
    status, _, error = cli(*command(setting, out, "--steps", "1", "--lr", "3", "--resume")[3:])
    assert status == 2 and "was made with --lr 0.01 (now 3.0): give the same options" in error
    (out / "report.json").write_text("{")
    status, _, error = cli(*command(setting, out, "--resume")[3:])
    assert status == 2 and "can't be read" in error and "--overwrite" in error
