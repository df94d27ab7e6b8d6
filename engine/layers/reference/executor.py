"""Executor of a program with torch: one short function per operation. It is the reference of the other executors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.kv.layout import Layout
from engine.layers.batch import Batch
from engine.layers.kv import kv_layers
from engine.layers.loaded import LoadedWeights
from engine.layers.lora import NO_ADAPTERS
from engine.layers.reference import attention, embeddings, experts, latent, recurrent, rows, streams
from engine.layers.reference.run import Run
from engine.layers.states import LayerStates
from engine.layers.step import Step, plan_step
from engine.layers.torch_compile import Executor, SegmentCompiler
from engine.lowering.executors import Functions
from engine.lowering.operations import Attend, Linear
from engine.lowering.program import Op, Program
from engine.lowering.rewrites import last_uses
from engine.lowering.segments import Segment, segments

FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    **attention.FUNCTIONS,
    **embeddings.FUNCTIONS,
    **experts.FUNCTIONS,
    **latent.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **rows.FUNCTIONS,
    **streams.FUNCTIONS,
}


class ReferenceExecutor:
    kept_states: Tensor | None = None  # of the last step, see `TextModel.kept_states`

    def __init__(
        self,
        program: Program,
        weights: LoadedWeights,
        world: World,
        layout: Layout,
        dtype: torch.dtype,
        *,
        torch_compile: bool = False,
        functions: Functions = MappingProxyType({}),
    ) -> None:
        """torch_compile: compile segments of the program with torch.compile. functions: of operations that another
        package executes (engine/lowering/executors.py)."""
        self.program, self.layout = program, layout
        self._functions = {**FUNCTIONS, **functions}
        self.compiler = SegmentCompiler(Executor(self._functions, _step_inputs, _bind)) if torch_compile else None
        self._segments: tuple[tuple[Segment, ...], tuple[Segment, ...]] | None = None
        self.routes: Tensor | None = None  # [tokens, experts of all layers] of the last step, if the program keeps them
        self.queries: Tensor | None = None  # of the last step, see `TextModel.queries`
        self._unused = last_uses(program.ops, program.out, program.kept, program.queries, *program.routes)
        self._encoder_unused = last_uses(program.encoder, program.encoder_out or program.out)
        self._parts = weights, world, kv_layers(layout), dtype
        self.adapters = NO_ADAPTERS
        shared = (op.layer for op in program.ops if isinstance(op, Attend) and op.part.shared_kv)
        self._read_again = frozenset(layer for layer in shared if layer is not None)

    def forward(self, batch: Batch, pages: Tensor, states: LayerStates = ()) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden]. Writes keys and values to the pages, and
        updates the states of the rows. states: from `layer_states`."""
        program = self.program
        given = batch, pages, self.layout, program.ropes, states, program.rope_axes
        step = plan_step(*given, windowed_spans=program.windowed_spans)
        if program.encoder and batch.encoder_inputs is not None:
            inputs = batch.encoder_inputs
            alone = Step(step.pages, (), (), {}, inputs.count, cross_writes=step.cross_writes)
            reading = Run(*self._parts, alone, inputs.ids, inputs.positions, spectrograms=inputs.spectrograms)
            self._execute(reading, encoder=True)
        inputs_of = batch.ids, batch.positions, batch.segments, batch.adapters
        run = Run(*self._parts, step, *inputs_of, loaded=self.adapters, media=batch.media, states=batch.states)
        run.read_again = self._read_again
        self._execute(run, encoder=False)
        if program.kept is not None:
            self.kept_states = run[program.kept]
        if program.queries is not None:
            self.queries = run[program.queries]
        if program.routes:
            self.routes = torch.cat([run[value] for value in program.routes], 1)
        return run[program.out]

    def _execute(self, run: Run, *, encoder: bool) -> None:
        if self.compiler is not None:
            self.compiler.execute(self._divided()[encoder], run)
        elif encoder:
            execute(self.program.encoder, run, self._encoder_unused, self._functions)
        else:
            execute(self.program.ops, run, self._unused, self._functions)

    def _divided(self) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """Return the segments of the program and of its encoder. Adapters are known only after `__init__`."""
        if self._segments is None:

            def has_adapters(op: Op) -> bool:
                return isinstance(op, Linear) and self.adapters.layer(op.weight.name) is not None

            self._segments = (
                segments(self.program.ops, self._unused, "torch", has_adapters),
                segments(self.program.encoder, self._encoder_unused, "torch"),
            )
        return self._segments


def execute(
    ops: Sequence[Op], run: Run, unused: Sequence[Sequence[str]] = (), functions: Functions | None = None
) -> None:
    """unused: the buffers that may be freed after each operation; nothing is freed by default. functions: torch's by
    default."""
    functions = FUNCTIONS if functions is None else functions
    for op, names in zip_longest(ops, unused, fillvalue=()):
        functions[type(op)](op, run)
        for name in names:
            run.values.pop(name, None)


def _step_inputs(run: Run) -> dict[str, Tensor]:
    """Return positions and angles, which compiled segments read in addition to buffers and weights."""
    found = {"positions": run.positions}
    for number, (cos, sin) in enumerate(run.step.angles.values()):
        found |= {f"cos {number}": cos, f"sin {number}": sin}
    return found


def _bind(run: Run, values: dict[str, Tensor], inputs: dict[str, Tensor]) -> Run:
    angles = {rope: (inputs[f"cos {number}"], inputs[f"sin {number}"]) for number, rope in enumerate(run.step.angles)}
    return replace(run, values=values, positions=inputs["positions"], step=replace(run.step, angles=angles))
