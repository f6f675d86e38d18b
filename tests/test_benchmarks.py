"""The scripts in ``benchmarks`` start, and the tables of the pages are what their files say."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.parametrize("name", ["step.py", "laws.py", "end_to_end.py"])
def test_a_script_starts(name):
    done = subprocess.run([sys.executable, FOLDER / name, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--json" in done.stdout, done.stderr


def test_tables_are_what_the_results_say():
    done = subprocess.run([sys.executable, FOLDER / "docs.py", "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
