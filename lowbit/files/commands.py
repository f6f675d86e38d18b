"""``lowbit convert`` and ``lowbit inspect`` on the terminal."""

from rich.table import Table

from lowbit.convert import convert as convert_state
from lowbit.convert import each
from lowbit.files import files
from lowbit.files.describe import describe
from lowbit.finetune.errors import UserError


def convert(source, target, to, model, console):
    """Read ``source``, convert every optimizer's state dict in it, write ``target``, and say what it holds."""
    tree = _read(source)
    like = list(_shapes_of(model)) if model else None
    try:
        new = each(tree, lambda _, state_dict: convert_state(state_dict, to, like))
        files.write(new, target)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    _print(new, console)
    console.print(f"Saved: {target}", soft_wrap=True)


def inspect(file, console):
    """Print what the optimizers of a checkpoint hold."""
    _print(_read(file), console)


def _read(path):
    """What a checkpoint with an optimizer in it holds."""
    try:
        tree = files.read(path)
    except ValueError as error:
        raise UserError(str(error)) from error
    if not _optimizers(tree):
        raise UserError(f"{path}: there is no optimizer's state dict in it, nothing with 'state' and 'param_groups'")
    return tree


def _optimizers(tree):
    """``(path, state dict)`` of every optimizer's state dict."""
    found = []
    each(tree, lambda path, state_dict: found.append((path, state_dict)))
    return found


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


def _print(tree, console):
    table = Table("optimizer", "kind", "parameters", "step", "MiB", "m lowest", "m highest", "v lowest", "v highest")
    for path, state_dict in _optimizers(tree):
        for row in describe(state_dict):
            first, last = min(row.steps), max(row.steps)
            step = str(last) if first == last else f"{first} - {last}"
            shares = [row.share(moment, which) for moment in ("exp_avg", "exp_avg_sq") for which in (1, 2)]
            shares = ["" if share is None else f"{share:.2%}" for share in shares]
            name = ".".join(map(str, path)) or "."
            table.add_row(name, row.kind, f"{row.tensors:,}", step, f"{row.bytes / 2**20:,.2f}", *shares)
    console.print(table)
