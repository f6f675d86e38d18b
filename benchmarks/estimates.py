"""``lowbit estimate`` beside the peaks of memory that were measured: every run of ``benchmarks/results`` on a GPU.

    python benchmarks/estimates.py --model SmolLM2.gguf --data alpaca_random_9k.json

Llama2-7B's shape needs nothing; SmolLM2's runs need its configuration and the records they were trained on.
"""

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # run as a script from anywhere

import end_to_end  # noqa: E402

from lowbit.bench import estimate, machine, peers  # noqa: E402
from lowbit.finetune.options import EstimateOptions, resolve  # noqa: E402

WITHIN = 0.05


def llama(report):
    """``{optimizer: (estimate, measured)}`` in bytes of the whole training steps."""
    options = replace(end_to_end.options_of(report["steps"], report["batch_size"]), compile=False)
    examples = end_to_end.examples(report["steps"] * report["batch_size"])
    with FakeTensorMode():
        model = end_to_end.model(report["layers"], "cpu")
    gradients, activations = estimate.passes(model, estimate.largest_batch(examples, options, 0), options, None)
    parameters = list(model.parameters())
    kept = sum(p.nbytes for p in parameters) + gradients + activations
    return {
        row["name"]: (kept + peers.find(row["name"]).state_bytes(parameters), row["max_memory"])
        for row in report["results"]
        if "max_memory" in row
    }


def benchmark(report, **places):
    """The same of a report of ``lowbit bench``."""
    known = {field.name for field in fields(EstimateOptions)} - {"optimizers"}
    options = {name: value for name, value in report["options"].items() if name in known} | places
    measured = {row["optimizer"]: row["result"].get("max_memory") for row in report["rows"]}
    names = [name for name, peak in measured.items() if peak]
    found = estimate.estimate(resolve(EstimateOptions(**options, optimizers=",".join(names))))
    return {row.optimizer: (row.peak, measured[row.optimizer]) for row in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="Alpaca's records that it was trained on")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of what was measured")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    found = {"end-to-end-h200": llama(json.loads((arguments.results / "end-to-end-h200.json").read_text()))}
    if arguments.model:
        report = json.loads((arguments.results / "smollm2-alpaca-h200" / "report.json").read_text())
        found["smollm2-alpaca-h200"] = benchmark(report, model=arguments.model, data=arguments.data)
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
