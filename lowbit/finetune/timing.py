"""Time: of the optimizer's steps, and of the whole training."""

import time
from contextlib import contextmanager
from statistics import median

import torch


class StepTimer:
    """Times of ``optimizer.step()``; on a GPU by events, so that only the first call is waited for."""

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


class Throughput:
    """Unpadded tokens a second, from the end of step ``skip`` on, pauses (as for saving) not counted."""

    def __init__(self, skip, device):
        self.skip, self.device = skip, device
        self.tokens = self.steps = 0
        self.start = self._now()

    def _now(self):
        synchronize(self.device)
        return time.perf_counter()

    def add(self, tokens):
        """Count a step."""
        self.steps += 1
        if self.steps > self.skip:
            self.tokens += tokens
        elif self.steps == self.skip:
            self.start = self._now()

    @contextmanager
    def pause(self):
        """Time that is not the training's, as for saving."""
        begin = self._now()
        yield
        self.start += time.perf_counter() - begin

    def rate(self):
        """Tokens a second until now; None if no step was counted."""
        return self.tokens / (self._now() - self.start) if self.tokens else None
