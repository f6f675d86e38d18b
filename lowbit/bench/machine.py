"""What a result was measured on: the machine and the versions of what ran."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import lowbit

PACKAGES = ("triton", "transformers", "torchao", "bitsandbytes", "flashoptim", "torch-optimi")


def machine(device):
    """CPU, cores this process may use, memory, and the GPU if ``device`` is one."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cpu": _cpu(), "cores": cores, "ram_bytes": psutil.virtual_memory().total, "gpu": None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions():
    """Versions of Python, torch, lowbit (with its commit, in a checkout) and of the libraries that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "lowbit": lowbit.__version__}
    commit = _commit()
    if commit:
        found["lowbit_commit"] = commit
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(root, *arguments):
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _commit():
    """Commit of the checkout that this package is in, with ``-dirty`` if files of it but results are changed."""
    root = Path(lowbit.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return _git(root, "rev-parse", "--short=12", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None
