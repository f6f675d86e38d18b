"""``lowbit bench``: one worker process per optimizer, and a report that is whole after each."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lowbit.bench import peers, report
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
        run_all([None, *names], options, folder, found, console)
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
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--resume: {path} can't be read ({error}): delete it, or give --overwrite") from error
    check_options(saved, options, path, FREE - {"eval_data", "eval_limit", "device"})
    return {"machine": found["machine"], "versions": found["versions"], "rows": rows}


def run_all(jobs, options, folder, found, console):
    """Run the jobs whose rows are not there yet, one after another; the report is written after each."""
    done = {row["optimizer"]: row for row in found["rows"]}
    found["rows"] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        everything = progress.add_task("jobs", total=len(jobs), note=f"0 of {len(jobs)}")
        for i, optimizer in enumerate(jobs):
            name = optimizer or report.NOT_TUNED
            if name in done:
                found["rows"].append(done[name])
                progress.update(everything, completed=i + 1, note=f"{i + 1} of {len(jobs)}")
                continue
            bar = progress.add_task(name, total=None, note="starting")
            job = Job(optimizer, options, folder)
            try:
                for event in job.events():
                    show(progress, bar, event, found)
            except KeyboardInterrupt:
                found["rows"] += [job.interrupted(name), *(done[later] for later in jobs[i + 1 :] if later in done)]
                raise
            row = job.row(name)
            if i == 0 and job.user_error:  # the others would fail alike
                raise UserError(row["reason"])
            found["rows"].append(row)
            write(folder, found, [done[later] for later in jobs[i + 1 :] if later in done])
            if row["status"] == "ok":
                job.clean()
            progress.remove_task(bar)
            progress.update(everything, completed=i + 1, note=f"{i + 1} of {len(jobs)}")
            progress.console.print(summary(row), soft_wrap=True)


def write(folder, found, later):
    """Write the report, with the rows of jobs that come ``later`` and are done."""
    report.write(folder, {**found, "rows": [*found["rows"], *later]})


def show(progress, bar, event, found):
    """Bring an event of a worker to the progress bar or into the report."""
    if event["event"] == "progress":
        loss = "" if event["loss"] is None else f", loss {event['loss']:.3f}"
        note = f"{event['stage']} {event['done']}/{event['total']}{loss}"
        progress.update(bar, total=event["total"], completed=event["done"], note=note)
    elif event["event"] == "machine":
        found["machine"], found["versions"] = event["machine"], event["versions"]


def summary(row):
    """A line for the terminal when a job has ended."""
    if row["status"] != "ok":
        return f"{row['optimizer']}: {row['status']}: {row['reason']}"
    shown = [f"{header} {text}" for header, text in zip(report.HEADERS[1:], report.cells(row)[1:], strict=True)]
    return f"{row['optimizer']}: " + ", ".join(text for text in shown if not text.endswith(" -"))


class Job:
    """A worker process, its events and its end."""

    def __init__(self, optimizer, options, folder):
        name = optimizer or report.NOT_TUNED.replace(" ", "-")
        logs = folder / "jobs"
        logs.mkdir(parents=True, exist_ok=True)
        self.path, self.log = logs / f"{name}.json", logs / f"{name}.log"
        self.checkpoints = logs / f"{name}-checkpoints"
        if not options.resume:
            self.clean()
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

    def interrupted(self, name):
        """The job's row if it was stopped on the way."""
        last = self.last or {}
        place = (
            f"{last['stage']}, {last['done']} of {last['total']}" if last.get("event") == "progress" else "the start"
        )
        return {"optimizer": name, "status": "interrupted", "reason": f"in {place}", "result": {}}

    def row(self, name):
        """The job's row of the report."""
        event = (self.last or {}).get("event")
        if event == "result":
            result = {key: value for key, value in self.last.items() if key != "event"}
            return {"optimizer": name, "status": "ok", "reason": None, "result": result}
        if event == "failure":
            reason = self.last["reason"]
        elif self.status == -signal.SIGKILL:
            reason = "killed by the system, most likely out of memory: lower --batch-size or --max-length"
        else:
            reason = f"the worker ended with status {self.status}: see {self.log}"
        return {"optimizer": name, "status": "failed", "reason": reason, "result": {}}
