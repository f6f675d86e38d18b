"""Memory: the peak of a run, and the bytes that an optimizer keeps."""

import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit.distributed import local

PEAK, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device):
    """Start measuring the peak anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # without Linux, or the permission, the peak is that of the process's whole life
        RESET.write_text("5")  # sets VmHWM back to the present size: https://man7.org/linux/man-pages/man5/proc.5.html


def peak_bytes(device):
    """Bytes: the most that tensors took on a GPU, the largest resident size of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        line = next(line for line in PEAK.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return _peak_of_life()


def reserved_bytes(device):
    """Bytes: the most that torch's allocator took of a GPU, what it keeps for later included; 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def _peak_of_life():
    """The largest resident size since the process began, where there is no /proc."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peaks(device):
    """``{name: GiB}`` of the peak until now: of tensors and of what is reserved on a GPU, of the process on a CPU.

    The names of the first two are torchtune's.
    """
    if device.type == "cuda":
        found = {"peak_memory_alloc": peak_bytes(device), "peak_memory_reserved": reserved_bytes(device)}
    else:
        found = {"peak_memory_resident": peak_bytes(device)}
    return {name: size / 2**30 for name, size in found.items()}


def parts(model, optimizer, peak, recorded=None):
    """What the bytes of a peak are: weights, gradients, optimizer state, activations, and the rest.

    ``recorded`` is what :class:`lowbit.finetune.peak.Recorder` found; then the rest are temporaries. Without it, as on
    a CPU, there are gradients of all weights that train, and activations are part of the rest.
    """
    found = {"weights": sum(local(p).nbytes for p in model.parameters()), "state": state_bytes(optimizer)}
    found |= recorded or {"gradients": sum(local(p).nbytes for p in model.parameters() if p.requires_grad)}
    return found | {"rest": max(0, peak - sum(found.values()))}


def state_bytes(optimizer):
    """Bytes of all tensors that an optimizer keeps; a tensor that parameters share counts once."""
    storages = {}
    for state in optimizer.state.values():
        for tensor in _tensors(state):
            storages[(tensor.device, tensor.data_ptr())] = tensor.numel() * tensor.element_size()
    return sum(storages.values())


def _tensors(value):
    """Plain tensors inside containers, tensor subclasses, as torchao's states are, and objects, as FlashOptim's are."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)
    elif hasattr(value, "__dict__"):
        yield from (x for x in vars(value).values() if isinstance(x, torch.Tensor))
