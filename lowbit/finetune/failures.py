"""What went wrong, in one line that says what to change."""

import torch

from lowbit.finetune.errors import UserError

OUT_OF_MEMORY = "out of memory: lower --batch-size (raising --grad-accum) or --max-length, or add --checkpointing"
_CPU_SIGNS = ("can't allocate memory", "not enough memory")  # of a RuntimeError of torch's CPU allocator


def explain(error):
    """One line for any exception."""
    if isinstance(error, UserError):
        return str(error)
    text = str(error).strip()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in text for sign in _CPU_SIGNS):
        return OUT_OF_MEMORY
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is missing: pip install {error.name}"
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
