"""``lowbit finetune`` in several processes: killed at one number of them, resumed at another, the same losses."""

import os
import re
import subprocess
import sys

import psutil
import pytest
import tiny

STEPS = 8
LINE = re.compile(r"step (\d+)/\d+  loss ([\d.]+)")


def finetune(processes, options, until=None):
    """Losses by step of a run in some processes under torchrun, or in one without; killed after step ``until``."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "lowbit", "finetune", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    losses = {}
    for line in run.stdout:
        if found := LINE.search(line):
            losses[int(found[1])] = float(found[2])
            if int(found[1]) == until:
                for process in [*psutil.Process(run.pid).children(recursive=True), run]:
                    process.kill()
                break
    errors = run.communicate()[1]
    assert until or run.returncode == 0, errors[-3000:]
    return losses


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A tiny model in fp32, so that the order of sums hardly shows; a batch that not all processes share evenly."""
    folder = tmp_path_factory.mktemp("torchrun")
    common = ["--eval-data", "none", "--dtype", "float32", "--save-every", "2", "--log-every", "1", "--batch-size", "5"]
    return [*tiny.write_all(folder), *common, "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """Losses of the run that nothing disturbs, in one process."""
    return finetune(1, [*options, "--out", str(tmp_path_factory.mktemp("whole"))])


def assert_same_losses(found, whole):
    assert found == pytest.approx({step: whole[step] for step in found}, abs=3e-4)


@pytest.mark.parametrize("chain", [(2, 3, 1), (1, 2)])
def test_killed_and_resumed_at_another_number_of_processes(options, whole, tmp_path, chain):
    found = {}
    for place, processes in enumerate(chain):
        last = place == len(chain) - 1
        resume = ["--resume"] if place else []
        losses = finetune(processes, [*options, "--out", str(tmp_path), *resume], None if last else 3 + 2 * place)
        assert min(losses) == 1 + 2 * place  # it went on from the checkpoint before the kill
        found |= losses
    assert set(found) == set(range(1, STEPS + 1))
    assert_same_losses(found, whole)


def test_replicas_of_shards(options, whole, tmp_path):
    assert_same_losses(finetune(4, [*options, "--out", str(tmp_path), "--replicas", "2"]), whole)


@pytest.mark.parametrize(
    "wrong, reason",
    [(["--batch-size", "1"], "--batch-size is 1: give at least 2"), (["--replicas", "3"], "--replicas is 3: give")],
)
def test_what_does_not_fit_the_processes(options, tmp_path, wrong, reason):
    with pytest.raises(AssertionError, match=reason):
        finetune(2, [*options, "--out", str(tmp_path), *wrong])
