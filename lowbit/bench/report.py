"""The report of a benchmark: one table, on the terminal and in ``report.md``; ``report.json``; ``loss.png``."""

import json
import os
from pathlib import Path

from lowbit.bench.statistics import NOT_TUNED, difference, grouped, reference

__all__ = ["JSON", "MARKDOWN", "NOT_TUNED", "write"]

JSON, MARKDOWN, PLOT, MEMORY_PLOT = "report.json", "report.md", "loss.png", "memory.png"
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
    ("held-out loss", "held_out_loss", number("{:.4f}")),
    ("mc1", "mc1", number("{:.3f}")),
    ("mc2", "mc2", number("{:.3f}")),
    ("first step (s)", "optimizer_first_step", number("{:.3f}")),
)
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
    parts = max(rows, key=lambda result: result.get("steps", 0), default={})
    return [
        f"*max memory*: {counted}.",
        "*state*: bytes of all optimizer state, divided by the number of parameters.",
        f"*tokens/s*: training tokens without padding, a second; the first {skipped} steps are not counted.",
        f"*held-out loss*: mean negative log-likelihood of a {'' if options['train_on_all'] else 'response '}token in "
        f"the {parts.get('held_out_examples', 0)} records set aside.",
        f"*mc1*, *mc2*: accuracy on {parts.get('questions', 0)} multiple-choice questions, as truthfulqa_mc1 and "
        "truthfulqa_mc2 of lm-eval.",
        *_BUILTIN[: options["data"] == "builtin"],
        "*first step*: the first call of optimizer.step(), allocation and compilation included.",
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
    for header in HEADERS[1:]:  # a unit below its name, so that the table fits 80 columns
        table.add_column(header.replace(" (", "\n(").replace("held-out ", "held-out\n"), justify="right", no_wrap=True)
    for group in grouped(report):
        name, *rest = cells(group, "\n±")
        table.add_row(name, *(rest if group.status == "ok" else [group.status]))
    table.caption = "\n".join(failures(report)) or None
    return table


def failures(report):
    """A line for each run that was not measured."""
    several = report["options"].get("seeds", 1) > 1
    return [
        row["optimizer"] + f", seed {row['seed']}" * several + f" {row['status']}: {row['reason']}"
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
    lines += ["", *(f"- {note}" for note in footnotes(report)), "", *comparison_table(report)]
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
    lines = [
        f"## Against {first}",
        "",
        "| optimizer | seeds | " + " | ".join(heads) + " |",
        "|---" * 2 + "|--:" * 3 + "|",
    ]
    for name, each in found:
        shown = [
            f"{'+' * (each[key].mean >= 0)}{texts[key](each[key].mean)} ± {texts[key](each[key].sd)}, {each[key].p:.2g}"
            if key in each
            else "-"
            for key in QUALITY
        ]
        seeds = max((value.seeds for value in each.values()), default=0)
        lines.append(f"| {name} | {seeds} | " + " | ".join(shown) + " |")
    return [*lines, "", "- mean ± standard deviation of the difference at one seed; *p*: Student's paired test.", ""]


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


def plot(report, path):
    """Draw the loss curves; nothing if there are none."""
    curves = [(row["optimizer"], curve(row)) for row in report["rows"] if curve(row)]
    if not curves:
        return
    figure, axes = blank((8, 5))
    names = list(dict.fromkeys(name for name, _ in curves))
    for name, points in curves:
        i, first = names.index(name), name not in axes.get_legend_handles_labels()[1]
        steps, losses = zip(*points, strict=True)
        color = f"C{i % 10}"
        axes.plot(steps, losses, color=color, alpha=0.12, linewidth=0.8)
        style = {"linestyle": ("-", "--", ":")[i % 3], "linewidth": 1.5 if first else 0.7}
        axes.plot(steps, smoothed(losses), color=color, label=name if first else None, **style)
    axes.set(xlabel="step", ylabel="training loss (smoothed)", title=title(report))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_memory(report, path):
    """Draw what each optimizer's peak of memory consists of, stacked; nothing if nothing trained."""
    found = memories(report)
    if not found:
        return
    figure, axes = blank((8, 1.5 + 0.4 * len(found)))
    names, left = [name for name, _ in found], [0.0] * len(found)
    for part, shown in memory_parts(report).items():
        sizes = [memory[part] / 2**30 for _, memory in found]
        axes.barh(names, sizes, left=left, label=shown)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="GiB", title="largest memory")
    axes.legend()
    figure.savefig(path, dpi=120)


def blank(size):
    """A figure with one pair of axes, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def write(folder, report):
    """Write the whole report into a folder; each file is replaced at once."""
    folder = Path(folder)
    for name, text in ((JSON, json.dumps(report, indent=1) + "\n"), (MARKDOWN, markdown(report))):
        partial = folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
    for name, draw in ((PLOT, plot), (MEMORY_PLOT, plot_memory)):
        partial = folder / f".partial-{name}"
        draw(report, partial)
        if partial.exists():
            os.replace(partial, folder / name)
