"""Derivations of the plan's numbers: each step is a formula with its values filled in.

Formulas use + − × / ⌊ ⌋ ⌈ ⌉ min( , ) max( , ) and numbers with thousands separators, so that a reader can recompute
each step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step of a derivation, shown as `name = formula = value unit`."""

    name: str
    formula: str
    value: float
    unit: str = "B"
    added: bool = True  # False for an intermediate result that is not part of the sum


@dataclass(frozen=True)
class Account:
    """The derivation of one number of the plan."""

    key: str
    meaning: str  # what the number is, in one line
    steps: tuple[Step, ...]
    unit: str = "B"
    is_sum: bool = True  # True: the number is the sum of the added steps; False: the last step is the number

    @property
    def total(self) -> float:
        return sum(step.value for step in self.steps if step.added) if self.is_sum else self.steps[-1].value


def leading(name: str, formula: str, value: float, unit: str = "B") -> Step:
    """Return an intermediate step, which is not added to the sum."""
    return Step(name, formula, value, unit, added=False)


def product(name: str, *factors: float, times: int = 1, unit: str = "B") -> Step:
    """Return the product of `factors`, multiplied by `times` for equal items."""
    every = (times, *factors) if times > 1 else factors
    return Step(name, " × ".join(map(number, every)), math.prod(every), unit)


def number(value: float) -> str:
    """Format a number: 1,234,567 for an integer, else as many decimals as it needs."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.12g}" if abs(value) < 1e9 else f"{value:,.3f}"


def summed(steps: Iterable[Step]) -> int:
    return int(sum(step.value for step in steps))
