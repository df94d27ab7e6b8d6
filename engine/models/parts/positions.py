"""Positions: rotary embeddings and their scalings, biases by distance, positions of patches."""

from typing import Literal

from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class LinearScaling:
    """Divide all frequencies by `factor`."""

    factor: float


@declared(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK: beyond `original` tokens, the base grows with the length of the sequence."""

    factor: float
    original: int


@declared(frozen=True, kw_only=True)
class Llama3Scaling:
    factor: float
    low_freq: float
    high_freq: float
    original: int


@declared(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0  # multiplies cos and sin
    truncate: bool = True  # round the correction range to integer dimensions


@declared(frozen=True, kw_only=True)
class LongScaling:
    """LongRoPE: one factor per frequency."""

    short: tuple[float, ...]  # for sequences of up to `original` tokens
    long: tuple[float, ...]  # for longer sequences
    original: int
    attention: float = 1.0


@declared(frozen=True, kw_only=True)
class NoRotation:
    """All frequencies are 0: the layer has no positions, but the shape of one that has (Kimi Linear)."""


@declared(frozen=True, kw_only=True)
class ProportionalScaling:
    """Only the first `pairs` frequencies are used, divided by `factor`; all others are 0 (Gemma 4)."""

    pairs: int
    factor: float = 1.0


Scaling = NoRotation | ProportionalScaling | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@declared(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding."""

    dim: int  # the first `dim` dimensions of each head are rotated
    theta: float
    interleaved: bool = False  # pairs are adjacent; else they are half of `dim` apart
    scaling: Scaling | None = None

    def variant(self, length: int) -> int:
        """Return an identifier of the scaling that applies to a sequence of this length. Keys depend on it, so
        sequences of different variants never share cached blocks."""
        match self.scaling:
            case DynamicScaling(original=original):
                return length if length > original else 0
            case LongScaling(original=original):
                return int(length > original)
            case _:
                return 0


@declared(frozen=True, kw_only=True)
class Alibi:
    """Linear bias (arXiv:2108.12409): slope of the head · (position of the key - position of the query), added to the
    scores."""

    max_bias: float = 8.0  # the last of a power of two of heads has the slope 2 ** -max_bias
    factor: float = 1.0  # multiplies all slopes

    def slopes(self, heads: int) -> tuple[float, ...]:
        """Return the slope of each of a model's heads. For n heads, a power of two, they are 2 ** (-max_bias · i / n)
        for i = 1 … n. Other numbers of heads have the slopes of the largest power of two below, then every second slope
        of its double."""
        power = 1 << (heads.bit_length() - 1)
        exponents = [(i + 1) / power for i in range(power)] + [(i + 0.5) / power for i in range(heads - power)]
        return tuple(self.factor * 2.0 ** (-self.max_bias * exponent) for exponent in exponents)


@declared(frozen=True, kw_only=True)
class RelativeBias:
    """Learned bias of each head for the distance d = position of the key - position of the query, added to the scores
    (T5, arXiv:1910.10683, section 2.1). Distances share `buckets` biases.

    Bidirectional attention uses half of the buckets for d ≤ 0, the other half for d > 0. Causal attention uses all of
    them for d ≤ 0. Of n buckets of a direction, the first n // 2 are for single distances |d| = 0, 1, …; the others are
    for ranges that grow by a constant factor up to `max_distance`. Larger distances are in the last one.
    """

    buckets: int
    max_distance: int
    bidirectional: bool
    source: str  # name of the layer in the checkpoint, [buckets, heads]; several attentions may share it

    @property
    def exact(self) -> int:
        """Number of buckets of a direction that are for a single distance."""
        return self.buckets // (4 if self.bidirectional else 2)


@declared(frozen=True, kw_only=True)
class DistanceTable:
    """Learned bias of each head for each distance d = position of the key - position of the query, added to the scores
    of bidirectional attention (Phi-4's Conformer). A table has rows for -max_distance ≤ d < max_distance, or for
    0 ≤ |d| < max_distance if it is `symmetric`. Other distances have the bias of the nearest."""

    max_distance: int
    symmetric: bool
    source: str  # name of the layer in the checkpoint, [buckets, heads]; several attentions may share it

    @property
    def buckets(self) -> int:
        return self.max_distance * (1 if self.symmetric else 2)


@declared(frozen=True, kw_only=True)
class QueryScale:
    """Factor of the queries at position p: 1 + scale · log(1 + floor((p + offset) / length))."""

    scale: float
    length: int
    offset: int = 0


@declared(frozen=True, kw_only=True)
class PatchPositions:
    """Learned table for a square grid of patches, whose rows are added to the patches.

    `fit` says how the table fits other grids:

    none      it does not: all images have the size of the table
    bilinear  bilinear interpolation between the centres of patches, with antialiasing (SigLIP 2)
    corners   bilinear interpolation, with the corners of the grid at the corners of the table (Qwen3-VL)
    bicubic   bicubic interpolation between the centres of patches
    nearest   the row of the table whose share of the side has the patch's begin (Idefics3)
    axes      there are two tables, one after the other: for columns, then for rows; their rows are added (Gemma 4)
    """

    name: str
    side: int
    fit: Literal["none", "bilinear", "corners", "bicubic", "nearest", "axes"] = "none"
    quotients: bool = False  # with `nearest`: shares are quotients, else multiples of the share of a patch (MiniCPM-V)
    class_row: bool = False  # the table has a row for the class token, in the place of the token
    stored: tuple[int, ...] = ()  # shape in the checkpoint, if it is not [rows, hidden]

    @property
    def rows(self) -> int:
        return 2 * self.side if self.fit == "axes" else self.side**2 + self.class_row


@declared(frozen=True, kw_only=True)
class GridRope:
    """Rotary positions of patches. Pair i of a head is rotated by p · theta^-exponents[i], where p is the patch's row
    (axes[i] = 0) or column (axes[i] = 1), counted from `first`."""

    rope: Rope  # of the attention, for its dimensions and pairs
    axes: tuple[int, ...]
    exponents: tuple[float, ...]
    first: int = 0


@declared(frozen=True, kw_only=True)
class GridPositions:
    """M-RoPE (arXiv:2409.12191): a token of an item has a position in time, height and width, and each pair of a head
    is rotated by one of them. The next text token continues after the largest position."""

    sections: tuple[int, ...]  # numbers of pairs for time, height and width
    interleaved: bool  # pairs alternate between the three; else they are in three runs
    side: int  # patches of a token's side
    time: Literal["frames", "seconds", "separate"]
    """Position in time of a video's frame: its number; its time in units of 1 / tokens_per_second (Qwen2.5-VL); or 0,
    as each frame is an item of its own between text tokens (Qwen3-VL)."""
    tokens_per_second: float = 1.0
    after_time: bool = False  # the next text token continues after the largest position in time too (Qwen2.5-Omni)
