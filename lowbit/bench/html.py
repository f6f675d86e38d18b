"""``report.html``: the report of a benchmark as one page, that needs no other file and no network."""

import itertools
import json
import math
import re
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import fmean, stdev
from string import Template

from lowbit.bench.footnotes import footnotes
from lowbit.bench.report import (
    COLUMNS,
    NAME,
    PARTS,
    cells,
    columns,
    failures,
    memories,
    memory_parts,
    signed,
    smoothed,
    title,
)
from lowbit.bench.statistics import NOT_TUNED, difference, grouped, reference

__all__ = ["page"]

STACK = (*PARTS, "rest")  # parts of memory, as page.css colours them
COMPARED = ("held_out_loss", "mc2")  # columns with a difference to the first optimizer
POINTS = {True: 200, False: 60}  # of a smooth and of a jagged curve at most
COLORS, DASHES = 7, 4  # of page.css; no common divisor, so that 28 curves differ


@dataclass(frozen=True)
class Graph:
    """Curves over steps or seconds: ``curve`` is a name in a result's ``curves``, None the training loss."""

    heading: str
    curve: str | None
    x: str
    y: str
    smooth: bool = False
    log: bool = False  # y in decades


LOSS, LOSS_IN_TIME = "loss", "seconds"
GRAPHS = {
    LOSS: Graph("Training loss", None, "step", "nats/token, smoothed", smooth=True),
    LOSS_IN_TIME: Graph("Training loss over time", None, "seconds", "nats/token, smoothed", smooth=True),
    "grad_norm": Graph("Norm of the gradient", "grad_norm", "step", "norm, smoothed", smooth=True),
    "update": Graph("Largest update of a weight", "update", "step", "largest |update| / learning rate", log=True),
    "stuck": Graph("Stuck state", "stuck", "step", "share of the state"),
}
# heading, unit and whether it starts at zero (bars) or not (dots), of a column
MEASURES = {
    "tokens_per_second": ("Speed", "tokens/s", True),
    "held_out_loss": ("Held-out loss", "nats/token; less is better", False),
    "mc2": ("Accuracy mc2", "probability of the true answers; more is better", False),
    "mc1": ("Accuracy mc1", "share of questions; more is better", False),
}


def page(report):
    """The page of a report, as text: table and notes in HTML, graphs drawn by a script from data within it."""
    groups = grouped(report)
    return Template(_file("page.html")).substitute(
        title=escape(title(report)),
        style=_file("page.css"),
        incomplete="" if report["complete"] else "<p class=warning>Not complete: interrupted, or still going on.</p>",
        table=table(groups),
        failures="".join(f"<li>{escape(line)}</li>" for line in failures(report)),
        notes="".join(f"<li>{emphasis(note)}</li>" for note in footnotes(report)),
        legend=legend(groups),
        figures=figures(report, groups),
        details=details(report),
        data=json.dumps(data(report, groups), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=_file("page.js"),
    )


def _file(name):
    return (files("lowbit.bench") / name).read_text(encoding="utf-8")


def emphasis(note):
    """HTML of a footnote, in which Markdown's stars are the only markup."""
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", escape(note))


def table(groups):
    """The table: a line an optimizer; ``data-value`` of a cell is the number that it is sorted by."""
    first, shown = reference(groups), columns(groups)
    compared = [column for column in shown if column[1] in COMPARED]
    if not first or not any(_comparable(group, first) for group in groups):
        compared = []
    heads = [NAME, *(header for header, *_ in shown)]
    heads += [f"{header}, minus {first.optimizer}" for header, *_ in compared]
    top = "".join(f'<th scope="col"><button type="button">{escape(head)}</button></th>' for head in heads)
    lines = "".join(f"<tr>{line(group, first, shown, compared)}</tr>" for group in groups)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def line(group, first, shown, compared):
    """Cells of an optimizer: columns ``shown``, then those ``compared`` to the first; its status if not measured."""
    name, *texts = cells(group, shown)
    head = f'<th scope="row">{escape(name)}</th>'
    if group.status != "ok":
        return head + f'<td class="failed" colspan="{len(shown) + len(compared)}">{escape(group.status)}</td>'
    found = [cell(group.mean(key), text) for (_, key, _), text in zip(shown, texts, strict=True)]
    return head + "".join([*found, *(against(group, first, key, text) for _, key, text in compared)])


def cell(value, text, below=""):
    """A cell with a number, and what stands small below it."""
    number = "" if value is None else f' data-value="{value!r}"'
    return f"<td{number}>{escape(text)}" + (f"<small>{escape(below)}</small>" if below else "") + "</td>"


def _comparable(group, first):
    return group.status == "ok" and group.optimizer not in (first.optimizer, NOT_TUNED)


def against(group, first, key, text):
    """A cell with the mean difference of a number to the first optimizer's, deviation and p-value if it has them."""
    found = difference(group, first, key) if _comparable(group, first) else None
    if found is None:
        return cell(None, "-")
    return cell(found.mean, signed(found, text), "" if found.p is None else f"p = {found.p:.2g}")


def styles(groups):
    """Classes of page.css for the line of each optimizer: colour and dashes."""
    count = itertools.count()
    return [
        "before" if group.optimizer == NOT_TUNED else f"c{(i := next(count)) % COLORS} d{i % DASHES}"
        for group in groups
    ]


def legend(groups):
    """Boxes to tick that show an optimizer in all graphs, each with a sample of its line."""
    boxes = []
    for i, (group, style) in enumerate(zip(groups, styles(groups), strict=True)):
        if group.results:
            checked = "" if group.optimizer == NOT_TUNED else " checked"
            sample = f'<svg class="key {style}" aria-hidden="true"><path class="curve" d="M1 7H35"/></svg>'
            name = escape(group.optimizer)
            boxes.append(f'<label><input type="checkbox" value="{i}"{checked}>{sample}{name}</label>')
    return "".join(boxes)


def figures(report, groups):
    """Empty figures of the graphs that there are data for; page.js draws by their ``data-kind`` and ``data-key``."""
    trained = [(i, group) for i, group in enumerate(groups) if curve_of(group, LOSS)]
    found = [
        figure("log" if graph.log else "lines", key, graph.heading, graph.x, graph.y)
        for key, graph in GRAPHS.items()
        if any(curve_of(group, key) for group in groups)
    ]
    if len(trained) > 1:
        names = "".join(f'<option value="{i}">{escape(group.optimizer)}</option>' for i, group in trained)
        heading = f'<label>Training loss minus that of <select id="base">{names}</select></label>'
        graph = GRAPHS[LOSS]
        found.insert(1, figure("minus", LOSS, heading, graph.x, graph.y))
    for key, (heading, unit, bars) in MEASURES.items():
        if any(group.values(key) for group in groups):
            found.append(figure("bars" if bars else "dots", key, heading, unit))
    if memories(report):
        parts = "".join(
            f'<span class="part p{STACK.index(part)}">{name}</span>' for part, name in memory_parts(report).items()
        )
        found.append(figure("memory", "memory", f"Largest memory <span>{parts}</span>", "GiB"))
    return "".join(found)


def figure(kind, key, heading, x, y=""):
    """A figure without its drawing; ``heading`` is HTML."""
    return (
        f'<figure data-kind="{kind}" data-key="{key}" data-x="{x}" data-y="{y}"><figcaption>{heading}</figcaption>'
        '<div class="plot"></div></figure>'
    )


def details(report):
    """Tables of machine, versions and options."""
    found = []
    for heading in ("machine", "versions", "options"):
        values = {name: value for name, value in (report[heading] or {}).items() if value is not None}
        lines = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(with_unit(name, value))}</td></tr>'
            for name, value in values.items()
        )
        found.append(f"<section><h3>{heading.capitalize()}</h3><table>{lines}</table></section>")
    return "".join(found)


def with_unit(name, value):
    """Text of an entry; bytes in GiB."""
    return f"{value / 2**30:.1f} GiB" if name.endswith("_bytes") else str(value)


def data(report, groups):
    """What page.js draws: a dictionary an optimizer, in the order of ``groups``."""
    memory = dict(memories(report))
    keys = [key for _, key, _ in COLUMNS]
    texts = [dict(zip(keys, cells(group, COLUMNS)[1:], strict=True)) for group in groups]
    return [
        {
            "name": group.optimizer,
            "style": style,
            "curves": {key: found for key in GRAPHS if (found := curve_of(group, key))},
            "values": {key: [finite(group.mean(key)), finite(group.sd(key)), text[key]] for key in MEASURES},
            "losses": {seed: of_seed(result) for seed, result in group.results.items()},
            "memory": [memory[group.optimizer].get(part, 0) for part in STACK] if group.optimizer in memory else None,
        }
        for group, style, text in zip(groups, styles(groups), texts, strict=True)
    ]


def finite(value):
    """A number that JSON has, else None."""
    return value if value is not None and math.isfinite(value) else None


def curve_of(group, key):
    """``[x, y, sd]`` of a graph's points: mean over seeds of x and y at a step, deviation of y or 0."""
    steps = {}
    for result in group.results.values():
        for step, x, y in points(result, key):
            steps.setdefault(step, []).append((x, y))
    found = []
    for step in sorted(steps):
        xs, ys = zip(*steps[step], strict=True)
        found.append((fmean(xs), fmean(ys), stdev(ys) if len(ys) > 1 and GRAPHS[key].smooth else 0.0))
    return [[float(f"{value:.6g}") for value in point] for point in thinned(found, GRAPHS[key].smooth)]


def of_seed(result):
    """``[step, loss]`` of one run, smoothed and thinned, for differences between runs of a seed."""
    found = thinned([(x, y) for _, x, y in points(result, LOSS)], GRAPHS[LOSS].smooth)
    return [[x, float(f"{y:.6g}")] for x, y in found]


def points(result, key):
    """``(step, x, y)`` of a run's curve, without those that are not finite."""
    graph, curves = GRAPHS[key], result.get("curves") or {}
    pairs = (curves.get(graph.curve) if graph.curve else result.get("losses")) or []
    pairs = [(step, y) for step, y in pairs if finite(y) is not None]
    ys = [y for _, y in pairs]
    if graph.smooth:
        ys = smoothed(ys)
    xs = dict(curves.get("seconds") or []) if key == LOSS_IN_TIME else {step: step for step, _ in pairs}
    return [(step, xs[step], y) for (step, _), y in zip(pairs, ys, strict=True) if finite(xs.get(step)) is not None]


def thinned(found, smooth):
    """:data:`POINTS` of a curve's points, and the last: of a smooth one every n-th, else the largest of every n."""
    every = math.ceil(len(found) / POINTS[smooth]) or 1
    kept = [
        found[i] if smooth else max(found[i : i + every], key=lambda point: point[1])
        for i in range(0, len(found), every)
    ]
    return kept if not found or kept[-1] == found[-1] else [*kept, found[-1]]
