"""Interface of recurrent mixers: their tensors, their division among ranks, and the state of a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from engine.models.parts.linear import Linear, Parameter, Rows, packed
from engine.models.parts.norms import RMSNorm

Shape = tuple[int, ...]
OwnUnits = Callable[[int, str], int]
"""Number of units and their name → how many of them a rank has."""


class Recurrent(ABC):
    """A part whose memory of a sequence has a fixed size. Its lowering is in engine/lowering/recurrent.py."""

    hidden: int  # size of inputs and outputs
    name: str  # of the module in a layer
    norms: tuple[RMSNorm, ...] = ()  # of values between two projections

    @abstractmethod
    def linears(self) -> tuple[Linear, ...]:
        """Return the projections; the last one is the output projection."""

    def exact_linears(self) -> tuple[Linear, ...]:
        """Return the projections that are never quantized: to decays, gates and time steps."""
        return ()

    @abstractmethod
    def parameters(self) -> dict[str, Parameter]:
        """Return the small tensors by role, such as conv, conv_bias, A, dt_bias, D and norm."""

    def block_matrices(self) -> dict[str, Shape]:
        """Return name and shape [heads, inputs, outputs] of tensors with a matrix for each head. They are never
        quantized."""
        return {}

    @abstractmethod
    def units(self) -> tuple[tuple[int, str], ...]:
        """Return the numbers that ranks divide, each with its name."""

    @abstractmethod
    def state_shapes(self, own: OwnUnits) -> tuple[Shape, ...]:
        """Return the shapes of the states of a sequence on a rank: the inputs of the convolution, then the state of the
        recurrence."""

    @abstractmethod
    def work_width(self, own: OwnUnits) -> int:
        """Return the elements per token of the values that torch keeps at once on a rank."""


def conv_taps(channels: Sequence[Rows], width: int, names: Sequence[str] = ("conv1d",)) -> Parameter:
    """Return the weights [channels, 1, width] of a causal convolution. channels: rows of the projections whose outputs
    it reads. names: of its tensor, or of a tensor for each of `channels`."""
    sources = names if len(names) == len(channels) else (*names,) * len(channels)
    rows = (
        Rows(source=f"{source}.weight", units=piece.units, width=piece.width, period=piece.period)
        for source, piece in zip(sources, channels, strict=True)
    )
    return Parameter(rows=packed(*rows), inner=(1, width), taps=True)


def projected_width(part: Recurrent, own: OwnUnits) -> int:
    """Return elements per token: projections, the output of the convolution, and float32 copies of queries, keys,
    values and outputs."""
    into = part.linears()[:-1]
    return 6 * max(sum(own(row.units, "rows") * row.width for row in linear.rows) for linear in into)
