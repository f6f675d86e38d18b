"""``lowbit estimate`` beside the peaks of memory that ``lowbit bench`` measured on a GPU.

    python benchmarks/estimates.py --run llama2-7b-alpaca-h200 llama2-7b alpaca_random_9k.json \
        --run smollm2-alpaca-h200 SmolLM2.gguf alpaca_random_9k.json

A run is a folder of ``benchmarks/results``, the model's configuration and the records it was trained on.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # run as a script from anywhere

from lowbit.bench import estimate, machine  # noqa: E402
from lowbit.finetune.options import EstimateOptions, resolve  # noqa: E402

WITHIN = 0.05


def both(report, **places):
    """``{optimizer: (estimate, measured)}`` in bytes, of a report."""
    known = {field.name for field in fields(EstimateOptions)} - {"optimizers"}
    options = {name: value for name, value in report["options"].items() if name in known} | places
    measured = {row["optimizer"]: row["result"].get("max_memory") for row in report["rows"]}
    names = [name for name, peak in measured.items() if peak]
    found = estimate.estimate(resolve(EstimateOptions(**options, optimizers=",".join(names))))
    return {row.optimizer: (row.peak, measured[row.optimizer]) for row in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=3, action="append", required=True, metavar=("NAME", "MODEL", "DATA"))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of what was measured")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    found = {}
    for name, model, data in arguments.run:
        report = json.loads((arguments.results / name / "report.json").read_text())
        found[name] = both(report, model=model, data=data)
    print(f"{'run':22}{'optimizer':20}{'estimate GiB':>13}{'measured':>10}{'off':>7}")
    off = []
    for run, rows in found.items():
        for name, (guess, measured) in rows.items():
            off.append(guess / measured - 1)
            print(f"{run:22}{name:20}{guess / 2**30:13.2f}{measured / 2**30:10.2f}{off[-1]:+7.1%}")
    near = sum(abs(x) <= WITHIN for x in off)
    print(f"{near} of {len(off)} within {WITHIN:.0%}, the worst {max(off, key=abs):+.1%} off")
    if arguments.json:
        head = {"machine": machine.machine(torch.device("cpu")), "versions": machine.versions()}
        arguments.json.write_text(json.dumps(head | {"estimate, measured, bytes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
