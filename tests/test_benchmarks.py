"""The scripts in ``benchmarks`` start."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.parametrize("name", ["step.py", "laws.py", "end_to_end.py", "counters.py"])
def test_a_script_starts(name):
    done = subprocess.run([sys.executable, FOLDER / name, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr
