"""Sharded parameters, in four processes of gloo: updates, checkpoints, resharding."""

import pytest
import torch
from sharded import CHECKS, WORLD, run


@pytest.mark.parametrize("name", CHECKS)
def test_four_processes(name, tmp_path):
    torch.multiprocessing.spawn(run, (name, str(tmp_path)), nprocs=WORLD)
