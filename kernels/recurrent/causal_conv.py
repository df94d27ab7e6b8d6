"""Causal depthwise convolution over the tokens of a sequence, whose state is its last width - 1 inputs.

    y[t, c] = act(bias[c] + Σ_j weight[c, j] · x[t - (width - 1) + j, c])

Inputs before the row's first token come from the state; the weights' last column belongs to the token itself, as in
torch's conv1d. Sums are in float32. Used by Mamba (arXiv:2312.00752), gated DeltaNet (arXiv:2412.06464) and LFM2.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.common import rows_with_tokens

ACTS = ("silu", "none")


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str,
    state: Tensor,
    query_start: Tensor,
    slots: Tensor,
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    """x: [tokens, channels], whose rows may be strided; weight: [channels, width] fp32; bias: [channels] fp32; act:
    silu or none; state: [slots, channels, width - 1], oldest input first; query_start, slots, first: see common.py →
    y: [tokens, channels], and the state, which is changed in place."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, before, line in rows_with_tokens(state, query_start, slots, first):
        inputs = torch.cat((before, x[tokens].float().T), 1)
        out = functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight)).T
        y[tokens] = (functional.silu(out) if act == "silu" else out).to(y.dtype)
        line.copy_(inputs[:, inputs.shape[1] - line.shape[1] :])
    return y, state
