"""The laws of the dynamics: what a low-bit optimizer may do to its moments, measured on ours and on others.

``python benchmarks/laws.py`` prints one table, a law a row and an optimizer a column, each through its own ``step()``.
Exit code 1 if one of ours breaks a law. The laws are also assertions in ``tests/test_dynamics.py``.
"""

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import rich
import scenarios
import torch
import typer
from limits import ANY, LAWS, STATES, ours
from rich.progress import track
from rich.table import Table

from lowbit.bench import peers


def _peer(peer):
    def make(params, lr, betas, eps):
        return peer.build(params, lr, betas, eps, 0.0, 0)

    return make


PEERS = {name: _peer(peers.find(name)) for name in ("bitsandbytes-8bit", "torchao-8bit", "torchao-4bit", "torchao-fp8")}
# fp32 weights have no low bits to keep
PEERS["flashoptim"] = _peer(peers.other("flashoptim", "FlashAdamW", "flashoptim", master_weight_bits=None))
NAMES = (*STATES, *PEERS)


def measure(name, backend, device, shape):
    """All laws of one optimizer: their numbers, whether each holds (None for others), or the error that stopped it."""
    found, cache, start = {"values": [], "holds": []}, {}, time.perf_counter()
    make = PEERS[name] if name in PEERS else ours(name, backend)
    torch.set_num_threads(1)  # tensors are small, and several processes may run
    # torchao compiles its step: minutes of it, for the same numbers
    stance = "force_eager" if name in PEERS else "default"
    for law in LAWS:
        try:
            with torch.compiler.set_stance(stance):
                numbers = law.measure(make, device, shape, cache)
        except Exception as error:  # another library that can't run here
            if name not in PEERS:
                raise
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        value = numbers[law.key]
        low, high = law.limits(name, numbers)
        found["values"].append(value)
        found["holds"].append(bool(low <= value <= high) if name not in PEERS else None)
    return found | {"seconds": time.perf_counter() - start}


def measure_all(names, jobs, *arguments):
    """:func:`measure` of each, in a process of its own, ``jobs`` at a time."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        tasks = {name: pool.submit(measure, name, *arguments) for name in names}
        return {name: task.result() for name, task in track(tasks.items(), "measuring")}


def table(results):
    """The table of laws; a law that is broken says FAIL."""
    grid = Table("law", "8bit must", "4bit must", *results, title="Laws of the dynamics")
    marks = {True: "[green]ok[/]", False: "[red]FAIL[/]", None: ""}
    for row, law in enumerate(LAWS):
        cells = []
        for found in results.values():
            shown = "–" if "error" in found else f"{found['values'][row]:.3g} {marks[found['holds'][row]]}"
            cells.append(shown)
        grid.add_row(law.title, *_musts(law), *cells)
    return grid


def _range(limits):
    low, high = limits
    if high == ANY:
        return f"≥ {low:g}"
    return f"≤ {high:g}" if low == 0 else f"{low:g} … {high:g}" if high - low > 1e-3 else f"{(low + high) / 2:g} ± 1e-5"


def _musts(law):
    return [_range(limits) + (" × exact" if law.unit else "") for limits in (law.must_8bit, law.must_4bit)]


def write_json(path, results, device):
    """The numbers with the machine and versions that they were measured on."""
    from lowbit.bench.machine import machine, versions

    laws = [dict(zip(("title", "must_8bit", "must_4bit"), (law.title, *_musts(law)), strict=True)) for law in LAWS]
    report = {"machine": machine(device), "versions": versions(), "laws": laws, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(
    optimizers: Annotated[str | None, typer.Option(help=f"Names separated by commas: {', '.join(NAMES)}.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or any other device of torch.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Of ours: auto, eager, compiled or triton.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Half as many elements; without --optimizers, only ours.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Optimizers measured at a time, each in its own process.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
):
    """Print the table of laws; exit code 1 if one of ours breaks one."""
    names = STATES if quick else NAMES
    if optimizers is not None:
        names = [name.strip() for name in optimizers.split(",")]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"unknown optimizers {unknown}: choose from {', '.join(NAMES)}")
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(f"no device {device!r} here: {str(error).splitlines()[0]}") from None
    shape = (16, 256) if quick else scenarios.SHAPE
    results = measure_all(names, jobs, backend, place, shape)
    console = rich.get_console()
    if not console.is_terminal:
        console.width = 240
    console.print(table(results))
    for name, found in results.items():
        if "error" in found:
            rich.print(f"{name} did not run: {found['error']}")
    if json_file:
        write_json(json_file, results, place)
        rich.print(f"numbers written to {json_file}")
    if any(False in found.get("holds", ()) for found in results.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
