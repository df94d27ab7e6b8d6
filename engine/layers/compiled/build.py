"""Operations of a program as structures for the compiled kernels, and the programs that they form."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.kv.layout import Layout
from engine.layers.batch import MediaRows
from engine.layers.compiled.bidirectional import bidirectional_kv
from engine.layers.compiled.buffers import LOW_RANK, Buffers
from engine.layers.kv import KVLayer
from engine.layers.loaded import LoadedWeights
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.states import LayerStates
from engine.layers.vocabulary import Vocabulary
from engine.lowering.measures import buffer_widths
from engine.lowering.operations import Columns
from engine.lowering.program import Op, Program
from engine.lowering.rewrites import compiled_encoder, compiled_ops
from kernels.cpu import program as cpu
from kernels.cpu.program import Program as CompiledProgram
from kernels.cpu.program import Team
from kernels.cpu.shm_collective import ShmCollective


@dataclass(frozen=True)
class Region:
    """Operations of one call. Those with keys and values have pages in the shape of this group."""

    program: CompiledProgram
    group: int


@dataclass(frozen=True)
class TorchOp:
    """An operation without a compiled kernel (`engine.lowering.measures.torch_parts`). torch computes it between two
    programs, on the first `tokens` rows of the buffers."""

    compute: Callable[[int], None]
    media: bool = False  # only steps with media need it


class CompiledOps:
    """Operations as structures for the compiled kernels, which point to shared buffers."""

    vocabulary: Vocabulary | None = None
    states: LayerStates = ()  # of the last step; operations point to them
    media: MediaRows | None = None  # of the running step
    count: Sequence[int] = ()  # in a tower: rows of each clip, or queries of each frame, of the running step
    context: Tensor | None = None  # likewise: keys and values of the rows of frames
    context_rows: Sequence[int] = ()  # rows of each frame
    read_states: tuple[Tensor, Tensor] | None = None  # of the running step: hidden states, and tokens at position 0

    def __init__(
        self,
        program: Program,
        weights: LoadedWeights,
        kv_layers: Sequence[KVLayer],
        team: Team,
        collective: ShmCollective | None = None,
        adapters: LoadedAdapters = NO_ADAPTERS,
    ) -> None:
        """collective: shared memory of the ranks, if there are several."""
        self.program, self.weights, self._kv_layers = program, weights, kv_layers
        self.team, self.collective, self.adapters = team, collective, adapters
        self.ops = compiled_ops(program)
        self.encoder_ops, self.cross_ops = compiled_encoder(program)
        every = (*self.encoder_ops, *self.cross_ops, *self.ops)
        widths = buffer_widths(every)
        self.buffers = Buffers(widths | {LOW_RANK: adapters.columns} if adapters.columns else widths)
        self.whole = bidirectional_kv(every)

    def columns(self, columns: Columns) -> Tensor:
        return self.buffers[columns.value][:, columns.first : columns.first + columns.width]

    def place(self, layer: int | None) -> KVLayer:
        """Return the pages of an attention layer; those of bidirectional attention have a single layer."""
        return KVLayer(0, 0) if layer is None else self._kv_layers[layer]


Structures = Iterator[cpu.Op | TorchOp]
Functions = dict[type, Callable[[Any, CompiledOps], Structures]]


def given(op: Op, ops: CompiledOps) -> Structures:
    """Yield nothing: the caller computes the operation before the step."""
    yield from ()


def regions(
    ops: Sequence[cpu.Op | TorchOp], keep_alive: Sequence[Tensor], layout: Layout | None = None
) -> list[Region | TorchOp]:
    """Return programs that are as long as possible, with torch operations between them. The operations of a program
    have pages of one shape. layout: of the KV cache, if the operations use it."""
    found: list[Region | TorchOp] = []
    some: list[cpu.Op] = []
    group = 0  # of the pages of `some`

    def finish() -> None:
        if some:
            found.append(Region(CompiledProgram(some, keep_alive), group))
            some.clear()

    for op in ops:
        if isinstance(op, TorchOp):
            finish()
            found.append(op)
            continue
        paged = isinstance(op, cpu.Attend | cpu.LatentKV | cpu.Select) or (
            isinstance(op, cpu.RopeKV) and op.kv_heads > 0
        )
        if paged and layout is not None and layout.groups:
            own = layout.shapes.index(layout.shapes[op.group])  # the first group with pages of this shape
            if own != group:
                finish()
                group = own
        some.append(op)
    finish()
    return found
