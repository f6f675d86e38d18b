"""Checkpoints of ``lowbit finetune``: folders ``step-<n>`` that transformers can load, with the run's state inside.

A checkpoint is written beside its place and then renamed, and older ones are deleted after that: whenever the process
dies, the newest whole checkpoint is there.
"""

import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import torch

from lowbit.finetune import processes
from lowbit.finetune.errors import UserError

STATE, OPTIONS = "training.pt", "options.json"
SHARDS = "optimizer"  # folder of the optimizer's state, if several processes saved it
# may change at a resume
FREE = {
    "out", "resume", "save_every", "log_every", "device", "eval_data", "eval_limit", "tasks", "replicas", "optimizers",
    "overwrite", "seeds", "diagnostics", "loggers", "log_peak_memory", "parallel",
    "fresh_caches",
}  # fmt: skip


def save(folder, run, tokenizer, options, fingerprint):
    """Save the :class:`~lowbit.finetune.train.Training` ``run`` and return the checkpoint's path.

    All processes call it. Weights are whole in the checkpoint, the optimizer's state is as each process has it.
    """
    folder = Path(folder)
    target, partial = folder / f"step-{run.step:06d}", folder / f"step-{run.step:06d}.partial"
    old, first = whole(folder), processes.first()
    processes.wait()
    if target in old:
        return target
    if first:
        for remains in (target, partial):  # of a process that died
            shutil.rmtree(remains, ignore_errors=True)
        partial.mkdir(parents=True)
    processes.wait()
    weights, state = None, run.state_dict()
    if processes.count() > 1:
        weights = processes.whole_weights(run.model)
        processes.save_optimizer(run.model, run.optimizer, partial / SHARDS)
        del state["optimizer"]
    if first:
        run.model.save_pretrained(partial, state_dict=weights)
        # fully_shard makes a class of its own
        run.model.config.architectures = [type(run.model).__name__.removeprefix("FSDP")]
        run.model.config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        torch.save(state, partial / STATE)
        saved = {"options": asdict(options), "data": fingerprint}
        (partial / OPTIONS).write_text(json.dumps(saved, indent=1) + "\n")
        os.replace(partial, target)
        for path in old:
            shutil.rmtree(path)
    processes.wait()
    return target


def whole(folder):
    """Paths of the checkpoints in a folder, the newest last."""
    found = [path for path in Path(folder).glob("step-*") if path.name[5:].isdigit() and (path / OPTIONS).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def newest(folder, options):
    """The newest checkpoint in a folder; raises :class:`UserError` if there is none or its options are others."""
    found = whole(folder)
    if not found:
        raise UserError(f"--resume: there is no checkpoint in {folder}: give the --out of the run to go on with")
    check_options(json.loads((found[-1] / OPTIONS).read_text())["options"], options, found[-1])
    return found[-1]


def check_options(saved, options, where, free=FREE):
    """Raise :class:`UserError` if options that decide a run's course are others than those saved as a dict."""
    now = asdict(options)
    saved = {field.name: field.default for field in fields(options)} | saved  # an older one had fewer options
    changed = [name for name in now if name not in free and saved[name] != now[name]]
    if changed:
        was = ", ".join(f"--{name.replace('_', '-')} {saved[name]} (now {now[name]})" for name in changed)
        raise UserError(f"--resume: {where} was made with {was}: give the same options")


def load_state(checkpoint, fingerprint):
    """The ``Training.state_dict()`` of a checkpoint; raises :class:`UserError` if it can't be read or the data differ.

    ``fingerprint`` is that of the training data now.
    """
    if json.loads((checkpoint / OPTIONS).read_text())["data"] != fingerprint:
        raise UserError(f"--resume: the training data are not those of {checkpoint}: give the same --data, unchanged")
    try:
        state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
        return {"optimizer": checkpoint / SHARDS} | state
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--resume: {checkpoint / STATE} can't be read ({reason}): delete {checkpoint}") from error
