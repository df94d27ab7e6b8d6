"""Data that all layers of a step share: KV write positions, block reads, and the angles of the positions.

Computed once per step, not once per layer.
"""

from dataclasses import dataclass, field

from torch import Tensor

from engine.kv.layout import Layout
from engine.layers.batch import Batch
from engine.layers.kv import group_pages
from engine.layers.rope import angles
from engine.layers.states import LayerStates
from engine.models.parts import Rope
from kernels.paged_attention import Reads, Sizes, causal_reads, cross_reads, group_reads
from kernels.paged_kv import write_rows


@dataclass(frozen=True)
class Step:
    pages: tuple[Tensor, ...]  # per group: [blocks, layers, planes, block_tokens, kv_heads, head_dim]
    reads: tuple[Reads, ...]  # per group
    writes: tuple[Tensor, ...]  # per group: [layers, planes, tokens] int64
    angles: dict[Rope, tuple[Tensor, Tensor]]  # cos and sin, [tokens, 1, dim]
    count: tuple[int, ...]  # tokens of each row
    cross_reads: tuple[Reads, ...] = ()  # per group, for cross-attention
    cross_writes: tuple[Tensor, ...] = ()  # per group: [layers_per_block, 2, tokens of encoder inputs] int64
    states: LayerStates = ()
    state_rows: tuple[Tensor, ...] = ()  # query_start, slots and first of the rows (kernels/recurrent/common.py)
    windows: tuple[int, ...] = ()  # patches of each window of a tower
    context: Tensor | None = None  # keys and values of the rows of frames, for learned queries of a tower
    context_rows: tuple[int, ...] = ()  # rows of each frame
    keys: Tensor | None = None  # [patches] bool: patches of a tower that others attend to; None: all of them


@dataclass(frozen=True)
class TowerRows:
    """Rows of a tower that attend to each other, and the angles of their positions."""

    count: tuple[int, ...] = ()  # patches of each frame
    windows: tuple[int, ...] = ()  # patches of each window
    angles: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cos and sin, [patches, 1, dim]
    context: Tensor | None = None  # keys and values of the rows of frames, which queries attend to
    context_rows: tuple[int, ...] = ()  # rows of each frame
    keys: Tensor | None = None  # [patches] bool: the patches that others attend to; None: all of them


NO_ROWS = TowerRows()


def rope_positions(batch: Batch, rope_axes: tuple[int, ...]) -> Tensor:
    """Return the positions that rotate the tokens: [tokens], or [tokens, pairs] with M-RoPE positions."""
    return batch.positions if batch.axes is None else batch.axes[:, list(rope_axes)]


def plan_step(
    batch: Batch,
    pages: Tensor,
    layout: Layout,
    ropes: tuple[Rope, ...],
    states: LayerStates = (),
    rope_axes: tuple[int, ...] = (),
    *,
    windowed_spans: bool = False,
) -> Step:
    """windowed_spans: only layers with a window read the spans of tokens that see one another."""
    shapes, block_tokens, planes = layout.shapes, layout.block_tokens, layout.planes
    viewed = group_pages(layout, pages)
    sizes = Sizes(
        block_tokens=block_tokens,
        columns=batch.tables[0].shape[1] if batch.tables else 0,  # no tables without a KV cache
        page_elements=block_tokens * layout.kv_heads * layout.head_dim,
        device=pages.device,
    )
    limits = {(group.window, group.chunk) for group in layout.groups}
    window_reads = {
        (window, chunk): causal_reads(
            batch.first,
            batch.count,
            sizes,
            window=window,
            chunk=chunk,
            key_starts=batch.decoder_starts,
            spans=None if windowed_spans and window is None else batch.spans,
        )
        for window, chunk in limits
    }
    reads = tuple(
        group_reads(window_reads[group.window, group.chunk], table, shape.layers, planes)
        for group, shape, table in zip(layout.groups, shapes, batch.tables, strict=True)
    )
    writes = tuple(
        write_rows(slot_mapping, shape.layers, block_tokens, planes)
        for shape, slot_mapping in zip(shapes, batch.slot_mapping, strict=True)
    )
    positions = rope_positions(batch, rope_axes)
    rotary_angles = {rope: angles(rope, positions, batch.rope_lengths) for rope in ropes}
    if batch.decoder_starts is None:
        rows = batch.state_rows if states else ()
        return Step(viewed, reads, writes, rotary_angles, batch.count, states=states, state_rows=rows)
    whole = cross_reads(batch.decoder_starts, batch.count, sizes)
    kept = () if batch.encoder_inputs is None else batch.encoder_inputs.slot_mapping
    layers = layout.layers_per_block
    return Step(
        viewed,
        reads,
        writes,
        rotary_angles,
        batch.count,
        tuple(group_reads(whole, table, layers) for table in batch.tables),
        tuple(write_rows(slot_mapping, layers, block_tokens) for slot_mapping in kept),
    )
