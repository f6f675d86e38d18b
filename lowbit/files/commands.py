"""``lowbit convert`` and ``lowbit inspect`` on the terminal."""

from rich.table import Table

from lowbit.convert import convert as convert_state
from lowbit.convert import describe, each
from lowbit.files import files
from lowbit.finetune.errors import UserError

NOTHING = "there is no optimizer's state dict in it, nothing with 'state' and 'param_groups'"


def convert(source, target, to, model, console):
    """Read ``source``, convert every optimizer's state dict in it, write ``target``, and say what it holds."""
    tree = _read(source)
    like = list(_shapes_of(model)) if model else None
    found = []

    def change(path, state_dict):
        found.append(path)
        return convert_state(state_dict, to, like)

    try:
        new = each(tree, change)
        if not found:
            raise ValueError(NOTHING)
        files.write(new, target)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    _print(new, console)
    console.print(f"Saved: {target}", soft_wrap=True)


def inspect(file, console):
    """Print what the optimizers of a checkpoint hold."""
    _print(_read(file), console, file)


def _read(path):
    try:
        return files.read(path)
    except ValueError as error:
        raise UserError(str(error)) from error


def _shapes_of(model):
    """The parameters of a transformers model, without their values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:
        raise UserError(f"--model {model} can't be read: {str(error).splitlines()[0]}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).parameters()


def _print(tree, console, source=None):
    found = []
    table = Table("optimizer", "kind", "parameters", "step", "MiB", "m lowest", "m highest", "v lowest", "v highest")
    each(tree, lambda path, state_dict: found.append((path, describe(state_dict))))
    for path, rows in found:
        for row in rows:
            first, last = row["steps"]
            shares = [
                f"{row[share][name]:.2%}" if name in row[share] else ""
                for name in ("exp_avg", "exp_avg_sq")
                for share in ("zero", "top")
            ]
            step = str(last) if first == last else f"{first} - {last}"
            cells = ".".join(map(str, path)) or ".", row["kind"], f"{row['tensors']:,}", step
            table.add_row(*cells, f"{row['bytes'] / 2**20:,.2f}", *shares)
    if not found:
        raise UserError(f"{source}: {NOTHING}")
    console.print(table)
