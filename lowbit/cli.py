"""The command line. Options come from the dataclasses of :mod:`lowbit.finetune.options`."""

import inspect
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowbit.bench.recipes import recipe
from lowbit.convert import TARGETS
from lowbit.finetune.errors import UserError
from lowbit.finetune.options import PANELS, BenchOptions, EstimateOptions, FinetuneOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def command(options_class):
    """Make ``f(options)`` a command that takes the fields of a dataclass as options and calls ``f`` with it."""

    def register(f):
        def run(context, **values):
            named = recipe(values["recipe"]) if values.get("recipe") else {}
            given = {name for name in values if context.get_parameter_source(name).name == "COMMANDLINE"}
            if given & {"steps", "epochs"}:  # one instead of the other
                given |= {"steps", "epochs"}
            f(options_class(**values | {name: value for name, value in named.items() if name not in given}))

        parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[
                    field.type, typer.Option(help=field.metadata["help"], rich_help_panel=field.metadata["panel"])
                ],
            )
            for field in sorted(fields(options_class), key=lambda field: PANELS.index(field.metadata["panel"]))
        ]
        run.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__, run.__name__ = f.__doc__, f.__name__
        return app.command()(run)

    return register


def show_version(wanted: bool):
    """Print the version and end."""
    if wanted:
        from lowbit.version import __version__

        typer.echo(f"lowbit {__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
):
    """Low-bit AdamW optimizers for PyTorch: compare them on a language model, or fine-tune with one."""


@command(BenchOptions)
def bench(options):
    """Fine-tune one model once per optimizer, from the same weights, and print one table.

    The exit status is 0 if at least one optimizer was measured, 1 if none was, 2 for options or data that can't be
    used, 130 after Ctrl-C; the report then has what was done.
    """
    from lowbit.bench.bench import bench

    raise typer.Exit(bench(options, Console()))


@command(FinetuneOptions)
def finetune(options):
    """Fine-tune a model with one optimizer, saving model and optimizer; --resume goes on exactly where it stopped."""
    from lowbit.finetune.command import finetune

    finetune(options, Console())


@command(EstimateOptions)
def estimate(options):
    """Memory of a GPU and time of the optimizer's step for a run, without running it: from the configuration alone."""
    from lowbit.bench.estimate import command

    command(options, Console())


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .pt or .safetensors file, or a folder of torch DCP.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="By its ending .pt, .safetensors or, without, a folder.")
    ],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(TARGETS)}; torch is torch.optim.AdamW's, in fp32.")],
    model: Annotated[str | None, typer.Option(help="Hub id or folder; 4-bit codes don't tell shapes alone.")] = None,
):
    """Convert every optimizer's state in a checkpoint, of lowbit, torch, torchao, bitsandbytes or FlashOptim."""
    from lowbit.files.commands import convert

    convert(source, target, to, model, Console())


@app.command("inspect")
def inspect_checkpoint(
    file: Annotated[Path, typer.Argument(help="A .pt or .safetensors file, or a folder of torch DCP.")],
):
    """What a checkpoint's optimizers hold: formats, steps, bytes, shares of the lowest and the highest codes."""
    from lowbit.files.commands import inspect

    inspect(file, Console())


def main():
    """Run the command line; an error of the user's is one line and exit status 2."""
    try:
        app()
    except UserError as error:
        print(f"lowbit: {error}", file=sys.stderr)
        sys.exit(2)
