"""Time: of the optimizer's steps, and of the whole training."""

import sys
import time
from contextlib import contextmanager
from statistics import median

import torch


class StepTimer:
    """Times of a part of each step; on a GPU by events, so that only the first call is waited for."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.device = device
        self.first = None
        self.marks = []

    @contextmanager
    def __call__(self):
        if self.cuda and self.first is not None:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            yield
            marks[1].record()
            self.marks.append(marks)
            return
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        seconds = time.perf_counter() - start
        if self.first is None:
            self.first = seconds
        else:
            self.marks.append(seconds)

    def median(self):
        """Median of the calls after the first; None without any. The device must be synchronized."""
        times = [a.elapsed_time(b) / 1000 for a, b in self.marks] if self.cuda else self.marks
        return median(times) if times else None


def synchronize(device):
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graphs_compiled():
    """How many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


class Throughput:
    """Tokens a second, without and with padding, from the end of step ``skip`` on; pauses, as for saving, don't count.

    Counting begins anew after a step in which something was compiled, as for new shapes, up to the step ``latest``.
    ``before`` are the seconds of the training that this one goes on from.
    """

    def __init__(self, skip, device, before=0.0, latest=0):
        self.skip, self.latest, self.device = skip, latest, device
        self.graphs = graphs_compiled()
        self.tokens = self.padded = self.steps = 0
        self.all_tokens = 0  # without padding, of all steps
        self.start = self._now()
        self.begin = self.start - before
        self.paused = None  # since when
        self.last = (before, 0)  # seconds and tokens of the last lap

    def _now(self):
        synchronize(self.device)
        return time.perf_counter()

    def add(self, tokens, padded):
        """Count a step of so many ``tokens``, ``padded`` with the padding."""
        self.steps += 1
        self.all_tokens += tokens
        graphs, self.graphs = self.graphs, graphs_compiled()
        if graphs != self.graphs and self.skip < self.steps <= self.latest:
            self.skip = self.steps
            self.tokens = self.padded = 0
        if self.steps > self.skip:
            self.tokens += tokens
            self.padded += padded
        elif self.steps == self.skip:
            self.start = self._now()

    @contextmanager
    def pause(self, short=False):
        """Time that is not the training's, as for saving.

        On a GPU a ``short`` one is counted: waiting for the device would take more than what is done in it.
        """
        if short and self.device.type == "cuda":
            yield
            return
        self.paused = self._now()
        yield
        length = time.perf_counter() - self.paused
        self.start += length
        self.begin += length
        self.paused = None

    def seconds(self):
        """Seconds of all steps until now, without waiting for the device."""
        return (time.perf_counter() if self.paused is None else self.paused) - self.begin

    def lap(self):
        """Tokens without padding a second since the last call, or since the start."""
        last, self.last = self.last, (self.seconds(), self.all_tokens)
        return (self.last[1] - last[1]) / (self.last[0] - last[0])

    def rates(self):
        """``(tokens, padded tokens)`` a second until now; None each if no step was counted."""
        if not self.tokens:
            return None, None
        seconds = self._now() - self.start
        return self.tokens / seconds, self.padded / seconds
