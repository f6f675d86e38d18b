"""``lowbit bench``: one worker process per optimizer, and a report that is whole after each."""

import json
import queue
import signal
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit.bench import peers, report
from lowbit.bench.job import Job
from lowbit.bench.statistics import value
from lowbit.finetune.checkpoints import FREE, check_options
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import resolve

INTERRUPTED = 130  # exit status after Ctrl-C, as of a shell


def bench(options, console):
    """Run the benchmark of :class:`BenchOptions` and print its table.

    Returns the exit status: 0 if at least one optimizer was measured, 1 if none was, 130 after Ctrl-C. Raises
    :class:`UserError` if the options, the model or the data can't be used at all.
    """
    names = peers.names(options.optimizers)
    options = resolve(options)
    folder = Path(options.out)
    found = {"complete": False, "options": asdict(options), "machine": None, "versions": None, "rows": []}
    if options.resume:
        found = {**begun(folder, options), "complete": False, "options": asdict(options)}
    elif (folder / report.JSON).exists() and not options.overwrite:
        raise UserError(f"{folder / report.JSON} is there already: give another --out, or add --overwrite or --resume")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on Ctrl-C
    try:
        run_all(jobs(names, options), options, folder, found, console)
        found["complete"] = True
        status = 0 if any(row["status"] == "ok" for row in found["rows"][1:]) else 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    if found["rows"]:
        report.write(folder, found)
        console.print(report.terminal_table(found))
        console.print(f"Report: {folder / report.MARKDOWN}", soft_wrap=True)
    if status == INTERRUPTED:
        console.print("Interrupted: the report has what was done until then; --resume goes on.", style="yellow")
    return status


def jobs(names, options):
    """``(optimizer, seed)`` of every run, in order: the model before (None) once, then all optimizers seed by seed."""
    seeds = range(options.seed, options.seed + options.seeds)
    return [(None, options.seed), *((name, seed) for seed in seeds for name in names)]


def begun(folder, options):
    """The report in a folder with the rows of optimizers that are done, to go on with; an empty one if there is none.

    Raises :class:`UserError` if its options are others, or it can't be read.
    """
    path = folder / report.JSON
    if not path.exists():
        return {"machine": None, "versions": None, "rows": []}
    try:
        found = json.loads(path.read_text())
        saved, rows = found["options"], [row for row in found["rows"] if row["status"] == "ok"]
        rows = [{"seed": saved["seed"], **row} for row in rows]  # reports of one seed had none in their rows
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume: {path} can't be read ({error}): delete it, or give --overwrite") from error
    check_options(saved, options, path, FREE - {"eval_data", "eval_limit", "tasks", "device"})
    return {"machine": found["machine"], "versions": found["versions"], "rows": rows}


def run_all(jobs, options, folder, found, console):
    """Run the jobs whose rows are not there yet, as many at once as configured; the report is written after each.

    The first, which measures the model before, runs alone: what it can't use, the others can't either.
    """
    keys = [(optimizer or report.NOT_TUNED, seed) for optimizer, seed in jobs]
    rows = {(row["optimizer"], row["seed"]): row for row in found["rows"]}
    gpus = visible_gpus(options) if options.parallel > 1 else 1
    todo = [
        Job(optimizer, seed, options, folder, crowded=options.parallel > gpus)
        for (optimizer, seed), key in zip(jobs, keys, strict=True)
        if key not in rows
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        everything = progress.add_task("jobs", total=len(jobs), note="")
        alone = [job for job in todo if job.key == keys[0]]
        for part, at_once in ((alone, 1), ([job for job in todo if job not in alone], options.parallel)):
            for job in run(part, at_once, gpus, progress, found):
                rows[job.key] = job.row()
                found["rows"] = [rows[key] for key in keys if key in rows]
                if job in alone and job.user_error:
                    raise UserError(job.row()["reason"])
                report.write(folder, found)
                if rows[job.key]["status"] == "ok":
                    job.clean()
                progress.console.print(summary(job.title, rows[job.key]), soft_wrap=True)
                progress.update(everything, completed=len(rows), note=f"{len(rows)} of {len(jobs)}")


def run(jobs, at_once, gpus, progress, found):
    """Run jobs, so many at once, over the GPUs in turn; yields each when it has ended.

    On Ctrl-C those that run are stopped and yielded before it is raised.
    """
    free = queue.SimpleQueue()
    for place in range(at_once):
        free.put(place % gpus if gpus > 1 else None)

    def one(job):
        gpu = free.get()
        follow(job, gpu, progress, found)
        free.put(gpu)
        return job

    pool = ThreadPoolExecutor(at_once)
    ends = [pool.submit(one, job) for job in jobs]
    running = list(jobs)
    try:
        for end in as_completed(ends):
            running.remove(end.result())
            yield end.result()
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)  # or a job that waits would start where one stops
        yield from [job for job in running if job.stop()]
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for job in running:
            job.stop()


def visible_gpus(options):
    """How many GPUs the runs are spread over; 1 where they stay on one device."""
    import torch

    return max(1, torch.cuda.device_count()) if options.device in ("auto", "cuda") else 1


def follow(job, gpu, progress, found):
    """Run a job to its end, with a progress bar of its own."""
    bar = progress.add_task(job.title, total=None, note="starting")
    for event in job.events(gpu):
        show(progress, bar, event, found)
    progress.remove_task(bar)


def show(progress, bar, event, found):
    """Bring an event of a worker to the progress bar or into the report."""
    if event["event"] == "progress":
        loss = "" if event["loss"] is None else f", loss {event['loss']:.3f}"
        note = f"{event['stage']} {event['done']}/{event['total']}{loss}"
        progress.update(bar, total=event["total"], completed=event["done"], note=note)
    elif event["event"] == "machine":
        found["machine"], found["versions"] = event["machine"], event["versions"]


def summary(title, row):
    """A line for the terminal when a job has ended."""
    if row["status"] != "ok":
        return f"{title}: {row['status']}: {row['reason']}"
    shown = [f"{header} {text(value(row['result'], key))}" for header, key, text in report.COLUMNS]
    return f"{title}: " + ", ".join(text for text in shown if not text.endswith(" -"))
