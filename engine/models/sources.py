"""Names and shapes of the checkpoint tensors of a declaration.

Layers build their matrices from the same `Linear` values, so the tensors that are checked are the tensors that are
loaded.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from engine.models.parts import (
    MLP,
    XIELU,
    Attention,
    AudioEmbedding,
    Block,
    Body,
    Convolution,
    Dense,
    Embedding,
    Experts,
    FusedStates,
    Indexer,
    LatentAttention,
    LayerInput,
    LayerInputs,
    LayerNorm,
    Linear,
    LocalAttention,
    LowRank,
    Model,
    Norm,
    Parameter,
    PooledNorm,
    PredictionInput,
    Projection,
    Recurrent,
    ResidualBlock,
    RMSNorm,
    Rows,
    Streams,
    TokenLogits,
    block_norms,
    bodies,
)
from engine.models.parts.linear import packed
from engine.models.parts.linear import parameter as rows_of_tensor

Shapes = dict[str, tuple[int, ...]]
ACT_FN = "act_fn"  # path of the numbers of an activation in an MLP
XIELU_NUMBERS: Shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
LIMITS = ("input_min", "input_max", "output_min", "output_max")  # tensors of a clipped projection
EXPERT_MODULES = ("mlp", "block_sparse_moe", "feed_forward")  # modules of transformers that have experts


def join(*names: str) -> str:
    """Join the names that are not empty with dots."""
    return ".".join(name for name in names if name)


def attention_linears(part: Attention) -> tuple[Linear, ...]:
    """Return the fused projection to q, k and v, and the output projection. For cross-attention: the projection to q,
    the fused one to k and v, and the output projection. With an output gate, its projection comes first."""
    rows = _qkv_rows(part)
    out = Linear(
        rows=(Rows(source=part.sources[3], units=part.outputs or part.hidden),),
        inputs=part.heads * part.value_width,
        split="inputs",
        bias=part.bias[1],
    )
    if part.gate_source:
        gate = Rows(source=part.gate_source, units=part.heads, width=1 if part.gate_per_head else part.head_dim)
        return (
            Linear(rows=(gate,), inputs=part.hidden, split="rows"),
            Linear(rows=rows, inputs=part.hidden, split="rows", bias=part.bias[0]),
            out,
        )
    parted = (rows[:1], rows[1:]) if part.source else (rows,)
    if part.gated:
        query = replace(rows[0], groups=part.heads, stride=2 * part.head_dim)
        parted = (replace(query, at=part.head_dim),), (query, *rows[1:])
    into = (Linear(rows=some, inputs=part.hidden, split="rows", bias=part.bias[0]) for some in parted)
    return *into, out


def latent_linears(part: LatentAttention) -> tuple[Linear, Linear, Linear]:
    """Return the projection to the latent and the shared key, the one from latents to the heads' keys and values
    (`kv_b_proj`), and the output projection."""
    latent = Rows(source="kv_a_proj_with_mqa", units=part.state_dim)
    expansion = Rows(source="kv_b_proj", units=part.heads, width=part.qk_nope_head_dim + part.v_head_dim)
    out = Rows(source="o_proj", units=part.hidden)
    return (
        Linear(rows=(latent,), inputs=part.hidden, split=None, bias=part.bias[0]),
        Linear(rows=(expansion,), inputs=part.kv_lora_rank, split="rows"),
        Linear(rows=(out,), inputs=part.heads * part.v_head_dim, split="inputs", bias=part.bias[1]),
    )


def indexer_linears(part: Indexer) -> tuple[Linear, Linear, Linear]:
    """Return the projections to queries, key and weights."""
    q = Rows(source="wq_b", units=part.heads, width=part.head_dim)
    key, weights = Rows(source="wk", units=part.head_dim), Rows(source="weights_proj", units=part.heads)
    return (
        Linear(rows=(q,), inputs=part.q_lora_rank, split=None),
        Linear(rows=(key,), inputs=part.hidden, split=None),
        Linear(rows=(weights,), inputs=part.hidden, split=None),
    )


def query_linears(part: LatentAttention) -> tuple[Linear, ...]:
    """Return the projection to the queries, or the two projections of low rank, with a norm between them."""
    if part.q_lora_rank is None:
        return (Linear(rows=(_latent_queries(part, "q_proj"),), inputs=part.hidden, split="rows"),)
    down = Rows(source="q_a_proj", units=part.q_lora_rank)
    return (
        Linear(rows=(down,), inputs=part.hidden, split=None, bias=part.bias[0]),
        Linear(rows=(_latent_queries(part, "q_b_proj"),), inputs=part.q_lora_rank, split="rows"),
    )


def _latent_queries(part: LatentAttention, source: str) -> Rows:
    return Rows(source=source, units=part.heads, width=part.query_dim)


def latent_norms(part: LatentAttention) -> tuple[RMSNorm, ...]:
    """Return the norms of the latent and of queries of low rank."""
    return (part.latent_norm,) if part.q_norm is None else (part.latent_norm, part.q_norm)


def _qkv_rows(part: Attention) -> tuple[Rows, ...]:
    names, heads = part.sources, (part.heads, part.kv_heads, part.kv_heads)
    if part.shared_kv:
        return (Rows(source=names[0], units=part.heads, width=part.head_dim),)
    widths = part.head_dim, part.head_dim, part.value_width
    rows = [
        Rows(source=name, units=units, width=width) for name, units, width in zip(names, heads, widths, strict=False)
    ]
    if not part.key_bias:
        rows[1] = replace(rows[1], has_bias=False)
    if names[1] == names[2] != names[0]:
        return tuple(rows)  # the values are the keys before their norm (Gemma 4)
    if part.groups == 1 and part.order == "qkv":
        return packed(*rows)
    sizes = [units * part.head_dim // part.groups for units in heads]  # rows of q, k and v in a group
    starts = (0, sizes[0], sizes[0] + sizes[1])
    if part.order == "qvk":
        starts = 0, sizes[0] + sizes[2], sizes[0]
    return tuple(
        replace(piece, at=start, groups=part.groups, stride=sum(sizes))
        for piece, start in zip(rows, starts, strict=True)
    )


def mlp_linears(part: MLP) -> tuple[Linear, Linear]:
    """Return the fused projection to gate and up (or up alone), and the down projection."""
    names = [name for name in (part.gate, part.up) if name is not None]
    if part.interleaved:
        step = len(names)
        rows = tuple(Rows(source=name, units=part.intermediate_size, at=at, step=step) for at, name in enumerate(names))
    else:
        rows = packed(
            *(Rows(source=name, units=part.intermediate_size) for name in names[:: -1 if part.up_first else 1])
        )
        rows = rows[:: -1 if part.up_first else 1]  # the gate is first in memory
    up = Linear(rows=rows, inputs=part.inputs or part.hidden, split="rows", bias=part.bias)
    down = Rows(source=part.down, units=part.hidden)
    bias = part.bias or part.down_bias
    return up, Linear(rows=(down,), inputs=part.intermediate_size, split="inputs", bias=bias)


def update_linears(part: Attention | MLP) -> tuple[Linear, ...]:
    """Return the matrices of a low-rank update: A of all projections together, and B of each. Empty without one."""
    if part.update is None:
        return ()
    into = attention_linears(part)[-2] if isinstance(part, Attention) else mlp_linears(part)[0]
    pieces = [(piece,) for piece in into.rows] if isinstance(part, Attention) else [into.rows]
    rank = part.update.rank
    down = tuple(Rows(source=f"{name}.0", units=rank) for name in part.update.names)
    ups = (
        packed(*(Rows(source=f"{name}.1", units=piece.units, width=piece.width) for piece in own))
        for name, own in zip(part.update.names, pieces, strict=True)
    )
    return (
        Linear(rows=down, inputs=part.hidden, split=None),
        *(Linear(rows=rows, inputs=rank, split="rows") for rows in ups),
    )


def projection_linear(part: Projection) -> Linear:
    return Linear(rows=(Rows(source=part.name, units=part.hidden),), inputs=part.hidden, split=None)


def layer_input_linears(part: LayerInput) -> tuple[Linear, Linear]:
    """Return the projection to the gate, and the one of the gated input."""
    gate, up = Rows(source=part.gate, units=part.width), Rows(source=part.up, units=part.hidden)
    return (
        Linear(rows=(gate,), inputs=part.hidden, split=None),
        Linear(rows=(up,), inputs=part.width, split=None),
    )


def layer_inputs_linear(part: LayerInputs, hidden: int) -> Linear:
    rows = Rows(source=part.projection, units=part.layers, width=part.width)
    return Linear(rows=(rows,), inputs=hidden, split=None)


def local_linears(part: LocalAttention) -> tuple[Linear, Linear]:
    """Return the fused projection to q, k and v, and the output projection."""
    *into, out = part.sources
    rows = tuple(Rows(source=name, units=part.hidden) for name in into)
    return (
        Linear(rows=rows, inputs=part.hidden, split=None),
        Linear(rows=(Rows(source=out, units=part.hidden),), inputs=part.hidden, split=None),
    )


def convolution_linears(part: Convolution) -> tuple[Linear, ...]:
    """Return the projection to gate and u, that between convolution and activation if there is one, and the last."""
    up, gate = packed(*(Rows(source=part.into, units=part.hidden) for _ in range(2)))
    found = [Linear(rows=(gate, up), inputs=part.hidden, split=None, bias=part.bias)]  # the gate is first in memory
    channels = part.hidden * part.multiplier
    for name in filter(None, (part.inner, part.out)):
        found.append(Linear(rows=(Rows(source=name, units=part.hidden),), inputs=channels, split=None, bias=part.bias))
        channels = part.hidden
    return tuple(found)


def low_rank_linears(part: LowRank) -> tuple[Linear, Linear]:
    down, up = Rows(source=part.down, units=part.rank), Rows(source=part.up, units=part.hidden)
    return (
        Linear(rows=(down,), inputs=part.hidden, split=None),
        Linear(rows=(up,), inputs=part.rank, split=None),
    )


def stream_linears(part: Streams, hidden: int) -> tuple[Linear, ...]:
    """Return the fused projection from the embedding to all other streams, and the projection of each of these to the
    output."""
    into = tuple(Rows(source=f"{part.into}.{number}", units=hidden) for number in range(part.count - 1))
    out = (Rows(source=f"{part.out}.{number}", units=hidden) for number in range(part.count - 1))
    return tuple(Linear(rows=rows, inputs=hidden, split=None) for rows in (into, *((one,) for one in out)))


def coefficient_linears(part: Streams, hidden: int) -> tuple[Linear, Linear, Linear]:
    """Return the projections of a layer to the inputs of the coefficients, and from them to those of predictions and of
    corrections. They are never quantized."""
    sizes = (part.router, part.count, hidden), (part.prediction, part.count**2, part.count)
    router, prediction, correction = (
        Linear(rows=(Rows(source=name, units=units),), inputs=inputs, split=None)
        for name, units, inputs in (*sizes, (part.correction, part.count, part.count))
    )
    return router, prediction, correction


def width_linears(embed: Embedding) -> tuple[Linear, ...]:
    """Return the projections from rows of tokens to hidden states, and back; none if they have the same size."""
    if embed.width is None:
        return ()
    into, out = Rows(source=embed.into, units=embed.hidden), Rows(source=embed.out, units=embed.width)
    return (
        Linear(rows=(into,), inputs=embed.width, split=None),
        Linear(rows=(out,), inputs=embed.hidden, split=None),
    )


def router_linear(part: Experts) -> Linear:
    """Return the projection to the logits of all experts and, if the shared expert has a gate, its logit. Every rank
    has all of them."""
    rows = [Rows(source=part.router, units=part.routed)]
    if part.shared_gate is not None:
        rows.append(Rows(source=part.shared_gate, units=1))
    return Linear(rows=tuple(rows), inputs=part.hidden, split=None, bias=part.router_bias)


def routed_mlps(part: Experts) -> tuple[MLP, ...]:
    """Return the routed experts, each named relative to the part's path."""
    return tuple(
        MLP(
            hidden=part.hidden,
            intermediate_size=part.intermediate_size,
            act=part.act,
            bias=part.bias,
            gate=part.gate,
            up=part.up,
            down=part.down,
            interleaved=part.interleaved,
            name=f"{part.experts}.{number}",
        )
        for number in range(part.num_experts)
    )


def convolution_parameters(part: Convolution) -> dict[str, Parameter]:
    """Return the filters of a convolution, and its biases if it has some."""
    sizes = (part.hidden * part.multiplier, 1)
    taps = replace(rows_of_tensor(f"{part.filters}.weight", sizes, inner=(1, part.kernel)), taps=True, divided=False)
    if not part.bias:
        return {"conv": taps}
    return {"conv": taps, "conv_bias": replace(rows_of_tensor(f"{part.filters}.bias", sizes), divided=False)}


def qk_norms(part: Attention) -> tuple[tuple[Norm, tuple[int, ...]], ...]:
    """Return the norms of q and k with their names and the shapes of their weights."""
    if part.qk_norm is None:
        return ()
    found = []
    sizes = (part.heads,) if part.shared_kv else (part.heads, part.kv_heads)
    for name, heads in zip(part.qk_norm_names, sizes, strict=False):
        shapes = {"head": (part.head_dim,), "own": (heads, part.head_dim), "all": (heads * part.head_dim,)}
        found.append((replace(part.qk_norm, name=name), shapes[part.qk_norm_span]))
    return tuple(found)


def qk_norm_paths(part: Attention, norm: Norm) -> tuple[str, ...]:
    """Return the paths of the weights of one norm of `qk_norms`, relative to the attention."""
    if not part.qk_norm_listed:
        return (norm.name,)
    heads = part.heads if norm.name == part.qk_norm_names[0] else part.kv_heads
    return tuple(f"{norm.name}.{head}" for head in range(heads))


def linear_sources(part: Linear, path: str) -> Shapes:
    """Return the weights and biases of all sources of a projection. A source may have more rows than the projection
    uses, for example an output gate."""
    height: Counter[str] = Counter()
    for piece in part.rows:
        run = piece.stored // piece.groups * piece.width  # consecutive rows, or every `step`-th one
        end = piece.at + piece.stride * (piece.groups - 1) + (run - 1) * piece.step + 1
        height[piece.source] = max(height[piece.source], end)
    found: Shapes = {f"{join(path, name)}.weight": (rows, part.inputs) for name, rows in height.items()}
    if part.bias:
        without = {piece.source for piece in part.rows if not piece.has_bias}
        found |= {f"{join(path, name)}.bias": (rows,) for name, rows in height.items() if name not in without}
    return found


def norm_sources(norm: Norm, path: str, shape: tuple[int, ...]) -> Shapes:
    name = join(path, norm.name)
    match norm:
        case RMSNorm(weight=weight):
            return {join(name, norm.last): shape} if weight else {}
        case LayerNorm(weight=weight, bias=bias):
            present = [suffix for suffix, has in (("weight", weight), ("bias", bias)) if has]
            return {f"{name}.{suffix}": shape for suffix in present}


def clipped(source: str) -> str:
    """Return the module that has the limits of a clipped projection, which is within it."""
    return source.removesuffix(".linear")


def sources(model: Model) -> Shapes:
    """Return every tensor that a checkpoint of this model must have: name and shape."""
    if model.foreign is not None:
        return {}  # transformers knows them
    if model.encoder_only:
        return {}  # towers have their own
    found = _embedding_sources(model.embed, model.root)
    if model.encoder is not None:
        embed = model.encoder.embed
        if isinstance(embed, AudioEmbedding):
            found |= audio_sources(embed, model.root)
        else:
            found |= _embedding_sources(embed, model.root)
        if model.encoder.norm is not None:
            found |= norm_sources(model.encoder.norm, model.root, (model.encoder.norm.size,))
    for path, block in placed_blocks(model):
        for branch in block:
            found |= branch_sources(branch, branch_path(branch, path, model.root))
            found |= bias_sources(branch, model.root)
    if model.prediction_input is not None:
        found |= _prediction_sources(model.prediction_input, model)
    if model.norm is not None:
        found |= norm_sources(model.norm, model.root, (model.norm.size,))
    if model.layer_inputs is not None:
        found |= _layer_inputs_sources(model.layer_inputs, model)
    if model.streams is not None:
        found |= _stream_sources(model.streams, model)
    if model.head is not None and not model.head.tied:
        found[f"{model.head.name}.weight"] = (model.head.rows or model.embed.vocab, model.embed.row_width)
    if model.head is not None and model.head.ids:
        found[model.head.ids] = (model.head.rows,)
    if model.head is not None and model.head.bias:
        found[f"{model.head.name}.bias"] = (model.embed.vocab,)
    if model.head is not None and model.head.added:
        found[model.head.added] = (1, model.embed.vocab)
    return found | _pooler_sources(model)


def shared_tensors(model: Model) -> frozenset[str]:
    """Return the tensors of a head for drafts that belong to the model that it drafts for."""
    head, found = model.head, set[str]()
    if model.shares_embedding:
        found.add(f"{join(model.root, model.embed.name)}.weight")
    if model.shares_head and head is not None:
        found |= {f"{head.name}.weight", f"{head.name}.bias"} | ({head.added} if head.added else set())
    return frozenset(found)


def prediction_path(model: Model) -> str:
    """Return the prefix of the tensors of a prediction head."""
    return join(model.root, model.layers, "0")


def prediction_linear(part: PredictionInput | FusedStates, hidden: int) -> Linear:
    inputs = 2 * hidden if isinstance(part, PredictionInput) else part.layers * part.hidden
    return Linear(rows=(Rows(source=part.projection, units=hidden),), inputs=inputs, split=None, bias=part.bias)


def _prediction_sources(part: PredictionInput | FusedStates, model: Model) -> Shapes:
    path = prediction_path(model)
    found = linear_sources(prediction_linear(part, model.embed.hidden), path)
    for norm in (part.token_norm, part.state_norm):
        if norm is not None:
            found |= norm_sources(norm, path, (model.embed.hidden,))
    return found


def _layer_inputs_sources(part: LayerInputs, model: Model) -> Shapes:
    found: Shapes = {f"{join(model.root, part.table)}.weight": (part.vocab, part.layers * part.width)}
    found |= linear_sources(layer_inputs_linear(part, model.embed.hidden), model.root)
    return found | norm_sources(part.norm, model.root, (part.norm.size,))


def _stream_sources(part: Streams, model: Model) -> Shapes:
    found: Shapes = {}
    for path, linear in _stream_projections(part, model):
        found |= linear_sources(linear, path)
    for path, _ in placed_blocks(model):
        found |= norm_sources(part.norm, path, (part.norm.size,))
        if part.scaled:
            found[join(path, part.scale)] = (model.embed.hidden,)
    return found


def _stream_projections(part: Streams, model: Model) -> Iterator[tuple[str, Linear]]:
    hidden = model.embed.hidden
    yield from ((model.root, linear) for linear in stream_linears(part, hidden))
    for path, _ in placed_blocks(model):
        yield from ((path, linear) for linear in coefficient_linears(part, hidden))


def placed_blocks(model: Model) -> Iterator[tuple[str, Block]]:
    """Yield every block with the path of its layer, beginning with the encoder."""
    if model.encoder is not None:
        for index, block in enumerate(model.encoder.blocks):
            yield join(model.root, model.encoder.layers, str(index)), block
    for index, block in enumerate(model.blocks):
        yield join(model.root, model.layers, str(index)), block


def branch_path(branch: ResidualBlock, path: str, root: str) -> str:
    """Return the path of the tensors of a residual block of the layer at `path`."""
    return join(root, branch.path) if branch.path else path


def _embedding_sources(embed: Embedding, root: str) -> Shapes:
    found: Shapes = {f"{join(root, embed.name)}.weight": (embed.vocab, embed.row_width)}
    for linear in width_linears(embed):
        found |= linear_sources(linear, root)
    for table in (embed.positions, embed.segments):
        if table is not None and table.period is None:
            found[f"{join(root, table.name)}.weight"] = (table.count, embed.hidden)
    if embed.norm is not None:
        found |= norm_sources(embed.norm, root, (embed.norm.size,))
    return found


def audio_sources(embed: AudioEmbedding, root: str) -> Shapes:
    path, found = join(root, embed.name), Shapes()
    for name, inputs in zip(embed.convolutions, (embed.mels, embed.hidden), strict=True):
        found[join(path, name, "weight")] = (embed.hidden, inputs, 3)
        found[join(path, name, "bias")] = (embed.hidden,)
    return found if embed.chunk else found | {join(path, embed.table, "weight"): (embed.positions, embed.hidden)}


def _pooler_sources(model: Model) -> Shapes:
    found: Shapes = {}
    for stage in () if model.pooler is None else model.pooler.stages:
        match stage:
            case Dense(linear=linear, path=path):
                found |= linear_sources(linear, path)
            case PooledNorm(norm=norm, path=path):
                found |= norm_sources(norm, path, (norm.size,))
            case TokenLogits(source=source, vocab=vocab, hidden=hidden):
                found[f"{source}.weight"] = (vocab, hidden)
    return found


def linear_paths(model: Model) -> tuple[str, ...]:
    """Return the checkpoint paths of the projections: each source of a fused one, and the head if it is not tied."""
    found: dict[str, None] = {}
    for inside, linear in projections(model):
        found |= dict.fromkeys(join(inside, piece.source) for piece in linear.rows)
    return (*found, *([] if model.head is None or model.head.tied else [model.head.name]))


def unquantized(model: Model) -> frozenset[str]:
    """Return the weights that are never quantized: routers of experts, projections to an indexer's weights,
    `exact_linears` of recurrent parts, and projections to coefficients of streams."""
    found: set[str] = set()
    for path, body in _placed_bodies(model):
        inside = join(path, body.name)
        match body:
            case Experts():
                found.update(linear_sources(router_linear(body), inside))
            case LatentAttention(indexer=Indexer() as indexer):
                found.update(linear_sources(indexer_linears(indexer)[2], join(inside, indexer.name)))
            case Recurrent():
                for linear in body.exact_linears():
                    found.update(linear_sources(linear, inside))
    if model.streams is not None:
        for path, _ in placed_blocks(model):
            for linear in coefficient_linears(model.streams, model.embed.hidden):
                found.update(linear_sources(linear, path))
    return frozenset(found)


def has_stacks(model: Model) -> bool:
    """Return whether the checkpoint has projections of all experts of a layer in one tensor."""
    return any(isinstance(body, Experts) and body.stacked is not None for _, body in _placed_bodies(model))


@dataclass(frozen=True)
class ExpertStack:
    """A tensor of the checkpoint that has a projection of all experts of a layer, or its bias."""

    name: str
    experts: tuple[str, ...]  # names of the tensors of each expert
    transposed: bool  # each is a matrix stored as [inputs, outputs]


def expert_stacks(model: Model, names: Iterable[str]) -> Iterator[ExpertStack]:
    """Yield the stacked tensors of a checkpoint. names: of the tensors that each expert would have."""
    last_names: dict[str, list[str]] = defaultdict(list)
    for path, _, last in (name.rpartition(".") for name in names):
        last_names[path].append(last)
    for path, body in _placed_bodies(model):
        if not isinstance(body, Experts) or body.stacked is None:
            continue
        inside, mlps = join(path, body.name), routed_mlps(body)
        for source in dict.fromkeys(name for name in (body.gate, body.up, body.down) if name is not None):
            paths = [join(inside, mlp.name, source) for mlp in mlps]
            for last in last_names[paths[0]]:
                name, turned = body.stacked.name(source, last), body.stacked.transposed and last == "weight"
                yield ExpertStack(join(inside, name), tuple(join(one, last) for one in paths), turned)


def expert_parameters(model: Model) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """Return the parameters in which transformers has a projection of all experts of a layer, each with its projections
    of every expert: (path, first output, number of outputs)."""
    found = {}
    for path, body in _placed_bodies(model):
        if not isinstance(body, Experts):
            continue
        inside, mlps, inner = join(path, body.name), routed_mlps(body), body.intermediate_size
        whole = {"down_proj": [(body.down, 0, body.hidden)], "up_proj": [(body.up, 0, inner)]}
        if body.gate is not None:
            fused = body.gate == body.up
            halves = [(body.up, 0, 2 * inner)] if fused else [(body.gate, 0, inner), (body.up, inner, inner)]
            whole = {"down_proj": whole["down_proj"], "gate_up_proj": halves}
        for parameter, pieces in whole.items():
            each = tuple((join(inside, mlp.name, name), first, size) for mlp in mlps for name, first, size in pieces)
            for name in dict.fromkeys((body.name, *EXPERT_MODULES)):
                found[join(path, name, "experts", parameter)] = each
    return found


def stacked_paths(model: Model) -> frozenset[str]:
    """Return the projections of routed experts, which Triton kernels take stacked."""
    return frozenset(
        join(path, body.name, mlp.name, piece.source)
        for path, body in _placed_bodies(model)
        if isinstance(body, Experts)
        for mlp in routed_mlps(body)
        for linear in mlp_linears(mlp)
        for piece in linear.rows
    )


def expansions(model: Model) -> frozenset[str]:
    """Return the projections from latents to keys and values, whose heads are separate matrices in all executors, in
    the type of the activations."""
    return frozenset(
        join(path, body.name, piece.source)
        for path, body in _placed_bodies(model)
        if isinstance(body, LatentAttention)
        for piece in latent_linears(body)[1].rows
    )


def fused_paths(model: Model) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the sources of each fused matrix; a tied head's source is the embedding."""
    found: dict[tuple[str, ...], None] = {}
    for inside, linear in projections(model):
        found[tuple(dict.fromkeys(join(inside, piece.source) for piece in linear.rows))] = None
    if model.head is None:
        return tuple(found)
    head = join(model.root, model.embed.name) if model.head.tied else model.head.name
    return (*found, (head,))


def projections(model: Model) -> Iterator[tuple[str, Linear]]:
    """Yield every projection except the head, with the path of its sources."""
    yield from ((model.root, linear) for linear in width_linears(model.embed))
    if model.prediction_input is not None:
        yield prediction_path(model), prediction_linear(model.prediction_input, model.embed.hidden)
    if model.layer_inputs is not None:
        yield model.root, layer_inputs_linear(model.layer_inputs, model.embed.hidden)
    if model.streams is not None:
        yield from _stream_projections(model.streams, model)
    for path, body in _placed_bodies(model):
        yield from _linears(body, path)


def _placed_bodies(model: Model) -> Iterator[tuple[str, Body]]:
    """Yield every body with the path of its layer."""
    for path, block in placed_blocks(model):
        for branch in block:
            for body in bodies(branch):
                yield branch_path(branch, path, model.root), body


def _linears(body: Body, path: str) -> Iterator[tuple[str, Linear]]:
    """Yield the projections of a body of the layer at `path`, each with the path of its sources."""
    inside = join(path, body.name)
    match body:
        case Attention():
            yield from ((inside, linear) for linear in (*attention_linears(body), *update_linears(body)))
        case LatentAttention():
            yield from ((inside, linear) for linear in (*query_linears(body), *latent_linears(body)))
            if body.indexer is not None:
                yield from ((join(inside, body.indexer.name), linear) for linear in indexer_linears(body.indexer))
        case MLP():
            yield from ((inside, linear) for linear in (*mlp_linears(body), *update_linears(body)))
        case Projection():
            yield path, projection_linear(body)
        case LayerInput():
            yield from ((inside, linear) for linear in layer_input_linears(body))
        case LowRank():
            yield from ((inside, linear) for linear in low_rank_linears(body))
        case Recurrent():
            yield from ((inside, linear) for linear in body.linears())
        case LocalAttention():
            yield from ((inside, linear) for linear in local_linears(body))
        case Convolution():
            yield from ((inside, linear) for linear in convolution_linears(body))
        case Experts():
            yield inside, router_linear(body)
            for mlp in (*routed_mlps(body), *([] if body.shared is None else [body.shared])):
                yield from _linears(mlp, inside)


def branch_sources(branch: ResidualBlock, path: str) -> Shapes:
    """Return the tensors of a residual block of the layer at `path`."""
    found: Shapes = {}
    for norm in block_norms(branch):
        found |= norm_sources(norm, path, (norm.size,))
    if branch.multiplier:
        found[join(path, branch.multiplier)] = (1,)
    for body in bodies(branch):
        if isinstance(body, Attention):
            for norm, shape in qk_norms(body):
                own = shape[1:] if body.qk_norm_listed else shape
                for name in qk_norm_paths(body, norm):
                    found |= norm_sources(replace(norm, name=name), join(path, body.name), own)
            if body.sinks:
                found[join(path, body.name, body.sinks_name)] = (body.heads,)
        if isinstance(body, LatentAttention):
            for rms in latent_norms(body):
                found |= norm_sources(rms, join(path, body.name), (rms.size,))
            if body.indexer is not None:
                norm = body.indexer.norm
                found |= norm_sources(norm, join(path, body.name, body.indexer.name), (norm.size,))
        if isinstance(body, LowRank):
            found |= norm_sources(body.norm, join(path, body.name), (body.norm.size,))
        if isinstance(body, LocalAttention):
            found[join(path, body.name, body.scales)] = (body.head_dim,)
            found[join(path, body.name, body.distances, "weight")] = (body.hidden, body.hidden)
        if isinstance(body, Convolution) and body.norm is not None:
            found |= norm_sources(body.norm, join(path, body.name), (body.norm.size,))
        if isinstance(body, Attention | MLP | LocalAttention | Convolution) and body.clipped:
            of = (row.source for _, linear in _linears(body, path) for row in linear.rows)
            found |= {join(path, body.name, clipped(source), limit): (1,) for source in of for limit in LIMITS}
        if isinstance(body, MLP) and body.act == XIELU:
            found |= {join(path, body.name, ACT_FN, name): shape for name, shape in XIELU_NUMBERS.items()}
        if isinstance(body, Experts) and body.correction:
            shape = (1, body.routed) if body.correction_is_row else (body.routed,)
            found[join(path, body.name, body.correction)] = shape
        if isinstance(body, Experts) and body.expert_scales:
            found[join(path, body.name, body.expert_scales)] = (body.num_experts,)
        if isinstance(body, Recurrent):
            found |= _recurrent_sources(body, join(path, body.name))
        if isinstance(body, Convolution):
            found |= _parameter_sources(convolution_parameters(body), join(path, body.name))
        for inside, linear in _linears(body, path):
            for name, shape in linear_sources(linear, inside).items():
                found[name] = max(shape, found.get(name, shape))
    return found


def _recurrent_sources(part: Recurrent, path: str) -> Shapes:
    """Return the tensors of a recurrent part, without those of its projections."""
    found = {join(path, name): shape for name, shape in part.block_matrices().items()}
    for norm in part.norms:
        found |= norm_sources(norm, path, (norm.size,))
    return found | _parameter_sources(part.parameters(), path)


def _parameter_sources(parameters: Mapping[str, Parameter], path: str) -> Shapes:
    found: Shapes = {}
    for one in (one for one in parameters.values() if one.values is None):
        height: Counter[str] = Counter()
        for piece in one.rows:
            height[piece.source] += piece.stored * piece.width
        for name, rows in height.items():
            found[join(path, name)] = one.stored or (rows, *one.inner)
    return found


def bias_sources(branch: ResidualBlock, root: str) -> Shapes:
    """Return the tables of relative biases."""
    relative = [(body.relative, body.heads) for body in bodies(branch) if isinstance(body, Attention)]
    return {f"{join(root, one.source)}.weight": (one.buckets, heads) for one, heads in relative if one is not None}


def harmless(model: Model, name: str) -> bool:
    """Return whether a tensor that is not declared may be ignored: rotary frequencies stored by old exporters, a copy
    of a tied head, tensors of zero-computation experts, and tensors that the model leaves unread, in the text model or
    beside it."""
    if name.endswith((".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")):
        return True
    if name.startswith((*model.unread, *(join(model.root, one) for one in model.unread))):
        return True
    if model.media is not None:
        towers = (one.tower for one in model.media.towers)
        if name.startswith(tuple(join(tower.root, one) for tower in towers for one in tower.unread)):
            return True
    if _of_zero_expert(model, name):
        return True
    return model.head is not None and model.head.tied and name == f"{model.head.name}.weight"


def _of_zero_expert(model: Model, name: str) -> bool:
    """Return whether a tensor belongs to a zero-computation expert, which needs none; transformers saves some."""
    for body in (body for block in model.blocks[:1] for branch in block for body in bodies(branch)):
        if isinstance(body, Experts) and body.zero_experts:
            found = re.search(rf"\.{re.escape(body.experts)}\.(\d+)\.", name)
            return found is not None and body.num_experts <= int(found[1]) < body.routed
    return False


def elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the total number of elements."""
    total = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
