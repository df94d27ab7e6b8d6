"""Numbers that can be explained: each is made of steps, and each step is a formula with the numbers put in.

A formula uses + − × / ⌊ ⌋ ⌈ ⌉ min( , ) max( , ) and numbers with commas, so that whoever doubts a step can do it again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """`name = formula = value unit`. `added`: the value is part of the account's sum; others only lead to it."""

    name: str
    formula: str
    value: float
    unit: str = "B"
    added: bool = True


@dataclass(frozen=True)
class Account:
    """How a number of the plan comes about. `meaning`: what it is, in one line. `is_sum`: it is the sum of the steps
    that are added; else the last step is the number itself."""

    key: str
    meaning: str
    steps: tuple[Step, ...]
    unit: str = "B"
    is_sum: bool = True

    @property
    def total(self) -> float:
        return sum(step.value for step in self.steps if step.added) if self.is_sum else self.steps[-1].value


def leading(name: str, formula: str, value: float, unit: str = "B") -> Step:
    """A step on the way to the number."""
    return Step(name, formula, value, unit, added=False)


def product(name: str, *factors: float, times: int = 1, unit: str = "B") -> Step:
    """`times` equal things of so many factors."""
    every = (times, *factors) if times > 1 else factors
    return Step(name, " × ".join(map(number, every)), math.prod(every), unit)


def number(value: float) -> str:
    """1,234,567, or as many digits of a fraction as it needs."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.12g}" if abs(value) < 1e9 else f"{value:,.3f}"


def summed(steps: Iterable[Step]) -> int:
    return int(sum(step.value for step in steps))
