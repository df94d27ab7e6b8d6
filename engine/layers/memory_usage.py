"""Measured memory of a loaded model, by the parts that are planned (engine/models/footprint.py).

Every tensor is counted once, even if it is shared. Tensors in a mapped file are counted separately: their pages belong
to the page cache, which drops them if memory is short.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from engine.layers.block import AttentionLayer, CrossAttentionLayer, ResidualBlockLayer, Sinks
from engine.layers.encoder import EncoderLayers
from engine.layers.linear import LinearLayer
from engine.layers.mlp import ExpertsLayer, MLPLayer
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.layers.pooler import PoolerLayer
from engine.layers.vocabulary import Vocabulary
from kernels.cpu.packing import Packed
from kernels.fp8 import Fp8Weight

MAPS = Path("/proc/self/maps")
_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class MemoryUsage:
    """Memory of the weights in bytes."""

    parts: dict[str, int]  # allocated, by part
    mapped: int  # used directly in the checkpoint file

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory_usage(
    vocabulary: Vocabulary,
    residual_blocks: Sequence[ResidualBlockLayer],
    norm: NormLayer | None,
    pooler: PoolerLayer | None = None,
    encoder: EncoderLayers | None = None,
) -> MemoryUsage:
    files = _Files()
    parts: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    mapped = 0
    tensors = _tensors(vocabulary, residual_blocks, norm, pooler)
    for part, tensor in tensors if encoder is None else chain(tensors, _encoder(encoder)):
        parts.setdefault(part, 0)
        place = tensor.data_ptr(), tensor.nbytes
        if place in seen or not tensor.nbytes:
            continue
        seen.add(place)
        if tensor.device.type == "cpu" and place[0] in files:
            mapped += tensor.nbytes
        else:
            parts[part] += tensor.nbytes
    return MemoryUsage(parts, mapped)


def _tensors(
    vocabulary: Vocabulary,
    residual_blocks: Sequence[ResidualBlockLayer],
    norm: NormLayer | None,
    pooler: PoolerLayer | None,
) -> Iterator[tuple[str, Tensor]]:
    tables = (vocabulary.table, vocabulary.positions, vocabulary.segments)
    yield from (("embedding", table) for table in tables if table is not None)
    if vocabulary.norm is not None:
        yield from _norm(vocabulary.norm)
    if vocabulary.head is not None:
        yield from (("head", tensor) for tensor in _pieces(vocabulary.head, vocabulary.bias))
    if pooler is not None:
        yield from (("head", tensor) for tensor in pooler.tensors)
    yield from _blocks(residual_blocks)
    if norm is not None:
        yield from _norm(norm)


def _encoder(encoder: EncoderLayers) -> Iterator[tuple[str, Tensor]]:
    if encoder.embedding.positions is not None:
        yield "embedding", encoder.embedding.positions
    for norm in (encoder.embedding.norm, encoder.norm):
        if norm is not None:
            yield from _norm(norm)
    yield from _blocks(encoder.residual_blocks)


def _blocks(residual_blocks: Sequence[ResidualBlockLayer]) -> Iterator[tuple[str, Tensor]]:
    for block in residual_blocks:
        for layer in block.norms:
            yield from _norm(layer)
        for body in block.bodies:
            match body:
                case AttentionLayer() | CrossAttentionLayer():
                    for one in body.loadables:
                        yield from _loadable("attention", one)
                case MLPLayer():
                    for one in body.loadables:
                        yield from _loadable("mlp", one)
                case ExpertsLayer():
                    for one in body.loadables:
                        yield from _loadable("experts", one)


def _loadable(
    part: str, layer: LinearLayer | NormLayer | HeadNorm | ProjectionNorm | Sinks
) -> Iterator[tuple[str, Tensor]]:
    match layer:
        case LinearLayer():
            yield from ((part, tensor) for tensor in _pieces(layer.weight, layer.bias))
        case Sinks():
            yield part, layer.logits
        case NormLayer():
            yield from _norm(layer)
        case HeadNorm():
            yield "norms", layer.weight
        case ProjectionNorm():
            yield from (("norms", weight) for weight in layer.weights)


def _norm(layer: NormLayer) -> Iterator[tuple[str, Tensor]]:
    yield from (("norms", tensor) for tensor in (layer.weight, layer.bias) if tensor is not None)


def _pieces(weight: Tensor | Packed | Fp8Weight, bias: Tensor | None) -> Iterator[Tensor]:
    whole: tuple[Tensor | None, ...]
    match weight:
        case Packed():
            whole = weight.data, weight.order
        case Fp8Weight():
            whole = weight.tensors
        case Tensor():
            whole = (weight,)
    yield from (tensor for tensor in (*whole, bias) if tensor is not None)


class _Files:
    """Address ranges of this process that are mapped files (proc(5), maps)."""

    def __init__(self) -> None:
        found = sorted(
            (int(low, 16), int(high, 16)) for low, high, node in _LINE.findall(MAPS.read_text()) if node != "0"
        )
        self._starts, self._ends = [low for low, _ in found], [high for _, high in found]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]
