"""Checkpoints of the first release load for ever: the same moments, the same next step."""

from pathlib import Path

import pytest
import torch
from cases import run, same_bits

import lowbit

FILES = sorted((Path(__file__).parent / "golden").glob("*.pt"))


def test_there_is_one_of_each_format():
    assert {path.stem.split("+")[0] for path in FILES} == {"8bit", "4bit", "12bit", "bf16", "fp32"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path):
    file = torch.load(path, weights_only=True)
    state, weights = path.stem.split("+")
    ps = [torch.nn.Parameter(x.clone()) for x in file["weights"]]
    optimizer = lowbit.AdamW(ps, state=state, weights=weights, min_numel=0, backend="eager")
    optimizer.load_state_dict(file["optimizer"])
    for p, moments in zip(ps, file["moments"], strict=True):
        assert all(same_bits(x, y) for x, y in zip(lowbit.decode(optimizer, p), moments, strict=True))
    run(optimizer, ps, 1, first=3)
    assert all(same_bits(p.detach(), x) for p, x in zip(ps, file["next"], strict=True))
