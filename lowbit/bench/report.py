"""The report of a benchmark: one table, on the terminal and in ``report.md``; ``report.json``; ``loss.png``."""

import json
import os
from pathlib import Path
from statistics import fmean

from lowbit.bench.footnotes import footnotes
from lowbit.bench.statistics import NOT_TUNED, difference, grouped, reference

__all__ = ["JSON", "MARKDOWN", "NOT_TUNED", "write"]

JSON, MARKDOWN, HTML = "report.json", "report.md", "report.html"
PLOT, MEMORY_PLOT = "loss.png", "memory.png"
PARTS = {  # of memory; there are activations where allocations were recorded
    "weights": "weights", "gradients": "gradients", "state": "optimizer state", "activations": "activations",
}  # fmt: skip
REST = {True: "temporaries", False: "the rest of the process"}  # on a GPU, on a CPU
SMOOTHING = 0.9  # of the plotted loss: an exponential mean, as TensorBoard's


def number(form, scale=1.0):
    """A cell's text from a number, ``-`` for None."""
    return lambda value: "-" if value is None else form.format(value / scale)


# header, key in a run's result, text of its value
COLUMNS = (
    ("max memory (MiB)", "max_memory", number("{:,.0f}", 2**20)),
    ("reserved (MiB)", "reserved_memory", number("{:,.0f}", 2**20)),
    ("state (B/param)", "state_bytes_per_param", number("{:.2f}")),
    ("tokens/s", "tokens_per_second", number("{:,.0f}")),
    ("padded tokens/s", "padded_tokens_per_second", number("{:,.0f}")),
    ("held-out loss", "held_out_loss", number("{:.4f}")),
    ("mc1", "mc1", number("{:.3f}")),
    ("mc2", "mc2", number("{:.3f}")),
    ("model compile (s)", ("model_first_step", "model_step"), number("{:.1f}")),
    ("step compile (s)", ("optimizer_first_step", "optimizer_step"), number("{:.2f}")),
    ("step (ms)", "optimizer_step", number("{:.1f}", 1e-3)),
)
NOT_ON_TERMINAL = ("reserved (MiB)", "padded tokens/s", "step (ms)")  # where 80 columns have to do
NAME = "optimizer"  # header of the first column
QUALITY = ("held_out_loss", "mc1", "mc2")  # that runs of two optimizers are compared by
NO_SPREAD = ("state_bytes_per_param",)  # the same for every seed


def columns(groups):
    """Those of :data:`COLUMNS` that something was measured for."""
    return [column for column in COLUMNS if any(group.values(column[1]) for group in groups)] or COLUMNS[:1]


def cells(group, shown, join=" ± "):
    """Texts of an optimizer's line: its name, and for columns ``shown`` means, with standard deviations over seeds."""
    return [group.optimizer, *(_cell(group, key, text, join) for _, key, text in shown)]


def _cell(group, key, text, join):
    sd = None if key in NO_SPREAD else group.sd(key)
    return text(group.mean(key)) + ("" if sd is None else join + text(sd))


def signed(found, text):
    """Text of a :class:`~lowbit.bench.statistics.Difference`: its mean with a sign, its deviation if it has one."""
    return "+" * (found.mean >= 0) + text(found.mean) + ("" if found.sd is None else f" ± {text(found.sd)}")


def compared(report):
    """``(optimizer, {key: Difference})`` of each optimizer to the first, where there are two seeds or more."""
    groups = grouped(report)
    first = reference(groups)
    if first is None or len(first.results) < 2:
        return []
    found = [(group.optimizer, {key: difference(group, first, key) for key in QUALITY}) for group in groups]
    return [
        (name, {key: value for key, value in each.items() if value and value.seeds > 1})
        for name, each in found
        if name not in (first.optimizer, NOT_TUNED)
    ]


def terminal_table(report):
    """The table for :mod:`rich`."""
    from rich import box
    from rich.table import Table

    table = Table(title=title(report), box=box.SIMPLE_HEAD, padding=0, caption_justify="left")
    groups = grouped(report)
    table.add_column(NAME, no_wrap=True)
    shown = [column for column in columns(groups) if column[0] not in NOT_ON_TERMINAL]
    for header, *_ in shown:
        table.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True)
    for group in groups:
        table.add_row(*(cells(group, shown, "\n±") if group.status == "ok" else [group.optimizer, group.status]))
    table.caption = "\n".join(failures(report)) or None
    return table


def failures(report):
    """A line for each run that was not measured."""
    several = report["options"].get("seeds", 1) > 1
    return [
        row["optimizer"] + (f", seed {row['seed']}" if several else "") + f" {row['status']}: {row['reason']}"
        for row in report["rows"]
        if row["status"] != "ok"
    ]


def title(report):
    """Model, data and length of the runs."""
    options = report["options"]
    count, unit = (options["steps"], "step") if options["steps"] else (f"{options['epochs']:g}", "epoch")
    length = f"{count} {unit}{'s' * (str(count) != '1')}"
    batch = options["batch_size"] * options["grad_accum"]
    seeds = f", {options['seeds']} seeds" if options.get("seeds", 1) > 1 else ""
    return f"{options['model']} on {options['data']}, {length} of batch {batch}, lr {options['lr']:g}{seeds}"


def markdown(report):
    """``report.md``."""
    lines = [f"# {title(report)}", ""]
    if not report["complete"]:
        lines += ["**Not complete:** the run was interrupted or is still going on.", ""]
    groups = grouped(report)
    shown = columns(groups)
    lines += ["| " + " | ".join([NAME, *(header for header, *_ in shown)]) + " |", "|---" + "|--:" * len(shown) + "|"]
    for group in groups:
        why = [group.optimizer, f"{group.status}: {group.reason}", *[""] * (len(shown) - 1)]
        texts = cells(group, shown) if group.status == "ok" else why
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")
    lines += ["", *(f"- {note}" for note in footnotes(report)), "", *comparison_table(report), *tasks_table(report)]
    if any(curve(row) for row in report["rows"]):
        lines += [f"![Training loss of each optimizer]({PLOT})", ""]
    lines += memory_table(report)
    for heading in ("machine", "versions", "options"):
        values = report[heading] or {}
        lines += [f"## {heading.capitalize()}", ""]
        lines += [f"- {name}: {value}" for name, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def comparison_table(report):
    """Lines of Markdown: differences to the first optimizer over seeds, each with the p-value of a paired test."""
    found = compared(report)
    if not found:
        return []
    first, texts = reference(grouped(report)).optimizer, dict((key, text) for _, key, text in COLUMNS)
    heads = [f"{header}, p" for header, key, _ in COLUMNS if key in QUALITY]
    lines = [f"## Against {first}", "", "| optimizer | seeds | " + " | ".join(heads) + " |"]
    lines.append("|---" + "|--:" * (1 + len(heads)) + "|")
    for name, each in found:
        shown = [f"{signed(each[key], texts[key])}, {each[key].p:.2g}" if key in each else "-" for key in QUALITY]
        seeds = max((value.seeds for value in each.values()), default=0)
        lines.append(f"| {name} | {seeds} | " + " | ".join(shown) + " |")
    return [*lines, "", "- mean ± standard deviation of the difference at one seed; *p*: Student's paired test.", ""]


def tasks(report):
    """``(optimizer, {task: (accuracy, its standard error)})``, means over seeds, of what lm-eval measured."""
    found = []
    for group in grouped(report):
        runs = [result["tasks"] for result in group.results.values() if result.get("tasks")]
        means = {
            task: tuple(fmean(run[task][name] for run in runs) for name in ("acc", "acc_stderr"))
            for task in (runs[0] if runs else ())
            if "acc" in runs[0][task]
        }
        found += [(group.optimizer, means)] if means else []
    return found


def tasks_table(report):
    """Lines of Markdown: accuracy on each task of lm-eval."""
    found = tasks(report)
    if not found:
        return []
    names = list(found[0][1])
    lines = ["## Tasks of lm-eval", "", "| optimizer | " + " | ".join(names) + " |", "|---" + "|--:" * len(names) + "|"]
    for optimizer, means in found:
        lines.append(f"| {optimizer} | " + " | ".join(f"{means[n][0]:.4f} ± {means[n][1]:.4f}" for n in names) + " |")
    return [*lines, "", "- accuracy ± standard error over questions, as lm-eval gives them.", ""]


def memories(report):
    """``(optimizer, {part: bytes})`` of the optimizers that trained, by their first seed."""
    found = {}
    for row in report["rows"]:
        if row["status"] == "ok" and row["result"].get("memory"):
            found.setdefault(row["optimizer"], row["result"]["memory"])
    return list(found.items())


def memory_parts(report):
    """``{part: how the report calls it}``, in the order in which they are stacked."""
    found = {part: name for part, name in PARTS.items() if any(part in memory for _, memory in memories(report))}
    rest = REST[bool((report["machine"] or {}).get("gpu"))]
    return found | {"rest": rest if "activations" in found else f"{rest}, activations included"}


def memory_table(report):
    """Lines of Markdown: what the peak of each optimizer consists of."""
    found, names = memories(report), memory_parts(report)
    if not found:
        return []
    lines = [
        "## Memory (MiB)",
        "",
        "| optimizer | " + " | ".join(names.values()) + " |",
        "|---" + "|--:" * len(names) + "|",
    ]
    for name, memory in found:
        lines.append(f"| {name} | " + " | ".join(f"{memory.get(part, 0) / 2**20:,.0f}" for part in names) + " |")
    note = "- at the moment of the peak; *activations*: what a forward pass leaves for the backward pass."
    return [*lines, "", *[note, ""] * ("activations" in names), f"![Memory of each optimizer]({MEMORY_PLOT})", ""]


def curve(row):
    """``[(step, loss)]`` of a row, empty without one."""
    return row["result"].get("losses") or [] if row["status"] == "ok" else []


def smoothed(values):
    """Exponential mean of a sequence, without a bias to its start."""
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight)
    return result


def write(folder, report):
    """Write the whole report into a folder; each file is replaced at once."""
    from lowbit.bench.html import page
    from lowbit.bench.plots import plot, plot_memory

    folder = Path(folder)
    texts = {JSON: json.dumps(report, indent=1) + "\n", MARKDOWN: markdown(report), HTML: page(report)}
    for name, text in texts.items():
        partial = folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
    for name, draw in ((PLOT, plot), (MEMORY_PLOT, plot_memory)):
        partial = folder / f".partial-{name}"
        draw(report, partial)
        if partial.exists():
            os.replace(partial, folder / name)
