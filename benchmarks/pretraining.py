"""Where the state decides and not the weights: a small Llama from random weights, at a high learning rate, in fp32.

    python benchmarks/pretraining.py --data alpaca.json --seeds 5 --json benchmarks/results/pretraining.json

Each optimizer trains the built-in model with the same weights, data and order. Columns, means over seeds with standard
deviations: held-out loss; the largest |m̂ / (√v̂ + eps)| of any element at any step; the largest jump of the loss above
its exponential mean; how far embedding rows of rare tokens moved, as a multiple of the first optimizer's, and the
farthest element of one; the farthest of tokens that are never met, and so have no gradient; exp_avg_sq that is a factor
2 from its exact mean at the end.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import rich
import torch
import typer
from rich.progress import track
from rich.table import Table

from lowbit.bench import machine, peers
from lowbit.bench.report import smoothed
from lowbit.finetune.options import BenchOptions, device_of, resolve
from lowbit.finetune.run import build_optimizer, evaluate, prepare
from lowbit.finetune.train import Order, train

OPTIMIZERS = "torch,8bit,12bit,4bit,bitsandbytes-8bit,torchao-8bit,torchao-4bit,torchao-fp8,flashoptim-bf16"
RARE = range(1, 11)  # times that a token is met in training
SETTLED = 20  # steps until the loss has a mean to jump above
COLUMNS = {
    "held_out_loss": ("held-out loss", "{:.3f}"),
    "update": ("largest |update|, in lr", "{:.3g}"),
    "jump": ("largest jump of the loss", "{:.2f}"),
    "rare_rows": ("rare rows moved", "{:.2f}"),
    "rare_farthest": ("farthest element, in lr", "{:.3g}"),
    "unmet_farthest": ("of tokens never met", "{:.3g}"),
    "stuck": ("stuck exp_avg_sq", "{:.2%}"),
}


def run(name, options):
    """What one run shows: ``{key of COLUMNS: value}``; ``rare_rows`` in units of the learning rate."""
    peer = peers.find(name)
    setup = prepare(options, peer)
    rows = setup.model.get_input_embeddings().weight  # [tokens, width]
    before = rows.detach().clone()
    optimizer = build_optimizer(peer, setup.model, options)
    found = train(setup.model, optimizer, setup.examples, setup.pad_id, options)
    moved = (rows.detach() - before).abs() / options.lr
    times = met(Order(setup.examples, options), len(rows)).to(rows.device)
    rare = moved[(times >= RARE[0]) & (times <= RARE[-1])]
    losses = [loss for _, loss in found.losses]
    return {
        "held_out_loss": evaluate(setup, options)["held_out_loss"],
        "update": max(value for _, value in found.curves.get("update", [[0, float("nan")]])),
        "jump": max(b - a for a, b in list(zip(smoothed(losses), losses[1:], strict=False))[SETTLED:]),
        "rare_rows": rare.norm(dim=1).mean().item(),
        "rare_farthest": farthest(rare),
        "unmet_farthest": farthest(moved[times == 0]),
        "stuck": found.curves.get("stuck", [[0, float("nan")]])[-1][1],
        "rare_tokens": len(rare),
    }


def farthest(moved):
    """The largest element; 0 if there is none."""
    return moved.max().item() if moved.numel() else 0.0


def met(order, tokens):
    """How often each token is met in training: [tokens]."""
    found = torch.zeros(tokens, dtype=torch.int64)
    for step in range(order.total):
        for i in (i for indices in order[step] for i in indices):
            found += torch.bincount(torch.tensor(order.examples[i].input_ids), minlength=tokens)
    return found


def summary(runs, first):
    """``{key: (mean, deviation)}`` over the runs of an optimizer, rows relative to those of the ``first``."""
    found = {}
    for key in COLUMNS:
        values = [one[key] / (two[key] if key == "rare_rows" else 1) for one, two in zip(runs, first, strict=True)]
        found[key] = (fmean(values), stdev(values) if len(values) > 1 else None)
    return found


def printed(results, title):
    """The table for :mod:`rich`."""
    table = Table("optimizer", *(head for head, _ in COLUMNS.values()), title=title)
    for name, result in results.items():
        if "error" in result:
            table.add_row(name, result["error"])
            continue
        cells = []
        for key, (_, form) in COLUMNS.items():
            mean, sd = result["summary"][key]
            cells.append(form.format(mean) + ("" if sd is None else " ± " + form.format(sd)))
        table.add_row(name, *cells)
    return table


def main(
    optimizers: Annotated[str, typer.Option(help="Names, separated by commas; the first is what rows relate to.")] = (
        OPTIMIZERS
    ),
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=2 * SETTLED)] = 300,
    lr: float = 1e-2,
    data: Annotated[str, typer.Option(help="Records, as of lowbit bench.")] = "builtin",
    device: str = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers there.")] = None,
):
    """Pretrain with each optimizer and seed; one that can't run is a line with its reason."""
    options = resolve(
        BenchOptions(
            data=data, from_scratch=True, dtype="float32", eval_data="none", steps=steps, lr=lr, device=device,
            diagnostics=True, log_every=1,
        )
    )  # fmt: skip
    results, first = {}, None
    for name in track(peers.names(optimizers), "pretraining"):
        try:
            runs = [run(name, replace(options, seed=options.seed + i)) for i in range(seeds)]
        except Exception as error:  # another library that can't run here
            if first is None or peers.ours(name):
                raise
            results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        first = first or runs
        results[name] = {"runs": runs, "summary": summary(runs, first)}
    rich.print(printed(results, f"{Path(data).name}, {steps} steps of {options.batch_size}, lr {lr:g}, {seeds} seeds"))
    if json_path:
        where = machine.machine(device_of(options)), machine.versions()
        found = {
            "machine": where[0],
            "versions": where[1],
            "options": asdict(options) | {"data": Path(data).name},
            "seeds": seeds,
        }
        json_path.write_text(json.dumps(found | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
