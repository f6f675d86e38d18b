"""``lowbit bench``: one worker process per optimizer, and a report that is whole after each."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit.bench import peers, report
from lowbit.bench.statistics import value
from lowbit.finetune.checkpoints import FREE, check_options
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import resolve

WORKER = (sys.executable, "-m", "lowbit.bench.worker")
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
    """Run the jobs whose rows are not there yet, one after another; the report is written after each."""
    done = {(row["optimizer"], row["seed"]): row for row in found["rows"]}
    keys = [(optimizer or report.NOT_TUNED, seed) for optimizer, seed in jobs]
    found["rows"] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        everything = progress.add_task("jobs", total=len(jobs), note=f"0 of {len(jobs)}")
        for i, (optimizer, seed) in enumerate(jobs):
            later = [done[key] for key in keys[i + 1 :] if key in done]
            if keys[i] in done:
                found["rows"].append(done[keys[i]])
            else:
                job = Job(optimizer, seed, options, folder)
                try:
                    follow(job, progress, found)
                except KeyboardInterrupt:
                    found["rows"] += [job.interrupted(), *later]
                    raise
                if i == 0 and job.user_error:  # the others would fail alike
                    raise UserError(job.row()["reason"])
                found["rows"].append(job.row())
                report.write(folder, {**found, "rows": [*found["rows"], *later]})
                if job.row()["status"] == "ok":
                    job.clean()
                progress.console.print(summary(job), soft_wrap=True)
            progress.update(everything, completed=i + 1, note=f"{i + 1} of {len(jobs)}")


def follow(job, progress, found):
    """Run a job to its end, with a progress bar of its own."""
    bar = progress.add_task(job.title, total=None, note="starting")
    for event in job.events():
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


def summary(job):
    """A line for the terminal when a job has ended."""
    row = job.row()
    if row["status"] != "ok":
        return f"{job.title}: {row['status']}: {row['reason']}"
    shown = [f"{header} {text(value(row['result'], key))}" for header, key, text in report.COLUMNS]
    return f"{job.title}: " + ", ".join(text for text in shown if not text.endswith(" -"))


class Job:
    """A worker process, its events and its end."""

    def __init__(self, optimizer, seed, options, folder):
        self.optimizer, self.seed = optimizer or report.NOT_TUNED, seed
        several = options.seeds > 1 and optimizer
        self.title = f"{self.optimizer}, seed {seed}" if several else self.optimizer
        name = self.optimizer.replace(" ", "-") + f"-seed{seed}" * bool(several)
        logs = folder / "jobs"
        logs.mkdir(parents=True, exist_ok=True)
        self.path, self.log = logs / f"{name}.json", logs / f"{name}.log"
        self.checkpoints = logs / f"{name}-checkpoints"
        if not options.resume:
            self.clean()
        options = replace(options, seed=seed)
        work = {"options": asdict(options), "optimizer": optimizer, "checkpoints": str(self.checkpoints)}
        self.path.write_text(json.dumps(work, indent=1) + "\n")
        self.last, self.status = None, None

    def clean(self):
        """Delete the checkpoints of the run, which is done."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def events(self):
        """The worker's events, as they come; the worker is stopped if the caller stops, as on Ctrl-C."""
        command = [*WORKER, str(self.path)]
        with self.log.open("w") as log:
            # a session of its own: Ctrl-C is this process's to handle
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
            try:
                for line in worker.stdout:
                    self.last = json.loads(line)
                    yield self.last
                self.status = worker.wait()
            finally:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()

    @property
    def user_error(self):
        """Whether the worker failed for a reason that the user's options name."""
        return bool(self.last) and self.last["event"] == "failure" and self.last["user"]

    def interrupted(self):
        """The job's row if it was stopped on the way."""
        last = self.last or {}
        place = (
            f"{last['stage']}, {last['done']} of {last['total']}" if last.get("event") == "progress" else "the start"
        )
        return self._row("interrupted", f"in {place}", {})

    def row(self):
        """The job's row of the report."""
        event = (self.last or {}).get("event")
        if event == "result":
            return self._row("ok", None, {key: value for key, value in self.last.items() if key != "event"})
        if event == "failure":
            reason = self.last["reason"]
        elif self.status == -signal.SIGKILL:
            reason = "killed by the system, most likely out of memory: lower --batch-size or --max-length"
        else:
            reason = f"the worker ended with status {self.status}: see {self.log}"
        return self._row("failed", reason, {})

    def _row(self, status, reason, result):
        return {
            "optimizer": self.optimizer, "seed": self.seed, "status": status, "reason": reason, "result": result,
        }  # fmt: skip
