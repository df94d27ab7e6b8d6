"""Root mean square norm with a gate, of recurrent layers' outputs.

    y = x / sqrt(mean(x²) + eps) · w · act(gate)                        gated DeltaNet: the gate follows the norm
    y = u / sqrt(mean(u²) + eps) · w,  u = x · act(gate)                Mamba 2 (`gate_first`)

The mean is over adjacent groups of `size` elements, and in float32, as everything else is. Sources: arXiv:2412.06464,
arXiv:2405.21060.
"""

import torch
from torch import Tensor
from torch.nn import functional

ACTS = {"silu": functional.silu, "sigmoid": torch.sigmoid}


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool = False, act: str = "silu", groups: int = 1
) -> Tensor:
    """x, gate: [tokens, groups · size], whose rows may be strided; weight: [groups · size], or [size] for all groups,
    fp32; act: silu or sigmoid → [tokens, groups · size] of x's type."""
    wide, factor = x.float(), ACTS[act](gate.float())
    if gate_first:
        wide = wide * factor
    pieces = wide.unflatten(1, (groups, -1))
    scale = torch.rsqrt(pieces.square().mean(-1, keepdim=True) + eps)
    normed = (pieces * scale * weight.view(-1, pieces.shape[2])).flatten(1)
    return (normed if gate_first else normed * factor).to(x.dtype)
