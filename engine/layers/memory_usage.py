"""Measured memory of a loaded model, by the parts that are planned (engine/lowering/footprint.py).

Every tensor is counted once, even if it is shared. Tensors in a mapped file are counted separately: their pages belong
to the page cache, which drops them if memory is short.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.layers.audio import AudioLayer
from engine.layers.draft_head import DraftHead
from engine.layers.linear import LinearLayer, Weight
from engine.layers.loaded import (
    ActivationLayer,
    BiasLayer,
    BlockWeights,
    BoundsLayer,
    ExpertCorrection,
    HeadWeights,
    Loadable,
    LoadedWeights,
    LocalLayer,
    MultiplierLayer,
    ParameterLayer,
    Sinks,
    SlopedBiases,
    Slopes,
)
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.norm import HeadNorm, NormLayer, ProjectionNorm
from engine.layers.pooler import PoolerLayer
from engine.layers.towers import Towers
from engine.layers.vocabulary import EncoderEmbedding, TokenRows, Vocabulary
from engine.lowering.operations import Matrix
from engine.lowering.program import Program
from kernels.block_weights import PlaneWeight, SegmentedWeight
from kernels.cpu.packing import Packed, Segments
from kernels.fp8 import Fp8Weight
from kernels.integers import IntegerWeight

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
    program: Program,
    weights: LoadedWeights,
    pooler: PoolerLayer | None = None,
    adapters: LoadedAdapters = NO_ADAPTERS,
    towers: Towers | None = None,
    draft_head: DraftHead | None = None,
) -> MemoryUsage:
    files = _Files()
    parts: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    mapped = 0
    for part, tensor in (
        *_tensors(program, weights, pooler, adapters),
        *_tower_tensors(towers),
        *_draft_head_tensors(draft_head),
    ):
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
    program: Program, weights: LoadedWeights, pooler: PoolerLayer | None, adapters: LoadedAdapters
) -> Iterator[tuple[str, Tensor]]:
    for weight in program.weights:
        part = weight.part if isinstance(weight, Matrix) else "norms"
        yield from _loaded(part, weights.by_name[weight.name])
    if pooler is not None:
        yield from (("head", tensor) for tensor in pooler.tensors)
    for layer in adapters.layers.values():
        yield from (("adapters", tensor) for tensor in layer.tensors)


def _tower_tensors(towers: Towers | None) -> Iterator[tuple[str, Tensor]]:
    for tower in () if towers is None else towers.towers:
        own = (
            tower.positions,
            tower.class_token,
            tower.newline,
            *tower.standard,
            *(tensor for both in tower.ends.values() for tensor in both),
            *(() if tower.audio is None else tower.audio.tensors),
        )
        yield from (("tower", tensor) for tensor in (*own, *tower.queries.values()) if tensor is not None)
        for layer in tower.layers:
            yield from (("tower", tensor) for _, tensor in _loaded("tower", layer))


def _draft_head_tensors(draft_head: DraftHead | None) -> Iterator[tuple[str, Tensor]]:
    if draft_head is None:
        return
    for layer in draft_head.layers:
        yield from _loaded("embedding", layer)
    if draft_head.ids is not None:
        yield "head", draft_head.ids


def _loaded(part: str, layer: Loadable) -> Iterator[tuple[str, Tensor]]:
    """part: of a matrix."""
    match layer:
        case LinearLayer():
            yield from ((part, tensor) for tensor in _pieces(layer.weight, layer.bias))
        case Sinks():
            yield "attention", layer.logits
        case ExpertCorrection():
            yield "experts", layer.values
        case ActivationLayer():
            yield "mlp", layer.numbers
        case Slopes():
            yield "attention", layer.slopes
        case BiasLayer() | SlopedBiases():
            yield "attention", layer.biases
        case LocalLayer():
            yield from (("attention", tensor) for tensor in (layer.factors, layer.distances))
        case TokenRows():
            yield "embedding", layer.table
        case MultiplierLayer():
            yield "norms", layer.tensor
        case BoundsLayer():
            yield "norms", layer.limits
        case ParameterLayer():
            yield "recurrent", layer.tensor
        case HeadWeights(whole=Tensor() as whole):
            yield "attention", whole
        case HeadWeights():
            yield from (("attention", one.data) for one in (*layer.absorbing, *layer.expanding))
        case BlockWeights(whole=Tensor() as whole):
            yield "recurrent", whole
        case BlockWeights():
            yield from (("recurrent", one.data) for one in layer.packed)
        case NormLayer() | HeadNorm():
            yield from (("norms", tensor) for tensor in (layer.weight, layer.bias) if tensor is not None)
        case ProjectionNorm():
            yield from (("norms", weight) for weight in layer.weights)
        case Vocabulary():
            tables = (layer.table, layer.positions, layer.segments)
            if layer.shared_table is None:
                yield from (("embedding", table) for table in tables if table is not None)
            if layer.head is not None and layer.shared_head is None:
                yield from (("head", tensor) for tensor in _pieces(layer.head, layer.bias))
        case AudioLayer():
            yield from (("embedding", tensor) for tensor in (*layer.weights, *layer.biases, layer.positions))
        case EncoderEmbedding(positions=Tensor() as positions):
            yield "embedding", positions


def _pieces(weight: Weight, bias: Tensor | None) -> Iterator[Tensor]:
    whole: tuple[Tensor | None, ...]
    match weight:
        case Packed():
            whole = weight.data, weight.order
        case Segments():
            whole = tuple(one.data for one in weight.pieces)
        case Fp8Weight() | IntegerWeight() | PlaneWeight() | SegmentedWeight():
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
