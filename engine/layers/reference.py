"""Executor of a program with torch: one short function per operation. It is the reference of the other executors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.kv.layout import Layout
from engine.layers.batch import Batch, MediaRows
from engine.layers.kv import KVLayer, kv_layers
from engine.layers.loaded import LoadedWeights, routing
from engine.layers.local_attention import local_attention
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.norm import gated_norm_of_ranks, normed
from engine.layers.query_scale import query_factors
from engine.layers.querying import attend_context
from engine.layers.states import LayerStates
from engine.layers.step import Step, plan_step
from engine.layers.streams import computed
from engine.layers.torch_compile import Executor, SegmentCompiler
from engine.layers.values import pad_values
from engine.layers.vocabulary import Vocabulary
from engine.lowering.executors import Functions
from engine.lowering.program import (
    AbsorbQueries,
    Activation,
    Add,
    AddMedia,
    AddNormalize,
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
    EmbedMedia,
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
from engine.lowering.rewrites import last_uses
from engine.lowering.segments import Segment, segments
from kernels.activation import function, gated
from kernels.attention.encoder_torch import encoder_attention
from kernels.experts.routes import route
from kernels.paged_attention import paged_attention
from kernels.paged_kv import write_kv, write_latents
from kernels.paged_latents import paged_latent_attention, select_paged_keys
from kernels.recurrent.causal_conv import CAUSAL_CONV, convolved
from kernels.recurrent.delta_rule import DELTA_RULE
from kernels.recurrent.gated_norm import GATED_NORM
from kernels.recurrent.rg_lru import RG_LRU
from kernels.recurrent.selective_scan import SELECTIVE_SCAN
from kernels.rope import rotate_


@dataclass
class Run:
    """Values of a step so far, by name."""

    weights: LoadedWeights
    world: World
    kv_layers: Sequence[KVLayer]
    dtype: torch.dtype
    step: Step
    ids: Tensor  # [tokens] integers, as are positions and segments
    positions: Tensor
    segments: Tensor | None = None
    adapters: Tensor | None = None  # [tokens] int32
    spectrograms: Tensor | None = None  # [windows, mels, frames] of encoder inputs that are audio
    loaded: LoadedAdapters = NO_ADAPTERS
    media: MediaRows | None = None
    states: Tensor | None = None  # [tokens, hidden]
    values: dict[str, Tensor] = field(default_factory=dict)
    read_again: frozenset[int] = frozenset()  # layers whose keys and values later layers share
    written: dict[int, Tensor] = field(default_factory=dict)  # keys and values of this step in these layers

    def __getitem__(self, value: Value) -> Tensor:
        return self.values[value.name]

    def __setitem__(self, value: Value, tensor: Tensor) -> None:
        self.values[value.name] = tensor


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


def _input(op: Input, run: Run) -> None:
    assert op.y.name in run.values, "the caller gives the rows"


def _keep(op: Keep, run: Run) -> None:
    if op.y.value.name not in run.values:
        x = run[op.x]
        run[op.y.value] = x.new_empty(x.shape[0], op.y.value.width)
    _columns(op.y, run).copy_(run[op.x])


def _embed(op: Embed, run: Run) -> None:
    run[op.y] = run.weights.tables(op.weight).summed(run.ids, run.positions, run.segments, run.dtype)


def _insert_media(op: InsertMedia, run: Run) -> None:
    if run.media is not None:
        run.media.insert(run[op.x])


def _embed_media(op: EmbedMedia, run: Run) -> None:
    run[op.y] = torch.zeros(len(run.ids), op.y.width, dtype=run.dtype, device=run.ids.device)
    if run.media is not None:
        run.media.insert(run[op.y])


def _fill_media(op: FillMedia, run: Run) -> None:
    if run.media is not None:
        row = run.weights.token_rows(op.weight).look_up(torch.tensor([op.token], device=run.ids.device), run.dtype)
        run.media.fill(run[op.x], row)


def _bound(op: Bound, run: Run) -> None:
    if op.y.value.name not in run.values:
        x = run[op.x]
        run[op.y.value] = x.new_empty(x.shape[0], op.y.value.width)
    low, high = run.weights.bounds(op.weight)
    torch.clamp(run[op.x], low, high, out=_columns(op.y, run))


def _read_states(op: ReadStates, run: Run) -> None:
    assert run.states is not None, "a prediction head reads hidden states"
    run[op.y] = run.states.to(run.dtype)
    if op.skips_first:
        run[op.x].masked_fill_((run.positions == 0).unsqueeze(1), 0)


def _add_media(op: AddMedia, run: Run) -> None:
    if run.media is not None:
        run.media.add(run[op.x], op.first)


def _look_up(op: LookUp, run: Run) -> None:
    run[op.y] = run.weights.token_rows(op.weight).look_up(run.ids, run.dtype)


def _look_up_positions(op: LookUpPositions, run: Run) -> None:
    tables = run.weights.tables(op.weight)
    assert isinstance(tables, Vocabulary), "only decoders project the rows of tokens"
    run[op.y] = tables.position(run.positions, run.dtype)


def _embed_audio(op: EmbedAudio, run: Run) -> None:
    assert run.spectrograms is not None, "the encoder inputs are audio"
    run[op.y] = run.weights.audio(op.weight).embed(run.spectrograms, run.dtype)


def _normalize(op: Normalize, run: Run) -> None:
    run[op.y] = run.weights.norm(op.weight)(run[op.x])


def _normalize_parts(op: NormalizeParts, run: Run) -> None:
    sizes = [weight.norm.size for weight in op.weights]
    for piece, weight in zip(run[op.x].split(sizes, 1), op.weights, strict=True):
        piece.copy_(run.weights.norm(weight)(piece))


def _normalize_groups(op: NormalizeGroups, run: Run) -> None:
    groups = _heads(_columns(op.x, run), op.weight.norm.size)
    groups.copy_(run.weights.norm(op.weight)(groups))


def _linear(op: Linear, run: Run) -> None:
    layer = run.weights.matrix(op.weight)
    x = _columns(op.x, run) if isinstance(op.x, Columns) else run[op.x]
    if op.fp32:
        run[op.y] = layer.in_fp32(x)
        return
    lora = None if run.adapters is None else run.loaded.layer(op.weight.name)
    added = None if lora is None or run.adapters is None else lora.delta(x, run.adapters)
    if op.partial:
        y = layer.partial_sum(x)
        run[op.y] = y if added is None else y + added
    else:
        run[op.y] = layer(x, added)


def _activation(op: Activation, run: Run) -> None:
    act, x = function(op.act, run.weights.activation(op.numbers)), run[op.x]
    run[op.y] = gated(act, x, op.limit, op.up_offset) if op.gated else act(x)


def _add(op: Add, run: Run) -> None:
    x = _columns(op.x, run) if isinstance(op.x, Columns) else run[op.x]
    x.add_(run[op.y], alpha=op.scale)


def _multiply(op: Multiply, run: Run) -> None:
    run[op.y] = run[op.x] * run.weights.multiplier(op.weight).to(run.dtype)


def _scale(op: Scale, run: Run) -> None:
    _columns(op.x, run).mul_(op.factor)


def _clamp(op: Clamp, run: Run) -> None:
    x = _columns(op.x, run)
    most = torch.finfo(x.dtype).max
    x.clamp_(max(op.low, -most), min(op.high, most))


def _repeat(op: Repeat, run: Run) -> None:
    run[op.y] = run[op.x].repeat_interleave(op.count, 1)


def _attend_context(op: AttendContext, run: Run) -> None:
    step = run.step
    assert step.context is not None, "the caller gives keys and values"
    run[op.y] = attend_context(op, run[op.q], step.count, step.context, step.context_rows)


def _attend_local(op: AttendLocal, run: Run) -> None:
    layer, qkv = run.weights.local(op.weight), run[op.qkv]
    y = local_attention(qkv, run.step.count, layer.factors, layer.distances, op.weight.part.softcap)
    run[op.y] = y.to(qkv.dtype)


def _all_reduce(op: AllReduce, run: Run) -> None:
    run[op.x] = run.world.all_reduce(run[op.x])


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[tokens, heads · head_dim] → [tokens, heads, head_dim]."""
    return x.unflatten(-1, (-1, head_dim))


def _qk_norm(op: QKNorm, run: Run) -> None:
    qk = _heads(run[op.qkv], op.weight.attention.head_dim)[:, : op.heads]
    qk.copy_(run.weights.qk_norm(op.weight)(qk))


def _rotate(op: Rotate, run: Run) -> None:
    rotate_(_heads(run[op.qkv], op.head_dim)[:, : op.heads], *run.step.angles[op.rope], op.rope.interleaved)


def _scale_queries(op: ScaleQueries, run: Run) -> None:
    _heads(run[op.qkv], op.head_dim)[:, : op.heads].mul_(query_factors(op.factor, run.positions))


def _write_kv(op: WriteKV, run: Run) -> None:
    kv = _heads(run[op.qkv], op.head_dim)[:, op.heads :]
    place = run.kv_layers[op.layer]
    writes = (run.step.cross_writes if op.cross else run.step.writes)[place.group][place.layer]
    if op.layer in run.read_again:
        run.written[op.layer] = kv
    write_kv(run.step.pages[place.group], writes, kv[:, : op.kv_heads], kv[:, op.kv_heads :])


def _prepare_kv(op: PrepareKV, run: Run) -> None:
    sizes = {"heads": op.heads, "kv_heads": op.kv_heads, "head_dim": op.head_dim}
    if op.norm is not None:
        _qk_norm(op.norm, run)
    if op.rope is not None:
        _rotate(Rotate(qkv=op.qkv, rope=op.rope, heads=op.heads + op.kv_heads, head_dim=op.head_dim), run)
    if op.layer is not None:
        _write_kv(WriteKV(qkv=op.qkv, layer=op.layer, **sizes), run)


def _attend(op: Attend, run: Run) -> None:
    part, step = op.part, run.step
    qkv = _heads(run[op.qkv], part.head_dim)
    q, k, v = (qkv, None, None) if op.queries_only else qkv.split((op.heads, op.kv_heads, op.kv_heads), 1)
    if part.shared_kv and op.layer is not None:
        k, v = run.written[op.layer].split(op.kv_heads, 1)
    if op.layer is None:
        biases, rows = run.weights.bias(op.bias), step.windows if op.windowed else step.count
        run[op.y] = encoder_attention(q, k, v, rows, op.scale, part.window, part.softcap, biases, step.keys).flatten(1)
        return
    place = run.kv_layers[op.layer]
    reads = (step.cross_reads if op.cross else step.reads)[place.group]
    options: dict[str, Any] = {"scale": op.scale, "softcap": part.softcap}
    if not op.cross:
        options |= {"sinks": run.weights.sinks(op.sinks), "slopes": run.weights.slopes(op.slopes)}
        options |= {"biases": run.weights.bias(op.bias)}
    run[op.y] = paged_attention(q, k, v, step.pages[place.group], place.layer, reads, **options).flatten(1)


def _prepare_latent(op: PrepareLatent, run: Run) -> None:
    part, latent, q = op.part, run[op.latent], _heads(run[op.q], op.part.query_dim)
    layer, rank = run.weights.norm(op.norm), part.kv_lora_rank
    latent[:, :rank] = normed(layer.norm, latent[:, :rank], layer.weight, layer.bias)
    rotated = q[..., part.qk_nope_head_dim :]
    for x in (latent[:, rank:].unsqueeze(1), rotated):
        rotate_(x, *run.step.angles[part.rope], part.rope.interleaved)
    absorbed = q.new_empty(len(q), op.heads, part.state_dim)
    absorbed[..., rank:] = rotated
    run[op.y] = absorbed.flatten(1)
    place = run.kv_layers[op.layer]
    write_latents(run.step.pages[place.group], run.step.writes[place.group][place.layer], latent)


def _prepare_index(op: PrepareIndex, run: Run) -> None:
    part, key, q = op.part, run[op.key], _heads(run[op.q], op.part.head_dim)
    layer, place = run.weights.norm(op.norm), run.kv_layers[op.layer]
    key = run[op.key] = normed(layer.norm, key, layer.weight, layer.bias)
    for x in (key.unsqueeze(1), q):
        rotate_(x, *run.step.angles[part.rope], part.rope.interleaved)
    write_latents(run.step.pages[place.group], run.step.writes[place.group][place.layer], key)


def _select_keys(op: SelectKeys, run: Run) -> None:
    place, step = run.kv_layers[op.layer], run.step
    q = _heads(run[op.q], op.part.head_dim)
    read = step.pages[place.group], place.layer, step.reads[place.group]
    run[op.y] = select_paged_keys(q, run[op.weights], run[op.key], *read, top_k=op.part.top_k)


def _absorb_queries(op: AbsorbQueries, run: Run) -> None:
    part, keys = op.weight.attention, run.weights.heads(op.weight).keys
    q, y = _heads(run[op.q], part.query_dim), _heads(run[op.y], part.state_dim)
    y[..., : part.kv_lora_rank] = torch.bmm(q[..., : part.qk_nope_head_dim].transpose(0, 1), keys).transpose(0, 1)


def _attend_latent(op: AttendLatent, run: Run) -> None:
    place, part, step = run.kv_layers[op.layer], op.part, run.step
    q = _heads(run[op.q], part.state_dim)
    options: dict[str, Any] = {"value_dim": part.kv_lora_rank, "scale": part.scale}
    options |= {"selected": None if op.selected is None else run[op.selected]}
    latents, reads, pages = run[op.latent], step.reads[place.group], step.pages[place.group]
    run[op.y] = paged_latent_attention(q, latents, pages, place.layer, reads, **options).flatten(1)


def _expand_values(op: ExpandValues, run: Run) -> None:
    values = run.weights.heads(op.weight).values
    x = _heads(run[op.x], op.weight.attention.kv_lora_rank)
    run[op.y] = torch.bmm(x.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).flatten(1)


def _block_linear(op: BlockLinear, run: Run) -> None:
    blocks = run.weights.blocks(op.weight).blocks
    x = _heads(run[op.x], op.weight.size)
    run[op.y] = torch.bmm(x.transpose(0, 1), blocks.transpose(1, 2)).transpose(0, 1).flatten(1)


def _route(op: Route, run: Run) -> None:
    logits = run[op.logits][:, : op.part.routed]
    run[op.chosen], run[op.weights] = route(logits, routing(op.part), run.weights.correction(op.correction))


def _scale_routes(op: ScaleRoutes, run: Run) -> None:
    scales = run.weights.correction(op.scales)
    assert scales is not None, "a program that scales routes has numbers of the experts"
    run[op.weights].mul_(scales[run[op.chosen]])


def _expert_linear(op: ExpertLinear, run: Run) -> None:
    """Multiply the pairs of each expert together."""
    x, chosen = run[op.x], run[op.chosen].flatten()
    lora = None if run.adapters is None else run.loaded.layer(op.stack)
    y: Tensor | None = None
    for number, matrix in enumerate(op.matrices):
        pairs = (chosen == number).nonzero().flatten()
        if len(pairs):
            rows = x[pairs // op.top_k if op.gathered else pairs]
            if op.weights is not None:
                rows = (rows * run[op.weights].flatten()[pairs, None]).to(x.dtype)
            product = run.weights.matrix(matrix).partial_sum(rows)
            if lora is not None and run.adapters is not None:
                product = product + lora.of_expert(number).delta(rows, run.adapters[pairs // op.top_k])
            y = product.new_empty(len(chosen), product.shape[1]) if y is None else y
            y[pairs] = product
    # No pair is computed if all have zero-computation experts.
    run[op.y] = x.new_empty(len(chosen), op.y.width) if y is None else y


def _combine(op: Combine, run: Run) -> None:
    """Add a token's experts in the order of their numbers, in float32."""
    chosen, x = run[op.chosen], run[op.x].unflatten(0, (-1, op.part.top_k))
    dtype = x.dtype
    order = chosen.argsort(dim=1)
    if op.inputs is not None:
        inputs = run[op.inputs] if run.world.rank == 0 else torch.zeros_like(run[op.inputs])
        x = torch.where((chosen < op.part.num_experts).unsqueeze(2), x, inputs.unsqueeze(1))
    scaled = x.float() if op.weights is None else x.float() * run[op.weights].unsqueeze(2)
    y = torch.zeros_like(scaled[:, 0])
    for pairs in order.unbind(1):
        y += scaled[torch.arange(len(x), device=x.device), pairs]
    if op.shared is not None:
        gate = 1.0 if op.part.shared_gate is None else run[op.logits][:, op.part.routed :].sigmoid()
        y += run[op.shared].float() * gate
    run[op.y] = (run.world.all_reduce(y) if op.reduce else y).to(dtype)


def _add_normalize(op: AddNormalize, run: Run) -> None:
    x = run[op.x].add_(run[op.added], alpha=op.scale)
    layer = run.weights.norm(op.weight)
    run[op.x], run[op.y] = x, normed(layer.norm, x, layer.weight, layer.bias)


def _columns(columns: Columns, run: Run) -> Tensor:
    return run[columns.value][:, columns.first : columns.first + columns.width]


def _stream(op: StreamOp, run: Run) -> None:
    for value, tensor in computed(op, run.__getitem__, run.world):
        run[value] = tensor


def _pad_values(op: PadValues, run: Run) -> None:
    x = run[op.x]
    run[op.y] = pad_values(op, x, x.new_empty(x.shape[0], op.y.width))


def _cut_heads(op: CutHeads, run: Run) -> None:
    run[op.y] = _heads(run[op.x], op.x.width // op.heads)[..., : op.y.width // op.heads].flatten(1)


def _gate(op: Gate, run: Run) -> None:
    gate = _columns(op.gate, run)
    factor = gate.sigmoid() if op.act == "sigmoid" else gate
    run[op.y] = (_columns(op.x, run).unflatten(1, (op.gate.width, -1)) * factor.unsqueeze(2)).flatten(1)


def _causal_conv(op: CausalConv, run: Run) -> None:
    weight = run.weights.parameter(op.weight)
    bias = None if op.bias is None else run.weights.parameter(op.bias)
    if op.layer is None:
        run[op.y] = convolved(_columns(op.x, run), weight, bias, run.step.count)
        return
    state = run.step.states[op.layer][0]
    run[op.y], _ = CAUSAL_CONV.reference(_columns(op.x, run), weight, bias, op.act, state, *run.step.state_rows)


def _delta_rule(op: DeltaRule, run: Run) -> None:
    keys, values = op.key_heads * op.key_dim, op.value_heads * op.value_dim
    q, k, v = run[op.qkv].split((keys, keys, values), 1)
    a, b, dt_bias = _columns(op.a, run), _columns(op.b, run), run.weights.parameter(op.dt_bias)
    if op.vector_decay:
        a, dt_bias = _heads(a, op.key_dim), dt_bias.view(-1, op.key_dim)
    y, _ = DELTA_RULE.reference(
        _heads(q, op.key_dim),
        _heads(k, op.key_dim),
        _heads(v, op.value_dim),
        a,
        b,
        run.weights.parameter(op.slope),
        dt_bias,
        run.step.states[op.layer][-1],
        *run.step.state_rows,
        scale=op.key_dim**-0.5,
        beta_scale=op.beta_scale,
    )
    run[op.y] = y.flatten(1)


def _selective_scan(op: SelectiveScan, run: Run) -> None:
    y, _ = SELECTIVE_SCAN.reference(
        _heads(_columns(op.x, run), op.head_dim),
        _columns(op.dt, run),
        run.weights.parameter(op.a),
        _heads(_columns(op.b, run), op.state),
        _heads(_columns(op.c, run), op.state),
        None if op.d is None else run.weights.parameter(op.d),
        None if op.dt_bias is None else run.weights.parameter(op.dt_bias),
        None if op.gate is None else _heads(_columns(op.gate, run), op.head_dim),
        run.step.states[op.layer][-1],
        *run.step.state_rows,
        dt_limits=op.dt_limits,
    )
    run[op.y] = y.flatten(1)


def _gated_norm(op: GatedNorm, run: Run) -> None:
    weight, x, gate = run.weights.parameter(op.weight), run[op.x], _columns(op.gate, run)
    if op.all_groups is not None:
        run[op.y] = gated_norm_of_ranks(op, x, gate, weight, run.world)
        return
    run[op.y] = GATED_NORM.reference(x, gate, weight, op.eps, op.gate_first, op.act, op.groups)


def _gated_recurrence(op: GatedRecurrence, run: Run) -> None:
    given = run[op.x], run[op.gate], run[op.decay]
    vectors = (run.weights.parameter(one) for one in (op.gate_bias, op.decay_bias, op.rate))
    run[op.y], _ = RG_LRU.reference(*given, *vectors, run.step.states[op.layer][-1], *run.step.state_rows)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    Input: _input,
    Keep: _keep,
    Repeat: _repeat,
    AttendLocal: _attend_local,
    AttendContext: _attend_context,
    Embed: _embed,
    InsertMedia: _insert_media,
    ReadStates: _read_states,
    AddMedia: _add_media,
    LookUp: _look_up,
    LookUpPositions: _look_up_positions,
    EmbedAudio: _embed_audio,
    EmbedMedia: _embed_media,
    FillMedia: _fill_media,
    Bound: _bound,
    Normalize: _normalize,
    NormalizeParts: _normalize_parts,
    NormalizeGroups: _normalize_groups,
    Linear: _linear,
    Activation: _activation,
    Add: _add,
    Multiply: _multiply,
    Scale: _scale,
    Clamp: _clamp,
    AllReduce: _all_reduce,
    QKNorm: _qk_norm,
    Rotate: _rotate,
    ScaleQueries: _scale_queries,
    WriteKV: _write_kv,
    PrepareKV: _prepare_kv,
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
    AddNormalize: _add_normalize,
}


def _step_inputs(run: Run) -> dict[str, Tensor]:
    """Return positions and angles, which compiled segments read in addition to buffers and weights."""
    found = {"positions": run.positions}
    for number, (cos, sin) in enumerate(run.step.angles.values()):
        found |= {f"cos {number}": cos, f"sin {number}": sin}
    return found


def _bind(run: Run, values: dict[str, Tensor], inputs: dict[str, Tensor]) -> Run:
    angles = {rope: (inputs[f"cos {number}"], inputs[f"sin {number}"]) for number, rope in enumerate(run.step.angles)}
    return replace(run, values=values, positions=inputs["positions"], step=replace(run.step, angles=angles))
