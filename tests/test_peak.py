"""What memory consists of at its peak: allocations of a step, replayed."""

import pytest
import torch
from torch import nn

from lowbit.finetune.memory import parts
from lowbit.finetune.peak import Recorder, at_peak

FORWARD = (10, 20)  # microseconds


def events(*lines):
    return [dict(zip(("action", "addr", "size", "time_us"), line, strict=True)) for line in lines]


def test_a_peak_in_the_backward_pass():
    trace = events(
        ("segment_alloc", 0, 1 << 20, 9),  # memory that the allocator takes is not in use yet
        ("alloc", 1, 100, 11),  # an activation
        ("alloc", 2, 1000, 12),
        ("free_requested", 2, 1000, 13),  # gone before the forward pass has ended
        ("free_completed", 2, 1000, 13),
        ("alloc", 2, 30, 14),  # another activation, at an address that is used again
        ("alloc", 3, 2000, 21),  # the gradient, which stays
        ("alloc", 4, 5, 22),  # temporary
        ("free_requested", 1, 100, 23),
        ("free_requested", 2, 30, 23),
        ("free_requested", 4, 5, 24),
        ("alloc", 5, 60, 30),  # of the optimizer's step
        ("free_requested", 5, 60, 31),
    )
    assert at_peak(trace, 7, [FORWARD], {3}) == {"gradients": 2000, "activations": 130}


def test_a_peak_in_the_forward_pass_and_one_in_the_step():
    forward = [("alloc", 1, 100, 11), ("alloc", 2, 5000, 12), ("free_requested", 2, 5000, 13)]
    backward = [("alloc", 3, 50, 21), ("free_requested", 1, 100, 22)]
    assert at_peak(events(*forward, *backward), 0, [FORWARD], {3}) == {"gradients": 0, "activations": 100}
    step = [("alloc", 4, 9000, 30), ("free_requested", 4, 9000, 31)]
    assert at_peak(events(*forward, *backward, *step), 0, [FORWARD], {3}) == {"gradients": 50, "activations": 0}


def test_memory_that_was_there_before():
    trace = events(("free_requested", 9, 400, 5), ("alloc", 1, 300, 11), ("free_requested", 1, 300, 25))
    assert at_peak(trace, 400, [FORWARD], set()) == {"gradients": 0, "activations": 0}  # the peak is the start
    trace = events(("free_requested", 9, 400, 5), ("alloc", 1, 500, 11), ("free_requested", 1, 500, 25))
    assert at_peak(trace, 400, [FORWARD], set()) == {"gradients": 0, "activations": 500}
    assert at_peak([], 400, [], set()) == {"gradients": 0, "activations": 0}


def test_parts_add_up():
    model = nn.Linear(64, 64)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    weights, gradients = 4 * (64 * 64 + 64), 4 * 64 * 64
    found = parts(model, optimizer, 10**6)
    assert found == {"weights": weights, "state": 0, "gradients": gradients, "rest": 10**6 - weights - gradients}
    recorded = {"gradients": 100, "activations": 200}
    assert parts(model, optimizer, 10**6, recorded) == recorded | {
        "weights": weights, "state": 0, "rest": 10**6 - weights - 300,
    }  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
def test_a_real_step(device):
    """Four layers of one width without biases: activations are the inputs of layers and of the loss."""
    width, rows, device = 1024, 4096, torch.device(device)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).to(device)
    x = torch.randn(rows, width, device=device)
    recorder = Recorder(device, 1)
    parameters = list(model.parameters())
    for step in range(3):
        with recorder.recording(step, parameters):
            with recorder.forward():
                loss = model(x).square().sum()
            loss.backward()
        model.zero_grad()
        assert (recorder.found is None) == (step < 1 or device.type == "cpu")
    if recorder.found:  # the peak is early in the backward pass, with three or four outputs and at most one gradient
        output = 4 * rows * width
        assert recorder.found["gradients"] in (0, 4 * width * width)
        assert 3 * output <= recorder.found["activations"] <= 4.01 * output
