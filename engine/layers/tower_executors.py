"""Executors of the programs of a tower: torch, and the compiled kernels on a CPU. `executor` selects one of them, or
Triton's (tower_triton.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from engine.distributed.shared import Shared
from engine.distributed.world import World
from engine.layers.compiled.build import CompiledOps, Region, TorchOp, regions
from engine.layers.compiled.functions import structures
from engine.layers.linear import Read, Target
from engine.layers.loaded import LoadedWeights, unloaded
from engine.layers.reference.executor import execute
from engine.layers.reference.run import Run
from engine.layers.step import NO_ROWS, Step, TowerRows
from engine.layers.tower_triton import TritonExecutor, has_kernels
from engine.lowering.operations import Attend
from engine.lowering.program import Op, Program
from engine.lowering.rewrites import last_uses
from kernels.cpu.program import StepData, Team


class Executor(Protocol):
    weights: LoadedWeights

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers that are kept between runs."""

    def reserve(self, tokens: int) -> None:
        """Allocate the buffers for up to this many rows."""

    def load(self, read: Read) -> None: ...

    def run(self, x: Tensor, rows: TowerRows = NO_ROWS) -> Tensor:
        """Return the output for the rows x, which it may overwrite; valid until the next call."""


def executor(program: Program, world: World, target: Target, *, masked: bool = False, triton: bool = False) -> Executor:
    """Return the executor for the kernels of the target. masked: there may be patches that others do not attend to.
    triton: use Triton kernels for programs whose operations all have some."""
    if triton and not masked and has_kernels(program):
        return TritonExecutor(program, world, target)
    if target.team is None:
        return TorchExecutor(program, world, target)
    return CompiledExecutor(program, world, target, target.team, masked=masked)


class TorchExecutor:
    def __init__(self, program: Program, world: World, target: Target) -> None:
        self.program, self.target, self._world = program, target, world
        self.weights: LoadedWeights = unloaded(program, None, world)
        self._unused = last_uses(program.ops, program.out)

    @property
    def buffer_bytes(self) -> int:
        return 0

    def reserve(self, tokens: int) -> None:
        """Allocate nothing: torch allocates as it computes."""

    def load(self, read: Read) -> None:
        for layer in self.weights.by_name.values():
            layer.load(read, self.target)

    def run(self, x: Tensor, rows: TowerRows = NO_ROWS) -> Tensor:
        none = x.new_empty(0)
        step = Step(none, (), (), rows.angles, rows.count, windows=rows.windows, keys=rows.keys)
        step = replace(step, context=rows.context, context_rows=rows.context_rows)
        run = Run(self.weights, self._world, (), self.target.dtype, step, none, none)
        run[self.program.given] = x
        execute(self.program.ops, run, self._unused)
        return run[self.program.out]


class CompiledExecutor:
    """Runs a program in segments: blocks with attention among the patches of a frame, and of a window. With masks, the
    patches that others attend to come first in their frame, like the encoder input that cross-attention reads."""

    def __init__(self, program: Program, world: World, target: Target, team: Team, *, masked: bool) -> None:
        self.program, self.target, self.team = program, target, team
        self.weights: LoadedWeights = unloaded(program, None, world)
        collective = world.collective if isinstance(world, Shared) else None
        self._ops = CompiledOps(program, self.weights, (), team, collective)
        if masked:
            self._ops.ops = tuple(replace(op, cross=True) if isinstance(op, Attend) else op for op in self._ops.ops)
        self._segments: list[tuple[bool, list[Region | TorchOp]]] = []
        self._tokens = 0

    @property
    def buffer_bytes(self) -> int:
        return sum(room.nbytes for room in self._ops.buffers.tensors.values())

    def reserve(self, tokens: int) -> None:
        self._fit(max(tokens, self._tokens))

    def load(self, read: Read) -> None:
        for layer in self.weights.by_name.values():
            layer.load(read, self.target)

    def run(self, x: Tensor, rows: TowerRows = NO_ROWS) -> Tensor:
        tokens, buffers = len(x), self._ops.buffers
        if tokens > self._tokens:
            self._fit(tokens)
        angles, order, starts = [rows.angles[rope] for rope in self.program.ropes], None, None
        if rows.keys is not None:
            order, starts = unmasked_first(rows.count, rows.keys)
            x, angles = x[order], [(cos[order], sin[order]) for cos, sin in angles]
        buffers[self.program.given][:tokens] = x
        self._ops.count, self._ops.context, self._ops.context_rows = rows.count, rows.context, rows.context_rows
        steps = {
            windowed: self._step(tokens, count, angles, starts)
            for windowed, count in enumerate((rows.count, rows.windows))
        }
        for windowed, segment in self._segments:
            for part in segment:
                if isinstance(part, Region):
                    self.team.run(part.program, steps[windowed])
                else:
                    part.compute(tokens)
        out = buffers[self.program.out][:tokens]
        return out if order is None else out[order.argsort()]

    def _step(
        self, tokens: int, count: Sequence[int], angles: Sequence[tuple[Tensor, Tensor]], starts: Tensor | None
    ) -> StepData:
        """Return the data of a step whose rows have these numbers of patches. starts: of `unmasked_first`."""
        if not count:
            return StepData(tokens, angles=angles)
        each = torch.tensor(count)
        rows = {"first": torch.zeros_like(each), "count": each, "slots": torch.arange(len(each))}
        if self._ops.whole is None:
            return StepData(tokens, angles=angles, **rows)
        ends = each.cumsum(0)
        positions = torch.arange(tokens) - (ends - each).repeat_interleave(each)
        tables, slot_mapping, pages = self._ops.whole.placed(each, positions)
        return StepData(
            tokens,
            **rows,
            starts=starts,
            angles=angles,
            tables=tables,
            slot_mapping=slot_mapping,
            pages=pages,
        )

    def _fit(self, tokens: int) -> None:
        """Allocate buffers for this many patches, and build the structures that point to them."""
        self._tokens, self._segments = tokens, []
        self._ops.buffers.make(tokens)
        keep_alive = tuple(self._ops.buffers.tensors.values())
        for windowed, ops in _segments(self._ops.ops):
            made = [one for op in ops for one in structures(op, self._ops)]
            self._segments.append((windowed, regions(made, keep_alive)))


def unmasked_first(count: Sequence[int], keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of patches in which those that others attend to come first in their frame, and their number in
    each frame, int64. count: patches of each frame; keys: of `TowerRows`."""
    frames = torch.arange(len(count)).repeat_interleave(torch.tensor(count))
    order = (2 * frames + (~keys).long()).argsort(stable=True)
    return order, torch.zeros(len(count), dtype=torch.int64).index_add_(0, frames, keys.long())


def _segments(ops: Sequence[Op]) -> Iterator[tuple[bool, list[Op]]]:
    """Yield runs of operations whose next attention is among the same rows: windows, or frames."""
    windowed, marked = False, list[tuple[bool, Op]]()
    for op in reversed(ops):
        if isinstance(op, Attend):
            windowed = op.windowed
        marked.append((windowed, op))
    for own, group in groupby(reversed(marked), lambda one: one[0]):
        yield own, [op for _, op in group]
