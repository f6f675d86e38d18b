"""Settings of the whole suite: Triton's interpreter where there is no GPU, one thread, examples that never change."""

import os
import sys

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: it decides when a function is decorated

torch.set_num_threads(1)
settings.register_profile("lowbit", deadline=None, derandomize=True, database=None)
settings.load_profile("lowbit")


@pytest.fixture
def exact_bf16_casts(monkeypatch):
    """Casts between fp32 and bf16 as processors make them: those of Triton's interpreter truncate, subnormals break."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    others = interpreter._convert_float

    def convert(x, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            y = torch.from_numpy(x.copy()).view(torch.float32).to(torch.bfloat16)
            return y.view(torch.int16).numpy().view("uint16")
        if (source, target) == (tl.bfloat16, tl.float32):
            return torch.from_numpy(x.view("int16").copy()).view(torch.bfloat16).float().view(torch.int32).numpy()
        return others(x, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def cli(monkeypatch, capsys):
    """``cli(*arguments)`` runs the command line in this process: ``(exit status, stdout, stderr)``."""
    from lowbit.cli import main

    def run(*arguments):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["lowbit", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run
