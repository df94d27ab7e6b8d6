"""Selective scan of Mamba (arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).

For each head with P channels, a state h of [P, N] and each token:

    Δ = clamp(softplus(dt + dt_bias), dt_limits)
    h ← exp(Δ A) h + (Δ x) Bᵀ
    y = h C + D x            (with a gate: · silu(gate))

Mamba 2: A is one number for each head, and B and C are shared by the heads of a group: head h belongs to group h //
(heads / groups). Mamba 1: each channel is a head with P = 1 and N numbers in A, and there is one group. All arithmetic
is in float32.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.common import rows_with_tokens


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    gate: Tensor | None,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    """x, gate: [tokens, heads, P]; dt: [tokens, heads]; B, C: [tokens, groups, N]; tokens of these may be strided, for
    example columns of one projection; A: [heads] or [heads, N] fp32, negative (-exp of the stored A_log); D: [heads] or
    [heads, P] fp32; dt_bias: [heads] fp32; state: [slots, heads, P, N]; query_start, slots, first: see common.py → y:
    [tokens, heads, P], and the state, which is changed in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, groups = x.shape[1], B.shape[1]
    wide_b, wide_c = (one.float().repeat_interleave(heads // groups, 1) for one in (B, C))
    step = dt.float() if dt_bias is None else dt.float() + dt_bias
    step = functional.softplus(step).clamp(*dt_limits).unsqueeze(2)  # [tokens, heads, 1]
    decay = torch.exp(step * (A if A.ndim == 2 else A.unsqueeze(1))).unsqueeze(2)  # [tokens, heads, 1, 1 or N]
    scaled = step * x.float()
    for tokens, matrix, line in rows_with_tokens(state, query_start, slots, first):
        for t in range(tokens.start, tokens.stop):
            matrix = decay[t] * matrix + scaled[t].unsqueeze(2) * wide_b[t].unsqueeze(1)
            out = torch.einsum("hpn,hn->hp", matrix, wide_c[t])
            if D is not None:
                out += x[t].float() * D.view(heads, -1)
            y[t] = (out if gate is None else out * functional.silu(gate[t].float())).to(y.dtype)
        line.copy_(matrix)
    return y, state
