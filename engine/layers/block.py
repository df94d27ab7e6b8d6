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
from engine.models.parts import MLP, Attention, Experts, ResidualBlock, bodies
from engine.models.sources import attention_linears, join
from kernels.attention.whole import whole_attention
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
class Place:
    """Storage of an attention layer's keys and values: group of the layout, and index within the group's blocks."""

    group: int
    layer: int


def places(layout: Layout) -> list[Place]:
    """Return the place of each attention layer of the model, in order."""
    found = {
        layer: Place(number, at) for number, group in enumerate(layout.groups) for at, layer in enumerate(group.layers)
    }
    return [found[index] for index in range(len(found))]


class AttentionLayer:
    def __init__(self, part: Attention, path: str, world: World, place: Place | None) -> None:
        """place: None for bidirectional attention, which has no KV cache."""
        qkv, out = attention_linears(part)
        path = join(path, part.name)
        self.part, self.place = part, place
        self.qkv, self.out = LinearLayer(qkv, path, world), LinearLayer(out, path, world)
        q, k, _ = (piece.rows // part.head_dim for piece in self.qkv.slots.pieces)
        self.heads, self.turned = q, q + k
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
        qk, v = qkv[:, : self.turned], qkv[:, self.turned :]
        if self.norm is not None:
            qk = self.norm(qk)
        if self.part.rope is not None:
            rotate_(qk, *step.angles[self.part.rope], self.part.rope.interleaved)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        if self.place is None:
            y = whole_attention(q, k, v, step.count, self.scale, self.part.window, self.part.softcap)
            return self.out(y.flatten(1))
        group, layer = self.place.group, self.place.layer
        write_kv(step.pages, step.writes[group][layer], k, v)
        options = {"scale": self.scale, "softcap": self.part.softcap}
        y = paged_attention(q, k, v, step.pages, layer, step.reads[group], sinks=self.sinks, **options)
        return self.out(y.flatten(1))


class CrossAttentionLayer:
    """Cross-attention. The keys and values of each row's encoder output are computed once and kept in the KV cache."""

    def __init__(self, part: Attention, path: str, world: World, place: Place) -> None:
        q, kv, out = attention_linears(part)
        path = join(path, part.name)
        self.part, self.place = part, place
        self.q, self.kv, self.out = (LinearLayer(linear, path, world) for linear in (q, kv, out))
        self.kv_heads = self.kv.slots.pieces[0].rows // part.head_dim
        self.scale = part.head_dim**-0.5 if part.scale is None else part.scale

    @property
    def loadables(self) -> list[Loadable]:
        return [self.q, self.kv, self.out]

    def keep(self, states: Tensor, step: Step) -> None:
        """Write keys and values to the KV cache. states: [tokens, hidden], encoder output."""
        kv = self.kv(states).unflatten(-1, (-1, self.part.head_dim))
        at = step.cross_writes[self.place.group][self.place.layer]
        write_kv(step.pages, at, kv[:, : self.kv_heads], kv[:, self.kv_heads :])

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x: [tokens, hidden]."""
        q = self.q(x).unflatten(-1, (-1, self.part.head_dim))
        group, layer = self.place.group, self.place.layer
        options = {"scale": self.scale, "softcap": self.part.softcap}
        y = paged_attention(q, None, None, step.pages, layer, step.cross_reads[group], **options)
        return self.out(y.flatten(1))


class PlaceAllocator:
    """Assigns places to the attention layers of a model, in order."""

    def __init__(self, layout: Layout) -> None:
        self._free = iter(places(layout))
        self._last: Place | None = None

    def take(self, part: Attention) -> Place | None:
        """Return the next place; None without a KV cache. Cross-attention shares that of the preceding attention."""
        if not part.causal and not part.source:
            return None
        if not part.source:
            self._last = next(self._free)
        return self._last


class ResidualBlockLayer:
    """last(x + scale · after(body(before(x)))); several bodies are summed."""

    def __init__(self, part: ResidualBlock, path: str, world: World, taken: PlaceAllocator) -> None:
        self.scale = part.scale
        self.before = NormLayer(part.before, path) if part.before is not None else None
        self.after = NormLayer(part.after, path) if part.after is not None else None
        self.last = NormLayer(part.last, path) if part.last is not None else None
        self.bodies: list[AttentionLayer | CrossAttentionLayer | MLPLayer | ExpertsLayer] = []
        for body in bodies(part):
            match body:
                case Attention(source=True):
                    place = taken.take(body)
                    assert place is not None, "self-attention precedes cross-attention in a block"
                    self.bodies.append(CrossAttentionLayer(body, path, world, place))
                case Attention():
                    self.bodies.append(AttentionLayer(body, path, world, taken.take(body)))
                case MLP():
                    self.bodies.append(MLPLayer(body, path, world))
                case Experts():
                    self.bodies.append(ExpertsLayer(body, path, world))

    @property
    def loadables(self) -> list[Loadable]:
        norms = [norm for norm in (self.before, self.after, self.last) if norm is not None]
        return [*norms, *(layer for body in self.bodies for layer in body.loadables)]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Add to x in place, unless there is a norm of the sum."""
        read = x if self.before is None else self.before(x)
        y = self.bodies[0](read, step)
        for body in self.bodies[1:]:
            y = y.add_(body(read, step))
        if self.after is not None:
            y = self.after(y)
        x = x.add_(y, alpha=self.scale)
        return x if self.last is None else self.last(x)
