"""Types of the constraint model: rules, variables and views of the choices.

A variable is a manifest key with a value from the operator, or with `auto`, which selects from a few values. A rule
relates variables to each other and to facts of the checkpoint and the machine. `solve.py` finds choices or a conflict.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from appliance.constraints.facts import ModelFacts
from appliance.hardware.machine import Machine
from engine.api.config import (
    Device,
    Dtype,
    EmbeddingBits,
    HeadBits,
    KVDtype,
    MatmulPrecision,
    SpeculationMethod,
    WeightBits,
)
from kernels.cpu.library import BF16_VARIANTS

TORCH, TRITON = "torch", "triton"


@dataclass(frozen=True)
class Facts:
    """Facts that rules read."""

    model: ModelFacts
    machine: Machine
    lacks: "Callable[[View], str] | None" = field(default=None, compare=False)
    """Function that returns the memory shortage of a choice, "" if it fits; None disables the memory rule."""
    group_size: int = 0  # inputs that share a scale of weights quantized at load; 0: chosen for the model
    head: HeadBits = "auto"  # number format of the head
    embedding: EmbeddingBits = "stored"  # number format of the token embedding
    precision: MatmulPrecision = "highest"  # of float32 matrix products


@dataclass
class View:
    """Typed values of all variables. During the search, later variables still have the defaults below."""

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
    speculation: SpeculationMethod = "off"
    data: int = 1
    tensor: int = 1

    @property
    def activations(self) -> Dtype:
        """Return the type of the activations between operations, which compiled kernels always keep in float32."""
        return "float32" if is_compiled(self.kernels) else self.dtype

    @property
    def multiplies_bf16(self) -> bool:
        """Return whether compiled kernels multiply in bfloat16."""
        return self.kernels in BF16_VARIANTS and "bfloat16" in (self.dtype, self.facts.precision)


def is_compiled(kernels: str) -> bool:
    """Return whether these are compiled CPU kernels, which use packed weights."""
    return kernels not in (TORCH, TRITON)


@dataclass(frozen=True)
class Variable:
    """A manifest key that takes part in the constraints."""

    key: str
    name: str  # field of `View`
    values: Callable[[Facts], tuple[Any, ...]]
    """All values that can be written; for numbers, only those worth suggesting."""
    auto: Callable[[View], tuple[Any, ...]]  # values of auto by facts and earlier variables, best first
    why: Callable[[View], str]  # reason for the first value of `auto`
    prefers: str  # preferences of `auto` as text
    reads: tuple[str, ...] = ()  # earlier variables that `auto` reads
    spell: tuple[tuple[str, str], ...] = ()  # values whose YAML text differs
    limit: bool = False  # True: any value below a legal value is legal
    sole: bool = False  # True: the key does not accept auto, so omitting it is the only alternative to a value

    def spelled(self, value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return dict(self.spell).get(str(value), str(value))


@dataclass(frozen=True)
class Rule:
    """A condition on variables and facts."""

    name: str
    keys: tuple[str, ...]  # variables that `holds` reads
    holds: Callable[[View], bool]
    text: str  # the rule as text
    because: Callable[[Facts], str] | None = None  # text for a specific checkpoint and machine
    facts: tuple[str, ...] = ()  # facts that `holds` reads
    chosen: bool = False  # True: the engine could start despite the rule, so the refusal is a policy

    def words(self, facts: Facts) -> str:
        return self.text if self.because is None else self.because(facts)
