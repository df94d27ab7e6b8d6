"""Gated delta rule of gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692).

For each value head, with the query and key head that it shares with its group, a state S of [K, V] and each token:

    g = A · softplus(a + dt_bias)        one number, or with KDA one for each of K dims; A = -exp(A_log) is negative
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

from kernels.recurrent.common import rows_with_tokens

L2_EPS = 1e-6


def l2_norm(x: Tensor) -> Tensor:
    """x: [..., dim] → x / sqrt(Σ x² + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def delta_rule(
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
    decay = torch.exp(slope * functional.softplus(a.float() + dt_bias))
    decay = decay.view(*decay.shape[:2], -1, 1)  # [tokens, value_heads, 1 or K, 1]
    beta = beta_scale * torch.sigmoid(b.float())
    for tokens, matrix, line in rows_with_tokens(state, query_start, slots, first):
        for t in range(tokens.start, tokens.stop):
            matrix *= decay[t]
            error = v[t].float() - torch.einsum("hkv,hk->hv", matrix, wide_k[t])
            matrix += wide_k[t].unsqueeze(2) * (beta[t].unsqueeze(1) * error).unsqueeze(1)
            y[t] = (torch.einsum("hkv,hk->hv", matrix, wide_q[t]) * scale).to(y.dtype)
        line.copy_(matrix)
    return y, state
