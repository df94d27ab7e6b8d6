"""Lowering of projector steps in which learned queries attend to the rows of a frame, or rows of a square to one
another. One program reads the rows of frames and returns the keys and values of all layers, side by side; the other
computes the queries."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from engine.lowering.lower import PartLowering
from engine.lowering.operations import (
    Add,
    Attend,
    AttendContext,
    Columns,
    Input,
    Keep,
    Linear,
    Matrix,
    Normalize,
    NormVector,
    Value,
)
from engine.lowering.program import Op, Program
from engine.models import parts
from engine.models.parts import (
    MLP,
    Attention,
    AttentionPool,
    LayerNorm,
    Perceiver,
    QFormer,
    Querying,
    Resampler,
    ResidualBlock,
    RMSNorm,
    Rows,
    WindowMerge,
)
from engine.models.sources import join


@dataclass(frozen=True)
class QueryProgram:
    part: Querying
    context: Program  # rows of frames in, keys and values out; of a merge: rows of squares in and out
    program: Program  # queries in, outputs out; of a merge: the rows of each square side by side in


def query_program(part: Querying, path: str, ranks: int) -> QueryProgram:
    """path: of the part's tensors."""
    match part:
        case AttentionPool():
            return _attention_pool(part, path, ranks)
        case Resampler():
            return _resampler(part, path, ranks)
        case QFormer():
            return _qformer(part, path, ranks)
        case Perceiver():
            return _perceiver(part, path, ranks)
        case WindowMerge():
            return _window_merge(part, path, ranks)


def _attention_pool(part: AttentionPool, path: str, ranks: int) -> QueryProgram:
    size = part.hidden
    lowering, x, y = _Querying(size, ranks), Value(name="x", width=size), Value(name="pooled", width=size)
    rows, kv = Value(name="rows", width=size), Value(name="kv", width=2 * size)
    q, attended = Value(name="q", width=size), Value(name="attended", width=size)
    into = "attention.in_proj"
    context = Program((Input(y=rows), lowering.linear(rows, kv, path, [(f"{into}_kv", 2 * size, size)], bias=True)), kv)
    ops = (
        Input(y=x),
        lowering.linear(x, q, path, [(f"{into}_q", size, 0)], bias=True),
        AttendContext(q=q, y=attended, part=_plain(size, part.heads), first=0),
        lowering.linear(attended, y, path, [("attention.out_proj", size, 0)], bias=True),
        lowering.norm(part.norm, path, y, lowering.normed),
        *lowering.mlp(part.mlp, join(path, part.mlp.name), lowering.normed, lowering.out, "mlp"),
        Add(x=y, y=lowering.out),
    )
    return QueryProgram(part, context, Program(ops, y))


def _resampler(part: Resampler, path: str, ranks: int) -> QueryProgram:
    size, inside = part.hidden, join(path, "cross_attn")
    lowering, norm = _Querying(size, ranks), LayerNorm(size=size, eps=part.eps)
    x, rows, kv = (Value(name=name, width=width) for name, width in (("x", size), ("rows", size), ("kv", 2 * size)))
    projected, out = Value(name="projected", width=2 * size), Value(name="resampled", width=size)
    ops: list[Op] = [
        Input(y=rows),
        lowering.norm(parts.named(norm, "layer_norm_kv"), inside, rows, lowering.normed),
        lowering.linear(lowering.normed, projected, inside, [("k_proj", size, 0), ("v_proj", size, 0)]),
    ]
    into = "multihead_attn.in_proj"
    for number, name in enumerate("kv"):
        at, one = number * size, Value(name=name, width=size)
        columns = Columns(value=projected, first=at, width=size)
        ops.append(lowering.linear(columns, one, inside, [(f"{into}_{name}", size, at + size)], bias=True))
        ops.append(Keep(x=one, y=Columns(value=kv, first=at, width=size)))
    q, second, attended = (Value(name=name, width=size) for name in ("q", "projected_q", "attended"))
    program = (
        Input(y=x),
        lowering.norm(parts.named(norm, "layer_norm"), inside, x, lowering.normed),
        lowering.linear(lowering.normed, second, inside, [("q_proj", size, 0)]),
        lowering.linear(second, q, inside, [(f"{into}_q", size, 0)], bias=True),
        AttendContext(q=q, y=attended, part=_plain(size, part.heads), first=0),
        lowering.linear(attended, lowering.out, inside, [("multihead_attn.out_proj", size, 0)], bias=True),
        lowering.linear(lowering.out, out, inside, [("linear", size, 0)], bias=True),
    )
    return QueryProgram(part, Program(tuple(ops), kv), Program(program, out))


def _qformer(part: QFormer, path: str, ranks: int) -> QueryProgram:
    size, root = part.hidden, join(path, "qformer")
    lowering, norm = _Querying(size, ranks), LayerNorm(size=size, eps=part.eps)
    crossing = range(0, part.layers, part.every)
    sources = [
        (f"encoder.layer.{index}.crossattention.attention.{name}", size, 0)
        for index in crossing
        for name in ("key", "value")
    ]
    rows, kv = Value(name="rows", width=part.inputs), Value(name="kv", width=len(sources) * size)
    context = Program((Input(y=rows), lowering.linear(rows, kv, root, sources, bias=True)), kv)
    feed = MLP(
        hidden=size,
        intermediate_size=part.intermediate_size,
        act=part.act,
        bias=True,
        gate=None,
        up="intermediate_query.dense",
        down="output_query.dense",
        name="",
    )
    ops: list[Op] = [Input(y=lowering.x), lowering.norm(parts.named(norm, "layernorm"), root, lowering.x, lowering.x)]
    firsts = count(0, 2 * size)
    for index in range(part.layers):
        layer = join(root, f"encoder.layer.{index}")
        for kind in ("attention", *(("crossattention",) if index in crossing else ())):
            attention = Attention(
                hidden=size,
                heads=part.heads,
                kv_heads=part.heads,
                head_dim=size // part.heads,
                rope=None,
                bias=(True, True),
                causal=False,
                source=kind != "attention",
                sources=(*(f"attention.{name}" for name in ("query", "key", "value")), "output.dense"),  # type: ignore[arg-type]
                name=kind,
            )
            block = ResidualBlock(body=attention, last=parts.named(norm, f"{kind}.output.LayerNorm"))
            ops += lowering.reading(lowering.residual_block(block, layer), firsts if attention.source else None)
        ops += lowering.residual_block(
            ResidualBlock(body=feed, last=parts.named(norm, "output_query.LayerNorm")), layer
        )
    return QueryProgram(part, context, Program(tuple(ops), lowering.x))


def _perceiver(part: Perceiver, path: str, ranks: int) -> QueryProgram:
    size, root, norm = part.hidden, join(path, "perceiver_resampler"), RMSNorm(size=part.hidden, eps=part.eps)
    lowering, width = _Querying(size, ranks), 2 * part.kv_heads * part.head_dim
    rows, one = Value(name="rows", width=size), Value(name="kv", width=width)
    every = Value(name="every_kv", width=part.layers * width)
    context: list[Op] = [Input(y=rows)]
    ops: list[Op] = [Input(y=lowering.x)]
    attention = Attention(
        hidden=size,
        heads=part.heads,
        kv_heads=part.kv_heads,
        head_dim=part.head_dim,
        rope=None,
        causal=False,
    )
    feed = MLP(hidden=size, intermediate_size=4 * size, act=part.act)
    firsts = count(0, width)
    for index in range(part.layers):
        layer = join(root, f"layers.{index}")
        sources = [(f"self_attn.{name}_proj", width // 2, 0) for name in "kv"]
        context += [
            lowering.norm(parts.named(norm, "input_context_norm"), layer, rows, lowering.normed),
            lowering.linear(lowering.normed, one, layer, sources),
            Keep(x=one, y=Columns(value=every, first=index * width, width=width)),
        ]
        for name, body in (("input_latents_norm", attention), ("post_attention_layernorm", feed)):
            block = ResidualBlock(before=parts.named(norm, name), body=body)
            ops += lowering.reading(lowering.residual_block(block, layer), firsts)
    ops.append(lowering.norm(parts.named(norm, "norm"), root, lowering.x, lowering.x))
    return QueryProgram(part, Program(tuple(context), every), Program(tuple(ops), lowering.x))


def _window_merge(part: WindowMerge, path: str, ranks: int) -> QueryProgram:
    size, root, wide = part.hidden, join(path, part.name), part.hidden * part.rows
    lowering, norm = _Querying(size, ranks), LayerNorm(size=size, eps=part.eps)
    attention = Attention(
        hidden=size,
        heads=part.heads,
        kv_heads=part.heads,
        head_dim=size // part.heads,
        rope=None,
        bias=(True, True),
        causal=False,
        sources=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    block = ResidualBlock(before=parts.named(norm, "layer_norm1"), body=attention)
    context = Program((Input(y=lowering.x), *lowering.residual_block(block, root)), lowering.x)
    x, normed = Value(name="square", width=wide), Value(name="normed_square", width=wide)
    feed = MLP(
        hidden=size,
        inputs=wide,
        intermediate_size=part.intermediate_size,
        act="gelu_tanh",
        bias=True,
        gate=None,
        up="linear_1",
        down="linear_2",
        name="",
    )
    program = (
        Input(y=x),
        Normalize(
            x=x, y=normed, weight=NormVector(norm=LayerNorm(size=wide, eps=part.eps, name="pre_norm"), path=root)
        ),
        *lowering.mlp(feed, root, normed, lowering.out, "mlp"),
    )
    return QueryProgram(part, context, Program(program, lowering.out))


def _plain(size: int, heads: int) -> Attention:
    return Attention(hidden=size, heads=heads, kv_heads=heads, head_dim=size // heads, rope=None, causal=False)


class _Querying(PartLowering):
    def linear(
        self, x: Value | Columns, y: Value, path: str, sources: list[tuple[str, int, int]], *, bias: bool = False
    ) -> Linear:
        """Return a projection whose rows are of several tensors. sources: name, number of rows, and first row."""
        rows = tuple(Rows(source=name, units=units, at=at) for name, units, at in sources)
        linear = parts.Linear(rows=rows, inputs=x.width, split=None, bias=bias)
        return Linear(x=x, y=y, weight=Matrix(linear=linear, path=path, part="attention"))

    def reading(self, ops: Iterator[Op], firsts: Iterator[int] | None) -> Iterator[Op]:
        """Let attention read the keys and values of a frame. Cross-attention reads no others. firsts: first column of
        each layer's keys, or None if the operations do not read a frame."""
        for op in ops:
            if firsts is not None and isinstance(op, Attend):
                op = AttendContext(q=op.qkv, y=op.y, part=op.part, first=next(firsts))
            yield op
