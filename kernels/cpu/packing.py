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

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import Tiling, load
from kernels.ggml_blocks import BlockWeight
from kernels.ggml_layout import LAYOUTS, row_bytes
from kernels.quantisation import Int4Weight, Int8Weight

BLOCK_FORMS = {kind: f"blocks_{kind.lower()}" for kind in LAYOUTS}
FORMS = ("tiles_f32", "tiles_bf16", "amx_bf16", "pairs_bf16", "tiles_int4", "tiles_int8", *BLOCK_FORMS.values())
Weight = Tensor | Int8Weight | Int4Weight | BlockWeight
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates the memory of a packed weight."""


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
    if not isinstance(weight, Tensor):
        return _pack_groups(weight, form, tiling, empty)
    outputs, inputs = weight.shape
    if form in ("amx_bf16", "pairs_bf16"):
        words = _words(_padded(weight.to(torch.bfloat16), 16, 32), 16, 2)
    else:
        kept = weight.to(torch.float32 if form == "tiles_f32" else torch.bfloat16)
        words = _words(_padded(kept, 2 * tiling.width, 1), 2 * tiling.width, 1)
    return Packed(empty(tuple(words.shape), words.dtype).copy_(words), form, outputs, inputs)


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
    zeros = weight.zeros if isinstance(weight, Int4Weight) else None
    if form == "tiles_int4":
        words = _halves(values, side, tiling.word4, group)
    else:
        words = _bytes(values, side, tiling.word8, group)
    parts = [words, _of_groups(weight.scales, side).view(torch.uint8)]
    if zeros is not None:
        parts.append(_of_groups(zeros, side))
    sizes = [math.prod(part.shape[2:]) * part.itemsize for part in parts]
    data = empty((*words.shape[:2], sum(sizes)), torch.uint8)
    for place, part in zip(data.split(sizes, 2), parts, strict=True):
        place.view(part.dtype).unflatten(2, part.shape[2:]).copy_(part)
    return Packed(
        data,
        form,
        outputs,
        inputs,
        group=group,
        zeros=zeros is not None,
        scale_type=weight.scales.dtype,
        order=None if weight.order is None else weight.order.to(torch.int32).contiguous(),
    )


def _halves(values: Tensor, side: int, word: int, group: int) -> Tensor:
    """4 bits → [outputs / side][group][pair of words][side] of `_elements`."""
    # [output, pair, 2, input of the word]: the first word of a pair goes to the low halves of the bytes
    pairs = values.view(len(values), -1, 2, word)
    joined = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return _elements(joined.flatten(1), side, word).unflatten(1, (-1, group // (2 * word)))


def _bytes(values: Tensor, side: int, word: int, group: int) -> Tensor:
    """8 bits → [outputs / side][group][word][side] of `_elements`."""
    unsigned = values.view(torch.uint8) ^ 128  # + 128
    return _elements(unsigned, side, word).unflatten(1, (-1, group // word))


def _elements(octets: Tensor, side: int, word: int) -> Tensor:
    """[outputs, bytes] → [outputs / side][words][side], a view. Words of 4 bytes are one element each, so that they are
    copied as such; shorter words are [side][word]."""
    octets = octets.contiguous()
    return _words(octets.view(torch.int32), side, 1).flatten(2) if word == 4 else _words(octets, side, word)


def _words(weight: Tensor, side: int, word: int) -> Tensor:
    """[outputs, inputs] → [outputs / side][inputs / word][side][word], a view."""
    return weight.view(len(weight) // side, side, -1, word).transpose(1, 2)


def _of_groups(values: Tensor, side: int) -> Tensor:
    """[outputs, groups] → [outputs / side][groups][side]."""
    return _padded(values, side, 1).view(-1, side, values.shape[1]).transpose(1, 2).contiguous()


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    rows, columns = -weight.shape[0] % outputs, -weight.shape[1] % inputs
    return torch.nn.functional.pad(weight, (0, columns, 0, rows)) if rows or columns else weight
