"""Matrix products that executors have for quantized weights, as data: which weights can be fused, how ranks may split
them, and their size in memory. A format without such a product is dequantized when it is loaded.

Groups    integers with a scale for each output and group of inputs: compiled kernels (kernels/cpu/linear_int.h) and
          Triton kernels (kernels/integers.py)
GgmlBlocks  blocks of a type of ggml: compiled kernels (kernels/cpu/linear_blocks.cpp) and Triton kernels
          (kernels/block_matmul.py); or of NVFP4, MXFP8, NF4 or FP4: Triton kernels
Segmented   outputs of several products, one after another: compiled kernels and Triton kernels
E4M3      float8_e4m3fn with a scale for each matrix, output or block: Triton kernels (kernels/fp8.py)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kernels.ggml_layout import LAYOUTS, layout_of, row_bytes
from kernels.integer_layout import packed_bytes
from kernels.plane_layout import PLANES, high_bytes, low_bytes, num_groups, num_units

Executor = Literal["torch", "compiled", "triton"]
EXECUTORS: tuple[Executor, ...] = ("torch", "compiled", "triton")
Role = Literal["projection", "head", "expert", "exact"]
"""Use of a matrix. expert: of a routed expert. exact: not quantized at load, such as a router."""
ROLES: tuple[Role, ...] = ("projection", "head", "expert", "exact")
CHANNEL_GROUP = 128  # matrices with one scale per output are stored in groups of this size with equal scales
FP8_BLOCK = 128  # number of outputs, and of inputs, of an fp8 block with one scale
MOST_RANKS = 64
Places = Sequence[tuple[int, int]]


class Piece(NamedTuple):
    """A tensor that a matrix takes in memory."""

    suffix: str  # of its name
    what: str  # data type, for people
    factors: tuple[int, ...]  # the product is the size in bytes
    temporary: int = 0  # additional bytes while it is loaded


@dataclass(frozen=True)
class Groups:
    """Integers of 4 or 8 bits with a scale for each output and group of inputs, and optional zero points."""

    bits: int
    group: int | None  # number of inputs that share a scale; None: all
    zeros: bool = False  # has zero points; else the zero point is the midpoint
    ordered: bool = False  # an index assigns inputs to groups (act order); else groups are contiguous
    inputs: Literal["static", "dynamic"] | None = None
    """How activations are quantized to 8 bits (W8A8): by a scale of the checkpoint, by a scale for each token, or not.
    Triton kernels follow it for integers with one scale per output; compiled kernels quantize all activations."""

    def __str__(self) -> str:
        return f"{self.bits} bits, {'one scale per output' if self.group is None else f'groups of {self.group}'}"

    def roles(self, executor: Executor) -> tuple[Role, ...]:
        """Return the matrices that an executor multiplies by in this form."""
        if executor == "compiled":
            return ROLES
        # The experts of a layer are multiplied at once, so their inputs have one order.
        on_gpu: tuple[Role, ...] = ("projection", "head") if self.ordered else ("projection", "head", "expert")
        return on_gpu if executor == "triton" else ()

    @property
    def kind(self) -> tuple[Any, ...]:
        """Matrices of the same kind can be fused."""
        return self.bits, self.group, self.inputs

    @property
    def layout(self) -> tuple[Any, ...]:
        """Experts of a layer need the same layout."""
        return self.bits, self.group or CHANNEL_GROUP, self.zeros, self.inputs

    def joined(self, others: Sequence["Groups"]) -> "Groups":
        """Return the product of a fused matrix. others: of all its sources, of one kind."""
        zeros, ordered = any(one.zeros for one in others), any(one.ordered for one in others)
        return replace(self, zeros=zeros, ordered=ordered)

    def split_problem(self, inputs: int, ranks: int) -> str | None:
        """Return why ranks cannot split these inputs, or None."""
        if self.ordered:
            return f"has groups in act order, which {ranks} ranks cannot share"
        if self.group is not None and inputs // ranks % self.group:
            return f"has groups of {self.group} inputs, and {ranks} ranks would get {inputs // ranks} of {inputs} each"
        return None

    def pieces(self, rows: int, inputs: int, width: int, scale_bytes: int, places: Places) -> tuple[Piece, ...]:
        """Return the tensors of a matrix. width: lanes of a CPU's vector, 0 on a GPU. scale_bytes: of a scale in the
        checkpoint. places: start of each piece of the matrix, in its source and in the matrix."""
        group, zeros = self.group or CHANNEL_GROUP, self.zeros and self.bits == 4
        if width == 0:
            return self._pieces_on_gpu(rows, inputs, group, scale_bytes, zeros=zeros)
        what = f"int{self.bits}, groups of {group} with a scale{' and a zero point' if zeros else ''}"
        side = width * (1 if self.bits == 4 else 2)
        factors = -(-rows // side) * side, -(-inputs // group), group * self.bits // 8 + scale_bytes + zeros
        # unpacked, joined, padded and reordered, one byte each
        numbers = Piece("", what, factors, temporary=6 * rows * inputs)
        has_order = self.ordered and self.group is not None
        return (numbers, Piece(" (order)", "int32", (inputs, 4))) if has_order else (numbers,)

    def _pieces_on_gpu(self, rows: int, inputs: int, group: int, scale_bytes: int, *, zeros: bool) -> tuple[Piece, ...]:
        """Tensors of kernels/integers.py."""
        if self.inputs is not None:
            values = Piece("", "int8", (rows, inputs), 6 * rows * inputs)
            found = [values, Piece(" (scales)", "one scale per output", (rows, 4))]
            return (*found, *([Piece(" (scale of the inputs)", "float32", (4,))] if self.inputs == "static" else ()))
        groups = -(-inputs // group)
        # The numbers are unpacked, joined, padded and packed on the way.
        found = [Piece("", f"int{self.bits}", (rows, packed_bytes(inputs, self.bits, group)), 6 * rows * inputs)]
        found.append(Piece(" (scales)", f"groups of {group}", (groups, rows, scale_bytes)))
        if zeros:
            found.append(Piece(" (zero points)", "uint8", (groups, rows)))
        if self.ordered and self.group is not None:
            found.append(Piece(" (order)", "int32", (inputs, 4)))
        return tuple(found)


Scales = Literal["tensor", "channel", "block"]
_SCALES = {
    "tensor": "one scale per matrix",
    "channel": "one scale per output",
    "block": f"blocks of {FP8_BLOCK} x {FP8_BLOCK}",
}


@dataclass(frozen=True)
class E4M3:
    """float8_e4m3fn. Scales per output and per matrix can be fused, block scales only with block scales; activations
    must be quantized in the same way."""

    scales: Scales
    inputs: Literal["static", "dynamic"] | None = None
    """How activations are quantized: by a scale of the checkpoint, by a scale for each token, or not."""

    def __str__(self) -> str:
        return f"fp8, {_SCALES[self.scales]}"

    def roles(self, executor: Executor) -> tuple[Role, ...]:
        return ("projection", "expert") if executor == "triton" else ()

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.scales == "block", self.inputs

    @property
    def layout(self) -> tuple[Any, ...]:
        return ("e4m3", *self.kind)

    def joined(self, others: Sequence["E4M3"]) -> "E4M3":
        return self if self.scales == "block" else replace(self, scales="channel")

    def split_problem(self, inputs: int, ranks: int) -> str | None:
        if self.scales == "block" and inputs // ranks % FP8_BLOCK:
            return f"has blocks of {FP8_BLOCK} inputs, and {ranks} ranks would get {inputs // ranks} of {inputs} each"
        return None

    def pieces(self, rows: int, inputs: int, width: int, scale_bytes: int, places: Places) -> tuple[Piece, ...]:
        scales: tuple[int, ...] = (rows, 4)
        if self.scales == "block":
            scales = -(-rows // block_unit(places)), -(-inputs // FP8_BLOCK), 4
        found = (
            Piece("", "fp8", (rows, inputs, 1), temporary=rows * inputs),
            Piece(" (scales)", "float32", scales),
        )
        return (*found, Piece(" (scale of the inputs)", "float32", (4,))) if self.inputs == "static" else found


@dataclass(frozen=True)
class GgmlBlocks:
    """Blocks of a type of ggml, as the file has them, or on a GPU in planes (kernels/plane_layout.py); or of floats."""

    type: str

    def __str__(self) -> str:
        return self.type

    def roles(self, executor: Executor) -> tuple[Role, ...]:
        if executor == "compiled":
            return ROLES if self.type in LAYOUTS else ()
        return ("projection", "head", "expert") if executor == "triton" and self.type in PLANES else ()

    @property
    def kind(self) -> tuple[Any, ...]:
        return (self.type,)

    @property
    def layout(self) -> tuple[Any, ...]:
        return (self.type,)

    def joined(self, others: Sequence["GgmlBlocks"]) -> "GgmlBlocks":
        return self

    def split_problem(self, inputs: int, ranks: int) -> str | None:
        size = layout_of(self.type).inputs
        if inputs // ranks % size:
            return f"has blocks of {size} inputs, and {ranks} ranks would get {inputs // ranks} of {inputs} each"
        return None

    def pieces(self, rows: int, inputs: int, width: int, scale_bytes: int, places: Places) -> tuple[Piece, ...]:
        if width == 0:
            return self._planes(rows, inputs)
        bytes_of_row = row_bytes(self.type, inputs)
        # The rows are cut and joined, and then packed.
        factors = -(-rows // width) * width, bytes_of_row
        return (Piece("", self.type, factors, temporary=3 * rows * bytes_of_row),)

    def _planes(self, rows: int, inputs: int) -> tuple[Piece, ...]:
        """Tensors of kernels/planes.py."""
        kind, layout = self.type, PLANES[self.type]
        # The blocks are cut and joined, and their codes are unpacked and packed on the way.
        temporary = 2 * rows * row_bytes(kind, inputs) + 5 * rows * inputs
        found = [Piece("", f"{kind}, {layout.low} bits", (rows, low_bytes(kind, inputs)), temporary)]
        if layout.high:
            found.append(Piece(f" ({layout.high} high bits)", kind, (rows, high_bytes(kind, inputs))))
        terms = "scales and minimums" if layout.minima else "scales"
        factors = num_groups(kind, inputs), layout.terms, rows, layout.scale_bytes
        found.append(Piece(f" ({terms})", f"groups of {layout.group}", factors))
        if layout.units:
            what = "float16" if layout.unit_bytes == 2 else "float32"
            sizes = num_units(kind, inputs), layout.units, rows, layout.unit_bytes
            found.append(Piece(" (factors)", what, sizes))
        return tuple(found)


@dataclass(frozen=True)
class Segmented:
    """Sources with different products, one after another: kernels multiply by each in turn."""

    natives: tuple["Groups | GgmlBlocks", ...]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(str, self.natives)))

    def roles(self, executor: Executor) -> tuple[Role, ...]:
        if executor == "compiled":
            return ("projection", "exact")
        return ("projection",) if executor == "triton" else ()

    @property
    def kind(self) -> tuple[Any, ...]:
        return tuple(one.kind for one in self.natives)

    @property
    def layout(self) -> tuple[Any, ...]:
        return tuple(one.layout for one in self.natives)

    def joined(self, others: Sequence["Segmented"]) -> "Segmented":
        raise AssertionError("products of several sources are not joined again")

    def split_problem(self, inputs: int, ranks: int) -> str | None:
        return next(filter(None, (one.split_problem(inputs, ranks) for one in self.natives)), None)

    def pieces(self, rows: int, inputs: int, width: int, scale_bytes: int, places: Places) -> tuple[Piece, ...]:
        raise AssertionError("each segment has pieces of its own")


Native = Groups | E4M3 | GgmlBlocks | Segmented


def fuse(sources: Iterable[Native | None]) -> Native | None:
    """Return the product of a matrix that is fused from these sources, or None if they must be dequantized."""
    found: list[Any] = list(dict.fromkeys(sources))
    if any(one is None for one in found):
        return None
    if len({(type(one), one.kind) for one in found}) != 1:
        has_blocks = any(isinstance(one, GgmlBlocks) for one in found)
        in_order = all(isinstance(one, GgmlBlocks) or (isinstance(one, Groups) and not one.ordered) for one in found)
        return Segmented(tuple(found)) if has_blocks and in_order else None
    joined: Native = found[0].joined(found)
    return joined


def runs(natives: Sequence[Native]) -> list[slice]:
    """Return the longest runs of adjacent sources that have products of one kind."""
    found: list[slice] = []
    for at, one in enumerate(natives):
        if found and (type(one), one.kind) == (type(natives[at - 1]), natives[at - 1].kind):
            found[-1] = slice(found[-1].start, at + 1)
        else:
            found.append(slice(at, at + 1))
    return found


def block_unit(places: Iterable[tuple[int, int]]) -> int:
    """Return how many consecutive rows of a fused matrix share a scale if its sources have block scales. Pieces may
    start within a block. places: first row of each piece in its source and in the matrix."""
    return math.gcd(FP8_BLOCK, *(row for place in places for row in place))


def split_sizes(native: Native, inputs: int) -> tuple[int, ...]:
    """Return the numbers of ranks that can split these inputs."""
    sizes = (size for size in range(1, MOST_RANKS + 1) if inputs % size == 0)
    return tuple(size for size in sizes if size == 1 or native.split_problem(inputs, size) is None)
