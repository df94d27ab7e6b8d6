"""Compiled bodies of the operations in the parent folder: a team of threads runs one operation on float32 of a CPU.

A model does not call them one by one; it writes all its operations into one program (engine/layers/compiled). These
functions call the same library with the signature of an `Op`, with a Team as an additional first argument, so that they
share the cases, the tolerance and the benchmark of the Triton bodies.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import program as cpu
from kernels.cpu.packing import Packed, pack
from kernels.cpu.pages import from_native, to_native
from kernels.cpu.program import Program, StepData, Team
from kernels.page_codes import head_dim


@dataclass(frozen=True)
class NativePages:
    """Pages in the compiled kernels' own order. Plain tensors have the order of their shape."""

    pages: Tensor


def native_layout(team: Team, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of `qk_norm_rope_kv` or of an attention with pages in the kernels' own order, as in a
    model."""
    return tuple(NativePages(to_native(x)) if isinstance(x, Tensor) and x.ndim == 6 else x for x in args)


def with_packed_weight(team: Team, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of `matmul` with a packed weight, as in a model."""
    return (args[0], pack(args[1], team.tiling), *args[2:])


def embedding(
    team: Team, ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0, *added: Tensor | None
) -> Tensor:
    """See kernels/embedding.py."""
    if added:
        raise NotImplementedError("compiled kernels add position and segment embeddings in a separate operation")
    out = torch.empty((len(ids), table.shape[1]))
    op = cpu.Embed(
        table=table.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        size=table.shape[1],
        type=cpu.TYPES[table.dtype],
        scale=scale,
    )
    team.run(Program([op], (table, out)), StepData(len(ids), ids=ids.to(torch.int64)))
    return out


def rms_norm(
    team: Team,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See kernels/rms_norm.py."""
    y = torch.empty(x.shape) if out is None else out
    _norm(team, cpu.RMS, x, weight, None, eps, residual, scale, y)
    return y if residual is None else (y, residual)


def layer_norm(
    team: Team,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """See kernels/layer_norm.py."""
    y = torch.empty(x.shape)
    _norm(team, cpu.LAYER, x, weight, bias, eps, residual, scale, y)
    return y if residual is None else (y, residual)


def _norm(
    team: Team,
    kind: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    scale: float,
    y: Tensor,
) -> None:
    size = x.shape[1]
    ops: list[cpu.Op] = []
    read = x
    if residual is not None:
        read = residual
        ops.append(
            cpu.Add(
                y=x.data_ptr(),
                x=residual.data_ptr(),
                y_stride=x.stride(0),
                x_stride=residual.stride(0),
                size=size,
                alpha=scale,
            )
        )
    ops.append(_norm_op(kind, read, weight, bias, y, eps, groups=1, size=size))
    team.run(Program(ops, (x, weight, y, read)), StepData(len(x)))


def _norm_op(
    kind: int, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, eps: float, *, groups: int, size: int
) -> cpu.Norm:
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
        norm=kind,
        eps=eps,
    )


def activation(
    team: Team,
    x: Tensor,
    act: str,
    has_gate: bool,
    limit: float | None = None,
    up_offset: float = 0.0,
    numbers: Tensor | None = None,
) -> Tensor:
    """See kernels/activation.py."""
    if act not in cpu.ACTS:
        raise NotImplementedError(f"compiled kernels support the activations {', '.join(cpu.ACTS)}, not {act}")
    inner = x.shape[1] // 2 if has_gate else x.shape[1]
    y = torch.empty((len(x), inner))
    op = cpu.Activate(
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        inner=inner,
        groups=1,
        act=cpu.ACTS[act],
        gated=has_gate,
        limit=math.inf if limit is None else limit,
        up_offset=up_offset,
    )
    team.run(Program([op], (x, y)), StepData(len(x)))
    return y


def qk_norm_rope_kv(
    team: Team,
    qkv: Tensor,
    pages: Tensor | NativePages | None,
    layer: int,
    slot_mapping: Tensor | None,
    heads: int,
    weight: Tensor | None,
    kind: str,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels/qk_norm_rope_kv.py."""
    if pages is None or slot_mapping is None:
        raise NotImplementedError("compiled kernels require pages and slot_mapping")
    native = _native(pages)
    kv_heads, dim = native.shape[4], qkv.shape[2]
    given, qkv = qkv, qkv.clone()  # the compiled kernels also rotate k in place
    ops: list[cpu.Op] = []
    if weight is not None:
        norm = cpu.LAYER if kind == "layer" else cpu.RMS
        if bias is None:
            ops.append(_norm_op(norm, qkv, weight, None, qkv, eps, groups=heads + kv_heads, size=dim))
        for head in range(0 if bias is None else heads + kv_heads):
            piece, added = qkv[:, head:], None if bias is None else bias[head]
            ops.append(_norm_op(norm, piece, weight[head], added, piece, eps, groups=1, size=dim))
    angles = [] if cos is None or sin is None else [_paired(cos, sin, interleaved)]
    ops.append(
        cpu.RopeKV(
            qkv=qkv.data_ptr(),
            stride=qkv.stride(0),
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            rotary_dim=angles[0][0].shape[1] if angles else 0,
            rope=0,
            interleaved=interleaved,
            group=0,
            layer=layer,
        )
    )
    places = slot_mapping.to(torch.int64)
    step = StepData(
        len(qkv), angles=angles, tables=[torch.zeros((0, 1), dtype=torch.int64)], slot_mapping=[places], pages=native
    )
    team.run(Program(ops, (qkv, native)), step)
    given[:, :heads] = qkv[:, :heads]
    return given, native if isinstance(pages, NativePages) else pages.copy_(from_native(native))


def _native(pages: Tensor | NativePages) -> Tensor:
    if isinstance(pages, NativePages):
        return pages.pages
    if pages.dtype not in cpu.PAGE_TYPES:
        raise NotImplementedError(f"compiled kernels support pages of {', '.join(map(str, cpu.PAGE_TYPES))}")
    return to_native(pages)


def _paired(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """[tokens, half] of pairs → [tokens, 2 · half] of elements, the order of the compiled kernels."""
    if interleaved:
        return cos.repeat_interleave(2, 1), torch.stack((-sin, sin), 2).flatten(1)
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def matmul(
    team: Team, x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """See kernels/linear.py."""
    packed = pack(weight, team.tiling) if isinstance(weight, Tensor) else weight
    y = torch.empty((len(x), packed.outputs))
    team.run(Program([cpu.linear(packed, bias, x, y)], (packed.data, x, y)), StepData(len(x)))
    return y


def attention(
    team: Team,
    q: Tensor,
    pages: Tensor | NativePages,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
    key_starts: Tensor | None = None,
    *,
    causal: bool = True,
    cross: bool = False,
    spans: Tensor | None = None,
) -> Tensor:
    """Compute attention of all rows that have tokens (kernels/attention/common.py), whether a row has one token or
    several. Without `causal`, rows whose tokens are all present read in both directions. cross: tokens of a row read
    the positions before its element of `key_starts`, and no others. spans: [tokens, 2] int64, see
    kernels/attention/prefill.py."""
    native = _native(pages)
    count = (query_start[1:] - query_start[:-1]).to(torch.int64)
    real = count > 0
    count = count[real].contiguous()
    op = cpu.Attend(
        q=q.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        slopes=None if slopes is None else slopes.data_ptr(),
        biases=None if biases is None else biases.data_ptr(),
        out=out.data_ptr(),
        q_stride=q.stride(0),
        out_stride=out.stride(0),
        heads=q.shape[1],
        kv_heads=native.shape[4],
        dim=head_dim(native),
        value_dim=head_dim(native),
        reach=0 if biases is None else biases.shape[1] // 2,
        window=window or 0,
        chunk=chunk or 0,
        scale=scale,
        softcap=softcap or 0.0,
        group=0,
        layer=layer,
        causal=causal,
        cross=cross,
    )
    step = StepData(
        int(count.sum()),
        first=lengths[real].to(torch.int64) - count,
        count=count,
        starts=None if key_starts is None else key_starts[real].to(torch.int64),
        spans=spans,
        tables=[table[slot[real].long()].to(torch.int64).contiguous()],
        slot_mapping=[torch.empty(0, dtype=torch.int64)],
        pages=native,
    )
    team.run(Program([op], (q, out, native)), step)
    return out


def _rows_of(
    chosen: Tensor,
    team: Team,
    q: Tensor,
    pages: Any,
    layer: int,
    table: Tensor,
    step: tuple[Tensor, ...],
    *options: Any,
) -> tuple[Tensor]:
    """Compute attention of the chosen rows only. step: slot, query_start, lengths, out. options: the last is
    key_starts."""
    slot, query_start, lengths, out = step
    *options, key_starts = options
    count = query_start.diff()
    tokens = torch.repeat_interleave(chosen, count)
    if bool(tokens.all()):
        return (attention(team, q, pages, layer, table, slot, query_start, lengths, out, *options, key_starts),)
    if key_starts is not None:
        key_starts = key_starts[chosen]
    start = torch.nn.functional.pad(count[chosen].cumsum(0), (1, 0))
    some = torch.empty((int(start[-1]), *q.shape[1:]))
    attention(
        team,
        q[tokens].contiguous(),
        pages,
        layer,
        table,
        slot[chosen],
        start,
        lengths[chosen],
        some,
        *options,
        key_starts,
    )
    out[tokens] = some
    return (out,)


def decode_attention(
    team: Team,
    q: Tensor,
    pages: Tensor | NativePages,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
) -> tuple[Tensor]:
    """See kernels/attention/decode.py. The compiled kernels ignore the splits in `schedule`."""
    step = slot, query_start, lengths, out
    options = scale, window, softcap, sinks, slopes, chunk, biases, key_starts
    return _rows_of(query_start.diff() == 1, team, q, pages, layer, table, step, *options)


def prefill_attention(
    team: Team,
    q: Tensor,
    pages: Tensor | NativePages,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor]:
    """See kernels/attention/prefill.py. `schedule` is not used: the threads divide the rows themselves."""
    if spans is not None:
        raise NotImplementedError("compiled attention does not support spans")
    step = slot, query_start, lengths, out
    options = scale, window, softcap, sinks, slopes, chunk, biases, key_starts
    return _rows_of(query_start.diff() > 1, team, q, pages, layer, table, step, *options)
