"""What limits the kernel: hardware counters of one launch over a billion bf16 parameters, by NVIDIA's Nsight Compute.

python benchmarks/counters.py --json benchmarks/results/counters-h200.json
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

import lowbit
from lowbit.bench import machine

FORMATS = ("8bit", "4bit", "12bit", "8bit+24bit", "8bit+32bit", "bf16")
TENSORS, SHAPE = 16, (4096, 16384)
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory bandwidth",
    "dram__bytes.sum": "bytes",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "% of issue slots",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "% of the integer pipe",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "% of the float pipe",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "% of roots and reciprocals",
    "smsp__inst_executed.sum": "instructions of warps",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps resident",
    "launch__registers_per_thread": "registers a thread",
    STALLED.format("long_scoreboard"): "warps that wait for memory",
    STALLED.format("math_pipe_throttle"): "warps that wait for a pipe",
    STALLED.format("wait"): "warps that wait for the instruction before",
    STALLED.format("not_selected"): "warps that could go",
}


def work(name):
    """Three steps of one optimizer, the last of which is looked at."""
    state, _, weights = name.partition("+")
    params = []
    for _ in range(TENSORS):
        p = torch.nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda").normal_(std=0.02))
        p.grad = torch.empty_like(p).normal_(std=1e-3)
        params.append(p)
    optimizer = lowbit.AdamW(params, lr=1e-5, state=state, weights=weights or "auto")
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()


def counters(name):
    """``{metric: value}`` of the kernel of whole chunks; raises ``RuntimeError`` with what Nsight Compute said."""
    ncu = shutil.which("ncu") or sys.exit("ncu is not there: install NVIDIA Nsight Compute")
    command = [ncu, "--csv", "--clock-control", "none", "-k", "step_kernel", "-s", "2", "-c", "1"]
    command += ["--metrics", ",".join(METRICS), sys.executable, __file__, "--work", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError((done.stdout + done.stderr).strip()[-500:])
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    return {row["Metric Name"]: (float(row["Metric Value"].replace(",", "")), row["Metric Unit"]) for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=FORMATS)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    report = {"machine": machine.machine(torch.device("cuda")), "versions": machine.versions(), "metrics": METRICS}
    report |= {"elements": TENSORS * SHAPE[0] * SHAPE[1], "results": {}}
    for name in arguments.optimizers:
        found = report["results"][name] = counters(name)
        print(f"\n{name}")
        for metric, title in METRICS.items():
            value, unit = found.get(metric, (float("nan"), ""))
            print(f"  {value:14,.2f} {unit:10} {title}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
