"""Write the golden files: ``python tests/golden/make.py``. Done once for each version of the formats, never again."""

import copy
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cases import parameter, run  # noqa: E402

import lowbit  # noqa: E402

KINDS = (("8bit", "auto"), ("4bit", "24bit"), ("12bit", "32bit"), ("bf16", "nearest"), ("fp32", "auto"))


def make(state, weights):
    """Two parameters after three steps: its state, its moments in fp32, the weights after one more."""
    ps = [parameter(5, 70, seed=1, dtype=torch.bfloat16), parameter(7, seed=2, dtype=torch.bfloat16)]
    optimizer = lowbit.AdamW(ps, lr=1e-2, state=state, weights=weights, min_numel=0, seed=5, backend="eager")
    run(optimizer, ps, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    file = {"weights": [p.detach().clone() for p in ps], "optimizer": saved}
    file["moments"] = [lowbit.decode(optimizer, p) for p in ps]
    run(optimizer, ps, 1, first=3)
    torch.save({**file, "next": [p.detach() for p in ps]}, HERE / f"{state}+{weights}.pt")


if __name__ == "__main__":
    for kind in KINDS:
        make(*kind)
