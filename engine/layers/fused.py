"""The layers of a loaded model as launches of fused kernels, for a GPU.

These are the declared parts that `block.py` runs with torch; their semantics are documented there. The kernel
boundaries
differ: the output of a residual block is added by the norm that follows, and one kernel moves queries, keys and values
from the projection to where attention reads them (the pages, or, for bidirectional attention, the same buffer). Encoder
inputs pass through the encoder first; then their keys and values for each decoder layer are written to the pages.
Nothing waits for the device, and no shape depends on its data, so that a step can be captured as a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.block import AttentionLayer, CrossAttentionLayer, KVLayer, ResidualBlockLayer
from engine.layers.encoder import EncoderLayers
from engine.layers.mlp import ExpertsLayer, MLPLayer
from engine.layers.model import TextModel
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.layers.rope import Rotation
from engine.layers.rounded import activated, rounding_of
from engine.models.kv_scales import KVScales
from engine.models.parts import LayerNorm, RMSNorm, Rope
from kernels.activation import ACTIVATION
from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.prefill import PREFILL_ATTENTION
from kernels.attention.schedule import DECODE_SCHEDULE
from kernels.e4m3 import Rounded
from kernels.embedding import EMBEDDING
from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.routes import EXPERT_ROUTES
from kernels.experts.schedule import EXPERT_SCHEDULE, tile_rows
from kernels.experts.sum import EXPERT_SUM
from kernels.layer_norm import LAYER_NORM
from kernels.qk_norm_rope_kv import QK_NORM_ROPE_KV, NormKind
from kernels.rms_norm import RMS_NORM
from kernels.rms_norm_quantized import RMS_NORM_QUANTIZED
from kernels.rope import ROPE_ANGLES
from kernels.sampling.cap_logits import CAP_LOGITS

QKArguments = tuple[Tensor | None, NormKind, float, Tensor | None, Tensor | None, bool]
_PLAIN_QK: QKArguments = (None, "rms", 0.0, None, None, False)


@dataclass(frozen=True)
class CrossAttentionInputs:
    """Cross-attention of a step: every decoder token is a separate row that attends to the entire encoder input."""

    decoder_starts: Tensor  # [rows] int32, first position of the decoder's tokens, where self-attention begins
    slot: Tensor  # [tokens] int32, slot of the token's request
    query_start: Tensor  # [tokens + 1] int32: 0, 1, …
    lengths: Tensor  # [tokens] int32, length of the encoder input; 0 for padding


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
    pages: Tensor  # [blocks, layers_per_block, 2, block_tokens, kv_heads, head_dim]
    singles: bool  # some row has one token
    spans: bool  # some row has several tokens
    segments: Tensor | None = None  # [tokens] int32, for models with segment embeddings
    cross_attention: CrossAttentionInputs | None = None
    encoder_inputs: "DeviceStep | None" = None  # encoder inputs to read before this step


class FusedModel:
    """Immutable; its only state is the KV pages."""

    def __init__(self, text_model: TextModel, scales: KVScales | None = None) -> None:
        self.vocabulary, self.residual_blocks, self.norm = (
            text_model.vocabulary,
            text_model.residual_blocks,
            text_model.norm,
        )
        self.dtype, self.layout = text_model.dtype, text_model.layout
        self.encoder, self.cross_attention_layers = text_model.encoder, text_model.cross_attention_layers
        self._rotations = {rope: Rotation(rope, text_model.device) for rope in text_model.ropes}
        layers = [body for block in self.residual_blocks for body in block.bodies if isinstance(body, AttentionLayer)]
        ones = (1.0,) * len(layers)
        scales = scales or KVScales(ones, ones)
        self._scales = {
            id(layer): pair for layer, pair in zip(layers, zip(scales.k, scales.v, strict=True), strict=True)
        }
        self._scales |= {id(layer): (1.0, 1.0) for layer in self.cross_attention_layers}

    def forward(self, step: DeviceStep) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden], and write the tokens' keys and values to the
        pages. Encoder inputs of the step must have been read before."""
        run = _Run(self, step, self.entered(step))
        for block in self.residual_blocks:
            run.block(block)
        return run.end(self.norm)

    def encode_inputs(self, encoder_inputs: DeviceStep) -> Tensor:
        """Return the encoder output, [tokens, hidden], and write the keys and values for cross-attention to the
        pages."""
        assert self.encoder is not None, "only encoder-decoder models have encoder inputs"
        states = self._encoded(self.encoder, encoder_inputs)
        for layer in self.cross_attention_layers:
            kv, kv_layer = layer.kv(states).unflatten(-1, (-1, layer.part.head_dim)), layer.kv_layer
            slot_mapping = encoder_inputs.slot_mapping[kv_layer.group]
            QK_NORM_ROPE_KV(
                kv, encoder_inputs.pages, kv_layer.layer, slot_mapping, 0, *_PLAIN_QK, *self._scales[id(layer)]
            )
        return states

    def _encoded(self, encoder: EncoderLayers, encoder_inputs: DeviceStep) -> Tensor:
        embedding, vocabulary = encoder.embedding, self.vocabulary
        if vocabulary.world.size > 1:
            x = embedding.summed(encoder_inputs.ids, encoder_inputs.positions, self.dtype)
        else:
            added = encoder_inputs.positions, embedding.position_rows
            x = EMBEDDING(encoder_inputs.ids, vocabulary.table, self.dtype, vocabulary.part.scale, *added)
        if embedding.norm is not None:
            x = fused_norm(embedding.norm, x)
        run = _Run(self, encoder_inputs, x)
        for block in encoder.residual_blocks:
            run.block(block)
        return run.end(encoder.norm)

    def entered(self, step: DeviceStep) -> Tensor:
        """Return the input of the first layer, [tokens, hidden]."""
        vocabulary = self.vocabulary
        if vocabulary.world.size > 1:
            x = vocabulary.summed(step.ids, step.positions, step.segments, self.dtype)
        else:
            added = step.positions, vocabulary.position_rows, step.segments, vocabulary.segments
            x = EMBEDDING(step.ids, vocabulary.table, self.dtype, vocabulary.part.scale, *added)
        return x if vocabulary.norm is None else fused_norm(vocabulary.norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32."""
        y, out = self.vocabulary.products(hidden), self.vocabulary.out
        return y if out.scale == 1.0 and out.softcap is None else CAP_LOGITS(y, out.scale, out.softcap or 0.0)


class _Run:
    """One step through the layers. The residual stream is `x` + `scale` · `pending`."""

    def __init__(self, model: FusedModel, step: DeviceStep, x: Tensor) -> None:
        self.model, self.step, self.x = model, step, x
        self.pending: Tensor | None = None
        self.scale = 1.0
        self.angles: dict[Rope, tuple[Tensor, Tensor]] = {
            rope: ROPE_ANGLES(step.positions, rotation.frequencies(step.rope_lengths), rotation.attention)
            for rope, rotation in model._rotations.items()
        }
        sources, kv_heads = step.cross_attention, model.layout.kv_heads
        self.decoder_starts = None if sources is None else sources.decoder_starts
        self.schedules = {
            window: DECODE_SCHEDULE(step.query_start, step.lengths, kv_heads, window, self.decoder_starts)
            for window in {group.window for group in model.layout.groups}
            if step.singles
        }
        self.cross_schedules = None
        if sources is not None:
            self.cross_schedules = DECODE_SCHEDULE(sources.query_start, sources.lengths, kv_heads, None)

    def block(self, block: ResidualBlockLayer) -> None:
        read: Tensor | Rounded
        read = self._joined() if block.before is None else self._normed_for(block.before, block)
        reads = [fused_norm(norm, self.x) for norm in block.body_norms] or [read] * len(block.bodies)
        y = self._body(block.bodies[0], reads[0])
        for body, read in zip(block.bodies[1:], reads[1:], strict=True):
            y = y.add_(self._body(body, read))
        if block.after is not None:
            y = fused_norm(block.after, y)
        self.pending, self.scale = y, block.scale
        if block.last is not None:
            self.x = self._normed(block.last)

    def end(self, norm: NormLayer | None) -> Tensor:
        return self._joined() if norm is None else self._normed(norm)

    def _joined(self) -> Tensor:
        if self.pending is not None:
            self.x.add_(self.pending, alpha=self.scale)
            self.pending = None
        return self.x

    def _normed(self, layer: NormLayer) -> Tensor:
        if self.pending is None:
            return fused_norm(layer, self.x)
        match layer.norm:
            case RMSNorm(eps=eps):
                normed, self.x = RMS_NORM(self.pending, layer.weight, eps, self.x, self.scale)
            case LayerNorm(eps=eps):
                normed, self.x = LAYER_NORM(self.pending, layer.weight, layer.bias, eps, self.x, self.scale)
        self.pending = None
        return normed

    def _normed_for(self, layer: NormLayer, block: ResidualBlockLayer) -> Tensor | Rounded:
        """Apply the norm. The output is quantized if all bodies of the block multiply by fp8 weights."""
        wanted = rounding_of(block.bodies)
        if wanted is None or not isinstance(layer.norm, RMSNorm):
            return self._normed(layer)
        residual, x = (None, self.x) if self.pending is None else (self.x, self.pending)
        made = RMS_NORM_QUANTIZED(
            x, layer.weight, layer.norm.eps, residual, self.scale, wanted.group, wanted.static_scale
        )
        self.pending = None
        return Rounded(*made[:2])

    def _body(
        self, body: AttentionLayer | CrossAttentionLayer | MLPLayer | ExpertsLayer, read: Tensor | Rounded
    ) -> Tensor:
        match body:
            case MLPLayer():
                return body.down(activated(body, body.up(read)))
            case ExpertsLayer():
                assert isinstance(read, Tensor), "routers and experts read unquantized rows"
                return _experts(body, read)
            case AttentionLayer():
                return self._attention(body, read)
            case CrossAttentionLayer():
                return self._cross_attention(body, read)

    def _attention(self, layer: AttentionLayer, read: Tensor | Rounded) -> Tensor:
        qkv = layer.qkv(read).unflatten(-1, (-1, layer.part.head_dim))
        if isinstance(layer.norm, ProjectionNorm):
            _norm_projections(layer.norm, qkv, layer.heads, layer.qk_heads)
        out = torch.empty(qkv[:, : layer.heads].shape, dtype=qkv.dtype, device=qkv.device)
        if layer.kv_layer is None:
            self._whole(layer, qkv, out)
        else:
            self._paged(layer, layer.kv_layer, qkv, out)
        return layer.out(out.flatten(1))

    def _whole(self, layer: AttentionLayer, qkv: Tensor, out: Tensor) -> None:
        """Bidirectional attention of each row over its tokens of this step."""
        part = layer.part
        if part.rope is not None or isinstance(layer.norm, HeadNorm):
            QK_NORM_ROPE_KV(qkv, None, 0, None, layer.heads, *self._qk_arguments(layer))
        q, k, v = qkv[:, : layer.heads], qkv[:, layer.heads : layer.qk_heads], qkv[:, layer.qk_heads :]
        ENCODER_ATTENTION(q, k, v, self.step.query_start, out, layer.scale, False, part.window, part.softcap)

    def _paged(self, layer: AttentionLayer, kv_layer: KVLayer, qkv: Tensor, out: Tensor) -> None:
        """Write keys and values of this step to the pages, then attend to the pages."""
        part, step = layer.part, self.step
        scales = self.model._scales[id(layer)]
        QK_NORM_ROPE_KV(
            qkv,
            step.pages,
            kv_layer.layer,
            step.slot_mapping[kv_layer.group],
            layer.heads,
            *self._qk_arguments(layer),
            *scales,
        )
        q, table = qkv[:, : layer.heads], step.tables[kv_layer.group]
        rows = step.slot, step.query_start, step.lengths
        options = layer.scale, part.window, part.softcap, layer.sinks
        if step.singles:
            schedules = self.schedules[part.window]
            DECODE_ATTENTION(
                q, step.pages, kv_layer.layer, table, *rows, schedules, out, *options, *scales, self.decoder_starts
            )
        if step.spans:
            PREFILL_ATTENTION(
                q, step.pages, kv_layer.layer, table, *rows, out, *options, None, *scales, self.decoder_starts
            )

    def _cross_attention(self, layer: CrossAttentionLayer, read: Tensor | Rounded) -> Tensor:
        """Attend from each token to the entire encoder input of its sequence."""
        part, kv_layer, step = layer.part, layer.kv_layer, self.step
        assert step.cross_attention is not None and self.cross_schedules is not None, (
            "cross-attention needs encoder inputs"
        )
        q = layer.q(read).unflatten(-1, (-1, part.head_dim))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        rows = step.cross_attention.slot, step.cross_attention.query_start, step.cross_attention.lengths
        options = layer.scale, None, part.softcap, None
        table, scales = step.tables[kv_layer.group], self.model._scales[id(layer)]
        DECODE_ATTENTION(q, step.pages, kv_layer.layer, table, *rows, self.cross_schedules, out, *options, *scales)
        return layer.out(out.flatten(1))

    def _qk_arguments(self, layer: AttentionLayer) -> QKArguments:
        """Return the arguments of QK_NORM_ROPE_KV: weight, kind and eps of the norm, cos and sin, and the layout of
        pairs."""
        weight: Tensor | None = None
        kind: NormKind = "rms"
        eps = 0.0
        if isinstance(layer.norm, HeadNorm):
            weight, eps = layer.norm.weight, layer.norm.norm.eps
            kind = "layer" if isinstance(layer.norm.norm, LayerNorm) else "rms"
        rope = layer.part.rope
        cos, sin = self.angles[rope] if rope is not None else (None, None)
        return weight, kind, eps, cos, sin, rope is not None and rope.interleaved


def _experts(layer: ExpertsLayer, read: Tensor) -> Tensor:
    """Compute routed and shared experts. As in ExpertsLayer, the sum is in fp32 until all ranks have added to it."""
    part, ranks = layer.part, layer.world.size
    assert layer.ups.whole is not None and layer.downs.whole is not None, "experts for fused kernels are loaded stacked"
    logits = layer.router.in_fp32(read)
    expert_ids, weights, order = EXPERT_ROUTES(logits, part.num_experts, part.top_k, part.scores)
    rows = tile_rows(len(read), part.top_k, part.num_experts)
    pairs, tiles = EXPERT_SCHEDULE(expert_ids, part.num_experts, rows)
    up = EXPERT_MATMUL(read, layer.ups.whole, pairs, tiles, part.top_k, rows)
    inner = ACTIVATION(up, part.act, layer.experts[0].has_gate)
    del up
    y = EXPERT_MATMUL(inner, layer.downs.whole, pairs, tiles, 1, rows)
    del inner
    shared = None
    if layer.shared is not None:
        shared = layer.shared.down.product(activated(layer.shared, layer.shared.up(read)))
    opening = None if part.shared_gate is None else logits
    y = EXPERT_SUM(y, weights, order, shared, opening, part.num_experts, read.dtype if ranks == 1 else torch.float32)
    return y if ranks == 1 else layer.world.all_reduce(y).to(read.dtype)


def fused_norm(layer: NormLayer, x: Tensor) -> Tensor:
    match layer.norm:
        case RMSNorm(eps=eps):
            return RMS_NORM(x, layer.weight, eps)
        case LayerNorm(eps=eps):
            return LAYER_NORM(x, layer.weight, layer.bias, eps)


def _norm_projections(norm: ProjectionNorm, qkv: Tensor, heads: int, qk_heads: int) -> None:
    """Normalise q and k in place, each over all its heads together."""
    if norm.world.size > 1:
        qkv[:, :qk_heads] = norm(qkv[:, :qk_heads])
        return
    for piece, weight in zip((qkv[:, :heads], qkv[:, heads:qk_heads]), norm.weights, strict=True):
        flat = piece.flatten(1)
        RMS_NORM(flat, weight, norm.eps, None, 1.0, flat)
