"""Loggers of a run: TensorBoard, Weights & Biases, Trackio, and lines of JSON.

A logger is a class with ``log(step, {name: value})`` and ``close()``. It is built with ``(folder, options, step)``: the
folder of the run, all options as a dict, and the step to go on from, 0 for a new run. Its library is imported then.
"""

import importlib.util
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from unittest import mock

from lowbit.finetune import memory, processes
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import listed

PROJECT = "lowbit"


class TensorBoard:
    """An event file, for ``tensorboard --logdir``."""

    def __init__(self, folder, options, step):
        from torch.utils.tensorboard import SummaryWriter

        # what a killed run logged after its checkpoint comes again
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, step, values):
        """Write the values; they are in the file when this returns."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self):
        """Close the file."""
        self.writer.close()


class Wandb:
    """A run of Weights & Biases: offline, for ``wandb sync``, unless WANDB_MODE or a login says otherwise."""

    def __init__(self, folder, options, step):
        import wandb

        chosen = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        kept = folder / "wandb-id"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=folder.name, dir=str(folder), config=options,
            id=kept.read_text() if kept.exists() else None, resume="allow" if step else None,
            mode=None if chosen else "offline", settings=wandb.Settings(console="off"),
        )  # fmt: skip
        kept.write_text(self.run.id)

    def log(self, step, values):
        """Hand the values to wandb's own process."""
        self.run.log(values, step=step)

    def close(self):
        """Wait until all is written, or sent."""
        self.run.finish()


class Trackio:
    """A run in Trackio's database on this machine, one for all runs of an --out; ``trackio sync`` uploads it.

    It reads TRACKIO_DIR when it is imported, so that a process has one database.
    """

    def __init__(self, folder, options, step):
        os.environ.setdefault("TRACKIO_DIR", str(folder.parent.absolute()))
        with _no_account():
            import trackio

            self.run = trackio.init(
                project=PROJECT, name=folder.name, config=options, resume="allow" if step else "never", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, step, values):
        """Hand the values to Trackio's thread, which writes them within a second."""
        self.run.log(values, step=step)

    def close(self):
        """Wait until all is written."""
        self.run.finish()


@contextmanager
def _no_account():
    """Keeps Trackio from asking the Hub whose account this is, and from logging to a Space or a server."""
    import huggingface_hub

    local = {name: x for name, x in os.environ.items() if name not in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")}
    no_token = mock.patch.object(huggingface_hub, "get_token", side_effect=LookupError)
    with mock.patch.dict(os.environ, local, clear=True), no_token:
        yield


class Jsonl:
    """``log.jsonl``: a line of JSON a report, with its ``step``."""

    def __init__(self, folder, options, step):
        path, partial = folder / "log.jsonl", folder / ".log.jsonl.partial"
        lines = path.read_text().splitlines() if path.exists() else []
        # the last one may be half a line of a killed run
        kept = [line + "\n" for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        partial.write_text("".join(kept))
        os.replace(partial, path)
        self.file = path.open("a")

    def log(self, step, values):
        """Write a line."""
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def close(self):
        """Close the file."""
        self.file.close()


KINDS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "jsonl": Jsonl}


def check(options):
    """Raise :class:`UserError` if the library of a logger in ``--loggers`` is missing."""
    for name in listed(options.loggers):
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise UserError(f"--loggers {name}: the package {name} is missing: pip install {name}")


class Log:
    """All loggers of a run; in processes other than the first it does nothing."""

    def __init__(self, loggers, peak_memory):
        self.loggers, self.peak_memory = loggers, peak_memory

    def step(self, run):
        """Log what was measured at this step of a :class:`~lowbit.finetune.progress.Training`, if something was."""
        measured = run.measurements()
        if not self.loggers or not measured:
            return
        with run.throughput.pause():
            rate = run.throughput.lap() / processes.count()
            values = {"loss": run.loss, "lr": run.lr, "tokens_per_second_per_gpu": rate, **measured}
            if self.peak_memory:
                values |= memory.peaks(next(run.model.parameters()).device)
            self.write(run.step, values)

    def write(self, step, values):
        """Log numbers at a step; those inside dicts are called ``a/b``, None is left out."""
        found = dict(_flat(values))
        if found:
            for logger in self.loggers:
                logger.log(step, found)


@contextmanager
def opened(options, folder, checkpoint=None):
    """The :class:`Log` of a run in a folder of its own; it goes on with what is there up to ``checkpoint``.

    Without a checkpoint, what is in the folder is deleted. Raises :class:`UserError` as :func:`check` does.
    """
    check(options)
    step = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
    loggers = []
    try:
        for name in listed(options.loggers) if processes.first() else ():
            if not step and not loggers:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            loggers.append(KINDS[name](folder, asdict(options), step))
        yield Log(loggers, options.log_peak_memory)
    finally:
        for logger in loggers:
            logger.close()


def _flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif value is not None:
            yield prefix + name, value
