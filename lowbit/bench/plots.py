"""The figures of a report: ``loss.png``, ``memory.png``."""

from lowbit.bench.report import curve, memories, memory_parts, smoothed, title


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
        sizes = [memory.get(part, 0) / 2**30 for _, memory in found]
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
