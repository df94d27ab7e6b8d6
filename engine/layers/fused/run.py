"""A step on its way through the operations."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.layers.fused.step import DeviceStep
from engine.layers.kv import group_pages, kv_layers
from engine.layers.lora import AdapterRows
from engine.layers.model import TextModel
from engine.layers.rope import Rotation
from engine.lowering.operations import AttendLatent, Columns, Value
from engine.models.kv_scales import KVScales
from engine.models.parts import Rope
from kernels.attention.latent import head_blocks
from kernels.attention.prefill_schedule import PREFILL_SCHEDULE, num_programs
from kernels.attention.schedule import DECODE_SCHEDULE
from kernels.rope import ROPE_ANGLES


@dataclass(frozen=True)
class Unreduced:
    """This rank's addend of a sum over the ranks, which the norm that reads it completes."""

    y: Tensor


class ModelParts:
    """Weights and settings that all steps of a model share. `reduced_by_norm` has the ids of projections that a norm
    adds over the ranks."""

    def __init__(self, model: TextModel, scales: KVScales | None = None) -> None:
        self.vocabulary, self.weights, self.adapters = model.vocabulary, model.weights, model.adapters
        self.dtype, self.layout, self.kv_layers = model.dtype, model.layout, kv_layers(model.layout)
        self.fp8, program, world = model.target.fp8, model.program, model.vocabulary.world
        self.windowed_spans = program.windowed_spans
        self.fused_reduce = world.fused if isinstance(world, Group) else None
        self.reduced_by_norm: set[int] = set()
        # Divided keys are added in an order that depends on the other rows and on how a prompt is cut.
        self.divides_keys = not model.target.invariant
        self.rope_axes = torch.tensor(program.rope_axes, dtype=torch.int32, device=model.device)
        self.rotations = {rope: Rotation(rope, model.device) for rope in program.ropes}
        layers = len(self.kv_layers)
        scales = scales or KVScales((1.0,) * layers, (1.0,) * layers)
        self.scales = list(zip(scales.k, scales.v, strict=True))
        self._latent_heads = [op.heads for op in program.ops if isinstance(op, AttendLatent)][:1]

    def scheduled_heads(self, kv_heads: int) -> int:
        """Return the heads for which decode attention divides its work."""
        return head_blocks(self._latent_heads[0]) if self._latent_heads else kv_heads


class Run:
    """One step through the operations."""

    def __init__(self, model: ModelParts, step: DeviceStep) -> None:
        self.model, self.weights, self.step, self.adapters = model, model.weights, step, model.adapters
        self.values: dict[str, Any] = {}  # Tensor, or Rounded after a Quantized
        self._prefill_schedules: dict[tuple[int, int], Tensor] = {}
        positions, axes = (step.positions, None) if step.axes is None else (step.axes, model.rope_axes)
        if step.rope_deltas is not None:
            positions = positions + step.rope_deltas
        self.angles: dict[Rope, tuple[Tensor, Tensor]] = {
            rope: ROPE_ANGLES(positions, rotation.frequencies(step.rope_lengths), rotation.attention, axes)
            for rope, rotation in model.rotations.items()
        }
        self.pages, layout = group_pages(model.layout, step.pages), model.layout
        sources = step.cross_attention
        self.decoder_starts = None if sources is None else sources.decoder_starts
        self.schedules = {
            (window, chunk, kv_heads): DECODE_SCHEDULE(
                step.query_start, step.lengths, model.scheduled_heads(kv_heads), window, self.decoder_starts, chunk
            )
            for window, chunk, kv_heads in {
                (group.window, group.chunk, layout.shape(group).kv_heads) for group in layout.groups
            }
            if step.singles
        }
        self.cross_schedules = None
        if sources is not None:
            self.cross_schedules = DECODE_SCHEDULE(sources.query_start, sources.lengths, layout.kv_heads, None)

    def __getitem__(self, value: Value) -> Any:
        return self.values[value.name]

    def __setitem__(self, value: Value, tensor: Any) -> None:
        self.values[value.name] = tensor

    def has(self, value: Value) -> bool:
        return value.name in self.values

    def columns(self, columns: Columns) -> Tensor:
        found: Tensor = self[columns.value]
        return found[:, columns.first : columns.first + columns.width]

    def prefill_schedule(self, kv_heads: int, block: int) -> Tensor:
        """Return the schedule of rows with several tokens, for blocks of this many tokens."""
        key = kv_heads, block
        if key not in self._prefill_schedules:
            step, programs = self.step, 0
            if self.model.divides_keys:
                programs = num_programs(step.lengths.device, kv_heads)
            made = PREFILL_SCHEDULE(step.query_start, step.lengths, len(step.ids), block, programs)
            self._prefill_schedules[key] = made
        return self._prefill_schedules[key]

    @cached_property
    def adapter_rows(self) -> AdapterRows:
        """Rows of the step by adapter, for all projections."""
        assert self.step.adapters is not None, "a step of a model with adapters has the adapter of each token"
        return AdapterRows.of(self.step.adapters[:, None], self.adapters.num_adapters)

    def adapter_pairs(self, chosen: Value, num_experts: int) -> AdapterRows:
        """Return the pairs of a layer's experts by adapter and expert, except pairs with zero-computation experts."""
        assert self.step.adapters is not None, "a step of a model with adapters has the adapter of each token"
        groups = self.adapters.num_adapters * num_experts
        expert_ids = self[chosen].expert_ids
        of_pairs = self.step.adapters[:, None] * num_experts + expert_ids
        return AdapterRows.of(of_pairs.masked_fill_(expert_ids >= num_experts, groups).clamp_(max=groups), groups)

    @property
    def state_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as recurrent operations receive them (kernels/recurrent/common.py)."""
        step = self.step
        assert step.first is not None, "recurrent layers need the positions of the rows"
        return step.query_start, step.slot, step.first
