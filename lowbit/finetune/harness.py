"""Tasks of EleutherAI's lm-evaluation-harness, run on the model that was trained."""

import difflib
import functools
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from lowbit.finetune.errors import UserError
from lowbit.finetune.options import listed
from lowbit.finetune.sources import first_line


@dataclass(frozen=True)
class Tasks:
    """What to run: names of tasks and paths of their files, and lm-eval's ``TaskManager`` that knows them."""

    names: list[str]
    manager: object


def find(text):
    """The :class:`Tasks` of a list separated by commas; None if it is empty.

    Each is the name of a task, a group or a tag of lm-eval, the path of a task's .yaml file, or a folder of such files,
    of which all tasks run.

    Raises:
        UserError: lm-eval is not installed, there is no such task or file, a folder without tasks.
    """
    wanted = listed(text)
    if not wanted:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-evaluation-harness: pip install 'lowbit[eval]'")
    paths = {name: Path(name).expanduser() for name in wanted}
    folders = tuple(str(path) for path in paths.values() if path.is_dir())
    named = any(not path.is_dir() and path.suffix != ".yaml" for path in paths.values())
    manager = _manager(folders, named)
    return Tasks([task for name, path in paths.items() for task in _tasks(name, path, manager)], manager)


@functools.cache
def _manager(folders, defaults):
    """lm-eval's ``TaskManager`` of the tasks in some folders, and of its own, whose files take seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders), include_defaults=defaults)


def _tasks(name, path, manager):
    """What lm-eval has to be given for a name or path: names of tasks, or the path of a file."""
    if path.is_dir():
        found = _manager((str(path),), False).all_subtasks
        if not found:
            raise UserError(f"--tasks {name}: no .yaml file there defines a task")
        return found
    if path.suffix == ".yaml":
        if not path.is_file():
            raise UserError(f"--tasks {name}: there is no such file")
        return [str(path)]
    if name not in manager.all_tasks:
        near = difflib.get_close_matches(name, manager.all_tasks)
        hint = f"did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
        raise UserError(f"--tasks: lm-eval has no task {name!r}, and there is no such file: {hint}")
    return [name]


def run(tasks, model, tokenizer, *, batch_size, limit=None, autocast=None):
    """Run :class:`Tasks`; returns ``{task: {metric: value}}`` with ``acc``, ``acc_stderr`` and so on as floats.

    A metric after one of lm-eval's filters is called ``metric,filter``. In several processes all call it together, and
    those other than the first of a machine get None.

    Args:
        batch_size: rows of a batch.
        limit: questions of a task, the first ones; None for all.
        autocast: dtype to compute in where it isn't that of the weights.

    Raises:
        UserError: a task's file or data can't be loaded.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, mixed_precision_dtype=autocast,
        softmax_dtype="float32",  # lm-eval's own default rounds the log-probabilities of bf16 logits to bf16
    )  # fmt: skip
    try:
        found = simple_evaluate(lm, tasks=tasks.names, task_manager=tasks.manager, limit=limit, log_samples=False)
    except (MemoryError, RuntimeError):  # of the model
        raise
    except Exception as error:  # of a task's file, the Hub, a format: no base class in common
        raise UserError(f"--tasks {','.join(tasks.names)}: {type(error).__name__}: {first_line(error)}") from error
    return found and {name: _metrics(values) for name, values in found["results"].items()}


def _metrics(values):
    """lm-eval's ``{"acc,none": value, "acc_stderr,none": value, "alias": ...}`` by plain names, numbers only."""
    kept = {key: x for key, x in values.items() if "," in key and isinstance(x, (int, float))}
    return {key.removesuffix(",none"): float(x) for key, x in kept.items()}
