"""What the optimizers of a checkpoint hold."""

from dataclasses import dataclass, field

import torch

from lowbit.convert import format_of


@dataclass
class Row:
    """Parameters whose state is of one kind."""

    kind: str
    tensors: int = 0
    bytes: int = 0
    steps: set = field(default_factory=set)
    codes: dict = field(default_factory=dict)  # of each moment in this library's codes: all, lowest, highest

    def share(self, moment, which):
        """Share of the lowest (``which`` is 1) or the highest (2) codes; None where a moment is in no codes."""
        counts = self.codes.get(moment)
        return counts and counts[which] / max(counts[0], 1)


def describe(state_dict):
    """The rows of an optimizer's state dict, one for each kind of state."""
    rows = {}
    for state in state_dict["state"].values():
        kind = _kind(state)
        row = rows.setdefault(kind, Row(kind))
        row.tensors += 1
        row.bytes += _bytes(state)
        row.steps.add(int(state.get("step", 0)))
        for moment, counts in _codes(state):
            row.codes[moment] = [a + b for a, b in zip(row.codes.get(moment, (0, 0, 0)), counts, strict=True)]
    return list(rows.values())


def _bytes(x):
    if isinstance(x, dict):
        return sum(map(_bytes, x.values()))
    if hasattr(x, "__tensor_flatten__"):
        return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes if isinstance(x, torch.Tensor) and x.ndim else 0


def _kind(state):
    m, format, low = state.get("exp_avg"), format_of(state), state.get("weight_low")
    if format:
        name = format.name
    elif any(isinstance(x, dict) for x in state.values()) or "state1" in state:
        name = "bitsandbytes"
    elif any("::" in key for key in state):
        name = "FlashOptim"
    elif hasattr(m, "__tensor_flatten__"):
        name = f"torchao {type(m).__name__}"
    else:
        name = str(m.dtype).removeprefix("torch.") if isinstance(m, torch.Tensor) else "unknown"
    return name if low is None else f"{name}+{'24bit' if low.dtype == torch.int8 else '32bit'}"


def _codes(state):
    """For each moment in codes of this library: its name, and how many codes, lowest and highest ones there are."""
    format = format_of(state)
    for name, codec in (("exp_avg", format.m), ("exp_avg_sq", format.v)) if format else ():
        codes = state[name].flatten()
        codes = (torch.cat((codes & 15, codes >> 4)) if codec.bits == 4 else codes) & codec.magnitude
        yield name, (codes.numel(), int((codes == 0).sum()), int((codes == codec.largest).sum()))
