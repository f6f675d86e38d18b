"""What a GPU's memory consists of at its peak, by replaying the allocations of one step.

They are those of ``torch.cuda.memory._snapshot``: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

import time
from contextlib import contextmanager

import torch

from lowbit.distributed import local


class Recorder:
    """Records allocations during one step of a training; nothing on a CPU, or if ``step`` is None.

    ``found`` is what :func:`at_peak` finds, None before the step and where nothing is recorded.
    """

    def __init__(self, device, step):
        self.device, self.step = device, step if device.type == "cuda" else None
        self.forwards = None  # (begin, end) in microseconds of the step's forward passes, while it is recorded
        self.found = None

    @contextmanager
    def recording(self, step, parameters):
        """A whole step, at the end of which its gradients are still there."""
        if step != self.step:
            yield
            return
        before, self.forwards = torch.cuda.memory_allocated(self.device), []
        torch.cuda.memory._record_memory_history(context=None)
        try:
            yield
            traces = torch.cuda.memory._snapshot()["device_traces"]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        gradients = {local(p.grad).untyped_storage().data_ptr() for p in parameters if p.grad is not None}
        self.found, self.forwards = at_peak(traces[index], before, self.forwards, gradients), None

    @contextmanager
    def forward(self):
        """A forward pass, loss included."""
        begin = time.time_ns() // 1000
        yield
        if self.forwards is not None:
            self.forwards.append((begin, time.time_ns() // 1000))


def at_peak(events, before, forwards, gradients):
    """``{"gradients", "activations"}`` in bytes at the moment of a step when most memory is in use.

    Activations are what a forward pass leaves for the backward pass. What a checkpointed layer computes again is not
    among them, nor anything else that is gone when the pass or the step has ended.

    Args:
        events: dictionaries with ``action``, ``addr``, ``size`` and ``time_us``, in order.
        before: bytes in use before the first.
        forwards: ``(begin, end)`` of the forward passes, in the microseconds of ``time_us``.
        gradients: addresses of gradients, which are there at the end.
    """
    blocks, live = [], {}  # (number of the event, [event, number and microseconds of the one that frees it])
    used = most = before
    peak = -1
    for i, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = block = [event, len(events), float("inf")]
            blocks.append((i, block))
            used += event["size"]
        elif event["action"] == "free_requested":
            used -= event["size"]
            if event["addr"] in live:
                live.pop(event["addr"])[1:] = i, event["time_us"]
        if used > most:
            most, peak = used, i
    found = {"gradients": 0, "activations": 0}
    for i, (event, freed, when) in blocks:
        if not i <= peak < freed:
            continue
        if freed == len(events) and event["addr"] in gradients:
            found["gradients"] += event["size"]
        elif any(begin <= event["time_us"] <= end < when for begin, end in forwards):
            found["activations"] += event["size"]
    return found
