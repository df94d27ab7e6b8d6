"""The layers of a loaded model as one list of operations for the compiled kernels: a step is a single call.

These are the declared parts that `block.py` runs with torch; their semantics are documented there. Every operation
reads
and writes rows of a few buffers that all layers share.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.kv.layout import whole_blocks
from engine.layers.batch import Batch
from engine.layers.block import AttentionLayer, ResidualBlockLayer
from engine.layers.linear import LinearLayer
from engine.layers.mlp import ExpertsLayer, MLPLayer
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.layers.rope import Rotation
from engine.layers.vocabulary import Vocabulary
from engine.models.parts import LayerNorm, Norm, Rope
from kernels.activation import gated
from kernels.cpu import program as cpu
from kernels.cpu.packing import Packed
from kernels.cpu.program import Program, StepData, Team
from kernels.cpu.shm_collective import ShmCollective

MIN_TOKENS = 64
WHOLE_BLOCK = 16  # tokens per block: a multiple of the vector width of every variant


class Buffers:
    """Buffers of a step: float32 [tokens, largest width] by name, reallocated when a step has more tokens."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}

    def make(self, tokens: int) -> None:
        self.tensors = {name: torch.empty(tokens, width) for name, width in self.widths.items()}

    def get(self, name: str, width: int) -> Tensor:
        """Return a buffer's first columns. Before `make`, only the width is recorded."""
        self.widths[name] = max(width, self.widths.get(name, 0))
        return self.tensors[name] if name in self.tensors else torch.empty(0, width)

    def dense(self, name: str, width: int) -> Tensor:
        """Return the buffer as contiguous rows."""
        room = self.get(name, width)
        return room.flatten()[: len(room) * width].view(-1 if len(room) else 0, width)


@dataclass(frozen=True)
class TorchOp:
    """An operation without a compiled kernel (see engine/models/native.py). torch computes it between two programs, on
    the first `tokens` rows of the buffers."""

    compute: Callable[[int], None]


class CompiledModel:
    def __init__(
        self,
        vocabulary: Vocabulary,
        residual_blocks: Sequence[ResidualBlockLayer],
        norm: NormLayer | None,
        ropes: tuple[Rope, ...],
        team: Team,
        collective: ShmCollective | None = None,
    ) -> None:
        """collective: shared memory of the ranks, if there are several."""
        self.collective = collective
        self.vocabulary, self.residual_blocks, self.norm = vocabulary, residual_blocks, norm
        self.ropes, self.team = ropes, team
        self.rotations = [Rotation(rope, torch.device("cpu")) for rope in ropes]
        self.buffers = Buffers()
        self.hidden = vocabulary.part.hidden
        # torch adds the rows of positions and segments, which are small tables.
        self.sums = vocabulary.part.positions is not None or vocabulary.part.segments is not None
        self.whole = _bidirectional_kv(residual_blocks)
        self.logit_rows = torch.empty(0, vocabulary.part.vocab)
        self._write_ops()  # records the buffer widths
        self._fit(MIN_TOKENS)

    def forward(self, batch: Batch, pages: Tensor) -> Tensor:
        """Implement `TextModel.forward`."""
        if batch.tokens > self.tokens:
            self._fit(max(batch.tokens, 2 * self.tokens))
        tables, slot_mapping = batch.tables, batch.slot_mapping
        if self.whole is not None:
            tables, slot_mapping, pages = self.whole.placed(batch)
        if self.sums:
            self.x[: batch.tokens] = self.vocabulary.summed(batch.ids, batch.positions, batch.segments, torch.float32)
        data = StepData(
            batch.tokens,
            ids=batch.ids,
            first=torch.tensor(batch.first),
            count=torch.tensor(batch.count),
            angles=[rotation.angles(batch.positions, batch.rope_lengths) for rotation in self.rotations],
            tables=tables,
            slot_mapping=slot_mapping,
            pages=pages,
        )
        for region in self.regions:
            if isinstance(region, Program):
                self.team.run(region, data)
            else:
                region.compute(batch.tokens)
        return self.out[: batch.tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """Implement `TextModel.logits`. The result is valid until the next call."""
        hidden = hidden.contiguous()
        if len(hidden) > len(self.logit_rows):
            # Kept: new memory for 16 rows of 152k logits costs 2 ms of page faults per step.
            self.logit_rows = torch.empty(len(hidden), self.vocabulary.part.vocab)
        y = self.logit_rows[: len(hidden)]
        head = self.vocabulary.head
        assert isinstance(head, Packed), "a pooling model has no logits"
        if self.collective is not None:
            own = torch.empty(len(hidden), head.outputs)
            self.team.run(
                Program([cpu.linear(head, self.vocabulary.bias, hidden, own)], (hidden, own)), StepData(len(hidden))
            )
            return self._gather_logits(own, y, self.collective)
        ops: list[cpu.Op] = [cpu.linear(head, self.vocabulary.bias, hidden, y), *self._caps(y)]
        self.team.run(Program(ops, (hidden, y)), StepData(len(hidden)))
        return y

    def _gather_logits(self, own: Tensor, y: Tensor, collective: ShmCollective) -> Tensor:
        """Gather the logits of all ranks into y, in pieces that fit into the shared memory."""
        rows = max(1, collective.floats // self.vocabulary.most)
        for part, whole in zip(own.split(rows), y.split(rows), strict=True):
            ops = [cpu.all_reduce(collective, part, whole, gathers=True), *self._caps(whole)]
            self.team.run(Program(ops, (part, whole)), StepData(len(part)))
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
            self.logit_rows = torch.empty(rows, self.vocabulary.part.vocab)
        if self.whole is not None:
            self.whole.reserve(tokens, rows)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffers of a step, without logits."""
        return sum(room.nbytes for room in self.buffers.tensors.values()) + (self.whole.nbytes if self.whole else 0)

    def _fit(self, tokens: int) -> None:
        """Allocate buffers for this many tokens, and rebuild the operations that point to them. Old buffers are freed
        first."""
        self.tokens, self.buffers.tensors = tokens, {}
        self.regions: list[Program | TorchOp] = []
        self.buffers.make(tokens)
        self.regions = _regions(self._write_ops(), tuple(self.buffers.tensors.values()))

    def _write_ops(self) -> list[cpu.Op | TorchOp]:
        get, hidden = self.buffers.get, self.hidden
        x, normed, out = get("x", hidden), get("normed", hidden), get("out", hidden)
        self.x = x
        table, scale = self.vocabulary.table, self.vocabulary.part.scale
        ops: list[cpu.Op | TorchOp] = []
        if not self.sums:
            ops.append(
                cpu.Embed(
                    table=table.data_ptr(),
                    out=x.data_ptr(),
                    out_stride=x.stride(0),
                    size=hidden,
                    type=cpu.TYPES[table.dtype],
                    scale=scale,
                )
            )
        if self.vocabulary.norm is not None:
            ops.append(_norm(self.vocabulary.norm, x, x))
        for block in self.residual_blocks:
            read = x
            if block.before is not None:
                ops.append(_norm(block.before, x, normed))
                read = normed
            for number, body in enumerate(block.bodies):
                target = out if number == 0 else get("other", hidden)
                if block.body_norms:
                    ops.append(_norm(block.body_norms[number], x, normed))
                    read = normed
                match body:
                    case AttentionLayer():
                        ops += self._attention(body, read, target)
                    case MLPLayer():
                        ops += self._mlp(body, read, target)
                    case ExpertsLayer():
                        ops += self._experts(body, read, target)
                if number > 0:
                    ops.append(_add(target, out, hidden, 1.0))
            if self.collective is not None:  # one all-reduce for the sum of all bodies
                ops.append(cpu.all_reduce(self.collective, out, out, gathers=False))
            if block.after is not None:
                ops.append(_norm(block.after, out, out))
            ops.append(_add(out, x, hidden, block.scale))
            if block.last is not None:
                ops.append(_norm(block.last, x, x))
        self.out = x
        if self.norm is not None:
            ops.append(_norm(self.norm, x, normed))
            self.out = normed
        return ops

    def _attention(self, layer: AttentionLayer, x: Tensor, y: Tensor) -> list[cpu.Op | TorchOp]:
        part, heads, kv_heads = layer.part, layer.heads, layer.qk_heads - layer.heads
        qkv = self.buffers.get("qkv", (heads + 2 * kv_heads) * part.head_dim)
        attended = self.buffers.get("attended", heads * part.head_dim)
        ops: list[cpu.Op | TorchOp] = [_project(layer.qkv, x, qkv)]
        if isinstance(layer.norm, HeadNorm):
            ops.append(_head_norm(layer.norm, qkv, layer.qk_heads, part.head_dim))
        elif isinstance(layer.norm, ProjectionNorm):
            if self.collective is None:
                ops += _projection_norm(layer.norm, qkv)
            else:
                ops.append(_torch_norm(layer.norm, qkv, layer.qk_heads, part.head_dim))
        rope, kv_layer = part.rope, layer.kv_layer
        group, number = (0, 0) if kv_layer is None else (kv_layer.group, kv_layer.layer)
        heads_op = cpu.RopeKV(
            qkv=qkv.data_ptr(),
            stride=qkv.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            dim=part.head_dim,
            rotary_dim=rope.dim if rope else 0,
            rope=self.ropes.index(rope) if rope else 0,
            interleaved=rope.interleaved if rope else False,
            group=group,
            layer=number,
        )
        attend = cpu.Attend(
            q=qkv.data_ptr(),
            sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
            out=attended.data_ptr(),
            q_stride=qkv.stride(0),
            out_stride=attended.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            dim=part.head_dim,
            window=part.window or 0,
            scale=layer.scale,
            softcap=part.softcap or 0.0,
            group=group,
            layer=number,
            causal=part.causal,
        )
        return [*ops, heads_op, attend, _project(layer.out, attended, y)]

    def _mlp(self, layer: MLPLayer, x: Tensor, y: Tensor) -> list[cpu.Op | TorchOp]:
        inner = layer.down.slots.inputs
        up = self.buffers.get("up", layer.up.slots.rows)
        activated = self.buffers.get("activated", inner)
        act = _activate(layer, up, activated, groups=1)
        return [_project(layer.up, x, up), act, _project(layer.down, activated, y)]

    def _experts(self, layer: ExpertsLayer, x: Tensor, y: Tensor) -> list[cpu.Op]:
        part, k, one = layer.part, layer.part.top_k, layer.experts[0]
        get, dense = self.buffers.get, self.buffers.dense
        logits, chosen, weights = get("router", layer.router.slots.rows), dense("chosen", k), dense("weights", k)
        # k rows per token: the outputs of its experts, until they are combined.
        up, activated = dense("pairs_up", k * one.up.slots.rows), dense("pairs_activated", k * one.down.slots.inputs)
        out = dense("pairs", k * self.hidden)
        route = cpu.Route(
            logits=logits.data_ptr(),
            chosen=chosen.data_ptr(),  # int32
            weights=weights.data_ptr(),
            logits_stride=logits.stride(0),
            count=part.num_experts,
            k=k,
            scores=cpu.SCORES[part.scores],
        )
        shared, ops = None, [_project(layer.router, x, logits), route]
        ups, downs = _alike([each.up for each in layer.experts]), _alike([each.down for each in layer.experts])
        ops += [
            cpu.experts(ups, x, _pairs(up, k), k, gathered=True),
            _activate(one, up, activated, groups=k),
            cpu.experts(downs, _pairs(activated, k), _pairs(out, k), k, gathered=False),
        ]
        if layer.shared is not None:
            shared = get("shared", self.hidden)
            ops += self._mlp(layer.shared, x, shared)
        gate = None if part.shared_gate is None else logits[:, part.num_experts :]
        combine = cpu.Combine(
            x=out.data_ptr(),
            weights=weights.data_ptr(),
            gate=None if gate is None else gate.data_ptr(),
            shared=None if shared is None else shared.data_ptr(),
            y=y.data_ptr(),
            x_stride=self.hidden,
            gate_stride=0 if gate is None else gate.stride(0),
            shared_stride=0 if shared is None else shared.stride(0),
            y_stride=y.stride(0),
            size=self.hidden,
            k=k,
        )
        return [*ops, combine]


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

    def placed(self, batch: Batch) -> tuple[tuple[Tensor], tuple[Tensor], Tensor]:
        """Return block tables, write positions and pages of a step."""
        count = torch.tensor(batch.count)
        blocks = -(-count // WHOLE_BLOCK)
        begin = blocks.cumsum(0) - blocks
        if int(blocks.sum()) > len(self.pages):
            self.pages = self._made(int(blocks.sum()))
        table = begin.unsqueeze(1) + torch.arange(int(blocks.max()))
        slot_mapping = begin.repeat_interleave(count) * WHOLE_BLOCK + batch.positions
        return (table,), (slot_mapping,), self.pages

    def _made(self, blocks: int) -> Tensor:
        return torch.zeros(blocks, 1, 2, WHOLE_BLOCK, self.kv_heads, self.dim)


def _bidirectional_kv(residual_blocks: Sequence[ResidualBlockLayer]) -> BidirectionalKV | None:
    """Return the pages for bidirectional attention, or None for a model with a KV cache."""
    layers = [body for block in residual_blocks for body in block.bodies if isinstance(body, AttentionLayer)]
    sizes = {(one.qk_heads - one.heads, one.part.head_dim) for one in layers if one.kv_layer is None}
    if not sizes:
        return None
    (size,) = sizes
    return BidirectionalKV(*size)


def _pairs(x: Tensor, k: int) -> Tensor:
    """[tokens, k · width] → [tokens · k, width]."""
    return x.unflatten(1, (k, -1)).flatten(0, 1)


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


def _regions(ops: Sequence[cpu.Op | TorchOp], keep_alive: Sequence[Tensor]) -> list[Program | TorchOp]:
    """Return programs that are as long as possible, with torch operations between them."""
    found: list[Program | TorchOp] = []
    for is_torch, group in groupby(ops, lambda op: isinstance(op, TorchOp)):
        if is_torch:
            found += [op for op in group if isinstance(op, TorchOp)]
        else:
            found.append(Program([op for op in group if not isinstance(op, TorchOp)], keep_alive))
    return found


def _project(layer: LinearLayer, x: Tensor, y: Tensor) -> cpu.Linear:
    """Project rows. If the ranks' products are summed, only rank 0 adds the bias."""
    bias = None if layer.part.split == "inputs" and layer.world.rank > 0 else layer.bias
    return cpu.linear(_packed(layer), bias, x, y)


def _activate(layer: MLPLayer, x: Tensor, y: Tensor, *, groups: int) -> cpu.Activate | TorchOp:
    """x: [tokens, groups · (gate and) up]; y: [tokens, groups · inner]."""
    if layer.part.act not in cpu.ACTS:
        return _torch_activation(layer, x, y, groups)
    return cpu.Activate(
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        inner=layer.down.slots.inputs,
        groups=groups,
        act=cpu.ACTS[layer.part.act],
        gated=layer.has_gate,
        limit=math.inf,
    )


def _norm(layer: NormLayer, x: Tensor, y: Tensor) -> cpu.Norm:
    return _norm_pieces(layer.norm, layer.weight, layer.bias, x, y, groups=1, size=layer.norm.size)


def _head_norm(layer: HeadNorm, qkv: Tensor, heads: int, dim: int) -> cpu.Norm:
    return _norm_pieces(layer.norm, layer.weight, None, qkv, qkv, groups=heads, size=dim)


def _projection_norm(layer: ProjectionNorm, qkv: Tensor) -> list[cpu.Op]:
    """Normalise q as one piece and k as another."""
    ops: list[cpu.Op] = []
    at = 0
    for weight in layer.weights:
        piece = qkv[:, at:]
        ops.append(_norm_pieces(layer.part.qk_norm, weight, None, piece, piece, groups=1, size=len(weight)))
        at += len(weight)
    return ops


def _norm_pieces(
    norm: Norm | None, weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor, *, groups: int, size: int
) -> cpu.Norm:
    assert norm is not None
    return cpu.Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        groups=groups,
        size=size,
        weight_stride=size,
        norm=cpu.LAYER if isinstance(norm, LayerNorm) else cpu.RMS,
        eps=norm.eps,
    )


def _add(y: Tensor, x: Tensor, size: int, alpha: float) -> cpu.Add:
    return cpu.Add(y=y.data_ptr(), x=x.data_ptr(), y_stride=y.stride(0), x_stride=x.stride(0), size=size, alpha=alpha)


def _torch_norm(layer: ProjectionNorm, qkv: Tensor, heads: int, dim: int) -> TorchOp:
    """Normalise over the heads of all ranks, which requires an all-reduce."""

    def compute(tokens: int) -> None:
        qk = qkv[:tokens, : heads * dim]
        qk[:] = layer(qk.unflatten(1, (heads, dim))).flatten(1)

    return TorchOp(compute)


def _torch_activation(layer: MLPLayer, x: Tensor, y: Tensor, groups: int) -> TorchOp:
    width, inner = layer.up.slots.rows, layer.down.slots.inputs

    def compute(tokens: int) -> None:
        read = x[:tokens, : groups * width].unflatten(1, (groups, width))
        made = gated(layer.act, read) if layer.has_gate else layer.act(read)
        y[:tokens, : groups * inner] = made.flatten(1)

    return TorchOp(compute)
