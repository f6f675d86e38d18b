"""Sharded parameters, in four processes of gloo and in nine: updates, checkpoints, resharding, FSDP2."""

import fsdp
import pytest
import sharded
import torch

CHECKS = sharded.CHECKS | fsdp.CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_four_processes(name, tmp_path):
    spawn(CHECKS[name], tmp_path, sharded.WORLD)


def test_more_processes_than_rows(tmp_path):
    spawn(sharded.check_gate, tmp_path, sharded.GATES)


def spawn(check, folder, world):
    torch.multiprocessing.spawn(sharded.run, (check, str(folder), world), nprocs=world)
