"""One job of the benchmark in a process of its own: ``python -m lowbit.bench.worker job.json``.

Events go to standard output as lines of JSON, everything that libraries print goes to standard error:
``{"event": "machine", ...}``, ``{"event": "progress", "stage", "done", "total", "loss"}``, and last either
``{"event": "result", ...}`` or ``{"event": "failure", "reason", "user"}``.
"""

import json
import math
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from lowbit.finetune.errors import UserError
from lowbit.finetune.options import BenchOptions


def run_job(options, optimizer, emit, folder=None, name="run"):
    """Train with the named optimizer (None: don't) and evaluate; returns the result as plain values.

    ``emit(event, **values)`` is called as the work goes on. Checkpoints are in ``folder``, as ``options`` say; the
    newest there is where training goes on. Logs are in the folder ``name`` of those of the benchmark.
    """
    from lowbit.bench import machine, peers
    from lowbit.finetune import checkpoints, loggers
    from lowbit.finetune.run import evaluate, fit, prepare

    def progress(stage, done=0, total=1, loss=None):
        emit("progress", stage=stage, done=done, total=total, loss=loss)

    progress("loading")
    peer = peers.find(optimizer) if optimizer else None
    begun = folder is not None and checkpoints.whole(folder)
    checkpoint = checkpoints.newest(folder, options) if begun else None
    setup = prepare(options, peer, checkpoint)
    emit("machine", machine=machine.machine(setup.device), versions=machine.versions())
    result = {
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "train_examples": len(setup.examples),
        "held_out_examples": len(setup.held_out),
        "questions": len(setup.questions),
    }
    with loggers.opened(options, Path(options.out) / "logs" / name, checkpoint) as log:
        if peer:
            measured, _ = fit(
                setup, peer, options, folder, lambda run: progress("training", run.step, run.total, run.loss),
                checkpoint, log=log,
            )  # fmt: skip
            result |= asdict(measured)
        progress("evaluation")
        evaluation = evaluate(setup, options, lambda done, total: progress("evaluation", done, total))
        log.write(result.get("steps", 0), evaluation)
    result |= evaluation
    loss = result["held_out_loss"]
    if loss is not None and not math.isfinite(loss):
        raise UserError(f"the held-out loss is {loss}: lower --lr or lengthen --warmup")
    return result


def main(path):
    """Do the job in a file and report its events; the exit status is 0 if it succeeded."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event, **values):
        print(json.dumps({"event": event, **values}), file=events, flush=True)

    job = json.loads(Path(path).read_text())
    try:
        options = BenchOptions(**job["options"])
        emit("result", **run_job(options, job["optimizer"], emit, job["checkpoints"], Path(path).stem))
    except BrokenPipeError:  # the parent is gone
        return 1
    except Exception as error:
        from lowbit.finetune.failures import explain

        traceback.print_exc()
        emit("failure", reason=explain(error), user=isinstance(error, UserError))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
