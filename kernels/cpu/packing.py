"""Weights in the order in which the compiled kernels read them (linear.h, linear_amx.h, linear_pairs.h, linear_int.h).

form         order                                                          used for
tiles_f32    [outputs / 2V][input][2V], V floats to a vector                float32, and types that round differently
tiles_bf16   the same in bf16: half the bytes, the same numbers             bf16 checkpoints
amx_bf16     [outputs / 16][inputs / 32][pair of inputs][output][2]         bf16 checkpoints on CPUs with matrix tiles
pairs_bf16   the same order; activations are rounded to bf16                all types, with bf16 arithmetic
tiles_int4   [outputs / V][group]{pairs of words, scales, zero points}      4 bits
tiles_int8   [outputs / 2V][group]{words, scales}, 128 for zero             8 bits
blocks_…     [outputs / V][block]{codes, scales of sub-blocks, scales}      blocks of ggml (block_codes.h)

Outputs are padded, and inputs are padded to whole words, groups or blocks, with values that multiply as zero. Integers
and blocks are copied once, from the file, where a file has them as `StoredCodes` or blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.library import Tiling, best, in_threads, load
from kernels.ggml_blocks import BlockWeight
from kernels.ggml_layout import LAYOUTS, row_bytes
from kernels.joined import Joined
from kernels.quantisation import Int4Weight, Int8Weight, common_type
from kernels.stored_codes import ACROSS, StoredCodes, unpacked

BLOCK_FORMS = {kind: f"blocks_{kind.lower()}" for kind in LAYOUTS}
FORMS = ("tiles_f32", "tiles_bf16", "amx_bf16", "pairs_bf16", "tiles_int4", "tiles_int8", *BLOCK_FORMS.values())
LARGE = 1 << 20  # bytes from which several threads copy
CHUNK = 16  # bytes of integers that are reordered at once
MIDDLE = 128  # of packed integers of 8 bits
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


Quantized = Int8Weight | Int4Weight | BlockWeight
Weight = Tensor | Pieces | Quantized | Joined


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
        case Joined(parts):
            return form_for(parts[0], tiling)
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
    if isinstance(weight, Joined | Quantized):
        parts = weight.parts if isinstance(weight, Joined) else (weight,)
        blocks = [part for part in parts if isinstance(part, BlockWeight)]
        if blocks:
            return _pack_blocks(blocks, form, tiling, empty)
        return _pack_groups([part for part in parts if not isinstance(part, BlockWeight)], form, tiling, empty)
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

    in_threads(_threads(rows), len(rows), order.side, part)


def _pack_blocks(parts: Sequence[BlockWeight], form: str, tiling: Tiling, empty: Empty) -> Packed:
    """The library of the variant reorders blocks, because torch would take several times as long."""
    kind, inputs, outputs = parts[0].kind, parts[0].inputs, sum(len(part.blocks) for part in parts)
    data = empty((-(-outputs // tiling.width) * tiling.width, row_bytes(kind, inputs)), torch.uint8)
    if outputs % tiling.width:
        data[-tiling.width :].zero_()  # scales of 0
    pack_blocks, at = load(tiling.variant).slipway_pack_blocks, 0
    for part in parts:
        blocks = part.blocks if part.blocks.stride(1) == 1 else part.blocks.contiguous()
        start, stride, to = blocks.data_ptr(), blocks.stride(0), at

        def some(first: int, last: int, start: int = start, stride: int = stride, to: int = to) -> None:
            where = start + first * stride, stride, to + first, last - first
            pack_blocks(FORMS.index(form), *where, inputs, data.data_ptr())

        in_threads(_threads(blocks), len(blocks), tiling.width, some)
        at += len(blocks)
    return Packed(data, form, outputs, inputs, group=LAYOUTS[kind].inputs)


def restore_blocks(weight: BlockWeight, variant: str) -> Tensor:
    """Return the values, [outputs, inputs] float32. Blocks are complete."""
    assert weight.inputs % LAYOUTS[weight.kind].inputs == 0
    assert weight.blocks.shape[1] == row_bytes(weight.kind, weight.inputs)
    blocks, values = weight.blocks.contiguous(), torch.empty((len(weight.blocks), weight.inputs))
    restore = load(variant).slipway_restore_blocks
    restore(FORMS.index(BLOCK_FORMS[weight.kind]), blocks.data_ptr(), len(blocks), weight.inputs, values.data_ptr())
    return values


def _pack_groups(parts: Sequence[Int8Weight | Int4Weight], form: str, tiling: Tiling, empty: Empty) -> Packed:
    weight, four = parts[0], form == "tiles_int4"
    outputs, inputs = sum(len(part.scales) for part in parts), weight.values.shape[1]
    side, group = tiling.width * (1 if four else 2), weight.group
    if group % 32:
        raise ValueError(f"groups of {group} inputs: compiled kernels multiply groups of a multiple of 32")
    fours = [part for part in parts if isinstance(part, Int4Weight)]
    zeros = any(part.zeros is not None for part in fours)
    scale_type, word = common_type(part.scales for part in parts), tiling.word4 if four else tiling.word8
    octets = side * group // (2 if four else 1)
    after_scales = octets + side * scale_type.itemsize
    size, groups = after_scales + side * zeros, -(-inputs // group)
    data = empty((-(-outputs // side), groups, size), torch.uint8)
    _pad(data, octets, 0 if four else MIDDLE, outputs % side, inputs % group)

    def order(element: int, columns: int, first: int) -> _Order:
        return _Order(element, side, columns, size, groups * size, first)

    at = 0
    for part in parts:
        _place_codes(part.values, at, data, order(word, octets // side // word, 0), group, four=four)
        _place(part.scales.to(scale_type), at, data, order(scale_type.itemsize, 1, octets))
        if zeros and isinstance(part, Int4Weight):
            _place(part.zero_points, at, data, order(1, 1, after_scales))
        at += len(part.scales)
    ordered = None if weight.order is None else weight.order.to(torch.int32).contiguous()
    return Packed(data, form, outputs, inputs, group, zeros, scale_type, ordered)


def _pad(data: Tensor, octets: int, zero: int, more_outputs: int, more_inputs: int) -> None:
    """Fill the last block, and the codes of the last group, if only some of their outputs or inputs exist."""
    if more_outputs and len(data):
        data[-1].zero_()
        data[-1, :, :octets] = zero
    if more_inputs:
        data[:, -1, :octets] = zero


def _place_codes(values: Tensor | StoredCodes, at: int, data: Tensor, order: _Order, group: int, *, four: bool) -> None:
    """Copy integers of one part to outputs `at` … of packed weights."""
    if isinstance(values, StoredCodes) and _place_stored(values, at, data, order):
        return
    rows = torch.nn.functional.pad(unpacked(values), (0, -values.shape[1] % group))
    # 8-bit weights have 128 for zero
    _place(_halves(rows, order.size) if four else rows, at, data, order, flip=0 if four else 0x80808080)


def _place_stored(codes: StoredCodes, at: int, data: Tensor, order: _Order) -> bool:
    """Copy integers as a file has them. Return False if their layout has to be unpacked first."""
    part, library = codes.data, load(best())
    if codes.layout == "across":
        return _place_across(codes, at, data, order)
    form = {"unsigned": 0, "signed": 1, "words": 2 if codes.bits == 4 else 0, "halves": 3}[codes.layout]
    to = data.data_ptr() + order.first
    if codes.layout == "words" and order.size == 4 and part.stride(0) == 1 and part.stride(1) > 1:
        if codes.inputs % codes.unit:
            return False

        def columns(first: int, last: int) -> None:
            where = part.data_ptr() + first * 4, part.stride(1) * 4, at + first, last - first
            library.slipway_pack_columns(form, *where, part.shape[1], order.side, order.columns, *order[3:5], to)

        in_threads(_threads(part), len(part), order.side, columns)
        return True
    if part.stride(-1) != 1:
        part = part.contiguous()
    block = part.shape[-1] * part.itemsize if part.ndim == 3 else CHUNK
    if codes.inputs * codes.bits % (8 * CHUNK) or block % CHUNK:
        return False
    stride = part.stride(0) * part.itemsize
    blocks = block // CHUNK, part.stride(1) * part.itemsize if part.ndim == 3 else CHUNK

    def rows(first: int, last: int) -> None:
        source = part.data_ptr() + first * stride, stride, codes.inputs * codes.bits // (8 * CHUNK), *blocks
        place = at + first, last - first, order.side, order.columns, *order[3:5]
        library.slipway_pack_codes(form, order.size, *source, *place, to)

    in_threads(_threads(part), len(part), order.side, rows)
    return True


def _place_across(codes: StoredCodes, at: int, data: Tensor, order: _Order) -> bool:
    words = codes.data.T  # [inputs, words]
    if order.size != 4 or words.stride(1) != 1 or codes.inputs % 8:
        return False
    pack, stride, each = load(best()).slipway_pack_across, words.stride(0) * 4, len(ACROSS)

    def some(first: int, last: int) -> None:
        where = words.data_ptr() + first * 4, stride, at + each * first, last - first, codes.inputs
        pack(*where, order.side, order.columns, *order[3:5], data.data_ptr() + order.first)

    in_threads(_threads(words), words.shape[1], CHUNK, some)
    return True


def _threads(rows: Tensor) -> int:
    return torch.get_num_threads() if rows.nbytes >= LARGE else 1


def _halves(values: Tensor, word: int) -> Tensor:
    """4 bits → [outputs, bytes]: the first word of a pair goes to the low halves of its bytes."""
    pairs = values.view(len(values), -1, 2, word)  # [output, pair, 2, input of the word]
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
