"""Sharded parameters, in four processes of gloo: updates, checkpoints, resharding, FSDP2."""

import fsdp
import pytest
import sharded
import torch

CHECKS = sharded.CHECKS | fsdp.CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_four_processes(name, tmp_path):
    torch.multiprocessing.spawn(sharded.run, (CHECKS[name], str(tmp_path)), nprocs=sharded.WORLD)
