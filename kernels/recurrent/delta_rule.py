"""Gated delta rule of gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692).

For each value head, with the query and key head that it shares with its group, a state S of [K, V] and each token:

    g = A · softplus(a + dt_bias)        one number, or with KDA one for each of K dims; A = -exp(A_log) is negative
    g = lower_bound · sigmoid(-A · (a + dt_bias))        instead, where there is a (negative) lower bound
    β = beta_scale · sigmoid(b)
    S ← diag(exp(g)) S
    S ← S + k (β (v - Sᵀ k))ᵀ
    y = Sᵀ q · scale

With `qk_norm`, q and k are divided by sqrt(Σ x² + 1e-6) first. Value head h belongs to key head h // (value_heads /
key_heads). All arithmetic is in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import recurrent as compiled
from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.recurrent.common import (
    check_state,
    draw_rows,
    draw_slopes,
    draw_state,
    row_bounds,
    rows_with_tokens,
    sigmoid,
    single_row,
    softplus,
    token_stride,
)

L2_EPS = 1e-6
TILE = 32  # columns of a state in a program


def l2_norm(x: Tensor) -> Tensor:
    """x: [..., dim] → x / sqrt(Σ x² + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    scale: float,
    qk_norm: bool = True,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k: [tokens, key_heads, K]; v: [tokens, value_heads, V]; tokens may be strided, for example columns of one
    convolution's output; a: [tokens, value_heads], or [tokens, value_heads, K] for one decay for each dim; b: [tokens,
    value_heads]; A: [value_heads] fp32; dt_bias: [value_heads] or [value_heads, K] fp32, as `a`; state: [slots,
    value_heads, K, V]; query_start, slots, first: see common.py → y: [tokens, value_heads, V], and the state, which is
    changed in place."""
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    group = v.shape[1] // q.shape[1]
    wide_q, wide_k = (x.float().repeat_interleave(group, 1) for x in (q, k))
    if qk_norm:
        wide_q, wide_k = l2_norm(wide_q), l2_norm(wide_k)
    slope = A if a.ndim == 2 else A.unsqueeze(1)
    raw = a.float() + dt_bias
    gate = slope * functional.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(-slope * raw)
    decay = gate.exp().view(*v.shape[:2], *(a.shape[2:] or (1,)), 1)  # [tokens, value_heads, 1 or K, 1]
    beta = beta_scale * torch.sigmoid(b.float())
    for tokens, matrix, line in rows_with_tokens(state, query_start, slots, first):
        for t in range(tokens.start, tokens.stop):
            matrix *= decay[t]
            error = v[t].float() - torch.einsum("hkv,hk->hv", matrix, wide_k[t])
            matrix += wide_k[t].unsqueeze(2) * (beta[t].unsqueeze(1) * error).unsqueeze(1)
            y[t] = (torch.einsum("hkv,hk->hv", matrix, wide_q[t]) * scale).to(y.dtype)
        line.copy_(matrix)
    return y, state


@jit
def _decay(raw, slope, lower_bound, BOUNDED: tl.constexpr):
    """e^g of a + dt_bias."""
    if BOUNDED:
        gate = lower_bound * sigmoid(-slope * raw)
    else:
        gate = slope * softplus(raw)
    return tl.exp(gate)


@jit
def _normed(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@jit
def delta_rule_kernel(
    q,
    k,
    v,
    a,
    b,
    A,
    dt_bias,
    state,
    query_start,
    slots,
    first,
    y,
    q_token,
    k_token,
    v_token,
    a_token,
    b_token,
    slot_stride,
    scale,
    beta_scale,
    lower_bound,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NORM: tl.constexpr,
    VECTOR_DECAY: tl.constexpr,
    BOUNDED: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each row, value head and tile of columns, which are in registers from token to token."""
    start, count, slot, position = row_bounds(tl.program_id(0), query_start, slots, first, slot_stride)
    if count == 0:
        return
    head = tl.program_id(1)
    key = head // (VALUE_HEADS // KEY_HEADS) * K
    dim = tl.arange(0, WIDE)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    live = dim < K
    real = column < V
    spot = state + slot + (head * K + dim)[:, None] * V + column[None, :]
    mask = live[:, None] & real[None, :]
    matrix = tl.load(spot, mask & (dim * 0 + position > 0)[:, None], 0.0)
    slope = tl.load(A + head)
    bias = tl.load(dt_bias + head * K + dim, live, 0.0) if VECTOR_DECAY else tl.load(dt_bias + head)
    for at in range(count):
        token = start + at
        query = tl.load(q + token * q_token + key + dim, live, 0.0).to(tl.float32)
        factor = tl.load(k + token * k_token + key + dim, live, 0.0).to(tl.float32)
        if NORM:
            query = _normed(query)
            factor = _normed(factor)
        if VECTOR_DECAY:
            raw = tl.load(a + token * a_token + head * K + dim, live, 0.0).to(tl.float32)
            matrix *= _decay(raw + bias, slope, lower_bound, BOUNDED)[:, None]
        else:
            raw = tl.load(a + token * a_token + head).to(tl.float32)
            matrix *= _decay(raw + bias, slope, lower_bound, BOUNDED)
        beta = beta_scale * sigmoid(tl.load(b + token * b_token + head).to(tl.float32))
        value = tl.load(v + token * v_token + head * V + column, real, 0.0).to(tl.float32)
        error = beta * (value - tl.sum(matrix * factor[:, None], 0))
        matrix += factor[:, None] * error[None, :]
        out = tl.sum(matrix * query[:, None], 0) * scale
        tl.store(y + (token * VALUE_HEADS + head) * V + column, out.to(y.dtype.element_ty), real)
    tl.store(spot, matrix, mask)


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    scale: float,
    qk_norm: bool = True,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _, heads, value_dim = v.shape
    tile = min(TILE, power_of_2(value_dim))
    launch(
        delta_rule_kernel,
        (slots.shape[0], heads, -(-value_dim // tile)),
        q,
        k,
        v,
        a,
        b,
        A,
        dt_bias,
        state,
        query_start,
        slots,
        first,
        y,
        *(token_stride(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (a, "a"), (b, "b"))),
        check_state(state),
        scale,
        beta_scale,
        0.0 if lower_bound is None else lower_bound,
        KEY_HEADS=q.shape[1],
        VALUE_HEADS=heads,
        K=q.shape[2],
        V=value_dim,
        NORM=qk_norm,
        VECTOR_DECAY=a.ndim == 3,
        BOUNDED=lower_bound is not None,
        WIDE=power_of_2(q.shape[2]),
        TILE=tile,
    )
    return y, state


def _inputs(
    make: Make,
    counts: tuple[int, ...],
    heads: tuple[int, int],
    dims: tuple[int, int],
    vector_decay: bool = False,
    qk_norm: bool = True,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
    pad: int = 0,
) -> Args:
    query_start, slots, first = draw_rows(make, counts)
    tokens, (key_heads, value_heads), (key_dim, value_dim) = sum(counts) + pad, heads, dims
    gates = (value_heads, key_dim) if vector_decay else (value_heads,)
    weights = draw_slopes(make, value_heads), make.normal(*gates, dtype=torch.float32)
    q, k = (make.normal(tokens, key_heads, key_dim, scale=1.0 if qk_norm else key_dim**-0.5) for _ in range(2))
    return (
        *(q, k, make.normal(tokens, value_heads, value_dim), make.normal(tokens, *gates, scale=3.0)),
        *(make.normal(tokens, value_heads), *weights),
        *(draw_state(make, slots, first, value_heads, key_dim, value_dim), query_start, slots, first),
        *(key_dim**-0.5, qk_norm, beta_scale, lower_bound),
    )


NEXT = {"heads": (16, 32), "dims": (128, 128)}  # Qwen3-Next 80B-A3B
KIMI = {"heads": (32, 32), "dims": (128, 128), "vector_decay": True}  # Kimi Linear 48B-A3B
DELTA_RULE = Op(
    name="delta_rule",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("grouped", {"counts": (1, 2, 0), "heads": (2, 4), "dims": (16, 24), "pad": 2}),
        Case("odd", {"counts": (2, 1), "heads": (1, 1), "dims": (33, 40), "qk_norm": False, "beta_scale": 2.0}),
        Case("vector", {"counts": (1, 3), "heads": (2, 2), "dims": (32, 16), "vector_decay": True}),
        Case("bounded", {"counts": (2,), "heads": (1, 1), "dims": (16, 8), "vector_decay": True, "lower_bound": -5.0}),
        Case("empty", {"counts": (), "heads": (1, 2), "dims": (16, 16)}),
        Case("next-decode-32", NEXT | {"counts": (1,) * 32}, bench=True),
        Case("kimi-decode-32", KIMI | {"counts": (1,) * 32}, bench=True),
        Case("kimi-bounded-8", KIMI | {"counts": (1,) * 8, "lower_bound": -5.0}, bench=True),
    ),
    tolerance={torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda q, k, v, a, b, A, dt_bias, state, starts, slots, *rest: (
        nbytes(q, k, v, v, a, b, A, dt_bias) + 2 * len(slots) * state[:1].nbytes
    ),
    compiled=compiled.delta_rule,
    cpu_cases=(
        Case("next-1", NEXT | {"counts": (1,)}),
        Case("next-8", NEXT | {"counts": (1,) * 8}),
        Case("next-512", NEXT | {"counts": (512,)}),
        Case("kimi-8", KIMI | {"counts": (1,) * 8}),
    ),
    single_row=single_row((0, 1, 2, 3, 4), 7),
    rows=lambda args: len(args[9]),
    strided=(0, 1, 2, 3, 4, 7),
)
