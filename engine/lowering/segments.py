"""Operations that torch.compile compiles for an executor, and why it leaves out the others. Independent of torch.

Consecutive operations are compiled together (a segment). With torch as the executor, a segment has every operation that
depends on the rows of its buffers, on weights, and on the angles or positions of the tokens. Triton executes most
operations with kernels of its own; only operations without one form segments there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engine.lowering.operations import (
    AbsorbQueries,
    Activation,
    Add,
    AddMedia,
    AddNormalize,
    AllReduce,
    Attend,
    AttendContext,
    AttendLatent,
    AttendLocal,
    BlockLinear,
    Bound,
    Clamp,
    Collect,
    Combine,
    Correct,
    CutHeads,
    Embed,
    EmbedAudio,
    EmbedMedia,
    ExpandValues,
    ExpertLinear,
    FillMedia,
    ForeignDecoder,
    Gate,
    GatedNorm,
    Input,
    InsertMedia,
    Keep,
    Linear,
    LookUp,
    LookUpPositions,
    Multiply,
    Normalize,
    NormalizeGroups,
    NormalizeParts,
    PadValues,
    Predict,
    PrepareIndex,
    PrepareKV,
    PrepareLatent,
    QKNorm,
    ReadStates,
    Recurrence,
    Repeat,
    Rotate,
    Route,
    Scale,
    ScaleQueries,
    ScaleRoutes,
    SelectKeys,
    Sparsify,
    Spread,
    Tanh,
    WriteKV,
)
from engine.lowering.program import Op, values_written

Executor = Literal["torch", "triton"]

_KERNEL, _PAGES, _TOKENS = "has a Triton kernel", "uses pages", "selects rows by token"
_EXPERTS, _STATES = "its shapes or its order depend on routes", "updates states row by row"

# Why torch.compile leaves out an operation of both executors. Operations that are not here depend only on rows.
LEFT_OUT: dict[type[Op], str] = {
    **dict.fromkeys((Input, Embed, EmbedAudio, EmbedMedia, LookUp, LookUpPositions), _TOKENS),
    **dict.fromkeys((InsertMedia, AddMedia, FillMedia, ReadStates), _TOKENS),
    **dict.fromkeys((WriteKV, PrepareKV, Attend, PrepareLatent, PrepareIndex, SelectKeys, AttendLatent), _PAGES),
    **dict.fromkeys((Route, ScaleRoutes, ExpertLinear, Combine), _EXPERTS),
    **dict.fromkeys(get_args(Recurrence), _STATES),
    AttendContext: "is of a tower, which torch.compile does not compile",
    AttendLocal: "is of a tower, which torch.compile does not compile",
    Repeat: "is of a tower, which torch.compile does not compile",
    AllReduce: "adds over ranks",
    ForeignDecoder: "is transformers' code, of which the modules without keys and values are compiled",
}
ROWS: tuple[type[Op], ...] = (
    *(Keep, Normalize, NormalizeParts, NormalizeGroups, AddNormalize, Linear, Activation, Add, Multiply, Scale, Clamp),
    *(QKNorm, Rotate, ScaleQueries, AbsorbQueries, ExpandValues, BlockLinear, PadValues, CutHeads, Gate, GatedNorm),
    *(Spread, Predict, Correct, Collect, Tanh, Sparsify, Bound),
)
"""Operations that torch.compile compiles if torch executes the program."""
WITHOUT_KERNEL: tuple[type[Op], ...] = (
    *(Keep, Add, Multiply, Scale, Clamp, ScaleQueries, PadValues, CutHeads, Gate),
    *(Spread, Predict, Correct, Collect, Tanh, Sparsify),
)
"""Operations of `ROWS` without a Triton kernel, which torch executes beside Triton kernels."""


def is_compiled(op: Op, executor: Executor) -> bool:
    """Return whether torch.compile compiles the operation."""
    return isinstance(op, ROWS if executor == "torch" else WITHOUT_KERNEL)


def why_left_out(op: Op, executor: Executor) -> str:
    """Return the reason for an operation that is not compiled."""
    if executor == "triton" and isinstance(op, Linear):
        return "is a product of the library, or has a Triton kernel"
    known = LEFT_OUT.get(type(op))
    return _KERNEL if known is None or (executor == "triton" and known in (_PAGES, _EXPERTS, _STATES)) else known


@dataclass(frozen=True)
class Coverage:
    """Operations of a program by name."""

    compiled: dict[str, int]  # number of operations of each name
    left_out: dict[str, str]  # reason by name

    @property
    def text(self) -> str:
        """The coverage as one line, such as `Linear (12), Normalize (7); not Attend (uses pages)`."""
        named = ", ".join(f"{name} ({count})" for name, count in self.compiled.items())
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        others = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        return named + (f"; not compiled: {others}" if others else "")


def coverage(ops: Sequence[Op], executor: Executor) -> Coverage:
    """Return which of the operations torch.compile compiles, and why it leaves out the others."""
    compiled = Counter(type(op).__name__ for op in ops if is_compiled(op, executor))
    others = (op for op in ops if not is_compiled(op, executor))
    return Coverage(dict(sorted(compiled.items())), {type(op).__name__: why_left_out(op, executor) for op in others})


@dataclass(frozen=True)
class Segment:
    """Consecutive operations. `unused`: for each, the buffers that nothing reads afterwards."""

    ops: tuple[Op, ...]
    unused: tuple[tuple[str, ...], ...]
    compiled: bool

    @property
    def dead(self) -> tuple[str, ...]:
        """The buffers that nothing reads after the segment."""
        found: set[str] = set()
        for op, names in zip(self.ops, self.unused, strict=True):
            found = (found - {value.name for value in values_written(op)}) | set(names)
        return tuple(sorted(found))

    def halves(self) -> tuple["Segment", "Segment"]:
        """Divide a segment of several operations in two."""
        middle = len(self.ops) // 2
        return (
            Segment(self.ops[:middle], self.unused[:middle], self.compiled),
            Segment(self.ops[middle:], self.unused[middle:], self.compiled),
        )


def segments(
    ops: Sequence[Op],
    unused: Sequence[tuple[str, ...]],
    executor: Executor,
    has_adapters: Callable[[Op], bool] = lambda op: False,
) -> tuple[Segment, ...]:
    """Divide a program into segments that are compiled and segments that are not. Projections with LoRA adapters, which
    depend on the requests of a step, are not compiled."""
    found: list[Segment] = []
    for op, names in zip(ops, unused, strict=True):
        compiled = is_compiled(op, executor) and not has_adapters(op)
        if found and found[-1].compiled == compiled:
            found[-1] = Segment((*found[-1].ops, op), (*found[-1].unused, names), compiled)
        else:
            found.append(Segment((op,), (names,), compiled))
    return tuple(found)
