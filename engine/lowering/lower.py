"""Lowering: a declared model and a number of ranks → the operations of a step on one rank."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from statistics import NormalDist

from engine.lowering.operations import (
    AbsorbQueries,
    Activation,
    ActivationNumbers,
    Add,
    AddMedia,
    AlibiSlopes,
    Attend,
    AttendLatent,
    AttendLocal,
    AudioWeights,
    Bound,
    Bounds,
    CausalConv,
    Clamp,
    Collect,
    Columns,
    Combine,
    Correct,
    Correction,
    CutHeads,
    DistanceBias,
    Embed,
    EmbedAudio,
    EmbedMedia,
    ExpandValues,
    ExpertLinear,
    ExpertScales,
    FillMedia,
    ForeignDecoder,
    ForeignWeights,
    Gate,
    HeadMatrices,
    Input,
    InsertMedia,
    Keep,
    Linear,
    LocalWeights,
    LookUp,
    LookUpPositions,
    Matrix,
    Multiplier,
    Multiply,
    Normalize,
    NormalizeGroups,
    NormVector,
    PadValues,
    Part,
    Predict,
    PrepareIndex,
    PrepareLatent,
    QKNorm,
    QKNormVectors,
    ReadStates,
    RecurrentParameter,
    Repeat,
    Rotate,
    Route,
    ScaleQueries,
    ScaleRoutes,
    SelectKeys,
    SinkLogits,
    SlopedDistances,
    Sparsify,
    Spread,
    Tables,
    Tanh,
    TokenTable,
    Value,
    WriteKV,
    scaled,
    split,
    whole,
)
from engine.lowering.program import SHORTCUT, Op, Program
from engine.lowering.recurrent import MixerInputs, mix
from engine.models import parts
from engine.models.parts import (
    MLP,
    Attention,
    AudioEmbedding,
    Convolution,
    Encoder,
    Experts,
    FusedStates,
    Indexer,
    LatentAttention,
    LayerInput,
    LayerInputs,
    LocalAttention,
    LowRank,
    Model,
    PredictionInput,
    Projection,
    Recurrent,
    ResidualBlock,
    Streams,
    all_bodies,
    bodies,
    body_norms,
    body_scales,
    output_norms,
    summed_bodies,
)
from engine.models.ranks import shared_units
from engine.models.sources import (
    attention_linears,
    branch_path,
    clipped,
    coefficient_linears,
    convolution_linears,
    convolution_parameters,
    indexer_linears,
    join,
    latent_linears,
    layer_input_linears,
    layer_inputs_linear,
    local_linears,
    low_rank_linears,
    mlp_linears,
    prediction_linear,
    prediction_path,
    projection_linear,
    query_linears,
    routed_mlps,
    router_linear,
    stream_linears,
    update_linears,
    width_linears,
)


@lru_cache(maxsize=4)
def state_projection(model: Model) -> Program | None:
    """Return the program that projects the states of several layers to the input of an EAGLE-3 head, or None for
    another model."""
    part = model.prediction_input
    if not isinstance(part, FusedStates):
        return None
    given = Value(name="fused_states", width=part.layers * part.hidden)
    out = Value(name="fused_out", width=model.embed.hidden)
    return Program((Input(y=given), Linear(x=given, y=out, weight=_projection_matrix(model, part))), out)


def _projection_matrix(model: Model, part: PredictionInput | FusedStates) -> Matrix:
    linear = prediction_linear(part, model.embed.hidden)
    return Matrix(linear=linear, path=prediction_path(model), part="embedding")


@lru_cache(maxsize=4)
def lower(model: Model, ranks: int = 1) -> Program:
    """Return the program of each of `ranks` tensor-parallel ranks. Raises ConfigError if heads or rows cannot be
    divided among them."""
    return _Lowering(model, ranks).program()


class PartLowering:
    """Lowers the parts of blocks. `x` is the residual stream, `normed` the input of a residual block, `out` its
    output."""

    def __init__(self, hidden: int, ranks: int) -> None:
        self.ranks = ranks
        self.x, self.normed, self.out = (Value(name=name, width=hidden) for name in ("x", "normed", "out"))
        self.layers = 0  # parts with pages so far
        self.last_of: dict[int | None, int] = {}  # window -> the last of them with this window
        self.recurrent = 0  # recurrent layers so far
        self.windowed = False  # bidirectional attention is among the patches of a window
        self.root = ""  # of the model's tensors
        self.layer_inputs: Value | None = None  # inputs of all layers
        self.side = self.x  # hidden states beside the residual stream, if there are some
        self.pair = Value(name="pair", width=2 * hidden)  # x and the embedding, side by side
        self.selected: Value | None = None  # keys that the last indexer selected
        self.shortcut = Value(name=SHORTCUT, width=hidden)
        self.pools = False  # the states are pooled to vectors
        self.aligned: tuple[int, ...] = ()  # layers with alignment heads
        self.queries: Value | None = None  # of those layers
        self.reach = 0  # largest distance between two tokens

    def residual_block(self, part: ResidualBlock, path: str) -> Iterator[Op]:
        if part.side in ("opens", "continues"):
            yield from self._side_block(part, path)
            return
        read, scales = self.x, body_scales(part)
        afters = output_norms(part)
        if part.first is not None:
            yield self.norm(part.first, path, self.x, self.x)
        assert (part.after is None and not afters) or scales[0] == 1.0, "a norm would remove the scale"
        # The ranks' shares of a sum are added before a norm. A body that every rank computes must not be part of it.
        summed = summed_bodies(part)
        assert part.body is summed[0] or not any(isinstance(one, LowRank) for one in summed) or afters[0]
        if part.side == "joins":
            read = self.side
            yield Add(x=read, y=self.x)
        if part.side == "pair":
            read = self.pair
        if part.before is not None:
            if part.limit is not None:
                limited = Value(name="limited", width=read.width)
                yield Keep(x=read, y=whole(limited))
                yield _limited(limited, part.limit)
                read = limited
            yield self.norm(part.before, path, read, self.normed)
            read = self.normed
        if part.shortcut is not None:
            given = read
            if part.shortcut_norm is not None:
                given = Value(name="shortcut_input", width=self.x.width)
                yield self.norm(part.shortcut_norm, path, self.x, given)
            yield from self._experts(part.shortcut, join(path, part.shortcut.name), given, self.shortcut)
        for number, body in enumerate(summed):
            y = self.out if number == 0 else Value(name="other", width=self.out.width)
            if norms := body_norms(part):
                read = self.normed
                yield self.norm(norms[number], path, self.x, read)
            yield from self._body(body, path, read, y)
            after = afters[number] if afters else None
            if after is not None:
                yield self.norm(after, path, y, y)
            if number > 0:
                yield Add(x=self.out, y=y, scale=scales[number] / scales[0])
        if part.after is not None:
            if part.limit is not None:
                yield _limited(self.out, part.limit)
            yield self.norm(part.after, path, self.out, self.out)
        yield Add(x=self.x, y=self.out, scale=part.scale * scales[0])
        yield from scaled(whole(self.x), part.factor)
        if part.last is not None:
            if part.limit is not None:
                yield _limited(self.x, part.limit)
            yield self.norm(part.last, path, self.x, self.x)
        if part.multiplier:
            yield Multiply(x=self.x, y=self.x, weight=Multiplier(name=join(path, part.multiplier)))

    def _body(self, body: parts.Body, path: str, read: Value, y: Value) -> Iterator[Op]:
        match body:
            case Attention():
                yield from self._attention(body, join(path, body.name), read, y)
            case Recurrent():
                yield from self._recurrent(body, join(path, body.name), read, y)
            case LatentAttention():
                yield from self._latent_attention(body, join(path, body.name), read, y)
            case MLP():
                yield from self.mlp(body, join(path, body.name), read, y, "mlp")
            case Experts():
                yield from self._experts(body, join(path, body.name), read, y)
            case LayerInput():
                yield from self._layer_input(body, join(path, body.name), read, y)
            case LowRank():
                yield from self._low_rank(body, join(path, body.name), read, y)
            case LocalAttention():
                yield from self._local_attention(body, join(path, body.name), read, y)
            case Convolution():
                yield from self._convolution(body, join(path, body.name), read, y)
            case Projection():
                yield Linear(x=read, y=y, weight=Matrix(linear=projection_linear(body), path=path, part="mlp"))

    def _side_block(self, part: ResidualBlock, path: str) -> Iterator[Op]:
        """Compute a part of the side stream, which has another buffer than its input."""
        assert len(bodies(part)) == 1 and part.after is part.last is None, "a side stream has one body at a time"
        read = self.side
        if part.side == "opens":
            read = self.pair
            yield Keep(x=self.x, y=Columns(value=read, first=0, width=self.x.width))
        if part.before is not None:
            normed = self.normed if part.side == "continues" else replace(self.pair, name="normed_pair")
            yield self.norm(part.before, path, read, normed)
            read = normed
        self.side = Value(name="other_side" if read.name == "side" else "side", width=self.out.width)
        yield from self._body(bodies(part)[0], path, read, self.side)

    def _keep_queries(self, q: Value, layer: int) -> Iterator[Op]:
        """Keep the queries of a layer with alignment heads."""
        if layer in self.aligned:
            self.queries = Value(name="aligned_queries", width=len(self.aligned) * q.width)
            yield Keep(x=q, y=Columns(value=self.queries, first=self.aligned.index(layer) * q.width, width=q.width))

    def _low_rank(self, part: LowRank, path: str, x: Value, y: Value) -> Iterator[Op]:
        down, up = (Matrix(linear=linear, path=path, part="attention") for linear in low_rank_linears(part))
        narrow = Value(name="low_rank", width=part.rank)
        yield Linear(x=x, y=narrow, weight=down)
        yield Linear(x=narrow, y=y, weight=up)
        yield self.norm(part.norm, path, y, y)
        yield Add(x=y, y=x)

    def _local_attention(self, part: LocalAttention, path: str, x: Value, y: Value) -> Iterator[Op]:
        into, out = (Matrix(linear=linear, path=path, part="attention") for linear in local_linears(part))
        qkv, attended = Value(name="qkv", width=3 * part.hidden), Value(name="attended", width=part.hidden)
        yield from self._clipped(x, qkv, into) if part.clipped else (Linear(x=x, y=qkv, weight=into),)
        yield AttendLocal(qkv=qkv, y=attended, weight=LocalWeights(part=part, path=path))
        yield from self._clipped(attended, y, out) if part.clipped else (Linear(x=attended, y=y, weight=out),)

    def _convolution(self, part: Convolution, path: str, x: Value, y: Value) -> Iterator[Op]:
        into, *inner, out = (Matrix(linear=linear, path=path, part="mlp") for linear in convolution_linears(part))
        of = {role: RecurrentParameter(parameter=one, path=path) for role, one in convolution_parameters(part).items()}
        wide, gated = Value(name="up", width=2 * part.hidden), Value(name="activated", width=part.hidden)
        gate, up = split(wide, part.hidden, part.hidden)
        yield from self._clipped(x, wide, into) if part.clipped else (Linear(x=x, y=wide, weight=into),)
        if part.gate_act == "sigmoid":
            yield Gate(x=up, gate=gate, y=gated, act="sigmoid")
        else:
            yield Activation(x=wide, y=gated, act=part.gate_act, gated=True)
        read, channels = gated, part.hidden * part.multiplier
        if part.multiplier > 1:
            read = Value(name="repeated", width=channels)
            yield Repeat(x=gated, y=read, count=part.multiplier)
        conved = Value(name="conved", width=channels)
        yield CausalConv(x=whole(read), y=conved, weight=of["conv"], bias=of.get("conv_bias"), act="none", layer=None)
        for matrix in inner:
            read, conved = conved, Value(name="inner", width=part.hidden)
            yield Linear(x=read, y=conved, weight=matrix)
        if part.norm is not None:
            if part.limit is not None:
                yield _limited(conved, part.limit)
            yield self.norm(part.norm, path, conved, conved)
        yield Activation(x=conved, y=gated, act=part.act, gated=False)
        yield from self._clipped(gated, y, out) if part.clipped else (Linear(x=gated, y=y, weight=out),)

    def _layer_input(self, part: LayerInput, path: str, x: Value, y: Value) -> Iterator[Op]:
        gate, up = (Matrix(linear=linear, path=path, part="mlp") for linear in layer_input_linears(part))
        assert self.layer_inputs is not None, "a layer that reads its input belongs to a model that has them"
        own = Columns(value=self.layer_inputs, first=part.layer * part.width, width=part.width)
        wide, gated = Value(name="up", width=part.width), Value(name="activated", width=part.width)
        yield Linear(x=x, y=wide, weight=gate)
        yield Activation(x=wide, y=gated, act=part.act, gated=False)
        yield Gate(x=whole(gated), gate=own, y=gated, act="none")
        yield Linear(x=gated, y=y, weight=up)

    def _attention(self, part: Attention, path: str, x: Value, y: Value) -> Iterator[Op]:
        *into, out = (Matrix(linear=linear, path=path, part="attention") for linear in attention_linears(part))
        heads, kv_heads, dim = self._share(part.heads, "heads"), self._share(part.kv_heads, "KV heads"), part.head_dim
        attended = Value(name="attended", width=heads * dim)
        sinks = SinkLogits(attention=part, path=path) if part.sinks else None
        slopes: AlibiSlopes | None = None
        bias: DistanceBias | SlopedDistances | None = None
        if part.alibi is not None and part.causal:
            slopes = AlibiSlopes(alibi=part.alibi, heads=part.heads)
        elif part.alibi is not None:
            bias = SlopedDistances(alibi=part.alibi, heads=part.heads, reach=self.reach)
        if part.relative is not None:
            bias = DistanceBias(relative=part.relative, heads=part.heads, root=self.root)
        if part.source:
            q = Value(name="q", width=heads * dim)
            yield Linear(x=x, y=q, weight=into[0])
            layer = self.layers - 1
            yield from self._keep_queries(q, layer)
            yield Attend(qkv=q, y=attended, part=part, layer=layer, heads=heads, kv_heads=kv_heads, cross=True)
        else:
            keys = 0 if part.shared_kv else kv_heads  # in qkv
            qkv = Value(name="qkv", width=(heads + 2 * keys) * dim)
            gate = Value(name="gate", width=heads if part.gate_per_head else heads * dim)
            if part.gated:
                yield Linear(x=x, y=gate, weight=into[0])
            # Vectors of short texts nearly cancel when they are pooled. Values are 8 % of the matrices of MiniLM and a
            # third of what int8 costs: the cosine of "Thank you" to float32 rises from 0.9985 to 0.9991.
            matrix = replace(into[-1], wide_rows=keys * part.value_width) if self.pools else into[-1]
            yield from self._qkv(part, x, qkv, matrix, heads + keys, keys)
            if part.v_norm is not None and not part.shared_kv:
                values = Columns(value=qkv, first=(heads + keys) * dim, width=keys * dim)
                yield NormalizeGroups(x=values, weight=NormVector(norm=part.v_norm, path=path))
            prepare: list[Op] = []
            if part.qk_norm is not None:
                vectors = QKNormVectors(attention=part, path=path)
                prepare.append(QKNorm(qkv=qkv, weight=vectors, heads=heads + keys, queries=heads))
            if part.rope is not None:
                prepare.append(Rotate(qkv=qkv, rope=part.rope, heads=heads + keys, head_dim=dim))
            yield from reversed(prepare) if part.qk_norm_last else prepare
            number = self.last_of[part.window] if part.shared_kv else self.layers if part.causal else None
            if number is not None and not part.shared_kv:
                self.layers += 1
                self.last_of[part.window] = number
                yield WriteKV(qkv=qkv, layer=number, heads=heads, kv_heads=kv_heads, head_dim=dim)
            if part.query_scale is not None:
                yield ScaleQueries(qkv=qkv, factor=part.query_scale, heads=heads, head_dim=dim)
            yield Attend(
                qkv=qkv,
                y=attended,
                part=part,
                layer=number,
                heads=heads,
                kv_heads=kv_heads,
                sinks=sinks,
                slopes=slopes,
                bias=bias,
                windowed=self.windowed and number is None,
            )
            if part.gated:
                yield Gate(x=whole(attended), gate=whole(gate), y=attended, act="sigmoid")
        if part.value_dim is not None:
            cut = Value(name="cut", width=heads * part.value_width)
            yield CutHeads(x=attended, y=cut, heads=heads)
            attended = cut
        yield from self._clipped(attended, y, out) if part.clipped else (self._summed(attended, y, out),)

    def _clipped(self, x: Value, y: Value, matrix: Matrix) -> Iterator[Op]:
        """Project x. The inputs and outputs of each source of the matrix are clipped to bounds of their own."""
        assert self.ranks == 1, "only towers have such projections, and every rank has the whole tower"
        given, first = Value(name=f"clipped_inputs_{x.width}", width=x.width), 0
        for source, group in groupby(matrix.linear.rows, lambda row: row.source):
            rows = tuple(group)
            path, width = join(matrix.path, clipped(source)), sum(row.units * row.width for row in rows)
            own = Value(name=f"clipped_outputs_{width}", width=width)
            yield Bound(x=x, y=whole(given), weight=Bounds(path=path, side="input"))
            yield Linear(x=given, y=own, weight=replace(matrix, linear=replace(matrix.linear, rows=rows)))
            to = Columns(value=y, first=first, width=width)
            yield Bound(x=own, y=to, weight=Bounds(path=path, side="output"))
            first += width

    def _qkv(self, part: Attention, x: Value, qkv: Value, matrix: Matrix, heads: int, keys: int) -> Iterator[Op]:
        """Project x to queries, keys and values. heads: queries and keys."""
        dim, width = part.head_dim, part.value_width
        first = heads * dim
        if part.clipped:
            yield from self._clipped(x, qkv, matrix)
            return
        if part.value_dim is None:
            yield Linear(x=x, y=qkv, weight=matrix)
            yield from self._update(part, matrix.path, x, qkv)
            yield from scaled(Columns(value=qkv, first=first, width=keys * width), part.value_scale)
            return
        narrow = Value(name="narrow_qkv", width=first + keys * width)
        yield Linear(x=x, y=narrow, weight=matrix)
        yield from scaled(Columns(value=narrow, first=first, width=keys * width), part.value_scale)
        yield PadValues(x=narrow, y=qkv, heads=heads, kv_heads=keys, head_dim=dim, value_dim=width)

    def _update(self, part: Attention | MLP, path: str, x: Value, y: Value) -> Iterator[Op]:
        """Add the low-rank update of a projection to its output."""
        if part.update is None:
            return
        kind: Part = "attention" if isinstance(part, Attention) else "mlp"
        down, *ups = (Matrix(linear=linear, path=path, part=kind) for linear in update_linears(part))
        rank, at = part.update.rank, 0
        low_rank = Value(name="low_rank", width=rank * len(ups))
        yield Linear(x=x, y=low_rank, weight=down)
        for number, up in enumerate(ups):
            change = Value(name="update", width=self._rows(up))
            yield Linear(x=Columns(value=low_rank, first=number * rank, width=rank), y=change, weight=up)
            yield Add(x=Columns(value=y, first=at, width=change.width), y=change)
            at += change.width
        assert at == y.width, "an update changes all columns"

    def _recurrent(self, part: Recurrent, path: str, x: Value, y: Value) -> Iterator[Op]:
        layer, self.recurrent = self.recurrent, self.recurrent + 1
        exact, of = part.exact_linears(), part.parameters()
        matrices = tuple(
            Matrix(linear=linear, path=path, part="recurrent", quantized=linear not in exact)
            for linear in part.linears()
        )
        parameters = {role: RecurrentParameter(parameter=one, path=path) for role, one in of.items()}
        mixed = yield from mix(part, MixerInputs(x, layer, path, matrices, parameters, self.ranks))
        yield self._summed(mixed, y, matrices[-1])

    def _latent_attention(self, part: LatentAttention, path: str, x: Value, y: Value) -> Iterator[Op]:
        """Attend with absorbed matrices: queries are multiplied by W_UK and outputs by W_UV, and keys and values are
        never expanded. A prompt takes the same operations as a decode step, so that its result does not depend on its
        chunks."""
        queries = [Matrix(linear=linear, path=path, part="attention") for linear in query_linears(part)]
        down, _, out = (Matrix(linear=linear, path=path, part="attention") for linear in latent_linears(part))
        heads, matrices = self._share(part.heads, "heads"), HeadMatrices(attention=part, path=path)
        q, latent = Value(name="q", width=heads * part.query_dim), Value(name="latent", width=part.state_dim)
        absorbed = Value(name="absorbed", width=heads * part.state_dim)
        attended = Value(name="attended_latents", width=heads * part.kv_lora_rank)
        values = Value(name="attended", width=heads * part.v_head_dim)
        read = x
        if part.q_lora_rank is not None:
            assert part.q_norm is not None, "queries of low rank have a norm"
            read = Value(name="q_latent", width=part.q_lora_rank)
            yield Linear(x=x, y=read, weight=queries[0])
            yield self.norm(part.q_norm, path, read, read)
        yield Linear(x=read, y=q, weight=queries[-1])
        if part.indexer is not None:
            yield from self._select(part.indexer, join(path, part.indexer.name), x, read)
        selected = None if part.indexer is None and not part.shares_selection else self.selected
        assert selected is not None or not part.shares_selection, "an indexer precedes attention that shares its keys"
        yield Linear(x=x, y=latent, weight=down)
        norm, layer = NormVector(norm=part.latent_norm, path=path), self.layers
        self.layers += 1
        yield PrepareLatent(latent=latent, q=q, y=absorbed, norm=norm, part=part, heads=heads, layer=layer)
        yield AbsorbQueries(q=q, y=absorbed, weight=matrices, heads=heads)
        yield AttendLatent(
            q=absorbed, latent=latent, y=attended, part=part, heads=heads, layer=layer, selected=selected
        )
        yield ExpandValues(x=attended, y=values, weight=matrices, heads=heads)
        yield self._summed(values, y, out)

    def _select(self, part: Indexer, path: str, x: Value, q_latent: Value) -> Iterator[Op]:
        of_q, of_key, of_weights = indexer_linears(part)
        q, key = Value(name="index_q", width=part.heads * part.head_dim), Value(name="index_key", width=part.head_dim)
        weights = Value(name="index_weights", width=part.heads)
        self.selected, layer = Value(name="selected", width=part.top_k), self.layers
        self.layers += 1
        yield Linear(x=q_latent, y=q, weight=Matrix(linear=of_q, path=path, part="attention"))
        yield Linear(x=x, y=key, weight=Matrix(linear=of_key, path=path, part="attention"))
        exact = Matrix(linear=of_weights, path=path, part="attention", quantized=False)
        yield Linear(x=x, y=weights, weight=exact, fp32=True)
        yield PrepareIndex(key=key, q=q, norm=NormVector(norm=part.norm, path=path), part=part, layer=layer)
        yield SelectKeys(q=q, weights=weights, key=key, y=self.selected, part=part, layer=layer)

    def mlp(self, part: MLP, path: str, x: Value, y: Value, kind: Part, *, partial: bool = False) -> Iterator[Op]:
        """partial: this rank's share of a sum that another operation completes."""
        up, down = (Matrix(linear=linear, path=path, part=kind) for linear in mlp_linears(part))
        inner = self._share(part.intermediate_size, "inner values")
        wide, activated = Value(name="up", width=self._rows(up)), Value(name="activated", width=inner)
        numbers = ActivationNumbers(path=path) if part.act == parts.XIELU else None
        yield from self._clipped(x, wide, up) if part.clipped else (Linear(x=x, y=wide, weight=up),)
        yield from self._update(part, path, x, wide)
        gate = Columns(value=wide, first=0, width=inner)
        yield from scaled(gate, part.gate_scale)
        if part.sparsity:
            yield Sparsify(x=gate, multiplier=NormalDist().inv_cdf(part.sparsity), size=part.intermediate_size)
        yield from _clamped(wide, part.clamp)
        yield Activation(x=wide, y=activated, act=part.act, gated=part.gate is not None, numbers=numbers)
        if part.clipped:
            yield from self._clipped(activated, y, down)
            return
        yield Linear(x=activated, y=y, weight=down, partial=True) if partial else self._summed(activated, y, down)

    def _experts(self, part: Experts, path: str, x: Value, y: Value) -> Iterator[Op]:
        router = Matrix(linear=router_linear(part), path=path, part="experts", quantized=False)
        routed = routed_mlps(part)
        ups, downs = (
            tuple(
                Matrix(linear=linear, path=join(path, mlp.name), part="experts", expert=number)
                for number, mlp in enumerate(routed)
            )
            for linear in mlp_linears(routed[0])
        )
        k, inner = part.top_k, self._share(part.intermediate_size, "inner values")
        logits = Value(name="router", width=self._rows(router))
        chosen, weights = Value(name="chosen", width=k), Value(name="weights", width=k)
        wide = Value(name="pairs_up", width=self._rows(ups[0]), rows=k)
        activated = Value(name="pairs_activated", width=inner, rows=k)
        pairs = Value(name="pairs", width=self.out.width, rows=k)
        read = x
        if part.router_norm is not None:
            read = Value(name="router_input", width=x.width)
            yield self.norm(part.router_norm, path, self.x, read)
        yield Linear(x=read, y=logits, weight=router, fp32=True)
        yield from scaled(whole(logits), part.logits_scale)
        correction = Correction(experts=part, path=path) if part.correction else None
        yield Route(logits=logits, chosen=chosen, weights=weights, part=part, correction=correction)
        if part.expert_scales:
            yield ScaleRoutes(chosen=chosen, weights=weights, scales=ExpertScales(experts=part, path=path))
        of_inputs, of_outputs = (weights, None) if part.scales_inputs else (None, weights)
        gated = part.gate is not None
        yield ExpertLinear(x=x, y=wide, chosen=chosen, matrices=ups, top_k=k, gathered=True, weights=of_inputs)
        yield from _clamped(wide, part.clamp)
        yield Activation(x=wide, y=activated, act=part.act, gated=gated, limit=part.limit, up_offset=part.up_offset)
        yield ExpertLinear(x=activated, y=pairs, chosen=chosen, matrices=downs, top_k=k, gathered=False)
        shared = None
        if part.shared is not None:
            shared = Value(name="shared", width=self.out.width)
            inside = join(path, part.shared.name)
            yield from self.mlp(part.shared, inside, x, shared, "experts", partial=True)
        yield Combine(
            x=pairs,
            chosen=chosen,
            weights=of_outputs,
            logits=logits,
            shared=shared,
            y=y,
            part=part,
            inputs=x if part.zero_experts else None,
            reduce=self.ranks > 1,
        )

    def _summed(self, x: Value, y: Value, weight: Matrix) -> Linear:
        """Return a projection whose inputs are divided among the ranks."""
        return Linear(x=x, y=y, weight=weight, reduce=self.ranks > 1)

    def norm(self, norm: parts.Norm, path: str, x: Value, y: Value) -> Normalize:
        return Normalize(x=x, y=y, weight=NormVector(norm=norm, path=path))

    def _rows(self, matrix: Matrix) -> int:
        """Return the outputs of a matrix on one rank."""
        divided = matrix.linear.split == "rows"
        return sum((self._share(row.units, "rows") if divided else row.units) * row.width for row in matrix.linear.rows)

    def _share(self, units: int, what: str) -> int:
        return shared_units(units, 0, self.ranks, what)[1]


class _Lowering(PartLowering):
    """Lowers a model."""

    def __init__(self, model: Model, ranks: int) -> None:
        super().__init__(model.embed.hidden, ranks)
        self.model, self.root, self.reach = model, model.root, model.max_context - 1
        self.pools = model.pooler is not None and model.head is None
        if model.encoder is not None and model.encoder.alignment is not None:
            self.aligned = model.encoder.alignment.layers

    def program(self) -> Program:
        model, encoder = self.model, self.model.encoder
        if model.encoder_only:
            return Program((EmbedMedia(y=self.x),), self.x)
        if model.foreign is not None:
            return Program(
                (ForeignDecoder(y=self.x, weight=ForeignWeights(foreign=model.foreign)), *self._foreign()), self.x
            )
        before = () if encoder is None else tuple(self._encoder(encoder))
        ops = list(self._embedding(Tables(embed=model.embed, root=model.root, head=model.head)))
        if model.layer_inputs is not None:
            ops += self._layer_inputs(model.layer_inputs)
        if model.streams is not None:
            ops += self._spread(model.streams)
        if any(part.side == "opens" for block in model.blocks for part in block):
            ops.append(Keep(x=self.x, y=Columns(value=self.pair, first=self.x.width, width=self.x.width)))
        if model.prediction_input is not None:
            ops += self._prediction_input(model.prediction_input)
        cross: list[Op] = []
        for index, block in enumerate(model.blocks):
            path = join(model.root, model.layers, str(index))
            ops += self._keep_states(index)
            if model.streams is not None:
                ops += self._stream_block(model.streams, block, path)
                continue
            for part in block:
                ops += self.residual_block(part, branch_path(part, path, model.root))
                cross += self._cross_kv(part, path)
            if any(part.shortcut is not None for part in block):
                ops.append(Add(x=self.x, y=self.shortcut))
            ops += self._deepstack(index)
        if model.streams is not None:
            ops += self._collect(model.streams)
        ops += self._keep_states(len(model.blocks))
        ops += self._final_norm(model.norm)
        out = self.x if model.norm is None else self.normed
        for linear in width_linears(model.embed)[1:]:
            narrow = Value(name="token_rows", width=model.embed.row_width)
            matrix = Matrix(linear=linear, path=model.root, part="head")
            ops.append(Linear(x=out, y=narrow, weight=matrix))
            out = narrow
        if encoder is None:
            axes, windowed = self._rope_axes(), self._windowed_spans
            return Program(tuple(ops), out, self._kept, rope_axes=axes, windowed_spans=windowed)
        states = self.x if encoder.norm is None else self.normed
        linked = [replace(op, x=states) if isinstance(op, Linear) else op for op in cross]
        return Program(tuple(ops), out, None, (*before, *linked), states, queries=self.queries)

    @property
    def _windowed_spans(self) -> bool:
        return self.model.media is not None and self.model.media.windowed_items

    @property
    def _kept(self) -> Value | None:
        count = len(self.model.kept_layers)
        return Value(name="kept_states", width=count * self.x.width) if count else None

    def _keep_states(self, index: int) -> Iterator[Op]:
        """Keep the input of a layer, if a head that drafts reads it."""
        hidden, kept = self.x.width, self._kept
        for number, layer in enumerate(self.model.kept_layers):
            if layer == index and kept is not None:
                yield Keep(x=self.x, y=Columns(value=kept, first=number * hidden, width=hidden))

    def _deepstack(self, index: int) -> Iterator[Op]:
        media = self.model.media
        if media is not None and index in media.deepstack:
            yield AddMedia(x=self.x, first=self.x.width * (1 + media.deepstack.index(index)))

    def _rope_axes(self) -> tuple[int, ...]:
        """Return the axis of each rotated pair. Interleaved: pairs alternate between time, height and width, as long as
        the sections of height and width last."""
        positions = None if self.model.media is None else self.model.media.positions
        if positions is None:
            return ()
        sections = positions.sections
        if not positions.interleaved:
            return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))

    def _foreign(self) -> Iterator[Op]:
        """Yield the attention of a decoder that transformers computes."""
        attentions = (body for body in all_bodies(self.model) if isinstance(body, Attention))
        for layer, part in enumerate(attentions):
            qkv = Value(name="qkv", width=(part.heads + 2 * part.kv_heads) * part.head_dim)
            y = Value(name="attended", width=part.heads * part.head_dim)
            yield Attend(qkv=qkv, y=y, part=part, layer=layer, heads=part.heads, kv_heads=part.kv_heads)

    def _encoder(self, encoder: Encoder) -> Iterator[Op]:
        root = self.model.root
        if isinstance(encoder.embed, AudioEmbedding):
            yield EmbedAudio(y=self.x, weight=AudioWeights(embed=encoder.embed, root=root))
        else:
            yield from self._embedding(Tables(embed=encoder.embed, root=root, head=None, own_tokens=False))
        for index, block in enumerate(encoder.blocks):
            for part in block:
                yield from self.residual_block(part, join(root, encoder.layers, str(index)))
        yield from self._final_norm(encoder.norm)

    def _embedding(self, tables: Tables) -> Iterator[Op]:
        embed, media = tables.embed, self.model.media is not None or self.model.reads_media
        if embed.width is None:
            yield Embed(y=self.x, weight=tables)
        else:
            assert embed.segments is None, "projected rows have no segments"
            rows, into = Value(name="token_rows", width=embed.width), width_linears(embed)[0]
            yield Embed(y=rows, weight=tables)
            yield Linear(x=rows, y=self.x, weight=Matrix(linear=into, path=self.model.root, part="embedding"))
        if media:
            yield InsertMedia(x=self.x)
        if embed.positions is not None and not embed.is_sum:
            yield LookUpPositions(y=self.out, weight=tables)
            yield Add(x=self.x, y=self.out)
        if tables.embed.norm is not None:
            yield self.norm(tables.embed.norm, self.model.root, self.x, self.x)

    def _layer_inputs(self, part: LayerInputs) -> Iterator[Op]:
        root = self.model.root
        width = part.layers * part.width
        self.layer_inputs, rows = Value(name="layer_inputs", width=width), Value(name="layer_rows", width=width)
        matrix = Matrix(linear=layer_inputs_linear(part, self.model.embed.hidden), path=root, part="embedding")
        table, media = TokenTable(part=part, root=root), self.model.media
        yield Linear(x=self.x, y=self.layer_inputs, weight=matrix)
        yield NormalizeGroups(x=whole(self.layer_inputs), weight=NormVector(norm=part.norm, path=root))
        yield LookUp(y=rows, weight=table, partial=part.vocab < self.model.embed.vocab)
        if media is not None:
            yield FillMedia(x=rows, weight=table, token=media.layer_token)
        yield Add(x=self.layer_inputs, y=rows)
        yield from scaled(whole(self.layer_inputs), part.factor)

    def _prediction_input(self, part: PredictionInput | FusedStates) -> Iterator[Op]:
        hidden, path = self.x.width, prediction_path(self.model)
        skips_first, states_first = (
            (part.skips_first, part.states_first) if isinstance(part, PredictionInput) else (False, False)
        )
        yield ReadStates(x=self.x, y=self.out, skips_first=skips_first)
        last = self.out
        for number, (norm, value) in enumerate(((part.token_norm, self.x), (part.state_norm, self.out))):
            last = value
            if norm is not None:
                last = self.normed
                yield self.norm(norm, path, value, last)
            column = 1 - number if states_first else number
            yield Keep(x=last, y=Columns(value=self.pair, first=column * hidden, width=hidden))
        if isinstance(part, PredictionInput):
            yield Linear(x=self.pair, y=self.x, weight=_projection_matrix(self.model, part))
        else:
            yield Keep(x=last if part.norm_before_residual else self.out, y=whole(self.x))

    def _spread(self, part: Streams) -> Iterator[Op]:
        hidden, root = self.x.width, self.model.root
        matrix = Matrix(linear=stream_linears(part, hidden)[0], path=root, part="embedding")
        projected = Value(name="projected_streams", width=(part.count - 1) * hidden)
        yield Linear(x=self.x, y=projected, weight=matrix)
        yield Spread(x=self.x, projected=projected, y=self._streams(part))

    def _collect(self, part: Streams) -> Iterator[Op]:
        hidden, streams, others = self.x.width, self._streams(part), []
        for number, linear in enumerate(stream_linears(part, hidden)[1:], 1):
            others.append(Value(name=f"stream_{number}", width=hidden))
            own = Columns(value=streams, first=number * hidden, width=hidden)
            yield Linear(x=own, y=others[-1], weight=Matrix(linear=linear, path=self.model.root, part="embedding"))
        yield Collect(x=self.x, others=tuple(others))

    def _stream_block(self, part: Streams, block: Sequence[ResidualBlock], path: str) -> Iterator[Op]:
        """Yield the blocks of a layer, of which the last is a `LayerInput`, between prediction and correction."""
        *inner, last = block
        hidden, streams = self.x.width, self._streams(part)
        matrices = (
            Matrix(linear=linear, path=path, part="mlp", quantized=False)
            for linear in coefficient_linears(part, hidden)
        )
        router, prediction, correction = matrices
        predictions = Value(name="predictions", width=streams.width)
        of_prediction, of_correction = (
            Value(name="coefficients", width=self._rows(matrix)) for matrix in (prediction, correction)
        )
        yield from self._coefficients(part, path, router, prediction, of_prediction)
        yield Predict(streams=streams, coefficients=of_prediction, y=predictions, x=self.x, count=part.count)
        for one in inner:
            yield from self.residual_block(one, path)
        yield from self._coefficients(part, path, router, correction, of_correction)
        yield Correct(predictions=predictions, x=self.x, coefficients=of_correction, y=streams)
        assert isinstance(last.body, LayerInput) and last.after is not None, "the last block is the layer's input"
        read = self.x
        if part.scaled:
            read = self.normed
            yield Multiply(x=self.x, y=read, weight=Multiplier(name=join(path, part.scale), size=hidden))
        yield from self._layer_input(last.body, join(path, last.body.name), read, self.out)
        yield self.norm(last.after, path, self.out, self.out)
        for number in range(1, part.count):
            yield Add(x=Columns(value=streams, first=number * hidden, width=hidden), y=self.out)

    def _coefficients(self, part: Streams, path: str, router: Matrix, matrix: Matrix, y: Value) -> Iterator[Op]:
        inputs = Value(name="modalities", width=part.count)
        yield self.norm(part.norm, path, self.x, self.normed)
        yield Linear(x=self.normed, y=inputs, weight=router)
        yield Tanh(x=inputs, factor=1 / self.x.width)
        yield Linear(x=inputs, y=y, weight=matrix)

    def _streams(self, part: Streams) -> Value:
        return Value(name="streams", width=part.count * self.x.width)

    def _final_norm(self, norm: parts.Norm | None) -> Iterator[Op]:
        if norm is not None:
            yield self.norm(norm, self.model.root, self.x, self.normed)

    def _cross_kv(self, block: ResidualBlock, path: str) -> Iterator[Op]:
        """Yield the operations that write the keys and values of encoder states for a cross-attention. Its layer is the
        one lowered last."""
        for part in bodies(block):
            if isinstance(part, Attention) and part.source:
                inside, kv_heads = join(path, part.name), self._share(part.kv_heads, "KV heads")
                matrix = Matrix(linear=attention_linears(part)[1], path=inside, part="attention")
                kv = Value(name="kv", width=2 * kv_heads * part.head_dim)
                yield Linear(x=self.x, y=kv, weight=matrix)
                sizes = {"heads": 0, "kv_heads": kv_heads, "head_dim": part.head_dim}
                yield WriteKV(qkv=kv, layer=self.layers - 1, cross=True, **sizes)


def _clamped(wide: Value, limits: tuple[float, float] | None) -> Iterator[Clamp]:
    """Yield the operations that clamp gate and up, which are the halves of `wide`."""
    if limits is not None:
        gate, up = split(wide, wide.width // 2, wide.width // 2)
        yield Clamp(x=gate, low=-math.inf, high=limits[0])
        yield Clamp(x=up, low=-limits[1], high=limits[1])


def _limited(value: Value, limit: float) -> Clamp:
    return Clamp(x=whole(value), low=-limit, high=limit)
