"""``lowbit finetune``: a run of :func:`lowbit.finetune.run.finetune` on the terminal."""

import sys

from rich.console import Console
from rich.progress import Progress

from lowbit.finetune import processes
from lowbit.finetune.checkpoints import whole
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import resolve


def finetune(options, console):
    """Run ``lowbit finetune`` with :class:`FinetuneOptions`, printing the loss as it goes and the evaluation last."""
    from lowbit.bench import peers

    console = console if processes.first() else Console(quiet=True)
    peers.find(options.optimizer)
    options = resolve(options)
    from transformers.utils import logging

    from lowbit.finetune import run
    from lowbit.finetune.failures import explain

    logging.disable_progress_bar()  # of loading and saving weights, which would cut into this one

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("training", total=None)

        def on_start(setup):
            console.print(f"{len(setup.examples)} examples to train on, {len(setup.held_out)} set aside")

        def on_step(training):
            progress.update(bar, total=training.total, completed=training.step)
            if training.step % options.log_every == 0 or training.step == training.total:
                lr = training.optimizer.param_groups[0]["lr"]
                console.print(f"step {training.step}/{training.total}  loss {training.loss:.4f}  next lr {lr:.3g}")

        try:
            result, evaluation, saved = run.finetune(options, on_start, on_step)
        except UserError:
            raise
        except KeyboardInterrupt:
            print(_interrupted(options), file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            if explain(error).startswith("out of memory"):
                raise UserError(explain(error)) from error
            raise
    _print(result, evaluation, saved, console)


def _print(result, evaluation, saved, console):
    if result.tokens_per_second:
        console.print(f"{result.tokens_per_second:,.0f} tokens/s, max memory {result.max_memory / 2**20:,.0f} MiB")
    tasks = evaluation["tasks"] or {}
    console.print(_numbers({name: value for name, value in evaluation.items() if name != "tasks"}))
    for name, values in tasks.items():
        console.print(f"{name}: {_numbers(values)}")
    console.print(f"Saved: {saved}", soft_wrap=True)


def _numbers(values):
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items() if value is not None)


def _interrupted(options):
    found = whole(options.out)
    return f"lowbit: interrupted; go on from {found[-1]} with --resume" if found else "lowbit: interrupted"
