"""Norms of hidden states, queries and keys."""

from dataclasses import replace

from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class RMSNorm:
    """y = x / sqrt(mean(x²) + eps) · scale · (w + offset)."""

    size: int
    eps: float
    weight: bool = True  # False: w is 1 (Llama 4)
    offset: float = 0.0  # 1: the checkpoint stores w - 1 (Gemma)
    scale: float = 1.0
    name: str = ""
    last: str = "weight"  # last component of the tensor's name; "": the tensor is `name` itself


@declared(frozen=True, kw_only=True)
class LayerNorm:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · (w + offset) + b."""

    size: int
    eps: float
    bias: bool = True
    weight: bool = True  # False: w is 1 (OLMo 1)
    offset: float = 0.0  # 1: the checkpoint stores w - 1 (Nemotron)
    name: str = ""


Norm = RMSNorm | LayerNorm


def named(norm: Norm, name: str) -> Norm:
    return replace(norm, name=name)
