"""Executor of a program on a CPU: the list of operations becomes structures for the compiled kernels, and a step is a
single call. Every operation reads and writes rows of a few buffers that all layers share.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.kv.layout import Layout, whole_blocks
from engine.layers.batch import Batch, EncoderInputs, MediaRows
from engine.layers.kv import KVLayer, group_pages, kv_layers
from engine.layers.linear import LinearLayer
from engine.layers.loaded import LoadedWeights
from engine.layers.local_attention import local_attention
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.norm import HeadNorm, ProjectionNorm, gated_norm_of_ranks
from engine.layers.querying import attend_context
from engine.layers.rope import Rotation
from engine.layers.states import LayerStates
from engine.layers.step import rope_positions
from engine.layers.streams import computed
from engine.layers.values import pad_values
from engine.layers.vocabulary import Vocabulary
from engine.lowering.measures import buffer_widths
from engine.lowering.program import (
    AbsorbQueries,
    Activation,
    Add,
    AddMedia,
    AllReduce,
    Attend,
    AttendContext,
    AttendLatent,
    AttendLocal,
    BlockLinear,
    Bound,
    CausalConv,
    Clamp,
    Collect,
    Columns,
    Combine,
    Correct,
    CutHeads,
    DeltaRule,
    Embed,
    EmbedAudio,
    ExpandValues,
    ExpertLinear,
    FillMedia,
    Gate,
    GatedNorm,
    GatedRecurrence,
    Input,
    InsertMedia,
    Keep,
    Linear,
    LookUp,
    LookUpPositions,
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
    Program,
    QKNorm,
    ReadStates,
    Recurrence,
    Repeat,
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
from engine.lowering.rewrites import compiled_encoder, compiled_ops
from engine.models.parts import LayerNorm, Norm
from kernels.activation import function, gated
from kernels.cpu import program as cpu
from kernels.cpu.memory import HUGE, region
from kernels.cpu.packing import BLOCK_FORMS, FORMS, Packed, Segments
from kernels.cpu.program import Program as CompiledProgram
from kernels.cpu.program import StepData, Team
from kernels.cpu.shm_collective import ShmCollective
from kernels.experts.routes import sparsemixer_weights
from kernels.ggml_blocks import BlockWeight

MIN_TOKENS = 64
LATENT_HEADS = 16  # heads that read the latents of a piece of work together, at most
ALIGNED = 16  # numbers of a cache line
LOW_RANK = "low_rank_of_adapters"  # buffer of x A
WHOLE_BLOCK = 16  # tokens per block: a multiple of the vector width of every variant


def allocated(count: int) -> Tensor:
    """Return `count` float32 numbers, uninitialized: in large pages unless they would not fill one."""
    size = 4 * count
    return torch.empty(count) if size < HUGE else region(size)[:size].view(torch.float32)


class Buffers:
    """Buffers of a step: float32, by name, with room for the widest value. Reallocated when a step has more tokens.
    They are in large pages: a piece of a product writes a few numbers to each of many rows, which lie pages apart."""

    def __init__(self, widths: dict[str, int]) -> None:
        self.widths = widths  # elements per token
        self.tensors: dict[str, Tensor] = {}

    def make(self, tokens: int) -> None:
        self.tensors = {}  # freed first
        sizes = {name: -(-tokens * width // ALIGNED) * ALIGNED for name, width in self.widths.items()}
        room = allocated(sum(sizes.values()))
        self.tensors = {
            name: part[: tokens * self.widths[name]]
            for name, part in zip(sizes, room.split(list(sizes.values())), strict=True)
        }
        self.tokens = tokens

    def __getitem__(self, value: Value) -> Tensor:
        """Return the value's rows, [tokens · rows, width], contiguous."""
        return self.tensors[value.name][: self.tokens * value.elements].view(-1, value.width)


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
        self.whole = _bidirectional_kv(every)

    def compiled(self, op: Op) -> Iterator[cpu.Op | TorchOp]:
        """Yield the structures of an operation."""
        values, weights = self.buffers, self.weights
        match op:
            case Input() | EmbedAudio():
                pass  # given before the step
            case Repeat():
                yield _torch_repeat(op, values[op.x], values[op.y])
            case AttendLocal():
                yield self._attend_local(op)
            case AttendContext():
                yield self._attend_context(op)
            case Keep():
                yield _torch_keep(values[op.x], self._columns(op.y))
            case Embed():
                if not _is_sum(op):
                    yield self._embed(values[op.y])
            case InsertMedia() | AddMedia() | FillMedia():
                yield self._media(op)
            case Bound():
                yield _torch_bound(values[op.x], self._columns(op.y), *weights.bounds(op.weight))
            case ReadStates():
                yield self._read_states(values[op.x], values[op.y], skips_first=op.skips_first)
            case Normalize():
                layer = weights.norm(op.weight)
                yield _norm(layer.norm, layer.weight, layer.bias, values[op.x], values[op.y])
            case LookUpPositions():
                pass  # before the first program
            case LookUp(partial=True):
                pass  # likewise
            case LookUp():
                table = weights.token_rows(op.weight).table
                yield _rows(table, op.weight.part.scale, values[op.y])
            case NormalizeParts():
                yield from self._normalize_parts(op)
            case NormalizeGroups():
                layer, x, size = weights.norm(op.weight), self._columns(op.x), op.weight.norm.size
                yield _norm(layer.norm, layer.weight, None, x, x, groups=op.x.width // size, size=size, shared=True)
            case Multiply():
                yield _multiply(op, values, weights.multiplier(op.weight))
            case PadValues():
                yield _pad_values(op, values)
            case CutHeads():
                yield _cut_heads(op, values)
            case Spread() | Predict() | Correct() | Collect() | Tanh() | Sparsify():
                yield self._stream(op)
            case Linear():
                x = self._columns(op.x) if isinstance(op.x, Columns) else values[op.x]
                yield from self._linear(op, x, values[op.y])
            case Activation():
                yield _activation(op, values[op.x], values[op.y], weights.activation(op.numbers))
            case Add():
                x, y = self._columns(op.x) if isinstance(op.x, Columns) else values[op.x], values[op.y]
                yield cpu.Add(
                    x=x.data_ptr(),
                    y=y.data_ptr(),
                    x_stride=x.stride(0),
                    y_stride=y.stride(0),
                    size=op.x.width,
                    alpha=op.scale,
                )
            case Scale():
                x = self._columns(op.x)
                yield cpu.Cap(x=x.data_ptr(), stride=x.stride(0), size=x.shape[1], scale=op.factor, cap=0.0)
            case Clamp():
                yield _torch_clamp(op, self._columns(op.x))
            case AllReduce():
                assert self.collective is not None, "several ranks have shared memory"
                yield cpu.all_reduce(self.collective, values[op.x], values[op.x], gathers=False)
            case QKNorm():
                yield from self._qk_norm(op, values[op.qkv])
            case Rotate():
                yield self._rotate(op, values[op.qkv])
            case PrepareKV():
                yield self._prepare_kv(op, values[op.qkv])
            case WriteKV():
                own = {"layer": op.layer, "heads": op.heads, "kv_heads": op.kv_heads, "head_dim": op.head_dim}
                yield self._prepare_kv(PrepareKV(qkv=op.qkv, norm=None, rope=None, **own), values[op.qkv])
            case ScaleQueries():
                yield _scale_queries(op, values[op.qkv])
            case Attend():
                yield self._attend(op, values[op.qkv], values[op.y])
            case PrepareLatent():
                yield from self._prepare_latent(op, values)
            case PrepareIndex():
                yield from self._prepare_index(op, values)
            case SelectKeys():
                yield self._select_keys(op, values)
            case AbsorbQueries():
                q, y = _heads(values[op.q], op.heads), _heads(values[op.y], op.heads)
                yield cpu.heads(weights.heads(op.weight).absorbing, q, y)
            case AttendLatent():
                yield self._attend_latent(op, values)
            case ExpandValues():
                x, y = _heads(values[op.x], op.heads), _heads(values[op.y], op.heads)
                yield cpu.heads(weights.heads(op.weight).expanding, x, y)
            case BlockLinear():
                x, y = _heads(values[op.x], op.heads), _heads(values[op.y], op.heads)
                yield cpu.heads(weights.blocks(op.weight).packed, x, y)
            case Route():
                yield self._route(op, values)
                if op.part.scores == "sparsemixer":
                    yield _sparsemixer(op, values)
            case ScaleRoutes():
                yield _scale_routes(op, values, weights.correction(op.scales))
            case ExpertLinear():
                layers = [weights.matrix(matrix) for matrix in op.matrices]
                biases = [layer.own_bias for layer in layers]
                scales = None if op.weights is None else values[op.weights]
                x, y, k = values[op.x], values[op.y], op.top_k
                yield cpu.experts(_alike(layers), biases, x, y, k, gathered=op.gathered, scales=scales)
                if (lora := self.adapters.layer(op.stack)) is not None:
                    own = lora.a, lora.b, lora.ranks, lora.pieces
                    yield cpu.lora_experts(*own, x, y, k, gathered=op.gathered, scales=scales)
            case Combine():
                yield _combine(op, values, 0 if self.vocabulary is None else self.vocabulary.world.rank)
            case CausalConv():
                yield self._causal_conv(op)
            case DeltaRule():
                yield self._delta_rule(op)
            case SelectiveScan():
                yield self._selective_scan(op)
            case GatedRecurrence():
                yield self._gated_recurrence(op)
            case GatedNorm(all_groups=int()):
                yield self._gated_norm_of_ranks(op)
            case GatedNorm():
                yield self._gated_norm(op)
            case Gate():
                yield _torch_gate(op, self._columns(op.x), self._columns(op.gate), values[op.y])
            case _:
                raise NotImplementedError(f"compiled kernels have no {type(op).__name__}")

    def _media(self, op: InsertMedia | AddMedia | FillMedia) -> TorchOp:
        x = self.buffers[op.x]
        row = x
        if isinstance(op, FillMedia):
            row = self.weights.token_rows(op.weight).look_up(torch.tensor([op.token]), x.dtype)

        def compute(tokens: int) -> None:
            assert self.media is not None, "a step without media has no such operation"
            if isinstance(op, FillMedia):
                self.media.fill(x[:tokens], row)
            elif isinstance(op, AddMedia):
                self.media.add(x[:tokens], op.first)
            else:
                self.media.insert(x[:tokens])

        return TorchOp(compute, media=True)

    def _read_states(self, x: Tensor, y: Tensor, *, skips_first: bool) -> TorchOp:
        def compute(tokens: int) -> None:
            assert self.read_states is not None, "a prediction head reads hidden states"
            states, first = self.read_states
            y[:tokens] = states
            if skips_first:
                x.index_fill_(0, first, 0.0)

        return TorchOp(compute)

    def _attend_context(self, op: AttendContext) -> TorchOp:
        q, y = self.buffers[op.q], self.buffers[op.y]

        def compute(tokens: int) -> None:
            assert self.context is not None, "the caller gives keys and values"
            y[:tokens] = attend_context(op, q[:tokens], self.count, self.context, self.context_rows)

        return TorchOp(compute)

    def _attend_local(self, op: AttendLocal) -> TorchOp:
        layer, qkv, y = self.weights.local(op.weight), self.buffers[op.qkv], self.buffers[op.y]

        def compute(tokens: int) -> None:
            weights = layer.factors, layer.distances, op.weight.part.softcap
            y[:tokens] = local_attention(qkv[:tokens], self.count, *weights)

        return TorchOp(compute)

    def _linear(self, op: Linear, x: Tensor, y: Tensor) -> Iterator[cpu.Op]:
        """Yield the product, between the two operations of its adapters."""
        products, lora = _linear(self.weights.matrix(op.weight), x, y), self.adapters.layer(op.weight.name)
        if lora is None:
            yield from products
            return
        u = self.buffers[Value(name=LOW_RANK, width=self.adapters.columns)]
        before, after = cpu.lora(lora.a, lora.b, lora.ranks, lora.pieces, x, y, u)
        yield from (before, *products, after)

    def _stream(self, op: StreamOp) -> TorchOp:
        assert self.vocabulary is not None, "a tower has no streams"
        world = self.vocabulary.world

        def compute(tokens: int) -> None:
            for value, tensor in computed(op, lambda one: self.buffers[one][:tokens], world):
                self.buffers[value][:tokens] = tensor

        return TorchOp(compute)

    def _normalize_parts(self, op: NormalizeParts) -> Iterator[cpu.Norm]:
        at = 0
        for weight in op.weights:
            layer, piece = self.weights.norm(weight), self.buffers[op.x][:, at:]
            yield _norm(layer.norm, layer.weight, layer.bias, piece, piece)
            at += weight.norm.size

    def _causal_conv(self, op: CausalConv) -> cpu.CausalConv:
        x, y = self._columns(op.x), self.buffers[op.y]
        state = None if op.layer is None else self.states[op.layer][0]
        weight = self.weights.parameter(op.weight)
        return cpu.CausalConv(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=None if op.bias is None else self.weights.parameter(op.bias).data_ptr(),
            y=y.data_ptr(),
            state=None if state is None else state.data_ptr(),
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            slot_stride=0 if state is None else state.stride(0),
            channels=weight.shape[1],
            width=weight.shape[0],
            silu=op.act == "silu",
        )

    def _delta_rule(self, op: DeltaRule) -> cpu.DeltaRule:
        qkv, y, state = self.buffers[op.qkv], self.buffers[op.y], self.states[op.layer][-1]
        a, b = self._columns(op.a), self._columns(op.b)
        keys = op.key_heads * op.key_dim
        return cpu.DeltaRule(
            q=qkv.data_ptr(),
            k=qkv[:, keys:].data_ptr(),
            v=qkv[:, 2 * keys :].data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            A=self.weights.parameter(op.slope).data_ptr(),
            dt_bias=self.weights.parameter(op.dt_bias).data_ptr(),
            y=y.data_ptr(),
            state=state.data_ptr(),
            **dict.fromkeys(("q_stride", "k_stride", "v_stride"), qkv.stride(0)),
            a_stride=a.stride(0),
            b_stride=b.stride(0),
            y_stride=y.stride(0),
            slot_stride=state.stride(0),
            heads=op.value_heads,
            key_heads=op.key_heads,
            key_dim=op.key_dim,
            value_dim=op.value_dim,
            scale=op.key_dim**-0.5,
            beta_scale=op.beta_scale,
            qk_norm=True,
            vector_decay=op.vector_decay,
        )

    def _selective_scan(self, op: SelectiveScan) -> cpu.SelectiveScan:
        x, b, c, dt = (self._columns(one) for one in (op.x, op.b, op.c, op.dt))
        gate = None if op.gate is None else self._columns(op.gate)
        a, y, state = self.weights.parameter(op.a), self.buffers[op.y], self.states[op.layer][-1]
        return cpu.SelectiveScan(
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            A=a.data_ptr(),
            B=b.data_ptr(),
            C=c.data_ptr(),
            D=None if op.d is None else self.weights.parameter(op.d).data_ptr(),
            dt_bias=None if op.dt_bias is None else self.weights.parameter(op.dt_bias).data_ptr(),
            gate=None if gate is None else gate.data_ptr(),
            y=y.data_ptr(),
            state=state.data_ptr(),
            x_stride=x.stride(0),
            B_stride=b.stride(0),
            C_stride=c.stride(0),
            gate_stride=0 if gate is None else gate.stride(0),
            dt_stride=dt.stride(0),
            y_stride=y.stride(0),
            slot_stride=state.stride(0),
            heads=op.heads,
            groups=op.groups,
            head_dim=op.head_dim,
            state_dim=op.state,
            dt_min=op.dt_limits[0],
            dt_max=op.dt_limits[1],
            vector_A=a.ndim == 2,
        )

    def _gated_recurrence(self, op: GatedRecurrence) -> cpu.RgLru:
        x, gate, decay, y = (self.buffers[one] for one in (op.x, op.gate, op.decay, op.y))
        state = self.states[op.layer][-1]
        return cpu.RgLru(
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            decay=decay.data_ptr(),
            gate_bias=self.weights.parameter(op.gate_bias).data_ptr(),
            decay_bias=self.weights.parameter(op.decay_bias).data_ptr(),
            rate=self.weights.parameter(op.rate).data_ptr(),
            y=y.data_ptr(),
            state=state.data_ptr(),
            x_stride=x.stride(0),
            gate_stride=gate.stride(0),
            decay_stride=decay.stride(0),
            y_stride=y.stride(0),
            slot_stride=state.stride(0),
            channels=x.shape[1],
        )

    def _gated_norm_of_ranks(self, op: GatedNorm) -> TorchOp:
        assert self.vocabulary is not None, "a tower has no recurrent layers"
        x, gate, y = self.buffers[op.x], self._columns(op.gate), self.buffers[op.y]
        weight, world = self.weights.parameter(op.weight), self.vocabulary.world

        def compute(tokens: int) -> None:
            y[:tokens] = gated_norm_of_ranks(op, x[:tokens], gate[:tokens], weight, world)

        return TorchOp(compute)

    def _gated_norm(self, op: GatedNorm) -> cpu.GatedNorm:
        x, gate, y, weight = (
            self.buffers[op.x],
            self._columns(op.gate),
            self.buffers[op.y],
            self.weights.parameter(op.weight),
        )
        size = x.shape[1] // op.groups
        return cpu.GatedNorm(
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            weight=weight.data_ptr(),
            y=y.data_ptr(),
            x_stride=x.stride(0),
            gate_stride=gate.stride(0),
            y_stride=y.stride(0),
            groups=op.groups,
            size=size,
            weight_stride=size if len(weight) == x.shape[1] else 0,
            eps=op.eps,
            gate_first=op.gate_first,
            silu=op.act == "silu",
        )

    def _columns(self, columns: Columns) -> Tensor:
        return self.buffers[columns.value][:, columns.first : columns.first + columns.width]

    def _embed(self, x: Tensor) -> cpu.Embed:
        assert self.vocabulary is not None, "a program with an embedding has a vocabulary"
        return _rows(self.vocabulary.table, self.vocabulary.part.scale, x, self.vocabulary.blocks)

    def _qk_norm(self, op: QKNorm, qkv: Tensor) -> Iterator[cpu.Op | TorchOp]:
        layer, dim = self.weights.qk_norm(op.weight), op.weight.attention.head_dim
        if isinstance(layer, HeadNorm):
            yield from _head_norm(layer, qkv, op.heads, dim)
        elif self.collective is None:
            yield from _projection_norm(layer, qkv)
        else:
            yield _torch_norm(layer, qkv, op.heads, dim)

    def _rotate(self, op: Rotate, qkv: Tensor) -> cpu.RopeKV:
        """Rotate all heads and write no keys and values."""
        return cpu.RopeKV(
            qkv=qkv.data_ptr(),
            stride=qkv.stride(0),
            heads=op.heads,
            kv_heads=0,
            dim=op.head_dim,
            rotary_dim=op.rope.dim,
            rope=self.program.ropes.index(op.rope),
            interleaved=op.rope.interleaved,
            group=0,
            layer=0,
        )

    def _prepare_kv(self, op: PrepareKV, qkv: Tensor) -> cpu.RopeKV:
        rope, place = op.rope, self._place(op.layer)
        return cpu.RopeKV(
            qkv=qkv.data_ptr(),
            stride=qkv.stride(0),
            heads=op.heads,
            kv_heads=op.kv_heads,
            dim=op.head_dim,
            rotary_dim=rope.dim if rope else 0,
            rope=self.program.ropes.index(rope) if rope else 0,
            interleaved=rope.interleaved if rope else False,
            group=place.group,
            layer=place.layer,
        )

    def _attend(self, op: Attend, qkv: Tensor, y: Tensor) -> cpu.Attend:
        part, place = op.part, self._place(op.layer)
        sinks, slopes = self.weights.sinks(op.sinks), self.weights.slopes(op.slopes)
        biases = self.weights.bias(op.bias)
        return cpu.Attend(
            q=qkv.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            slopes=None if slopes is None else slopes.data_ptr(),
            biases=None if biases is None else biases.data_ptr(),
            out=y.data_ptr(),
            q_stride=qkv.stride(0),
            out_stride=y.stride(0),
            heads=op.heads,
            kv_heads=op.kv_heads,
            dim=part.head_dim,
            value_dim=part.head_dim,
            reach=0 if biases is None else biases.shape[1] // 2,
            window=op.window or 0,
            chunk=op.chunk or 0,
            scale=op.scale,
            softcap=part.softcap or 0.0,
            group=place.group,
            layer=place.layer,
            causal=part.causal,
            cross=op.cross,
        )

    def _prepare_latent(self, op: PrepareLatent, values: Buffers) -> Iterator[cpu.Op]:
        part, latent, q, y, place = op.part, values[op.latent], values[op.q], values[op.y], self._place(op.layer)
        layer = self.weights.norm(op.norm)
        yield _norm(layer.norm, layer.weight, layer.bias, latent, latent, size=part.kv_lora_rank)
        yield cpu.LatentKV(
            latent=latent.data_ptr(),
            q=q.data_ptr(),
            y=y.data_ptr(),
            latent_stride=latent.stride(0),
            q_stride=q.stride(0),
            y_stride=y.stride(0),
            heads=op.heads,
            query_dim=part.query_dim,
            dim=part.state_dim,
            rotary_dim=part.rope.dim,
            rope=self.program.ropes.index(part.rope),
            interleaved=part.rope.interleaved,
            group=place.group,
            layer=place.layer,
        )

    def _prepare_index(self, op: PrepareIndex, values: Buffers) -> Iterator[cpu.Op]:
        part, key, layer, place = op.part, values[op.key], self.weights.norm(op.norm), self._place(op.layer)
        yield _norm(layer.norm, layer.weight, layer.bias, key, key)
        for x, heads in ((values[op.q], part.heads), (key, 1)):
            yield self._rotate(Rotate(qkv=op.q, rope=part.rope, heads=heads, head_dim=part.head_dim), x)
        # A latent without queries, whose rotation is done.
        yield cpu.LatentKV(
            latent=key.data_ptr(),
            latent_stride=key.stride(0),
            dim=part.head_dim,
            group=place.group,
            layer=place.layer,
        )

    def _select_keys(self, op: SelectKeys, values: Buffers) -> cpu.Select:
        part, q, weights, place = op.part, values[op.q], values[op.weights], self._place(op.layer)
        return cpu.Select(
            q=q.data_ptr(),
            weights=weights.data_ptr(),
            selected=values[op.y].data_ptr(),  # int32
            q_stride=q.stride(0),
            weights_stride=weights.stride(0),
            heads=part.heads,
            dim=part.head_dim,
            top_k=part.top_k,
            group=place.group,
            layer=place.layer,
        )

    def _attend_latent(self, op: AttendLatent, values: Buffers) -> cpu.Attend:
        part, place, q, y = op.part, self._place(op.layer), values[op.q], values[op.y]
        # Heads are the work of several threads.
        each = max(size for size in range(1, min(op.heads, LATENT_HEADS) + 1) if op.heads % size == 0)
        return cpu.Attend(
            q=q.data_ptr(),
            selected=None if op.selected is None else values[op.selected].data_ptr(),  # int32
            out=y.data_ptr(),
            q_stride=q.stride(0),
            out_stride=y.stride(0),
            heads=op.heads,
            kv_heads=op.heads // each,
            dim=part.state_dim,
            value_dim=part.kv_lora_rank,
            window=0,
            chunk=0,
            top_k=0 if op.selected is None else op.selected.width,
            scale=part.scale,
            softcap=0.0,
            group=place.group,
            layer=place.layer,
            causal=True,
            latent=True,
        )

    def _route(self, op: Route, values: Buffers) -> cpu.Route:
        """Select experts and weigh them; the weights of sparsemixer follow."""
        scores = "softmax_chosen" if op.part.scores == "sparsemixer" else op.part.scores
        part, logits, correction = op.part, values[op.logits], self.weights.correction(op.correction)
        return cpu.Route(
            logits=logits.data_ptr(),
            chosen=values[op.chosen].data_ptr(),  # int32
            weights=values[op.weights].data_ptr(),
            correction=None if correction is None else correction.data_ptr(),
            logits_stride=logits.stride(0),
            count=part.routed,
            k=part.top_k,
            groups=part.groups,
            groups_kept=part.groups_kept,
            scale=part.weight_scale,
            scores=cpu.SCORES[scores],
            top_two=part.group_score == "top_two",
            normalized=part.normalized,
        )

    def _place(self, layer: int | None) -> KVLayer:
        """Return the pages of an attention layer; those of bidirectional attention have a single layer."""
        return KVLayer(0, 0) if layer is None else self._kv_layers[layer]


class CompiledModel(CompiledOps):
    vocabulary: Vocabulary
    computed_tokens = 0  # of the last step

    def __init__(
        self,
        program: Program,
        weights: LoadedWeights,
        vocabulary: Vocabulary,
        layout: Layout,
        team: Team,
        collective: ShmCollective | None = None,
        adapters: LoadedAdapters = NO_ADAPTERS,
    ) -> None:
        """collective: shared memory of the ranks, if there are several."""
        super().__init__(program, weights, kv_layers(layout), team, collective, adapters)
        self.vocabulary, self._layout = vocabulary, layout
        self.rotations = [Rotation(rope, torch.device("cpu")) for rope in program.ropes]
        self.is_recurrent = any(isinstance(op, Recurrence) for op in self.ops)
        self.logit_rows = torch.empty(0, vocabulary.num_logits)
        self._fit(MIN_TOKENS)

    def forward(self, batch: Batch, pages: Tensor, states: LayerStates = ()) -> Tensor:
        """Implement `TextModel.forward`."""
        inputs = batch.encoder_inputs if self.encoder_ops else None
        tokens = max(batch.tokens, 0 if inputs is None else len(inputs.ids))
        if tokens > self.tokens or states is not self.states:
            self.states = states
            self._fit(max(tokens, 2 * self.tokens) if tokens > self.tokens else self.tokens)
        if inputs is not None:
            self._encode(inputs, pages)
        tables, slot_mapping = batch.tables, batch.slot_mapping
        if self.whole is not None and not self.encoder_ops:
            tables, slot_mapping, pages = self.whole.placed(torch.tensor(batch.count), batch.positions)
        self._embed_sums(self.ops[0], batch.ids, batch.positions, batch.segments)
        self._look_up(batch)
        if batch.states is not None:
            self.read_states = batch.states, (batch.positions == 0).nonzero()[:, 0]
        self.media, positions = batch.media, rope_positions(batch, self.program.rope_axes)
        angles = [rotation.angles(positions, batch.rope_lengths) for rotation in self.rotations]
        first, count = torch.tensor(batch.first), torch.tensor(batch.count)
        own_pages = (self.whole is None or bool(self.encoder_ops)) and bool(self._layout.groups)
        viewed = group_pages(self._layout, pages) if own_pages else (pages,)
        parts = self.regions if self.media is None else self.media_regions
        data = {
            group: StepData(
                batch.tokens,
                ids=batch.ids,
                first=first,
                count=count,
                slots=batch.slots,
                adapters=batch.adapters,
                starts=None if batch.decoder_starts is None else torch.tensor(batch.decoder_starts),
                spans=None if self._is_causal(group) else batch.spans,
                angles=angles,
                tables=tables,
                slot_mapping=slot_mapping,
                pages=viewed[group],
            )
            for group in sorted({part.group for part in parts if isinstance(part, Region)})
        }
        self._run(parts, data, batch.tokens)
        self.computed_tokens = batch.tokens
        return self.buffers[self.program.out][: batch.tokens]

    def _is_causal(self, group: int) -> bool:
        """Return whether the layers of a group do not read spans."""
        groups = self._layout.groups
        return self.program.windowed_spans and bool(groups) and groups[group].window is None

    @property
    def kept_states(self) -> Tensor | None:
        """Implement `TextModel.kept_states`."""
        kept = self.program.kept
        return None if kept is None else self.buffers[kept][: self.computed_tokens]

    @property
    def queries(self) -> Tensor | None:
        """Implement `TextModel.queries`."""
        kept = self.program.queries
        return None if kept is None else self.buffers[kept][: self.computed_tokens]

    def routes(self, tokens: int) -> Tensor:
        """Return the selected experts of all layers in the last step, [tokens, experts]."""
        return torch.cat([self.buffers[value][:tokens].view(torch.int32) for value in self.program.routes], 1)

    def _encode(self, inputs: EncoderInputs, pages: Tensor) -> None:
        """Compute encoder inputs, and write their keys and values for cross-attention to the pages."""
        assert self.whole is not None, "an encoder has bidirectional attention"
        count = torch.tensor(inputs.count)
        tables, slot_mapping, own = self.whole.placed(count, inputs.positions)
        embed = self.encoder_ops[0]
        if isinstance(embed, EmbedAudio):
            assert inputs.spectrograms is not None, "the encoder inputs are audio"
            rows = self.weights.audio(embed.weight).embed(inputs.spectrograms, torch.float32)
            self.buffers[embed.y][: len(inputs.ids)] = rows
        else:
            self._embed_sums(embed, inputs.ids, inputs.positions, None)
        data = StepData(
            len(inputs.ids),
            ids=inputs.ids,
            first=torch.zeros_like(count),
            count=count,
            angles=[rotation.angles(inputs.positions, inputs.positions + 1) for rotation in self.rotations],
            tables=tables,
            slot_mapping=slot_mapping,
            pages=own,
        )
        self._run(self.encoder_regions, {0: data}, len(inputs.ids))
        # This program writes pages and reads none, so its block tables are placeholders.
        unread = tuple(torch.zeros((len(count), 1), dtype=torch.int64) for _ in inputs.slot_mapping)
        data = StepData(
            len(inputs.ids),
            first=torch.zeros_like(count),
            count=count,
            tables=unread,
            slot_mapping=inputs.slot_mapping,
            pages=pages,
        )
        self._run(self.cross_regions, {0: data}, len(inputs.ids))

    def _run(self, parts: "Sequence[Region | TorchOp]", data: Mapping[int, StepData], tokens: int) -> None:
        for part in parts:
            if isinstance(part, Region):
                self.team.run(part.program, data[part.group])
            else:
                part.compute(tokens)

    def _look_up(self, batch: Batch) -> None:
        """Look up rows that the kernels do not: of positions alone, and of tables that lack some tokens."""
        for op in self.ops:
            if isinstance(op, LookUpPositions):
                rows = self.vocabulary.position(batch.positions, torch.float32)
                self.buffers[op.y][: batch.tokens] = rows
            if isinstance(op, LookUp) and op.partial:
                rows = self.weights.token_rows(op.weight).look_up(batch.ids, torch.float32)
                self.buffers[op.y][: batch.tokens] = rows

    def _embed_sums(self, op: Op, ids: Tensor, positions: Tensor, segments: Tensor | None) -> None:
        """Compute an embedding with positions or segments, whose small tables torch adds."""
        assert isinstance(op, Embed), "a program begins with its embedding"
        if _is_sum(op):
            rows = self.weights.tables(op.weight).summed(ids, positions, segments, torch.float32)
            self.buffers[op.y][: len(ids)] = rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `TextModel.logits`. The result is valid until the next call."""
        hidden = hidden.contiguous()
        if len(hidden) > len(self.logit_rows):
            # Kept: new memory for 16 rows of 152k logits costs 2 ms of page faults per step.
            self.logit_rows = torch.empty(len(hidden), self.vocabulary.num_logits)
        y = self.logit_rows[: len(hidden)]
        head = self.vocabulary.head
        assert isinstance(head, Packed), "a pooling model has no logits"
        if self.collective is not None:
            own = torch.empty(len(hidden), head.outputs)
            self.team.run(
                CompiledProgram([cpu.linear(head, self.vocabulary.bias, hidden, own)], (hidden, own)),
                StepData(len(hidden)),
            )
            return self._gather_logits(own, y, self.collective)
        ops: list[cpu.Op] = [cpu.linear(head, self.vocabulary.bias, hidden, y), *self._caps(y)]
        self.team.run(CompiledProgram(ops, (hidden, y)), StepData(len(hidden)))
        return y

    def _gather_logits(self, own: Tensor, y: Tensor, collective: ShmCollective) -> Tensor:
        """Gather the logits of all ranks into y, in pieces that fit into the shared memory."""
        rows = max(1, collective.floats // self.vocabulary.most)
        for part, whole in zip(own.split(rows), y.split(rows), strict=True):
            ops = [cpu.all_reduce(collective, part, whole, gathers=True), *self._caps(whole)]
            self.team.run(CompiledProgram(ops, (part, whole)), StepData(len(part)))
        return y

    def _caps(self, y: Tensor) -> list[cpu.Op]:
        part = self.vocabulary.out
        assert part is not None, "only models with a head have logits"
        if part.scale == 1.0 and part.softcap is None:
            return []
        cap = part.softcap or 0.0
        return [cpu.Cap(x=y.data_ptr(), stride=y.stride(0), size=y.shape[1], scale=part.scale, cap=cap)]

    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate buffers for the largest step once. Their pages are not touched before they are used."""
        self._fit(max(tokens, self.tokens))
        if self.vocabulary.head is not None:
            self.logit_rows = torch.empty(rows, self.vocabulary.num_logits)
        if self.whole is not None:
            self.whole.reserve(tokens, rows)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers of a step, without logits."""
        return sum(room.nbytes for room in self.buffers.tensors.values()) + (self.whole.nbytes if self.whole else 0)

    def _fit(self, tokens: int) -> None:
        """Allocate buffers for this many tokens, and rebuild the operations that point to them. Old buffers are freed
        first."""
        self.tokens = tokens
        self.regions: list[Region | TorchOp] = []
        self.encoder_regions: list[Region | TorchOp] = []
        self.cross_regions: list[Region | TorchOp] = []
        self.media_regions: list[Region | TorchOp] = []  # of a step with media
        self.buffers.make(tokens)
        if self.is_recurrent and not self.states:
            return  # the first step brings the states
        kept = tuple(self.buffers.tensors.values())
        ops, encoder_ops, cross_ops = (
            [made for op in group for made in self.compiled(op)]
            for group in (self.ops, self.encoder_ops, self.cross_ops)
        )
        without_media = [op for op in ops if not (isinstance(op, TorchOp) and op.media)]
        self.regions = regions(without_media, kept, self._layout)
        self.media_regions = self.regions if len(without_media) == len(ops) else regions(ops, kept, self._layout)
        self.encoder_regions, self.cross_regions = regions(encoder_ops, kept), regions(cross_ops, kept)


def _rows(table: Tensor, scale: float, y: Tensor, blocks: BlockWeight | None = None) -> cpu.Embed:
    """Write the row of each token, times `scale`. blocks: the table if it is in blocks of ggml."""
    return cpu.Embed(
        table=table.data_ptr(),
        out=y.data_ptr(),
        out_stride=y.stride(0),
        size=y.shape[1],
        type=cpu.TYPES[table.dtype] if blocks is None else cpu.EMBED_BLOCKS + FORMS.index(BLOCK_FORMS[blocks.kind]),
        scale=scale,
    )


def _heads(x: Tensor, heads: int) -> Tensor:
    """[tokens, heads · dim] → [tokens, heads, dim]."""
    return x.unflatten(1, (heads, -1))


def _scale_queries(op: ScaleQueries, qkv: Tensor) -> cpu.ScaleQueries:
    return cpu.ScaleQueries(
        qkv=qkv.data_ptr(),
        stride=qkv.stride(0),
        size=op.heads * op.head_dim,
        length=op.factor.length,
        offset=op.factor.offset,
        scale=op.factor.scale,
    )


def _combine(op: Combine, values: Buffers, rank: int) -> cpu.Combine:
    y, logits = values[op.y], values[op.logits]
    shared = None if op.shared is None else values[op.shared]
    gate = None if op.part.shared_gate is None else logits[:, op.part.routed :]
    inputs = None if op.inputs is None or rank > 0 else values[op.inputs]
    return cpu.Combine(
        x=values[op.x].data_ptr(),
        weights=None if op.weights is None else values[op.weights].data_ptr(),
        gate=None if gate is None else gate.data_ptr(),
        shared=None if shared is None else shared.data_ptr(),
        input=None if inputs is None else inputs.data_ptr(),
        y=y.data_ptr(),
        x_stride=op.x.width,
        gate_stride=0 if gate is None else gate.stride(0),
        shared_stride=0 if shared is None else shared.stride(0),
        input_stride=0 if inputs is None else inputs.stride(0),
        y_stride=y.stride(0),
        size=op.y.width,
        k=op.part.top_k,
        count=op.part.num_experts,
    )


class BidirectionalKV:
    """Keys and values of bidirectional attention, for one layer at a time. They are stored in pages like those of the
    KV
    cache, with each prompt in contiguous blocks."""

    def __init__(self, kv_heads: int, dim: int) -> None:
        self.kv_heads, self.dim = kv_heads, dim
        self.pages = self._made(0)

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate pages for steps of this many tokens and prompts."""
        self.pages = self._made(whole_blocks(tokens, rows))

    def placed(self, count: Tensor, positions: Tensor) -> tuple[tuple[Tensor], tuple[Tensor], Tensor]:
        """Return block tables, write positions and pages of a step. count: tokens of each row; positions: of the tokens
        in their rows."""
        blocks = -(-count // WHOLE_BLOCK)
        begin = blocks.cumsum(0) - blocks
        if int(blocks.sum()) > len(self.pages):
            self.pages = self._made(int(blocks.sum()))
        table = begin.unsqueeze(1) + torch.arange(int(blocks.max()))
        slot_mapping = begin.repeat_interleave(count) * WHOLE_BLOCK + positions
        return (table,), (slot_mapping,), self.pages

    def _made(self, blocks: int) -> Tensor:
        return torch.zeros(blocks, 1, 2, WHOLE_BLOCK, self.kv_heads, self.dim)


def _is_sum(op: Embed) -> bool:
    return op.weight.embed.is_sum


def _bidirectional_kv(ops: Sequence[Op]) -> BidirectionalKV | None:
    """Return the pages for bidirectional attention, or None for a model with a KV cache."""
    sizes = {(op.kv_heads, op.part.head_dim) for op in ops if isinstance(op, Attend) and op.layer is None}
    if not sizes:
        return None
    (size,) = sizes
    return BidirectionalKV(*size)


def _packed(layer: LinearLayer) -> Packed:
    assert isinstance(layer.weight, Packed)
    return layer.weight


def _alike(layers: Sequence[LinearLayer]) -> list[Packed]:
    """Return the weights of a layer's experts. Raises CheckpointError if they have different types."""
    weights = [_packed(layer) for layer in layers]
    other = next((i for i, weight in enumerate(weights) if weight.form != weights[0].form), None)
    if other is not None:
        raise CheckpointError(
            f"{layers[other].path} is stored in another type than {layers[0].path}, and compiled kernels support only "
            "experts of one type; convert the checkpoint, or set hardware.kernels to torch"
        )
    return weights


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


def _linear(layer: LinearLayer, x: Tensor, y: Tensor) -> Iterator[cpu.Linear]:
    """Yield the products of a matrix, one for each of its segments."""
    bias, at = layer.own_bias, 0
    for weight in layer.weight.pieces if isinstance(layer.weight, Segments) else (_packed(layer),):
        outputs = slice(at, at + weight.outputs)
        yield cpu.linear(weight, None if bias is None else bias[outputs], x, y[:, outputs])
        at += weight.outputs


def _activation(op: Activation, x: Tensor, y: Tensor, numbers: Tensor | None) -> cpu.Activate | TorchOp:
    if op.act not in cpu.ACTS:
        return _torch_activation(op, x, y, numbers)
    return cpu.Activate(
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=op.x.elements,
        y_stride=op.y.elements,
        inner=op.y.width,
        groups=op.y.rows,
        act=cpu.ACTS[op.act],
        gated=op.gated,
        limit=math.inf if op.limit is None else op.limit,
        up_offset=op.up_offset,
    )


def _head_norm(layer: HeadNorm, qkv: Tensor, heads: int, dim: int) -> Iterator[cpu.Norm]:
    """Normalise all heads at once, or one by one if they have biases, which pieces of a norm share."""
    if layer.bias is None:
        yield _norm(layer.norm, layer.weight, None, qkv, qkv, groups=heads, size=dim)
        return
    for head in range(heads):
        piece = qkv[:, head * dim :]
        yield _norm(layer.norm, layer.weight[head], layer.bias[head], piece, piece, size=dim)


def _projection_norm(layer: ProjectionNorm, qkv: Tensor) -> Iterator[cpu.Norm]:
    """Normalise q as one piece and k as another."""
    assert layer.part.qk_norm is not None, "the norm of a projection is declared"
    at = 0
    for weight in layer.weights:
        piece = qkv[:, at:]
        yield _norm(layer.part.qk_norm, weight, None, piece, piece, size=len(weight))
        at += len(weight)


def _norm(
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    y: Tensor,
    *,
    groups: int = 1,
    size: int = 0,
    shared: bool = False,
) -> cpu.Norm:
    """size: of each group; the norm's own if 0. shared: all groups have the same weights."""
    return cpu.Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        groups=groups,
        size=size or norm.size,
        weight_stride=0 if shared else size or norm.size,
        norm=cpu.LAYER if isinstance(norm, LayerNorm) else cpu.RMS,
        eps=norm.eps,
    )


def _torch_norm(layer: ProjectionNorm, qkv: Tensor, heads: int, dim: int) -> TorchOp:
    """Normalise over the heads of all ranks, which requires an all-reduce."""

    def compute(tokens: int) -> None:
        qk = qkv[:tokens, : heads * dim]
        qk[:] = layer(qk.unflatten(1, (heads, dim))).flatten(1)

    return TorchOp(compute)


def _sparsemixer(op: Route, values: Buffers) -> TorchOp:
    """Weigh the experts that a Route selected by logits."""
    logits, chosen, weights = values[op.logits], values[op.chosen].view(torch.int32), values[op.weights]

    def compute(tokens: int) -> None:
        own = logits[:tokens, : op.part.routed]
        weights[:tokens] = sparsemixer_weights(own, chosen[:tokens].long(), op.part.jitter)

    return TorchOp(compute)


def _pad_values(op: PadValues, values: Buffers) -> TorchOp:
    x, y = values[op.x], values[op.y]

    def compute(tokens: int) -> None:
        pad_values(op, x[:tokens], y[:tokens])

    return TorchOp(compute)


def _cut_heads(op: CutHeads, values: Buffers) -> TorchOp:
    x, y = _heads(values[op.x], op.heads), _heads(values[op.y], op.heads)

    def compute(tokens: int) -> None:
        y[:tokens] = x[:tokens, :, : y.shape[2]]

    return TorchOp(compute)


def _multiply(op: Multiply, values: Buffers, factor: Tensor) -> cpu.Cap | TorchOp:
    x, y = values[op.x], values[op.y]
    if op.weight.size == 1 and op.x == op.y:
        return cpu.Cap(x=x.data_ptr(), stride=x.stride(0), size=x.shape[1], scale=factor.item(), cap=0.0)

    def compute(tokens: int) -> None:
        torch.mul(x[:tokens], factor, out=y[:tokens])

    return TorchOp(compute)


def _torch_repeat(op: Repeat, x: Tensor, y: Tensor) -> TorchOp:
    def compute(tokens: int) -> None:
        y[:tokens].unflatten(1, (-1, op.count)).copy_(x[:tokens].unsqueeze(2))

    return TorchOp(compute)


def _torch_keep(x: Tensor, y: Tensor) -> TorchOp:
    def compute(tokens: int) -> None:
        y[:tokens] = x[:tokens]

    return TorchOp(compute)


def _torch_bound(x: Tensor, y: Tensor, low: Tensor, high: Tensor) -> TorchOp:
    def compute(tokens: int) -> None:
        torch.clamp(x[:tokens], low, high, out=y[:tokens])

    return TorchOp(compute)


def _scale_routes(op: ScaleRoutes, values: Buffers, scales: Tensor | None) -> TorchOp:
    chosen, weights = values[op.chosen].view(torch.int32), values[op.weights]
    assert scales is not None, "a program that scales routes has numbers of the experts"

    def compute(tokens: int) -> None:
        weights[:tokens].mul_(scales[chosen[:tokens].long()])

    return TorchOp(compute)


VECTOR = 64  # floats; more than the widest registers of torch's loops


def _torch_gate(op: Gate, x: Tensor, gate: Tensor, y: Tensor) -> TorchOp:
    """Multiply by a gate. torch rounds the sigmoid of the last elements of a tensor differently if they do not fill its
    vectors. Rows of other widths are then computed one by one, so that a row does not depend on others."""
    together = op.act == "none" or gate.shape[1] % VECTOR == 0

    def compute(tokens: int) -> None:
        for rows in (slice(tokens),) if together else (slice(row, row + 1) for row in range(tokens)):
            factor = gate[rows].sigmoid() if op.act == "sigmoid" else gate[rows]
            if gate.shape[1] < x.shape[1]:
                factor = factor.repeat_interleave(x.shape[1] // gate.shape[1], 1)
            torch.mul(x[rows], factor, out=y[rows])

    return TorchOp(compute)


def _torch_clamp(op: Clamp, x: Tensor) -> TorchOp:
    rows = op.x.value.rows

    def compute(tokens: int) -> None:
        x[: tokens * rows].clamp_(op.low, op.high)

    return TorchOp(compute)


def _torch_activation(op: Activation, x: Tensor, y: Tensor, numbers: Tensor | None) -> TorchOp:
    act, rows = function(op.act, numbers), op.y.rows

    def compute(tokens: int) -> None:
        read = x[: tokens * rows]
        y[: tokens * rows] = gated(act, read, op.limit, op.up_offset) if op.gated else act(read)

    return TorchOp(compute)
