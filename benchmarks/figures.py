"""Draw the figures of the docs from the files in ``benchmarks/results``: ``python benchmarks/figures.py``."""

import matplotlib

from docs import ROOT, SHAPES, steps_h200

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"svg.hashsalt": "lowbit", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)

from matplotlib import pyplot  # noqa: E402  after the choice of backend

OURS, OTHERS = "#0072b2", "#999999"


def step_h200():
    """One panel for each list of shapes: milliseconds a step of each optimizer, log scale."""
    found = steps_h200()
    figure, axes = pyplot.subplots(1, len(found), figsize=(3.2 * len(found) + 1.5, 5), sharey=True, squeeze=False)
    for axis, (name, results) in zip(axes[0], found.items(), strict=True):
        rows = [row for row in results.values() if "ms" in row]
        colors = [OURS if row["name"][0].isdigit() or row["name"] == "bf16" else OTHERS for row in rows]
        bars = axis.barh([row["name"] for row in rows], [row["ms"] for row in rows], color=colors)
        axis.bar_label(bars, labels=[f"{row['ms']:.3g}" for row in rows], padding=2, fontsize=7)
        axis.set(xscale="log", title=SHAPES[name], xlabel="ms a step")
        axis.margins(x=0.2)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "step-h200.svg", metadata={"Date": None})


if __name__ == "__main__":
    step_h200()
