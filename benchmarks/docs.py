"""Write the tables of README and docs from the files in ``benchmarks/results``: ``python benchmarks/docs.py``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; ``--check`` changes nothing and exits with 1 if
one is not what its file says.
"""

import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "README.md")

FINE_TUNED = (  # name in the report, how the README calls it, its weights
    ("torch-fp32", "`torch.optim.AdamW(fused=True)`, autocast", "fp32"),
    ("torch", "`torch.optim.AdamW(fused=True)`", "bf16"),
    ("8bit", "`lowbit.AdamW8bit`", "bf16, dithered"),
    ("12bit", '`lowbit.AdamW(state="12bit")`', "bf16, dithered"),
    ("4bit", "`lowbit.AdamW4bit`", "bf16, dithered"),
    ("8bit+nearest", '`lowbit.AdamW8bit(weights="nearest")`', "bf16, nearest"),
)
LAW_COLUMNS = (
    "fp32",
    "8bit",
    "12bit",
    "4bit",
    "bitsandbytes-8bit",
    "torchao-8bit",
    "torchao-4bit",
    "torchao-fp8",
    "flashoptim",
)

LARGE = {  # of the largest list of shapes
    "share": ("of copy speed", "{:.0%}"),
    "first_step_s": ("first step, s", "{:.1f}"),
    "warm_first_step_s": ("cached, s", "{:.1f}"),
    "state_bytes": ("state, bytes a parameter", "{:.2f}"),
    "temporary_bytes": ("temporary", "{:.2f}"),
}
SHAPES = {
    "llama2-7b": "Llama2-7B",
    "llama-1b": "Llama-1B",
    "vit-h": "ViT-H",
    "gpt2-124m": "GPT-2 124M",
    "resnet-101": "ResNet-101",
}
SMALL = ("gpt2-124m", "resnet-101")  # where the host may take longer than the device
PRETRAINING = {  # of benchmarks/pretraining.py: head of the column, form of the value
    "held_out_loss": ("held-out loss", "{:.3f}"),
    "update": ("largest |update|", "{:.3g}"),
    "rare_rows": ("rare rows moved", "{:.2f}"),
    "rare_farthest": ("farthest", "{:.3g}"),
    "unmet_farthest": ("never met", "{:.3g}"),
    "stuck": ("stuck exp_avg_sq", "{:.2%}"),
}
COUNTERS = {  # of benchmarks/counters.py: head of the column, form of the value
    "gpu__time_duration.sum": ("ms", lambda x: f"{x / 1e6:.2f}"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("memory bandwidth", "{:.0f}%".format),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue slots", "{:.0f}%".format),
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": ("integer pipe", "{:.0f}%".format),
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": ("float pipe", "{:.0f}%".format),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("roots, reciprocals", "{:.0f}%".format),
    "launch__registers_per_thread": ("registers", "{:.0f}".format),
}


def read(name):
    """A result file."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def grid(head, rows, numbers_from):
    """A Markdown table whose columns from ``numbers_from`` on are numbers."""
    rule = ["---" if i < numbers_from else "--:" for i in range(len(head))]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    return "\n".join(f"| {line} |" for line in (lines[0], " | ".join(rule), *lines[1:]))


def fine_tuned():
    """Held-out loss after one epoch of SmolLM2, and the state that it took."""
    rows = {row["optimizer"]: row["result"] for row in read("smollm2-alpaca-h200/report.json")["rows"]}
    body = [
        (shown, weights, f"{rows[name]['state_bytes_per_param']:.2f}", f"{rows[name]['held_out_loss']:.4f}")
        for name, shown, weights in FINE_TUNED
    ]
    before = ("not fine-tuned", "", "", f"{rows['not fine-tuned']['held_out_loss']:.4f}")
    return grid(("optimizer", "weights", "state, bytes a parameter", "held-out loss"), (before, *body), 2)


def step_cpu():
    """Milliseconds of a step on a CPU."""
    body = [
        (row["name"], f"{row['ms']:.0f}", f"{row['state_bytes']:.2f}")
        for row in read("step-cpu.json")["results"]
        if "ms" in row
    ]
    return grid(("optimizer", "ms a step", "state, bytes a parameter"), body, 1)


def pretraining():
    """What state does in a pretraining at a high learning rate: means over seeds, and standard deviations."""
    report = read("pretraining-cpu.json")
    body = [
        (name, *(with_deviation(form, *result["summary"][key]) for key, (_, form) in PRETRAINING.items()))
        for name, result in report["results"].items()
        if "summary" in result
    ]
    return grid(("optimizer", *(head for head, _ in PRETRAINING.values())), body, 1)


def with_deviation(form, mean, sd):
    """A mean and its standard deviation, of one digit's worth."""
    return f"{form.format(mean)} ± {form.format(sd)}" if sd else form.format(mean)


def steps_h200():
    """``{shapes: {optimizer: result}}`` of a GPU, in the order of ``SHAPES``."""
    found = {}
    for shapes in SHAPES:
        path = RESULTS / "step-h200" / f"{shapes}.json"
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            found[shapes] = {row["name"]: row for row in report["results"]}
            for row in found[shapes].values():
                row["share"] = (
                    row.get("moved_bytes", math.nan) / row.get("ms", math.nan) * 1e3 / row["copy_bytes_per_s"]
                )
    return found


def step_h200():
    """Milliseconds of a step on a GPU for each list of shapes, and what else the largest one tells."""
    found = steps_h200()
    columns = {(shapes, "ms"): SHAPES[shapes] for shapes in found}
    columns |= {(shapes, "wall_ms"): f"{SHAPES[shapes]}, wall" for shapes in found if shapes in SMALL}
    large = next(iter(found.values()))
    body = [
        (
            name,
            *(shown("{:.3g}", found[shapes].get(name, {}), key) for shapes, key in columns),
            *(shown(form, row, key) for key, (_, form) in LARGE.items()),
        )
        for name, row in large.items()
    ]
    return grid(("optimizer", *columns.values(), *(head for head, _ in LARGE.values())), body, 1)


def counters():
    """How much of each resource of a GPU the kernel uses."""
    report = read("counters-h200.json")
    body = [
        (name, *(form(values[metric][0]) for metric, (_, form) in COUNTERS.items()))
        for name, values in report["results"].items()
    ]
    return grid(("format", *(head for head, _ in COUNTERS.values())), body, 1)


def shown(form, row, key):
    """A number of a row as text, a dash where it was not measured."""
    value = row.get(key, math.nan)
    return "–" if math.isnan(value) else form.format(value)


def laws():
    """Every law of every optimizer that ran."""
    report = read("laws-h200.json")
    columns = [report["results"][name]["values"] for name in LAW_COLUMNS]
    body = [
        (law["title"], law["must_8bit"], law["must_4bit"], *(f"{column[i]:.3g}" for column in columns))
        for i, law in enumerate(report["laws"])
    ]
    return grid(("law", "8bit must", "4bit must", *LAW_COLUMNS), body, 1)


TABLES = {
    "smollm2-alpaca-h200": fine_tuned,
    "step-cpu": step_cpu,
    "step-h200": step_h200,
    "counters-h200": counters,
    "laws-h200": laws,
    "pretraining-cpu": pretraining,
}


def filled(text):
    """The text of a page with its tables as the results say."""
    pattern = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main(check):
    """Fill the pages, or only look at them; returns the exit status."""
    stale = [page for page in PAGES if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    for page in stale:
        print(f"{page.relative_to(ROOT)} is {'not what the results say' if check else 'written'}")
        if not check:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
