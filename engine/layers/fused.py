"""Executor of a program with Triton: one launch of a fused kernel per operation.

The kernel boundaries differ from those of torch: the output of a residual block is added by the norm that follows, and
one kernel moves queries, keys and values from the projection to where attention reads them (the pages, or, for
bidirectional attention, the same buffer). Encoder inputs pass through the encoder first; then their keys and values for
each decoder layer are written to the pages. Nothing waits for the device, and no shape depends on its data, so that a
step can be captured as a CUDA graph.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.layers.batch import MediaRows
from engine.layers.fused_rows import (
    UNSCALED,
    QKArguments,
    activation,
    add,
    add_norm,
    keep,
    normalize,
    prepare_rows,
    qk_arguments,
    qk_norm,
    rotate,
)
from engine.layers.kv import KVLayer, group_pages, kv_layers
from engine.layers.loaded import routing
from engine.layers.lora import AdapterRows
from engine.layers.model import TextModel
from engine.layers.norm import gated_norm_of_ranks
from engine.layers.query_scale import query_factors
from engine.layers.rope import Rotation
from engine.layers.rounded import rounding_of
from engine.layers.states import LayerStates
from engine.layers.streams import computed
from engine.layers.torch_compile import Executor, SegmentCompiler
from engine.layers.values import pad_values
from engine.lowering.program import (
    AbsorbQueries,
    Activation,
    Add,
    AddMedia,
    AddNormalize,
    Attend,
    AttendLatent,
    BlockLinear,
    CausalConv,
    Clamp,
    Collect,
    Columns,
    Combine,
    Correct,
    CutHeads,
    DeltaRule,
    Embed,
    EmbedMedia,
    ExpandValues,
    ExpertLinear,
    FillMedia,
    Gate,
    GatedNorm,
    GatedRecurrence,
    InsertMedia,
    Keep,
    Linear,
    LookUp,
    LookUpPositions,
    Matrix,
    Multiply,
    Normalize,
    NormalizeGroups,
    NormalizeParts,
    Op,
    PadValues,
    Predict,
    PrepareIndex,
    PrepareKV,
    PrepareLatent,
    QKNorm,
    Quantized,
    ReadStates,
    Rotate,
    Route,
    Scale,
    ScaleQueries,
    ScaleRoutes,
    SelectiveScan,
    SelectKeys,
    Sparsify,
    Spread,
    StreamOp,
    Tanh,
    Value,
    WriteKV,
)
from engine.lowering.rewrites import fuse_add_normalize, fuse_prepare_kv, last_uses, quantize_outputs, sums_for_norms
from engine.lowering.segments import Segment, segments
from engine.models.kv_scales import KVScales
from engine.models.parts import RMSNorm, Rope
from kernels.activation_quantized import ACTIVATION_QUANTIZED
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.latent import LATENT_DECODE, LATENT_PREFILL, head_blocks
from kernels.attention.prefill import PREFILL_ATTENTION, tokens_of_block
from kernels.attention.prefill_schedule import PREFILL_SCHEDULE, num_programs
from kernels.attention.schedule import DECODE_SCHEDULE
from kernels.attention.select import SELECT_KEYS
from kernels.attention.sparse_latent import SPARSE_LATENT
from kernels.e4m3 import Rounded
from kernels.embedding import EMBEDDING
from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.routes import EXPERT_ROUTES
from kernels.experts.schedule import EXPERT_SCHEDULE, tile_rows
from kernels.experts.sum import EXPERT_SUM
from kernels.head_matmul import HEAD_MATMUL
from kernels.index_kv import INDEX_KV
from kernels.integers import multiply_experts
from kernels.latent_kv import LATENT_KV
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV
from kernels.recurrent.causal_conv import CAUSAL_CONV
from kernels.recurrent.delta_rule import DELTA_RULE
from kernels.recurrent.gated_norm import GATED_NORM
from kernels.recurrent.rg_lru import RG_LRU
from kernels.recurrent.selective_scan import SELECTIVE_SCAN
from kernels.rms_norm import RMS_NORM
from kernels.rms_norm_quantized import RMS_NORM_QUANTIZED
from kernels.rope import ROPE_ANGLES
from kernels.sampling.cap_logits import CAP_LOGITS

_PLAIN_QK: QKArguments = (None, "rms", 0.0, None, None, False)


@dataclass(frozen=True)
class CrossAttentionInputs:
    """Cross-attention of a step: every decoder token is a separate row that attends to the entire encoder input."""

    decoder_starts: Tensor  # [rows] int32, first position of the decoder's tokens, where self-attention begins
    slot: Tensor  # [tokens] int32, slot of the token's request
    query_start: Tensor  # [tokens + 1] int32: 0, 1, …
    lengths: Tensor  # [tokens] int32, length of the encoder input; 0 for padding


class Forwarded(NamedTuple):
    """Results of a step: the hidden states after the final norm, [tokens, hidden]; the inputs of the layers
    `Model.kept_layers`, [tokens, layers · hidden], and the selected experts of all layers, [tokens, experts], if the
    program keeps them."""

    hidden: Tensor
    kept: Tensor | None
    routes: Tensor | None


@dataclass(frozen=True)
class DeviceStep:
    """A step as device tensors. Rows without tokens are padding.

    In an encoder-decoder model, rows contain only decoder tokens, and `positions` counts from the end of the encoder
    input."""

    ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    rope_lengths: Tensor  # [tokens] int32, length that determines the token's rotary scaling
    slot_mapping: Tensor  # [groups, tokens] int32, KV write position: block · block_tokens + offset, or negative
    slot: Tensor  # [rows] int32, index into `tables`
    query_start: Tensor  # [rows + 1] int32
    lengths: Tensor  # [rows] int32, tokens of each sequence after this step
    tables: Tensor  # [groups, slots, blocks] int32
    pages: Tensor  # [blocks, layers_per_block, planes, block_tokens, kv_heads, head_dim]
    singles: bool  # some row has one token
    spans: bool  # some row has several tokens
    segments: Tensor | None = None  # [tokens] int32, for models with segment embeddings
    first: Tensor | None = None  # [rows] int32, position of each row's first token, for recurrent layers
    states: LayerStates = ()  # of the recurrent layers
    cross_attention: CrossAttentionInputs | None = None
    encoder_inputs: "DeviceStep | None" = None  # encoder inputs to read before this step
    media: MediaRows | None = None  # None: no token is of media
    rope_deltas: Tensor | None = None  # [tokens] int32, rotary position minus position; None: both are equal
    axes: Tensor | None = None  # [tokens, 3] int32, M-RoPE positions in time, height and width; None: all `positions`
    adapters: Tensor | None = None  # [tokens] int32, LoRA adapter of each token, their number for none
    draft_inputs: Tensor | None = None  # [tokens, hidden], hidden states that a head for drafts reads
    bidirectional: Tensor | None = None  # [tokens, 2] int32, spans of tokens that see one another; None: none do


@dataclass(frozen=True)
class Unreduced:
    """This rank's addend of a sum over the ranks, which the norm that reads it completes."""

    y: Tensor


class FusedModel:
    """Immutable; its only state is the KV pages."""

    def __init__(self, text_model: TextModel, scales: KVScales | None = None) -> None:
        self.vocabulary, self.weights = text_model.vocabulary, text_model.weights
        self.dtype, self.layout, self.kv_layers = text_model.dtype, text_model.layout, kv_layers(text_model.layout)
        self.program, self.adapters = text_model.program, text_model.adapters
        self.towers = text_model.towers
        self.fp8 = text_model.target.fp8
        world = text_model.vocabulary.world
        self.fused_reduce = world.fused if isinstance(world, Group) else None
        # Divided keys are added in an order that depends on the other rows and on how a prompt is cut.
        self.divides_keys = not text_model.target.invariant
        self.rope_axes = torch.tensor(self.program.rope_axes, dtype=torch.int32, device=text_model.device)
        self._rotations = {rope: Rotation(rope, text_model.device) for rope in self.program.ropes}
        self._latent_heads = [op.heads for op in self.program.ops if isinstance(op, AttendLatent)][:1]
        layers = len(self.kv_layers)
        scales = scales or KVScales((1.0,) * layers, (1.0,) * layers)
        self.scales = list(zip(scales.k, scales.v, strict=True))
        self.reduced_by_norm: set[int] = set()
        # Launches on `meta` tensors are recorded to compile Triton's kernels, and torch.compile takes part in none.
        compiles = text_model.torch_compile and text_model.device.type != "meta"
        self.compiler: SegmentCompiler[_Run] | None = SegmentCompiler(_EXECUTOR) if compiles else None
        self._ops = self._fused(self.program.ops, self.program.out, self.program.kept, *self.program.routes)
        self._encoder_ops = None
        if self.program.encoder_out is not None:
            self._encoder_ops = self._fused(self.program.encoder, self.program.encoder_out)

    def _fused(self, ops: Sequence[Op], *out: Value | None) -> tuple[Segment, ...]:
        """Return the operations that are launched, each with the buffers that nothing reads afterwards."""
        fused = quantize_outputs(fuse_add_normalize(fuse_prepare_kv(ops, norms=True)), self._quantizes)
        self.reduced_by_norm |= sums_for_norms(fused)
        return segments(fused, last_uses(fused, *out), "triton")

    def scheduled_heads(self, kv_heads: int) -> int:
        """Return the heads for which decode attention divides its work."""
        return head_blocks(self._latent_heads[0]) if self._latent_heads else kv_heads

    def _quantizes(self, op: Normalize | AddNormalize | Activation, matrices: Sequence[Matrix]) -> bool:
        if not isinstance(op, Activation) and not isinstance(op.weight.norm, RMSNorm):
            return False
        if isinstance(op, Activation) and op.numbers is not None:
            return False
        if any(self.adapters.layer(matrix.name) is not None for matrix in matrices):
            return False  # adapters multiply the rows before quantization
        return rounding_of([self.weights.matrix(matrix) for matrix in matrices]) is not None

    def forward(self, step: DeviceStep) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden], and write the tokens' keys and values to the
        pages. Encoder inputs of the step must have been read before."""
        return self.forward_all(step).hidden

    def forward_all(self, step: DeviceStep) -> Forwarded:
        """Return the hidden states and the other values that the program keeps."""
        run, kept, routes = _Run(self, step).execute(self._ops), self.program.kept, self.program.routes
        return Forwarded(
            run[self.program.out],
            None if kept is None else run[kept],
            torch.cat([run[value].expert_ids for value in routes], 1) if routes else None,
        )

    def encode_inputs(self, encoder_inputs: DeviceStep) -> Tensor:
        """Return the encoder output, [tokens, hidden], and write the keys and values for cross-attention to the
        pages."""
        assert self._encoder_ops is not None and self.program.encoder_out is not None, "the model has no encoder"
        return _Run(self, encoder_inputs).execute(self._encoder_ops)[self.program.encoder_out]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32."""
        return self.vocabulary.joined(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, columns of this rank] fp32."""
        y, out = self.vocabulary.own_products(hidden), self.vocabulary.out
        return y if out.scale == 1.0 and out.softcap is None else CAP_LOGITS(y, out.scale, out.softcap or 0.0)


class _Run:
    """One step through the operations."""

    def __init__(self, model: FusedModel, step: DeviceStep) -> None:
        self.model, self.weights, self.step, self.adapters = model, model.weights, step, model.adapters
        self.values: dict[str, Any] = {}  # Tensor, or Rounded after a Quantized
        self._prefill_schedules: dict[tuple[int, int], Tensor] = {}
        positions, axes = (step.positions, None) if step.axes is None else (step.axes, model.rope_axes)
        if step.rope_deltas is not None:
            positions = positions + step.rope_deltas
        self.angles: dict[Rope, tuple[Tensor, Tensor]] = {
            rope: ROPE_ANGLES(positions, rotation.frequencies(step.rope_lengths), rotation.attention, axes)
            for rope, rotation in model._rotations.items()
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

    def execute(self, divided: Sequence[Segment]) -> "_Run":
        if self.model.compiler is not None:
            self.model.compiler.execute(divided, self)
            return self
        for segment in divided:
            for op, unused in zip(segment.ops, segment.unused, strict=True):
                FUNCTIONS[type(op)](op, self)
                for name in unused:
                    self.values.pop(name, None)
        return self


def _read_states(op: ReadStates, run: _Run) -> None:
    assert run.step.draft_inputs is not None, "a head for drafts reads hidden states"
    run[op.y] = run.step.draft_inputs.to(run.model.dtype)
    if op.skips_first:
        run[op.x].masked_fill_((run.step.positions == 0).unsqueeze(1), 0)


def _embed(op: Embed, run: _Run) -> None:
    step, tables, vocabulary = run.step, run.weights.tables(op.weight), run.model.vocabulary
    if vocabulary.world.size > 1 or vocabulary.blocks is not None:
        run[op.y] = tables.summed(step.ids, step.positions, step.segments, run.model.dtype)
        return
    if not op.weight.embed.is_sum:
        run[op.y] = EMBEDDING(step.ids, vocabulary.table, run.model.dtype, vocabulary.part.scale)
        return
    added = step.positions, tables.position_rows, step.segments, tables.segments
    run[op.y] = EMBEDDING(step.ids, vocabulary.table, run.model.dtype, vocabulary.part.scale, *added)


def _insert_media(op: InsertMedia, run: _Run) -> None:
    if run.step.media is not None:
        run.step.media.insert(run[op.x])


def _embed_media(op: EmbedMedia, run: _Run) -> None:
    ids = run.step.ids
    run[op.y] = torch.zeros(len(ids), op.y.width, dtype=run.model.dtype, device=ids.device)
    if run.step.media is not None:
        run.step.media.insert(run[op.y])


def _fill_media(op: FillMedia, run: _Run) -> None:
    step = run.step
    if step.media is not None:
        token = torch.tensor([op.token], device=step.ids.device)
        step.media.fill(run[op.x], run.weights.token_rows(op.weight).look_up(token, run.model.dtype))


def _add_media(op: AddMedia, run: _Run) -> None:
    if run.step.media is not None:
        run.step.media.add(run[op.x], op.first)


def _look_up(op: LookUp, run: _Run) -> None:
    rows = run.weights.token_rows(op.weight)
    ids = torch.where(run.step.ids < rows.part.vocab, run.step.ids, 0)
    run[op.y] = EMBEDDING(ids, rows.table, run.model.dtype, rows.part.scale)


def _look_up_positions(op: LookUpPositions, run: _Run) -> None:
    run[op.y] = run.model.vocabulary.position(run.step.positions, run.model.dtype)


def _normalize_parts(op: NormalizeParts, run: _Run) -> None:
    sizes = [weight.norm.size for weight in op.weights]
    for piece, weight in zip(run[op.x].split(sizes, 1), op.weights, strict=True):
        layer = run.weights.norm(weight)
        assert isinstance(layer.norm, RMSNorm), "parts have RMS norms"
        RMS_NORM(piece, layer.weight, layer.norm.eps, None, 1.0, piece)


def _normalize_groups(op: NormalizeGroups, run: _Run) -> None:
    layer, x, size = run.weights.norm(op.weight), run.columns(op.x), op.weight.norm.size
    assert isinstance(layer.norm, RMSNorm), "groups have RMS norms"
    pieces = [x.view(-1, size)] if x.is_contiguous() else x.split(size, 1)
    for piece in pieces:
        RMS_NORM(piece, layer.weight, layer.norm.eps, None, 1.0, piece)


def _add_normalize(op: AddNormalize, run: _Run) -> None:
    layer, x, added = run.weights.norm(op.weight), run[op.x], run[op.added]
    if isinstance(added, Unreduced):
        assert run.model.fused_reduce is not None, "only fused sums are left to norms"
        run[op.y], run[op.x] = run.model.fused_reduce.reduce_norm(added.y, layer.weight, layer.norm.eps, x, op.scale)
        return
    run[op.y], run[op.x] = add_norm(layer, added, x, op.scale)


def _quantized(op: Quantized, run: _Run) -> None:
    wanted, inner = rounding_of([run.weights.matrix(matrix) for matrix in op.matrices]), op.op
    assert wanted is not None, "the readers of a quantized output multiply by fp8 weights"
    if isinstance(inner, Activation):
        made = ACTIVATION_QUANTIZED(run[inner.x], inner.act, inner.gated, wanted.group, wanted.static_scale)
        run[inner.y] = Rounded(*made)
        return
    layer = run.weights.norm(inner.weight)
    residual, x, scale = None, run[inner.x], 1.0
    if isinstance(inner, AddNormalize):
        residual, x, scale = x, run[inner.added], inner.scale  # the residual is updated in place
    made = RMS_NORM_QUANTIZED(x, layer.weight, layer.norm.eps, residual, scale, wanted.group, wanted.static_scale)
    run[inner.y] = Rounded(*made[:2])


def _linear(op: Linear, run: _Run) -> None:
    layer = run.weights.matrix(op.weight)
    x = run.columns(op.x) if isinstance(op.x, Columns) else run[op.x]
    if op.fp32:
        run[op.y] = layer.in_fp32(x)
        return
    y, lora = layer.partial_sum(x) if op.partial else layer.unreduced(x), run.adapters.layer(op.weight.name)
    if lora is not None:
        lora.add(x, y, run.adapter_rows)
    fused = run.model.fused_reduce
    if id(op) in run.model.reduced_by_norm and fused is not None and layer.bias is None and fused.takes(y):
        run[op.y] = Unreduced(y)
        return
    run[op.y] = y if op.partial else layer.reduced(y)


def _multiply(op: Multiply, run: _Run) -> None:
    run[op.y] = run[op.x] * run.weights.multiplier(op.weight).to(run.model.dtype)


def _scale(op: Scale, run: _Run) -> None:
    run.columns(op.x).mul_(op.factor)


def _clamp(op: Clamp, run: _Run) -> None:
    run.columns(op.x).clamp_(op.low, op.high)


def _prepare_kv(op: PrepareKV, run: _Run) -> None:
    if op.layer is None:
        prepare_rows(op, run)
        return
    arguments, bias = qk_arguments(op, run)
    qkv, place, step = run[op.qkv].unflatten(-1, (-1, op.head_dim)), run.model.kv_layers[op.layer], run.step
    scales = run.model.scales[op.layer]
    pages, slots = run.pages[place.group], step.slot_mapping[place.group]
    QK_NORM_ROPE_KV(qkv, pages, place.layer, slots, op.heads, *arguments, *scales, bias)


def _scale_queries(op: ScaleQueries, run: _Run) -> None:
    queries = run[op.qkv].unflatten(-1, (-1, op.head_dim))[:, : op.heads]
    queries.mul_(query_factors(op.factor, run.step.positions))


def _write_kv(op: WriteKV, run: _Run) -> None:
    """Write the keys and values of encoder inputs; others are written by PrepareKV."""
    place, step = run.model.kv_layers[op.layer], run.step
    kv = run[op.qkv].unflatten(-1, (-1, op.head_dim))
    pages, slots = run.pages[place.group], step.slot_mapping[place.group]
    QK_NORM_ROPE_KV(kv, pages, place.layer, slots, 0, *_PLAIN_QK, *UNSCALED)


def _attend(op: Attend, run: _Run) -> None:
    part, step = op.part, run.step
    qkv = run[op.qkv].unflatten(-1, (-1, part.head_dim))
    out = torch.empty(qkv[:, : op.heads].shape, dtype=qkv.dtype, device=qkv.device)
    if op.layer is None:
        q, k, v = qkv.split((op.heads, op.kv_heads, op.kv_heads), 1)
        biases = run.weights.bias(op.bias)
        ENCODER_ATTENTION(q, k, v, step.query_start, out, op.scale, False, part.window, part.softcap, biases)
    elif op.cross:
        _cross_attention(op, run.model.kv_layers[op.layer], run, qkv, out)
    else:
        _paged_attention(op, run.model.kv_layers[op.layer], run, qkv[:, : op.heads], out)
    run[op.y] = out.flatten(1)


def _paged_attention(op: Attend, place: KVLayer, run: _Run, q: Tensor, out: Tensor) -> None:
    """Attend to the pages."""
    part, step, table, pages = op.part, run.step, run.step.tables[place.group], run.pages[place.group]
    assert op.layer is not None, "pages belong to a layer"
    scales, starts = run.model.scales[op.layer], run.decoder_starts
    rows = step.slot, step.query_start, step.lengths
    options = op.scale, part.window, part.softcap, run.weights.sinks(op.sinks)
    last = *scales, starts, run.weights.slopes(op.slopes), part.chunk, run.weights.bias(op.bias)
    if step.singles:
        schedules = run.schedules[part.window, part.chunk, op.kv_heads]
        DECODE_ATTENTION(q, pages, place.layer, table, *rows, schedules, out, *options, *last)
    if step.spans:
        schedule = run.prefill_schedule(op.kv_heads, tokens_of_block(q, pages, part.window))
        own_spans = None if run.model.program.windowed_spans and part.window is None else step.bidirectional
        PREFILL_ATTENTION(q, pages, place.layer, table, *rows, out, *options, own_spans, *last, schedule)


def _prepare_latent(op: PrepareLatent, run: _Run) -> None:
    part, layer, step = op.part, run.weights.norm(op.norm), run.step
    place, (cos, sin) = run.model.kv_layers[op.layer], run.angles[part.rope]
    q = run[op.q].unflatten(-1, (op.heads, part.query_dim))
    y = q.new_empty(len(q), op.heads, part.state_dim)
    slots = step.slot_mapping[place.group]
    norm = layer.weight, layer.norm.eps
    LATENT_KV(run[op.latent], q, run.pages[place.group], place.layer, slots, *norm, cos, sin, part.rope.interleaved, y)
    run[op.y] = y.flatten(1)


def _prepare_index(op: PrepareIndex, run: _Run) -> None:
    part, layer, step = op.part, run.weights.norm(op.norm), run.step
    place, (cos, sin) = run.model.kv_layers[op.layer], run.angles[part.rope]
    assert layer.bias is not None and not isinstance(layer.norm, RMSNorm), "keys of an indexer have a layer norm"
    written = run.pages[place.group], place.layer, step.slot_mapping[place.group]
    q = run[op.q].unflatten(-1, (part.heads, part.head_dim))
    norm = layer.weight, layer.bias, layer.norm.eps
    INDEX_KV(run[op.key], q, *written, *norm, cos, sin, part.rope.interleaved)


def _select_keys(op: SelectKeys, run: _Run) -> None:
    part, step, place = op.part, run.step, run.model.kv_layers[op.layer]
    q = run[op.q].unflatten(-1, (part.heads, part.head_dim))
    selected = torch.empty((len(q), part.top_k), dtype=torch.int32, device=q.device)
    rows = step.tables[place.group], step.slot, step.query_start, step.lengths
    run[op.y], *_ = SELECT_KEYS(q, run[op.weights], run.pages[place.group], place.layer, *rows, selected)


def _absorb_queries(op: AbsorbQueries, run: _Run) -> None:
    part, keys = op.weight.attention, run.weights.heads(op.weight).keys
    q = run[op.q].unflatten(-1, (op.heads, part.query_dim))[..., : part.qk_nope_head_dim]
    y = run[op.y].unflatten(-1, (op.heads, part.state_dim))[..., : part.kv_lora_rank]
    HEAD_MATMUL(q, keys.transpose(1, 2), y)


def _attend_latent(op: AttendLatent, run: _Run) -> None:
    part, step, place = op.part, run.step, run.model.kv_layers[op.layer]
    q = run[op.q].unflatten(-1, (op.heads, part.state_dim))
    out = q.new_empty(len(q), op.heads, part.kv_lora_rank)
    read = q, run.pages[place.group], place.layer, step.tables[place.group], step.slot, step.query_start, step.lengths
    if op.selected is not None:
        SPARSE_LATENT(*read, run[op.selected], out, part.scale)
        run[op.y] = out.flatten(1)
        return
    if step.singles:
        LATENT_DECODE(*read, run.schedules[None, None, op.kv_heads], out, part.scale)
    if step.spans:
        LATENT_PREFILL(*read, out, part.scale)
    run[op.y] = out.flatten(1)


def _expand_values(op: ExpandValues, run: _Run) -> None:
    part, x = op.weight.attention, run[op.x].unflatten(-1, (op.heads, -1))
    y = x.new_empty(len(x), op.heads, part.v_head_dim)
    run[op.y] = HEAD_MATMUL(x, run.weights.heads(op.weight).values, y).flatten(1)


def _block_linear(op: BlockLinear, run: _Run) -> None:
    x = run[op.x].unflatten(-1, (op.heads, -1))
    run[op.y] = HEAD_MATMUL(x, run.weights.blocks(op.weight).blocks, torch.empty_like(x)).flatten(1)


def _cross_attention(op: Attend, place: KVLayer, run: _Run, q: Tensor, out: Tensor) -> None:
    """Attend from each token to the entire encoder input of its sequence."""
    step = run.step
    assert step.cross_attention is not None and run.cross_schedules is not None, "cross-attention needs encoder inputs"
    rows = step.cross_attention.slot, step.cross_attention.query_start, step.cross_attention.lengths
    options, table = (op.scale, None, op.part.softcap, None), step.tables[place.group]
    pages = run.pages[place.group]
    DECODE_ATTENTION(q, pages, place.layer, table, *rows, run.cross_schedules, out, *options, *UNSCALED)


@dataclass(frozen=True)
class _Routes:
    """Routes of a step's tokens, and the tiles of rows by expert."""

    expert_ids: Tensor
    order: Tensor
    pairs: Tensor
    tiles: Tensor
    rows: int


def _route(op: Route, run: _Run) -> None:
    part, logits = op.part, run[op.logits]
    correction = run.weights.correction(op.correction)
    expert_ids, weights, order = EXPERT_ROUTES(logits, part.routed, routing(part), correction)
    rows = tile_rows(len(logits), part.top_k, part.num_experts)
    run[op.chosen] = _Routes(expert_ids, order, *EXPERT_SCHEDULE(expert_ids, part.num_experts, rows), rows)
    run[op.weights] = weights


def _scale_routes(op: ScaleRoutes, run: _Run) -> None:
    scales = run.weights.correction(op.scales)
    assert scales is not None, "a program that scales routes has numbers of the experts"
    run[op.weights].mul_(scales[run[op.chosen].expert_ids])


def _expert_linear(op: ExpertLinear, run: _Run) -> None:
    routes, stack = run[op.chosen], run.weights.stacks[op.stack]
    k = op.top_k if op.gathered else 1
    bias = None if run.weights.matrix(op.matrices[0]).own_bias is None else stack.biases
    scales = None if op.weights is None else run[op.weights]
    rest = routes.pairs, routes.tiles, k, routes.rows, bias, scales
    if (one := stack.integers) is not None:
        y = multiply_experts(one, run[op.x], *rest)
    elif stack.blocks is not None:
        y = stack.blocks.multiply_experts(run[op.x], *rest)
    elif stack.fp8 is not None:
        products = run.model.fp8
        assert products is not None, "fp8 weights need kernels that multiply by them"
        y = stack.fp8.multiply(products, run[op.x], *rest)
    else:
        assert stack.whole is not None, "experts for fused kernels are loaded stacked"
        y = EXPERT_MATMUL(run[op.x], stack.whole, *rest)
    if (lora := run.adapters.layer(op.stack)) is not None:
        lora.add_routed(run[op.x], y, run.adapter_pairs(op.chosen, lora.num_experts), k, scales)
    run[op.y] = y


def _combine(op: Combine, run: _Run) -> None:
    """The sum is in fp32 until all ranks have added to it."""
    part, dtype = op.part, run[op.x].dtype
    shared = None if op.shared is None else run[op.shared]
    opening = None if part.shared_gate is None else run[op.logits]
    summed = torch.float32 if op.reduce else dtype
    order = run[op.chosen].order
    weights = torch.ones_like(order, dtype=torch.float32) if op.weights is None else run[op.weights]
    skipped = None
    if op.inputs is not None:
        inputs = run[op.inputs] if run.model.vocabulary.world.rank == 0 else torch.zeros_like(run[op.inputs])
        skipped = run[op.chosen].expert_ids, part.num_experts, inputs
    y = EXPERT_SUM(run[op.x], weights, order, shared, opening, part.routed, summed, skipped)
    run[op.y] = run.model.vocabulary.world.all_reduce(y).to(dtype) if op.reduce else y


def _stream(op: StreamOp, run: _Run) -> None:
    for value, tensor in computed(op, run.__getitem__, run.model.vocabulary.world):
        run[value] = tensor


def _pad_values(op: PadValues, run: _Run) -> None:
    x = run[op.x]
    run[op.y] = pad_values(op, x, x.new_empty(x.shape[0], op.y.width))


def _cut_heads(op: CutHeads, run: _Run) -> None:
    run[op.y] = run[op.x].unflatten(-1, (op.heads, -1))[..., : op.y.width // op.heads].flatten(1)


def _gate(op: Gate, run: _Run) -> None:
    gate = run.columns(op.gate)
    factor = gate.sigmoid() if op.act == "sigmoid" else gate
    run[op.y] = (run.columns(op.x).unflatten(1, (op.gate.width, -1)) * factor.unsqueeze(2)).flatten(1)


def _causal_conv(op: CausalConv, run: _Run) -> None:
    weights, state = run.weights, run.step.states[op.layer][0]
    bias = None if op.bias is None else weights.parameter(op.bias)
    arguments = run.columns(op.x), weights.parameter(op.weight), bias, op.act, state, *run.state_rows
    run[op.y], _ = CAUSAL_CONV(*arguments)


def _delta_rule(op: DeltaRule, run: _Run) -> None:
    keys, weights, state = op.key_heads * op.key_dim, run.weights, run.step.states[op.layer][-1]
    q, k, v = run[op.qkv].split((keys, keys, op.value_heads * op.value_dim), 1)
    a, b, dt_bias = run.columns(op.a), run.columns(op.b), weights.parameter(op.dt_bias)
    if op.vector_decay:
        a = a.unflatten(1, (-1, op.key_dim))
    heads = (one.unflatten(1, (-1, dim)) for one, dim in ((q, op.key_dim), (k, op.key_dim), (v, op.value_dim)))
    decay = a, b, weights.parameter(op.slope), dt_bias
    y, _ = DELTA_RULE(*heads, *decay, state, *run.state_rows, op.key_dim**-0.5, True, op.beta_scale)
    run[op.y] = y.flatten(1)


def _selective_scan(op: SelectiveScan, run: _Run) -> None:
    weights, state = run.weights, run.step.states[op.layer][-1]
    b, c = (run.columns(one).unflatten(1, (-1, op.state)) for one in (op.b, op.c))
    x = run.columns(op.x).unflatten(1, (-1, op.head_dim))
    gate = None if op.gate is None else run.columns(op.gate).unflatten(1, (-1, op.head_dim))
    a = weights.parameter(op.a)
    d, bias = (None if one is None else weights.parameter(one) for one in (op.d, op.dt_bias))
    y, _ = SELECTIVE_SCAN(x, run.columns(op.dt), a, b, c, d, bias, gate, state, *run.state_rows, op.dt_limits)
    run[op.y] = y.flatten(1)


def _gated_norm(op: GatedNorm, run: _Run) -> None:
    weight, x, gate = run.weights.parameter(op.weight), run[op.x], run.columns(op.gate)
    if op.all_groups is not None:
        run[op.y] = gated_norm_of_ranks(op, x, gate, weight, run.model.vocabulary.world)
        return
    run[op.y] = GATED_NORM(x, gate, weight, op.eps, op.gate_first, op.act, op.groups)


def _gated_recurrence(op: GatedRecurrence, run: _Run) -> None:
    given = run[op.x], run[op.gate], run[op.decay]
    vectors = (run.weights.parameter(one) for one in (op.gate_bias, op.decay_bias, op.rate))
    run[op.y], _ = RG_LRU(*given, *vectors, run.step.states[op.layer][-1], *run.state_rows)


FUNCTIONS: dict[type, Callable[[Any, _Run], None]] = {
    Keep: keep,
    ReadStates: _read_states,
    Embed: _embed,
    EmbedMedia: _embed_media,
    FillMedia: _fill_media,
    InsertMedia: _insert_media,
    AddMedia: _add_media,
    LookUp: _look_up,
    LookUpPositions: _look_up_positions,
    Normalize: normalize,
    NormalizeParts: _normalize_parts,
    NormalizeGroups: _normalize_groups,
    AddNormalize: _add_normalize,
    Quantized: _quantized,
    Linear: _linear,
    Activation: activation,
    Add: add,
    Multiply: _multiply,
    Scale: _scale,
    Clamp: _clamp,
    QKNorm: qk_norm,
    Rotate: rotate,
    PrepareKV: _prepare_kv,
    ScaleQueries: _scale_queries,
    WriteKV: _write_kv,
    Attend: _attend,
    PrepareLatent: _prepare_latent,
    PrepareIndex: _prepare_index,
    SelectKeys: _select_keys,
    AbsorbQueries: _absorb_queries,
    AttendLatent: _attend_latent,
    ExpandValues: _expand_values,
    BlockLinear: _block_linear,
    Route: _route,
    ScaleRoutes: _scale_routes,
    ExpertLinear: _expert_linear,
    Combine: _combine,
    **dict.fromkeys((Spread, Predict, Correct, Collect, Tanh, Sparsify), _stream),
    PadValues: _pad_values,
    CutHeads: _cut_heads,
    Gate: _gate,
    CausalConv: _causal_conv,
    DeltaRule: _delta_rule,
    SelectiveScan: _selective_scan,
    GatedNorm: _gated_norm,
    GatedRecurrence: _gated_recurrence,
}


def _step_inputs(run: _Run) -> dict[str, Tensor]:
    """Return the positions, which compiled segments read in addition to buffers and weights."""
    return {"positions": run.step.positions}


def _bind(run: _Run, values: dict[str, Any], inputs: dict[str, Tensor]) -> _Run:
    bound = copy.copy(run)
    bound.values, bound.step = values, replace(run.step, positions=inputs["positions"])
    return bound


_EXECUTOR: Executor[_Run] = Executor(FUNCTIONS, _step_inputs, _bind)
