"""The report of a benchmark: one table, on the terminal and in ``report.md``; ``report.json``; ``loss.png``."""

import json
import os
from pathlib import Path
from statistics import fmean

from lowbit.bench.statistics import NOT_TUNED, difference, grouped, reference

__all__ = ["JSON", "MARKDOWN", "NOT_TUNED", "write"]

JSON, MARKDOWN, HTML = "report.json", "report.md", "report.html"
PLOT, MEMORY_PLOT = "loss.png", "memory.png"
PARTS = {"weights": "weights", "gradients": "gradients", "state": "optimizer state"}  # of memory, and what is left
REST = {True: "activations, temporaries", False: "the rest of the process"}  # on a GPU, on a CPU
SMOOTHING = 0.9  # of the plotted loss: an exponential mean, as TensorBoard's


def number(form, scale=1.0):
    """A cell's text from a number, ``-`` for None."""
    return lambda value: "-" if value is None else form.format(value / scale)


# header, key in a run's result, text of its value
COLUMNS = (
    ("max memory (MiB)", "max_memory", number("{:,.0f}", 2**20)),
    ("state (B/param)", "state_bytes_per_param", number("{:.2f}")),
    ("tokens/s", "tokens_per_second", number("{:,.0f}")),
    ("padded tokens/s", "padded_tokens_per_second", number("{:,.0f}")),
    ("held-out loss", "held_out_loss", number("{:.4f}")),
    ("mc1", "mc1", number("{:.3f}")),
    ("mc2", "mc2", number("{:.3f}")),
    ("model compile (s)", ("model_first_step", "model_step"), number("{:.1f}")),
    ("step compile (s)", ("optimizer_first_step", "optimizer_step"), number("{:.2f}")),
)
NOT_ON_TERMINAL = ("padded tokens/s",)  # where 80 columns have to do
HEADERS = ("optimizer", *(header for header, *_ in COLUMNS))
QUALITY = ("held_out_loss", "mc1", "mc2")  # that runs of two optimizers are compared by
NO_SPREAD = ("state_bytes_per_param",)  # the same for every seed


def cells(group, join=" ± "):
    """Texts of an optimizer's line: its name and means, with standard deviations over seeds; or why it has none."""
    if group.status != "ok":
        return [group.optimizer, f"{group.status}: {group.reason}"]
    return [group.optimizer, *(_cell(group, key, text, join) for _, key, text in COLUMNS)]


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


_BUILTIN = (
    "The built-in records say each thing in several ways, and the built-in questions are about things in the training "
    "data: both measure how well the text is learnt, not what the model makes of new text.",
)


def footnotes(report):
    """What the columns are, for this machine and these options."""
    machine, options = report["machine"] or {}, report["options"]
    counted = "the most memory that tensors took on the GPU during training"
    if not machine.get("gpu"):
        counted = "the largest resident memory of the training process, so Python and its libraries are in it"
    rows = [row["result"] for row in report["rows"] if row["status"] == "ok"]
    skipped = max((result.get("steps_not_timed") or 0 for result in rows), default=0)
    crowded = options.get("parallel", 1) > 1 and not any(result.get("tokens_per_second") for result in rows)
    parts = max(rows, key=lambda result: result.get("steps", 0), default={})
    return [
        f"*max memory*: {counted}.",
        "*state*: bytes of all optimizer state, divided by the number of parameters.",
        f"*tokens/s*: training tokens without padding, a second, and *padded* with it; the first {skipped} steps are "
        "not counted.",
        *["Several runs were on one device at once, so that times say nothing and are left out."] * crowded,
        f"*held-out loss*: mean negative log-likelihood of a {'' if options['train_on_all'] else 'response '}token in "
        f"the {parts.get('held_out_examples', 0)} records set aside.",
        f"*mc1*, *mc2*: accuracy on {parts.get('questions', 0)} multiple-choice questions, as truthfulqa_mc1 and "
        "truthfulqa_mc2 of lm-eval.",
        *_BUILTIN[: options["data"] == "builtin"],
        "*compile*: the first forward and backward pass, and the first optimizer.step(), less the median of the later "
        "ones: what is compiled, allocated and loaded once.",
        *["*±*: standard deviation of a run, over seeds."] * (options.get("seeds", 1) > 1),
        "All optimizers start from the same weights and see the same data in the same order; each runs in a process of "
        "its own.",
    ]


def terminal_table(report):
    """The table for :mod:`rich`."""
    from rich import box
    from rich.table import Table

    table = Table(title=title(report), box=box.SIMPLE_HEAD, padding=0, caption_justify="left")
    table.add_column(HEADERS[0], no_wrap=True)
    shown = [i for i, header in enumerate(HEADERS) if header not in NOT_ON_TERMINAL]
    for i in shown[1:]:
        table.add_column(HEADERS[i].replace(" ", "\n"), justify="right", no_wrap=True)
    for group in grouped(report):
        texts = cells(group, "\n±") if group.status == "ok" else [group.optimizer, group.status]
        table.add_row(*(texts[i] for i in shown if i < len(texts)))
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
    length = f"{options['steps']} steps" if options["steps"] else f"{options['epochs']:g} epochs"
    batch = options["batch_size"] * options["grad_accum"]
    seeds = f", {options['seeds']} seeds" if options.get("seeds", 1) > 1 else ""
    return f"{options['model']} on {options['data']}, {length} of batch {batch}, lr {options['lr']:g}{seeds}"


def markdown(report):
    """``report.md``."""
    lines = [f"# {title(report)}", ""]
    if not report["complete"]:
        lines += ["**Not complete:** the run was interrupted or is still going on.", ""]
    lines += ["| " + " | ".join(HEADERS) + " |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for group in grouped(report):
        texts = [text.replace("|", "\\|") for text in cells(group)]
        lines.append("| " + " | ".join(texts + [""] * (len(HEADERS) - len(texts))) + " |")
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
    return PARTS | {"rest": REST[bool((report["machine"] or {}).get("gpu"))]}


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
        lines.append(f"| {name} | " + " | ".join(f"{memory[part] / 2**20:,.0f}" for part in names) + " |")
    return [*lines, "", f"![Memory of each optimizer]({MEMORY_PLOT})", ""]


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
