"""Weights in the order in which the compiled kernels read them (linear.h, linear_amx.h, linear_pairs.h, linear_int.h).

form         order                                                          used for
tiles_f32    [outputs / 2V][input][2V], V floats to a vector                float32, and types that round differently
tiles_bf16   the same in bf16: half the bytes, the same numbers             bf16 checkpoints
amx_bf16     [outputs / 16][inputs / 32][pair of inputs][output][2]         bf16 checkpoints on CPUs with matrix tiles
pairs_bf16   the same order; activations are rounded to bf16                all types, with bf16 arithmetic
tiles_int4   [outputs / V][group]{pairs of words, scales, zero points}      4 bits
tiles_int8   [outputs / 2V][group]{words, scales}, 128 for zero             8 bits
blocks_…     [outputs / V][block]{codes, scales of sub-blocks, scales}      blocks of ggml (block_codes.h)

Outputs are padded, and inputs are padded to whole words, groups or blocks, with values that multiply as zero.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.library import Tiling, best, in_threads, load
from kernels.ggml_blocks import BlockWeight
from kernels.ggml_layout import LAYOUTS, row_bytes
from kernels.quantisation import Int4Weight, Int8Weight

BLOCK_FORMS = {kind: f"blocks_{kind.lower()}" for kind in LAYOUTS}
FORMS = ("tiles_f32", "tiles_bf16", "amx_bf16", "pairs_bf16", "tiles_int4", "tiles_int8", *BLOCK_FORMS.values())
LARGE = 1 << 20  # bytes from which several threads copy
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates the memory of a packed weight."""


@dataclass(frozen=True)
class Pieces:
    """A matrix [outputs, inputs] whose rows are copied from several tensors, each of them once, so that they may be
    views of a file."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    read: Callable[[], Iterable[tuple[int, Tensor]]]
    """Returns the first output of each piece and its rows, [rows, inputs] of any type."""

    def whole(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the matrix in one tensor of another type."""
        found = torch.empty((self.outputs, self.inputs), dtype=dtype, device=device)
        for at, rows in self.read():
            found[at : at + len(rows)].copy_(rows)
        return found


Weight = Tensor | Pieces | Int8Weight | Int4Weight | BlockWeight


@dataclass(frozen=True)
class Packed:
    """Packed weight of one linear."""

    data: Tensor
    form: str
    outputs: int
    inputs: int
    group: int = 0  # inputs that share a scale, which is stored within `data`; 0: none
    zeros: bool = False  # whether 4-bit weights have zero points
    scale_type: torch.dtype = torch.float16  # of the scales within `data`
    order: Tensor | None = None  # [inputs] int32, the input that each column multiplies; default: column i is input i

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + sum(one.nbytes for one in (self.order,) if one is not None)


@dataclass(frozen=True)
class Segments:
    """Packed weight in several forms. The outputs of a piece come after the outputs of the previous piece."""

    pieces: tuple[Packed, ...]


def form_for(weight: Weight, tiling: Tiling) -> str:
    """Return the fastest form that keeps every number of the weight. bf16 arithmetic rounds other types to bf16."""
    match weight:
        case Int8Weight():
            return "tiles_int8"
        case Int4Weight():
            return "tiles_int4"
        case BlockWeight():
            return BLOCK_FORMS[weight.kind]
        case _ if tiling.bf16:
            return "pairs_bf16"
        case _ if weight.dtype == torch.bfloat16:
            return "amx_bf16" if tiling.matrix else "tiles_bf16"
    return "tiles_f32"


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def pack(weight: Weight, tiling: Tiling, form: str | None = None, empty: Empty = _fresh) -> Packed:
    """Pack a weight, [outputs, inputs]. `form` None: the best form for it."""
    form = form or form_for(weight, tiling)
    if isinstance(weight, BlockWeight):
        return _pack_blocks(weight, form, tiling, empty)
    if isinstance(weight, Int8Weight | Int4Weight):
        return _pack_groups(weight, form, tiling, empty)
    if isinstance(weight, Pieces):
        return _pack_pieces(weight, form, tiling, empty)
    return _pack_pieces(Pieces(*weight.shape, weight.dtype, lambda: [(0, weight)]), form, tiling, empty)


def _pack_pieces(weight: Pieces, form: str, tiling: Tiling, empty: Empty) -> Packed:
    outputs, inputs = weight.outputs, weight.inputs
    if form in ("amx_bf16", "pairs_bf16"):
        side, word, wide, kept = 16, 2, -(-inputs // 32) * 32, torch.bfloat16
    else:
        side, word, wide = 2 * tiling.width, 1, inputs
        kept = torch.float32 if form == "tiles_f32" else torch.bfloat16
    data = empty((-(-outputs // side), wide // word, side, word), kept)
    if outputs % side:
        data[-1].zero_()
    if wide != inputs:
        data[:, inputs // word :].zero_()
    block = data[0].nbytes if len(data) else 0
    for at, piece in weight.read():
        _place(piece.to(kept), at, data, _Order(word * kept.itemsize, side, wide // word, block, block))
    return Packed(data, form, outputs, inputs)


class _Order(NamedTuple):
    """Order of the elements of packed weights, [outputs / side][groups]{[columns of the group][side], more}."""

    size: int  # bytes of an element
    side: int
    columns: int  # columns of a group
    group: int  # bytes from a group to the next
    block: int  # bytes from `side` outputs to the next
    first: int = 0  # bytes before the first element of a group


def _place(rows: Tensor, at: int, data: Tensor, order: _Order, flip: int = 0) -> None:
    """Copy a piece's rows to outputs `at` … of packed weights. flip: bits to invert in each element."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if rows.shape[1] * rows.itemsize % order.size:
        rows = torch.nn.functional.pad(rows, (0, 1))  # pairs of an odd number of inputs
    copy, stride = load(best()).slipway_pack_words, rows.stride(0) * rows.itemsize
    columns = rows.shape[1] * rows.itemsize // order.size

    def part(first: int, last: int) -> None:
        copy(
            *(order.size, rows.data_ptr() + first * stride, stride, at + first, last - first, columns, flip),
            *(order.side, order.columns, order.group, order.block, data.data_ptr() + order.first),
        )

    in_threads(torch.get_num_threads() if rows.nbytes >= LARGE else 1, len(rows), order.side, part)


def _pack_blocks(weight: BlockWeight, form: str, tiling: Tiling, empty: Empty) -> Packed:
    """The library of the variant reorders blocks, because torch would take several times as long."""
    outputs, blocks = len(weight.blocks), weight.blocks.contiguous()
    data = empty((-(-outputs // tiling.width) * tiling.width, blocks.shape[1]), torch.uint8)
    pack_blocks = load(tiling.variant).slipway_pack_blocks
    pack_blocks(FORMS.index(form), blocks.data_ptr(), outputs, weight.inputs, data.data_ptr())
    return Packed(data, form, outputs, weight.inputs, group=LAYOUTS[weight.kind].inputs)


def restore_blocks(weight: BlockWeight, variant: str) -> Tensor:
    """Return the values, [outputs, inputs] float32. Blocks are complete."""
    assert weight.inputs % LAYOUTS[weight.kind].inputs == 0
    assert weight.blocks.shape[1] == row_bytes(weight.kind, weight.inputs)
    blocks, values = weight.blocks.contiguous(), torch.empty((len(weight.blocks), weight.inputs))
    restore = load(variant).slipway_restore_blocks
    restore(FORMS.index(BLOCK_FORMS[weight.kind]), blocks.data_ptr(), len(blocks), weight.inputs, values.data_ptr())
    return values


def _pack_groups(weight: Int8Weight | Int4Weight, form: str, tiling: Tiling, empty: Empty) -> Packed:
    outputs, inputs = weight.values.shape
    side, group = tiling.width * (1 if isinstance(weight, Int4Weight) else 2), weight.group
    if group % 32:
        raise ValueError(f"groups of {group} inputs: compiled kernels multiply groups of a multiple of 32")
    values = _padded(weight.values, side, group)
    four = form == "tiles_int4"
    word = tiling.word4 if four else tiling.word8
    octets = _halves(values, word) if four else values
    parts = [
        (octets, word, group // 2 if four else group),
        (_padded(weight.scales, side, 1), weight.scales.itemsize, 0),
    ]
    if isinstance(weight, Int4Weight) and weight.zeros is not None:
        parts.append((_padded(weight.zeros, side, 1), 1, 0))
    sizes = [side * (octets or size) for _, size, octets in parts]
    blocks, groups, first = len(values) // side, values.shape[1] // group, 0
    data = empty((blocks, groups, sum(sizes)), torch.uint8)
    for (rows, size, octets), taken in zip(parts, sizes, strict=True):
        order = _Order(size, side, max(1, octets // size), sum(sizes), groups * sum(sizes), first)
        # 8-bit weights have 128 for zero
        _place(rows, 0, data, order, flip=0 if four or not octets else 0x80808080)
        first += taken
    return Packed(
        data,
        form,
        outputs,
        inputs,
        group=group,
        zeros=len(parts) > 2,
        scale_type=weight.scales.dtype,
        order=None if weight.order is None else weight.order.to(torch.int32).contiguous(),
    )


def _halves(values: Tensor, word: int) -> Tensor:
    """4 bits → [outputs, bytes]: the first word of a pair goes to the low halves of its bytes."""
    pairs = values.view(len(values), -1, 2, word)  # [output, pair, 2, input of the word]
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    rows, columns = -weight.shape[0] % outputs, -weight.shape[1] % inputs
    return torch.nn.functional.pad(weight, (0, columns, 0, rows)) if rows or columns else weight
