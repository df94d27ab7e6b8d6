"""Norm layers of hidden states, and of the queries and keys of attention."""

import torch
from torch import Tensor

from engine.distributed.world import World, share
from engine.layers.linear import Read, Target
from engine.lowering.operations import GatedNorm
from engine.models.parts import Attention, LayerNorm, Norm, RMSNorm
from engine.models.sources import join, qk_norm_paths, qk_norms
from kernels.layer_norm import layer_norm
from kernels.recurrent.gated_norm import ACTS
from kernels.rms_norm import rms_norm, rms_norm_shared


def normed(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    match norm:
        case RMSNorm(eps=eps):
            return rms_norm(x, weight, eps)
        case LayerNorm(eps=eps):
            return layer_norm(x, weight, bias, eps)


class NormLayer:
    """A norm over the hidden size, on every rank. Weights are kept in fp32, in which norms are computed."""

    weight: Tensor
    bias: Tensor | None = None

    def __init__(self, norm: Norm, path: str) -> None:
        self.norm, self.path = norm, join(path, norm.name)

    def load(self, read: Read, target: Target) -> None:
        if not self.norm.weight:
            self.weight = torch.ones(self.norm.size, device=target.device)
        else:
            last = self.norm.last if isinstance(self.norm, RMSNorm) else "weight"
            self.weight = _weight(self.norm, read(join(self.path, last)), target.device)
        if isinstance(self.norm, LayerNorm) and self.norm.bias:
            self.bias = read(f"{self.path}.bias").to(target.device, torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        return normed(self.norm, x, self.weight, self.bias)


class HeadNorm:
    """Norm of each head of q and k separately, in one call. weight, bias: [heads + kv_heads, head_dim] of this rank,
    without KV heads if the layer has no keys."""

    weight: Tensor
    bias: Tensor | None = None

    def __init__(self, part: Attention, path: str, world: World) -> None:
        assert part.qk_norm is not None, "an attention without qk_norm has no norm layer"
        self.part, self.path, self.norm = part, path, part.qk_norm
        shares = (share(part.heads, world, "heads"), share(part.kv_heads, world, "KV heads"))
        self.shares = shares[:1] if part.shared_kv else shares

    def load(self, read: Read, target: Target) -> None:
        if not self.norm.weight:
            heads = sum(heads for _, heads in self.shares)
            self.weight = torch.ones(heads, self.part.head_dim, device=target.device)
            return
        weight = self._read(read, target, "weight")
        self.weight = weight + self.norm.offset if self.norm.offset else weight
        if isinstance(self.norm, LayerNorm) and self.norm.bias:
            self.bias = self._read(read, target, "bias")

    def _read(self, read: Read, target: Target, suffix: str) -> Tensor:
        """Return the weights or biases of all heads of this rank."""
        pieces = []
        for (norm, shape), (first, heads) in zip(qk_norms(self.part), self.shares, strict=True):
            stored = [read(f"{self.path}.{name}.{suffix}") for name in qk_norm_paths(self.part, norm)]
            whole = torch.stack(stored) if self.part.qk_norm_listed else stored[0]
            values, own = whole.to(target.device, torch.float32), len(shape) == 2
            pieces.append(values[first : first + heads] if own else values.expand(heads, -1))
        return torch.cat(pieces)

    def __call__(self, qk: Tensor) -> Tensor:
        """qk: [tokens, heads + kv_heads, head_dim]."""
        return normed(self.norm, qk, self.weight, self.bias)


class ProjectionNorm:
    """Norm of q and of k over all their heads together, including those of other ranks (OLMo 2)."""

    weights: tuple[Tensor, Tensor]

    def __init__(self, part: Attention, path: str, world: World) -> None:
        assert isinstance(part.qk_norm, RMSNorm), "only RMS norms span an entire projection"
        self.part, self.path, self.eps, self.world = part, path, part.qk_norm.eps, world
        self.shares = (share(part.heads, world, "heads"), share(part.kv_heads, world, "KV heads"))

    def load(self, read: Read, target: Target) -> None:
        pieces = []
        for (norm, _), (first, heads) in zip(qk_norms(self.part), self.shares, strict=True):
            weight = _weight(norm, read(f"{self.path}.{norm.name}.weight"), target.device).view(-1, self.part.head_dim)
            pieces.append(weight[first : first + heads].reshape(-1))
        self.weights = (pieces[0], pieces[1])

    def __call__(self, qk: Tensor) -> Tensor:
        heads = self.shares[0][1]
        return torch.cat(
            [self._norm(x, w) for x, w in zip((qk[:, :heads], qk[:, heads:]), self.weights, strict=True)], 1
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.flatten(1)
        if self.world.size == 1:
            return rms_norm(flat, weight, self.eps).view_as(x)
        square_sum = self.world.all_reduce(flat.float().square().sum(-1, keepdim=True))
        # KV heads that several ranks have are counted several times, both in the sum and in the size.
        size = flat.shape[1] * self.world.size
        return rms_norm_shared(flat, weight, self.eps, square_sum, size).view_as(x)


def gated_norm_of_ranks(op: GatedNorm, x: Tensor, gate: Tensor, weight: Tensor, world: World) -> Tensor:
    """Compute a gated norm (kernels/recurrent/gated_norm.py) whose groups have columns on several ranks. x: [tokens,
    columns of this rank], all of one group."""
    assert op.all_groups is not None and op.groups == 1, "a rank has a share of one group"
    wide, factor = x.float(), ACTS[op.act](gate.float())
    if op.gate_first:
        wide = wide * factor
    sums = wide.new_zeros(len(x), op.all_groups)
    own = world.rank * op.all_groups // world.size
    sums[:, own] = wide.square().sum(-1)
    total = world.all_reduce(sums)[:, own : own + 1]
    normed = wide * torch.rsqrt(total / (x.shape[1] * world.size // op.all_groups) + op.eps) * weight
    return (normed if op.gate_first else normed * factor).to(x.dtype)


def _weight(norm: Norm, stored: Tensor, device: torch.device) -> Tensor:
    weight = stored.to(device, torch.float32)
    weight = weight + norm.offset if norm.offset else weight.clone()
    return weight * norm.scale if isinstance(norm, RMSNorm) and norm.scale != 1.0 else weight
