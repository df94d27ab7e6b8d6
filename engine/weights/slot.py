"""Origin of the pieces of a fused, divided matrix, derived from the declaration of the projection.

The fused matrix contains the rows of its sources one after another. A rank has its share of the rows of each source
(split "rows") or of the inputs (split "inputs"). If there are fewer heads than ranks, several ranks have copies of
them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.distributed.world import World, share
from engine.models.parts import Linear
from engine.models.ranks import row_runs


@dataclass(frozen=True)
class Slot:
    """Rows [at, at + rows) of the fused matrix are `taken` of a source."""

    source: str
    start: int
    rows: int
    at: int
    step: int = 1
    has_bias: bool = True

    @property
    def taken(self) -> slice:
        """Rows of the source: start, start + step, …"""
        return slice(self.start, self.start + self.rows * self.step, self.step)


@dataclass(frozen=True)
class Slots:
    """One rank's matrix: [rows, inputs]."""

    pieces: tuple[Slot, ...]
    rows: int
    first_input: int  # index of its first input in the sources
    inputs: int


def slots(part: Linear, world: World) -> Slots:
    pieces, at = [], 0
    for piece in part.rows:
        what = "heads" if piece.width > 1 else "rows"
        first, units = share(piece.units, world, what) if part.split == "rows" else (0, piece.units)
        for start, rows in row_runs(piece, first, units):
            pieces.append(Slot(piece.source, start, rows, at, piece.step, piece.has_bias))
            at += rows
    first_input, inputs = share(part.inputs, world, "inputs") if part.split == "inputs" else (0, part.inputs)
    return Slots(tuple(pieces), at, first_input, inputs)


def stored_dtype(read: Callable[[str], Tensor], path: str, matrix: Slots) -> torch.dtype:
    """Return the type in which the checkpoint stores all sources of a weight; float32 if they differ."""
    found = {read(_name(path, piece.source, "weight")).dtype for piece in matrix.pieces}
    return found.pop() if len(found) == 1 else torch.float32


def _name(path: str, source: str, suffix: str) -> str:
    return f"{path}.{source}.{suffix}" if path else f"{source}.{suffix}"


def fused(
    read: Callable[[str], Tensor], path: str, suffix: str, matrix: Slots, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the rank's weight [rows, inputs] or bias [rows], converted from its sources."""
    shape = (matrix.rows, matrix.inputs) if suffix == "weight" else (matrix.rows,)
    return fill(torch.empty(shape, dtype=dtype, device=device), read, path, suffix, matrix)


def fill(whole: Tensor, read: Callable[[str], Tensor], path: str, suffix: str, matrix: Slots) -> Tensor:
    """Fill `whole` with the rank's weight or bias."""
    for piece in matrix.pieces:
        if suffix == "bias" and not piece.has_bias:
            whole[piece.at : piece.at + piece.rows].zero_()
    for at, rows in stored_rows(read, path, suffix, matrix):
        whole[at : at + len(rows)].copy_(rows)
    return whole


def stored_rows(read: Callable[[str], Tensor], path: str, suffix: str, matrix: Slots) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of the rank's weight or bias: the first row of each, and its rows as the checkpoint stores
    them."""
    for name, pieces in groupby(matrix.pieces, lambda piece: piece.source):
        pieces = [piece for piece in pieces if suffix == "weight" or piece.has_bias]
        if not pieces:
            continue
        source = read(_name(path, name, suffix))
        if suffix == "weight":
            source = source.narrow(1, matrix.first_input, matrix.inputs)
        for piece in pieces:
            yield piece.at, source[piece.taken]
