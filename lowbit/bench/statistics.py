"""Runs of one optimizer with several seeds as one row: mean, standard deviation, a paired test against another's."""

import math
import statistics
from dataclasses import dataclass

NOT_TUNED = "not fine-tuned"


def value(result, key):
    """A number of a run's result by its key, or by a pair of keys the first less the second; None if it has it not."""
    if isinstance(key, str):
        return result.get(key)
    first, later = (result.get(name) for name in key)
    return None if first is None or later is None else max(0.0, first - later)


@dataclass(frozen=True)
class Group:
    """All runs of one optimizer. A run that failed has no result; ``reason`` is that of the first."""

    optimizer: str
    status: str  # "ok" if there is a result
    reason: str | None
    results: dict  # seed -> result of the run

    def values(self, key):
        """``{seed: number}`` of the runs that have this number; see :func:`value`."""
        found = {seed: value(result, key) for seed, result in self.results.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, key):
        """Mean over the runs; None if none has this number."""
        values = self.values(key)
        return statistics.fmean(values.values()) if values else None

    def sd(self, key):
        """Standard deviation of a run; None for fewer than two."""
        values = self.values(key)
        return statistics.stdev(values.values()) if len(values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """Of the runs of two optimizers with the same seeds."""

    mean: float
    sd: float | None  # of one seed's difference
    p: float | None  # of Student's paired test, two-sided; None for fewer than two seeds
    seeds: int


def grouped(report):
    """The :class:`Group` of each optimizer of a report, in the order of its rows."""
    rows = {}
    for row in report["rows"]:
        rows.setdefault(row["optimizer"], []).append(row)
    groups = []
    for name, runs in rows.items():
        done = {row.get("seed"): row["result"] for row in runs if row["status"] == "ok"}
        failed = next((row for row in runs if row["status"] != "ok"), {"status": "ok", "reason": None})
        groups.append(Group(name, "ok" if done else failed["status"], failed["reason"], done))
    return groups


def reference(groups):
    """The optimizer that the others are compared with: the first that was measured; None if there is none."""
    return next((group for group in groups if group.optimizer != NOT_TUNED and group.results), None)


def difference(group, other, key):
    """:class:`Difference` of a number, ``group`` minus ``other``; None without a seed that both have."""
    a, b = group.values(key), other.values(key)
    each = [a[seed] - b[seed] for seed in a if seed in b]
    if not each:
        return None
    sd = statistics.stdev(each) if len(each) > 1 else None
    return Difference(statistics.fmean(each), sd, paired_p(each), len(each))


def paired_p(differences):
    """Two-sided p-value of Student's t-test that the mean of differences is zero; None for fewer than two."""
    if len(differences) < 2:
        return None
    if len(set(differences)) == 1:  # no spread: certain, one way or the other
        return 1.0 if differences[0] == 0 else 0.0
    from scipy.stats import ttest_1samp

    p = float(ttest_1samp(differences, 0.0).pvalue)
    return None if math.isnan(p) else p
