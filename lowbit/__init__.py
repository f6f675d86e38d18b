"""lowbit: 8-bit and 4-bit AdamW for PyTorch."""

from lowbit.convert import convert
from lowbit.optimizers import Adam, Adam4bit, Adam8bit, AdamFp8, AdamW, AdamW4bit, AdamW8bit, AdamWFp8
from lowbit.state import decode_parameter as decode
from lowbit.version import __version__

__all__ = [
    "Adam",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "__version__",
    "convert",
    "decode",
]
