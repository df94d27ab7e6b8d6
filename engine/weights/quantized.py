"""Quantized projections of a checkpoint: a rank's share of a fused matrix as an executor multiplies by it (`native`),
or dequantized, as if the checkpoint had the weights in float32 (`read`). `engine.formats` has the formats.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.formats.format import Format
from engine.formats.fp8 import NUMBERS
from engine.formats.native import Executor, GgmlBlocks, Groups, Native, Role, Segmented, runs
from engine.models.parts import Model
from engine.models.quantized import Quantization
from engine.models.sources import join, sources
from engine.models.stored import native_paths, stored_tensors
from engine.weights.files import Weights
from engine.weights.fused import NativeWeight, fused_native
from engine.weights.random import RandomWeights
from engine.weights.slot import Slots
from kernels.ggml_blocks import BlockWeight
from kernels.joined import Joined


@dataclass(frozen=True)
class _Matrix:
    """The tensors of one matrix (`engine.formats.format.StoredMatrix`)."""

    path: str
    rows: int
    inputs: int
    weights: Weights | RandomWeights

    def read(self, suffix: str) -> Tensor:
        return self.weights.read(f"{self.path}.{suffix}")

    def has(self, suffix: str) -> bool:
        return self.weights.has(f"{self.path}.{suffix}")

    def type(self, suffix: str) -> str:
        return self.weights.type(f"{self.path}.{suffix}")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.weights.file(self.path)}: {text}")


class QuantizedWeights:
    """Same interface as `Weights`. `shapes`: shapes of the declared tensors."""

    def __init__(
        self, weights: Weights | RandomWeights, quantization: Quantization, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.quantization = quantization
        self.read_names: set[str] = set()
        self._weights, self._shapes = weights, shapes

    def read(self, name: str) -> Tensor:
        """Return a declared tensor; a quantized weight is dequantized to float32."""
        self.read_names.add(name)
        path, _, suffix = name.rpartition(".")
        format = self.quantization.formats.get(path)
        if format is not None and suffix == "weight":
            return format.dequantize(self._matrix(path, format))
        found = self._weights.read(name)
        return found if format is None or suffix != "bias" else format.bias(found)

    def release(self) -> None:
        """Make the pages of all tensors read so far non-resident."""
        self._weights.release()

    def restores(self, path: str) -> bool:
        """Return whether a weight is dequantized when it is read."""
        return self.quantization.restores(path)

    def unpacked(self, path: str) -> NativeWeight:
        """Return the numbers of a projection for the product of its format. Raises CheckpointError if they contradict
        the declaration."""
        self.read_names.add(f"{path}.weight")
        format = self.quantization.formats[path]
        if isinstance(self._weights, RandomWeights) and isinstance(format.native, Groups):
            return self._weights.integers(path, *self._shapes[f"{path}.weight"], format.native)
        found: NativeWeight = format.unpack(self._matrix(path, format))
        return found

    def native(
        self, path: str, matrix: Slots, executor: Executor, device: torch.device, role: Role = "projection"
    ) -> NativeWeight | Joined | Iterator[NativeWeight | Joined] | None:
        """Return a rank's share of a fused matrix, or None if the executor needs it dequantized; several for a
        `Segmented` product, each read when it is asked for. Raises CheckpointError if the share would divide groups or
        blocks."""
        names = tuple(join(path, piece.source) for piece in matrix.pieces)
        native = self.quantization.native(names, executor)
        if native is None or role not in native.roles(executor):
            return None
        if not isinstance(native, Segmented):
            return self._share(native, names, matrix, executor, device)
        return (
            self._share(one, names[run], replace(matrix, pieces=matrix.pieces[run]), executor, device)
            for run, one in self._segments(names, executor)
        )

    def block_table(self, path: str, executor: Executor) -> BlockWeight | None:
        """Return an embedding in blocks of ggml if the executor looks its rows up, else None."""
        format = self.quantization.formats.get(path)
        native = None if format is None else format.on(executor)
        if format is None or not isinstance(native, GgmlBlocks):
            return None
        self.read_names.add(f"{path}.weight")
        if isinstance(self._weights, RandomWeights):
            return self._weights.blocks(path, *self._shapes[f"{path}.weight"], native.type)
        return format.blocks(self._matrix(path, format))

    def _segments(self, names: tuple[str, ...], executor: Executor) -> list[tuple[slice, Native]]:
        """Return runs of sources with their common product."""
        natives = [self.quantization.native((name,), executor) for name in names]
        found = []
        for run in runs([one for one in natives if one is not None]):
            native = self.quantization.native(names[run], executor)
            assert native is not None, "segments have products"
            found.append((run, native))
        return found

    def _share(
        self, native: Native, names: tuple[str, ...], matrix: Slots, executor: Executor, device: torch.device
    ) -> NativeWeight | Joined:
        parts = {name: self._numbers(name, executor) for name in dict.fromkeys(names)}
        return fused_native(native, names, parts, matrix, device)

    def _numbers(self, path: str, executor: Executor) -> NativeWeight:
        return self.block_table(path, executor) or self.unpacked(path)

    def _matrix(self, path: str, format: Format) -> _Matrix:
        rows, inputs = self._shapes[f"{path}.weight"]
        matrix = _Matrix(path, rows, inputs, self._weights)
        extra_bias = (
            f"{path}.bias" not in self._shapes and "bias" in format.tensors(rows, inputs) and matrix.has("bias")
        )
        if extra_bias and bool(matrix.read("bias").any()):
            raise matrix.error(f"has {path}.bias, but config.json makes {path} without a bias")
        return matrix


def random_weights(
    model: Model, quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> RandomWeights | QuantizedWeights:
    """Return random weights in the checkpoint's format where Triton kernels multiply by it, else plain ones."""
    kept = (
        {}
        if quantization is None
        else {path: quantization.formats[path] for path in native_paths(model, quantization, "triton")}
    )
    if not kept or quantization is None:
        shapes = {name: one.shape for name, one in stored_tensors(model, None).items()}
        return RandomWeights(shapes, dtype, device)
    own = Quantization(quantization.method, kept)
    stored = stored_tensors(model, own)
    shapes = {name: one.shape for name, one in stored.items()}
    fp8 = frozenset(name for name, one in stored.items() if one.types == NUMBERS)
    return QuantizedWeights(RandomWeights(shapes, dtype, device, fp8), own, sources(model))
