"""What a rule, a variable and a view of the choices are.

A variable is a key of the manifest that takes part: its value is the operator's, or `auto` chooses among few. A rule
ties variables to one another and to facts of the checkpoint and the machine. `solve.py` finds choices, or a conflict.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.constraints.facts import ModelFacts
from appliance.hardware.machine import Machine
from engine.api.config import Device, Dtype, KVDtype, WeightBits

TORCH, TRITON = "torch", "triton"


@dataclass(frozen=True)
class Facts:
    """`lacks`: what memory lacks for a choice, empty where it fits; None where nothing depends on it."""

    model: ModelFacts
    machine: Machine
    lacks: "Callable[[View], str] | None" = field(default=None, compare=False)


@dataclass
class View:
    """All choices, typed. While they are searched for, those of later variables still have the values below."""

    facts: Facts
    device: Device = "cpu"
    dtype: Dtype = "float32"
    weights: WeightBits = "stored"
    kernels: str = TORCH
    graphs: bool = False
    batch_invariant: bool = False
    kv_cache: KVDtype = "float32"
    block_tokens: int = 16
    max_context: int = 2
    data: int = 1
    tensor: int = 1


def is_compiled(kernels: str) -> bool:
    """Whether these are kernels of a CPU, which pack weights."""
    return kernels not in (TORCH, TRITON)


@dataclass(frozen=True)
class Variable:
    """`name` is the field of `View`. `values`: all that could be written, of numbers those worth a proposal. `auto`:
    what it may become where nothing is written, the best first, by the facts and earlier variables. `why` says so of
    the first of them, `prefers` of all in words. `spell`: values that are written otherwise. `limit`: whatever is below
    a legal value is legal. `sole`: the manifest takes no auto for the key, so that leaving it out is its one value."""

    key: str
    name: str
    values: Callable[[Facts], tuple[Any, ...]]
    auto: Callable[[View], tuple[Any, ...]]
    why: Callable[[View], str]
    prefers: str
    spell: tuple[tuple[str, str], ...] = ()
    limit: bool = False
    sole: bool = False

    def spelled(self, value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return dict(self.spell).get(str(value), str(value))


@dataclass(frozen=True)
class Rule:
    """`holds` reads the variables of `keys`, by their names, and of the facts those of `facts`. `text` is the rule in
    words; `because` the same for one checkpoint and one machine. `chosen`: an engine that was forced would start all
    the same, so that the refusal is the project's choice."""

    name: str
    keys: tuple[str, ...]
    holds: Callable[[View], bool]
    text: str
    because: Callable[[Facts], str] | None = None
    facts: tuple[str, ...] = ()
    chosen: bool = False

    def words(self, facts: Facts) -> str:
        return self.text if self.because is None else self.because(facts)
