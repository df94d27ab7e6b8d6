"""A rank's share of a fused matrix of quantized weights, cut from the numbers of its sources and joined.

Groups  integers, scales and zero points are cut between groups of inputs
GgmlBlocks  blocks are cut between each other
E4M3    each source keeps its scales: scales per output or per matrix become one per output; block scales have the
        granularity at which rows of the sources are aligned (`block_unit`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.formats.native import E4M3, FP8_BLOCK, GgmlBlocks, Groups, Native, Segmented, block_unit, split_sizes
from engine.weights.slot import Slots
from kernels.fp8 import Fp8Weight
from kernels.ggml_blocks import BlockWeight
from kernels.joined import Joined
from kernels.quantisation import Int4Weight, Int8Weight
from kernels.stored_codes import StoredCodes

Integers = Int4Weight | Int8Weight
NativeWeight = Integers | Fp8Weight | BlockWeight


def fused_native(
    native: Native, names: Sequence[str], parts: Mapping[str, NativeWeight], matrix: Slots, device: torch.device
) -> NativeWeight | Joined:
    """Return a rank's share. native: the product of the fused matrix. names: source of each piece of the matrix. parts:
    numbers of each source. Raises CheckpointError if the share would divide groups or blocks."""
    match native:
        case Groups():
            return _fused_integers(native, names, parts, matrix)
        case E4M3():
            return _fused_fp8(native, names, parts, matrix, device)
        case GgmlBlocks():
            return _fused_blocks(native, names, parts, matrix)
        case Segmented():
            raise AssertionError("segments are joined one by one")


def _check_split(native: Native, name: str, inputs: int, matrix: Slots) -> None:
    if matrix.inputs == inputs:
        return
    problem = native.split_problem(inputs, inputs // matrix.inputs)
    if problem is not None:
        sizes = ", ".join(map(str, split_sizes(native, inputs)))
        raise CheckpointError(
            f"{name} {problem}; lower parallelism.tensor (possible: {sizes}), or set hardware.kernels to torch"
        )


def _fused_integers(
    native: Groups, names: Sequence[str], parts: Mapping[str, NativeWeight], matrix: Slots
) -> Integers | Joined:
    pieces = []
    for name, piece in zip(names, matrix.pieces, strict=True):
        part = parts[name]
        assert isinstance(part, Integers), "formats unpack integers for this product"
        _check_split(replace(native, ordered=part.order is not None), name, part.values.shape[1], matrix)
        pieces.append(_cut(part, piece.taken, matrix, channels=native.group is None))
    return pieces[0] if len(pieces) == 1 else _joined(names, pieces)


def _fused_blocks(
    native: GgmlBlocks, names: Sequence[str], parts: Mapping[str, NativeWeight], matrix: Slots
) -> BlockWeight | Joined:
    pieces = []
    for name, piece in zip(names, matrix.pieces, strict=True):
        part = parts[name]
        assert isinstance(part, BlockWeight), "formats have blocks for this product"
        _check_split(native, name, part.inputs, matrix)
        pieces.append(part.cut(piece.taken, matrix.first_input, matrix.inputs))
    return pieces[0] if len(pieces) == 1 else Joined(tuple(pieces))


def _cut(part: Integers, rows: slice, matrix: Slots, *, channels: bool) -> Integers:
    """channels: with one scale per output all groups are equal, and new ones start at the rank's first input."""
    first, count = matrix.first_input, matrix.inputs
    groups = slice(None)
    values = part.values.rows(rows) if isinstance(part.values, StoredCodes) else part.values[rows]
    if count != values.shape[1]:
        values = _columns(values, first, count)
        start = 0 if channels else first // part.group
        groups = slice(start, start + -(-count // part.group))
    cut = {"values": values, "scales": part.scales[rows, groups].contiguous()}
    if isinstance(part, Int4Weight) and part.zeros is not None:
        cut["zeros"] = part.zeros[rows, groups].contiguous()
    return replace(part, **cut)


def _columns(values: Tensor | StoredCodes, first: int, count: int) -> Tensor | StoredCodes:
    if isinstance(values, StoredCodes):
        found = values.columns(first, count)
        if found is not None:
            return found
        values = values.unpacked()
    return values[:, first : first + count].contiguous()


def _joined(names: Sequence[str], pieces: Sequence[Integers]) -> Joined:
    if any(not _same(piece.order, pieces[0].order) for piece in pieces):
        raise CheckpointError(
            f"{', '.join(dict.fromkeys(names))} group the same inputs in different orders (act order), which compiled "
            "kernels do not support; set hardware.kernels to torch"
        )
    return Joined(tuple(pieces))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _fused_fp8(
    native: E4M3, names: Sequence[str], parts: Mapping[str, NativeWeight], matrix: Slots, device: torch.device
) -> Fp8Weight:
    eights = {name: part for name, part in parts.items() if isinstance(part, Fp8Weight)}
    _check_split(native, names[0], eights[names[0]].values.shape[1], matrix)
    values = torch.empty((matrix.rows, matrix.inputs), dtype=torch.float8_e4m3fn, device=device)
    inputs, blocks = slice(matrix.first_input, matrix.first_input + matrix.inputs), native.scales == "block"
    places = [(piece.start, piece.at) for piece in matrix.pieces]
    unit, groups = (block_unit(places), -(-matrix.inputs // FP8_BLOCK)) if blocks else (1, 1)
    first_group = matrix.first_input // FP8_BLOCK if blocks else 0
    scales = torch.empty((-(-matrix.rows // unit), groups), device=device)
    for name, piece in zip(names, matrix.pieces, strict=True):
        part, rows = eights[name], slice(piece.start, piece.start + piece.rows)
        values[piece.at : piece.at + piece.rows].copy_(part.values[rows, inputs])
        # The source's scale of each unit of the piece.
        places_of = torch.arange(piece.start, piece.start + piece.rows, unit, device=part.scales.device) // part.unit
        own = part.scales[places_of, first_group : first_group + groups]
        scales[piece.at // unit : -(-(piece.at + piece.rows) // unit)].copy_(own)
    static = [part.static_scale for part in eights.values() if part.static_scale is not None]
    # One scale for all sources, because they read the same rows: the largest one.
    static_scale = torch.cat(static).amax().view(1).to(device) if static else None
    return Fp8Weight(values, scales, unit, native.inputs is not None, static_scale)
