"""Attention layers, and residual blocks of attention and MLPs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.world import World, share
from engine.kv.layout import Layout
from engine.layers.linear import LinearLayer, Read, Target
from engine.layers.mlp import ExpertsLayer, MLPLayer
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.layers.step import Step
from engine.models.parts import MLP, Attention, Experts, ResidualBlock, bodies, body_norms
from engine.models.sources import attention_linears, join
from kernels.attention.encoder_torch import encoder_attention
from kernels.paged_attention import paged_attention
from kernels.paged_kv import write_kv
from kernels.rope import rotate_

Body = Callable[[Tensor, Step], Tensor]


class Sinks:
    """The learned logits of an attention's heads, [heads] fp32 of this rank."""

    logits: Tensor

    def __init__(self, part: Attention, path: str, world: World) -> None:
        self.path = join(path, "sinks")
        self.first, self.heads = share(part.heads, world, "heads")

    def load(self, read: Read, target: Target) -> None:
        self.logits = read(self.path)[self.first : self.first + self.heads].to(target.device, torch.float32, copy=True)


Loadable = LinearLayer | NormLayer | HeadNorm | ProjectionNorm | Sinks


@dataclass(frozen=True)
class KVLayer:
    """Storage of an attention layer's keys and values: group of the layout, and index within the group's blocks."""

    group: int
    layer: int


def kv_layers(layout: Layout) -> list[KVLayer]:
    """Return the KV layer of each attention layer of the model, in order."""
    found = {
        layer: KVLayer(number, at)
        for number, group in enumerate(layout.groups)
        for at, layer in enumerate(group.layers)
    }
    return [found[index] for index in range(len(found))]


class AttentionLayer:
    def __init__(self, part: Attention, path: str, world: World, kv_layer: KVLayer | None) -> None:
        """kv_layer: None for bidirectional attention, which has no KV cache."""
        qkv, out = attention_linears(part)
        path = join(path, part.name)
        self.part, self.kv_layer = part, kv_layer
        self.qkv, self.out = LinearLayer(qkv, path, world), LinearLayer(out, path, world)
        self.heads, kv_heads = share(part.heads, world, "heads")[1], share(part.kv_heads, world, "KV heads")[1]
        self.qk_heads = self.heads + kv_heads
        self.scale = part.head_dim**-0.5 if part.scale is None else part.scale
        self.norm: HeadNorm | ProjectionNorm | None = None
        if part.qk_norm is not None:
            self.norm = (ProjectionNorm if part.qk_norm_span == "all" else HeadNorm)(part, path, world)
        self._sinks = Sinks(part, path, world) if part.sinks else None

    @property
    def sinks(self) -> Tensor | None:
        """[heads] fp32, or None if the attention has no sinks."""
        return None if self._sinks is None else self._sinks.logits

    @property
    def loadables(self) -> list[Loadable]:
        return [self.qkv, self.out, *(one for one in (self.norm, self._sinks) if one is not None)]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: [tokens, hidden]."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.part.head_dim))
        qk, v = qkv[:, : self.qk_heads], qkv[:, self.qk_heads :]
        if self.norm is not None:
            qk = self.norm(qk)
        if self.part.rope is not None:
            rotate_(qk, *step.angles[self.part.rope], self.part.rope.interleaved)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        if self.kv_layer is None:
            y = encoder_attention(q, k, v, step.count, self.scale, self.part.window, self.part.softcap)
            return self.out(y.flatten(1))
        group, layer = self.kv_layer.group, self.kv_layer.layer
        write_kv(step.pages, step.writes[group][layer], k, v)
        options = {"scale": self.scale, "softcap": self.part.softcap}
        y = paged_attention(q, k, v, step.pages, layer, step.reads[group], sinks=self.sinks, **options)
        return self.out(y.flatten(1))


class CrossAttentionLayer:
    """Cross-attention. The keys and values of each row's encoder output are computed once and kept in the KV cache."""

    def __init__(self, part: Attention, path: str, world: World, kv_layer: KVLayer) -> None:
        q, kv, out = attention_linears(part)
        path = join(path, part.name)
        self.part, self.kv_layer = part, kv_layer
        self.q, self.kv, self.out = (LinearLayer(linear, path, world) for linear in (q, kv, out))
        self.kv_heads = self.kv.slots.pieces[0].rows // part.head_dim
        self.scale = part.head_dim**-0.5 if part.scale is None else part.scale

    @property
    def loadables(self) -> list[Loadable]:
        return [self.q, self.kv, self.out]

    def write_kv(self, states: Tensor, step: Step) -> None:
        """Write keys and values to the KV cache. states: [tokens, hidden], encoder output."""
        kv = self.kv(states).unflatten(-1, (-1, self.part.head_dim))
        at = step.cross_writes[self.kv_layer.group][self.kv_layer.layer]
        write_kv(step.pages, at, kv[:, : self.kv_heads], kv[:, self.kv_heads :])

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: [tokens, hidden]."""
        q = self.q(x).unflatten(-1, (-1, self.part.head_dim))
        group, layer = self.kv_layer.group, self.kv_layer.layer
        options = {"scale": self.scale, "softcap": self.part.softcap}
        y = paged_attention(q, None, None, step.pages, layer, step.cross_reads[group], **options)
        return self.out(y.flatten(1))


class KVLayerAllocator:
    """Assigns KV layers to the attention layers of a model, in order."""

    def __init__(self, layout: Layout) -> None:
        self._free = iter(kv_layers(layout))
        self._last: KVLayer | None = None

    def allocate(self, part: Attention) -> KVLayer | None:
        """Return the next KV layer; None without a KV cache. Cross-attention shares that of the preceding attention."""
        if not part.causal and not part.source:
            return None
        if not part.source:
            self._last = next(self._free)
        return self._last


class ResidualBlockLayer:
    """last(x + scale · after(body(before(x)))); several bodies are summed."""

    def __init__(self, part: ResidualBlock, path: str, world: World, allocator: KVLayerAllocator) -> None:
        self.scale = part.scale
        self.before = NormLayer(part.before, path) if part.before is not None else None
        self.body_norms = [NormLayer(norm, path) for norm in body_norms(part)]
        self.after = NormLayer(part.after, path) if part.after is not None else None
        self.last = NormLayer(part.last, path) if part.last is not None else None
        self.bodies: list[AttentionLayer | CrossAttentionLayer | MLPLayer | ExpertsLayer] = []
        for body in bodies(part):
            match body:
                case Attention(source=True):
                    kv_layer = allocator.allocate(body)
                    assert kv_layer is not None, "self-attention precedes cross-attention in a block"
                    self.bodies.append(CrossAttentionLayer(body, path, world, kv_layer))
                case Attention():
                    self.bodies.append(AttentionLayer(body, path, world, allocator.allocate(body)))
                case MLP():
                    self.bodies.append(MLPLayer(body, path, world))
                case Experts():
                    self.bodies.append(ExpertsLayer(body, path, world))

    @property
    def norms(self) -> list[NormLayer]:
        """All norms of the hidden states."""
        found = (self.before, *self.body_norms, self.after, self.last)
        return [norm for norm in found if norm is not None]

    @property
    def loadables(self) -> list[Loadable]:
        return [*self.norms, *(layer for body in self.bodies for layer in body.loadables)]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Add to x in place, unless there is a norm of the sum."""
        read = x if self.before is None else self.before(x)
        reads = [norm(x) for norm in self.body_norms] or [read] * len(self.bodies)
        y = self.bodies[0](reads[0], step)
        for body, read in zip(self.bodies[1:], reads[1:], strict=True):
            y = y.add_(body(read, step))
        if self.after is not None:
            y = self.after(y)
        x = x.add_(y, alpha=self.scale)
        return x if self.last is None else self.last(x)
