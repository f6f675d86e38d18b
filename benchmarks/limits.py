"""The table of laws: which number of which scenario, and the limits that this library's optimizers must keep."""

from collections.abc import Callable
from dataclasses import dataclass, field

import scenarios

import lowbit

ANY = float("inf")


@dataclass(frozen=True)
class Law:
    """One number of a scenario and the limits that ours must keep, (lowest, highest)."""

    title: str
    scenario: Callable
    key: str
    must_8bit: tuple[float, float]
    must_4bit: tuple[float, float]
    options: dict = field(default_factory=dict)
    unit: str | None = None  # the key of the number that the limits are multiples of

    def limits(self, name, found):
        """Limits of an optimizer of ours. 12-bit is the 8-bit m beside the 4-bit v; fp32 is held to the 8-bit laws."""
        unit = found[self.unit] if self.unit else 1.0
        low, high = self.must_4bit if name in ("4bit", "12bit") else self.must_8bit
        return low * unit, high * unit

    def measure(self, make, device, shape, cache):
        """All numbers of the scenario, measured once for all laws of one optimizer."""
        key = (self.scenario, *self.options.items())
        if key not in cache:
            cache[key] = self.scenario(make, device, shape=shape, **self.options)
        return cache[key]


def _direction(key, title, must_8bit, must_4bit):
    return Law(title, scenarios.directions, key, (0, must_8bit), (0, must_4bit))


def _stop(beta1, must_8bit, must_4bit):
    title = f"half of a block's gradients stop: |m| left after 200 steps, β1={beta1}"
    return Law(title, scenarios.stop, "left", (0, must_8bit), (0, must_4bit), {"beta1": beta1})


def _turn(key, exact):
    limits = (exact - 1e-5, exact + 1e-5)
    title = f"gradients of +1, half of a block's turn to -1, 500 steps: m of those that {key}"
    return Law(title, scenarios.turn, key, limits, limits)


def _tiny(size):
    title = f"|update| over the exact one at gradient RMS {size:g}, eps 1e-15"
    return Law(title, scenarios.tiny, "ratio", (0.97, 1.03), (0.90, 1.12), {"size": size})


LAWS = (
    _direction("dir 0.3 0.999", "error of the update, spread 0.3, β2=.999", 0.10, 0.50),
    _direction("dir 0.8 0.999", "error of the update, spread 0.8, β2=.999", 0.11, 0.85),
    _direction("acc 0.3 0.999", "error of the sum of updates, spread 0.3, β2=.999", 0.06, 0.36),
    _direction("acc 0.8 0.999", "error of the sum of updates, spread 0.8, β2=.999", 0.06, 0.85),
    _direction("dir 0.3 0.95", "error of the update, spread 0.3, β2=.95", 0.09, 0.58),
    _direction("dir 0.8 0.95", "error of the update, spread 0.8, β2=.95", 0.10, 0.87),
    Law(
        "largest |update| of these runs, in lr",
        scenarios.directions, "largest", (0, 1.1), (0, 1.5), unit="exact largest",
    ),
    Law(
        "half of a block's gradients shrink 10x: √(exact v / v) 2000 steps later, β2=.999",
        scenarios.shrink, "ratio", (0.95, 1.10), (0.75, 1.30),
    ),
    _stop(0.9, 1e-6, 1e-3),
    _stop(0.95, 1e-4, 1e-3),
    _stop(0.99, 0.16, 0.18),
    _turn("stayed", 1.0),
    _turn("turned", -1.0),
    *[_tiny(size) for size in (1e-3, 1e-5, 1e-7, 1e-8, 1e-10)],
    Law(
        "one gradient of 100 in 256 among 1e-4, lr 1e-3, 20 steps: max |p|",
        scenarios.rare, "max", (0, 0.022), (0, 0.026),
    ),
    Law(
        "one gradient of 100 in 256 among 1e-4, lr 1e-3, 20 steps: mean |p|",
        scenarios.rare, "mean", (0.0035, ANY), (0.003, ANY),
    ),
)  # fmt: skip


STATES = ("fp32", "8bit", "4bit", "12bit")


def ours(state, backend):
    """How to make an optimizer of this library by its state format."""
    return lambda params, **options: lowbit.AdamW(params, weight_decay=0.0, state=state, backend=backend, **options)
