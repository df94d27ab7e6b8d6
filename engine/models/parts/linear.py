"""Projections and small tensors, with the rows that each takes from tensors of the checkpoint."""

from collections import Counter
from dataclasses import replace

from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class Rows:
    """Output rows of a projection that come from one checkpoint tensor."""

    source: str  # the tensor's name
    units: int  # number of heads, or of rows
    width: int = 1  # rows per unit
    at: int = 0  # first row in the tensor
    groups: int = 1  # the units are in this many equal runs of consecutive rows
    stride: int = 0  # rows of the tensor from the start of a run to that of the next
    step: int = 1  # rows of the tensor from one row to the next (2: the rows of two projections alternate)
    has_bias: bool = True  # False: in a projection with a bias, that of these rows is 0 and not stored (Whisper's keys)
    period: int = 0  # number of units in the tensor if the others repeat them; 0: it has all units

    @property
    def stored(self) -> int:
        """Number of units in the tensor."""
        return self.period or self.units


@declared(frozen=True, kw_only=True)
class Linear:
    """y = x W^T (+ b)."""

    rows: tuple[Rows, ...]
    inputs: int
    split: str | None  # axis that tensor parallelism divides: "rows", "inputs" or None
    bias: bool = False


@declared(frozen=True, kw_only=True)
class LowRankUpdate:
    """Matrices of low rank, whose product with x is added to projections of x that other layers share (Zamba2):
    W x + B A x. A and B are stored as `name`.0 and `name`.1."""

    rank: int
    names: tuple[str, ...]  # for each projection


@declared(frozen=True, kw_only=True)
class Parameter:
    """Rows of small tensors that are kept in float32. They are divided among ranks like the heads whose rows they
    have."""

    rows: tuple[Rows, ...]  # `source` is the full name of a tensor
    inner: tuple[int, ...] = ()  # shape of a row in the checkpoint
    values: tuple[float, ...] | None = None  # numbers that are not in the checkpoint
    divided: bool = True
    repeat: int = 1  # times that each row is kept: D of a head for each of its channels
    taps: bool = False  # of a convolution: compiled kernels keep it as [conv, channels]
    negative_exp: bool = False  # the value is -exp(tensor): A of a recurrence, stored as its logarithm
    stored: tuple[int, ...] = ()  # shape in the checkpoint, if it is not [rows] or [rows, inner]


@declared(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint that layers read under another name, shape or scale."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    scale: str = ""  # name of a vector, by whose elements the rows are multiplied
    added: tuple["StoredTensor", ...] = ()  # vectors that are added to this one, one after another
    half: int = 0
    """Rows of half a head, if each half is rotated by itself. The second quarter of a head is exchanged with the third,
    so that the halves of the pairs are half a head apart."""


def packed(*rows: Rows) -> tuple[Rows, ...]:
    """Set `at` of rows so that rows of the same source are consecutive in it."""
    at: Counter[str] = Counter()
    placed = []
    for piece in rows:
        placed.append(replace(piece, at=at[piece.source]))
        at[piece.source] += piece.stored * piece.width
    return tuple(placed)


def parameter(source: str, *sizes: tuple[int, int], inner: tuple[int, ...] = ()) -> Parameter:
    """Return consecutive rows of one tensor. sizes: units of each piece, and rows per unit."""
    rows = (Rows(source=source, units=units, width=width) for units, width in sizes)
    return Parameter(rows=packed(*rows), inner=inner)
