"""Quantized projections of a checkpoint, read as integers without rounding.

engine/models/schemes.py defines the formats, engine/models/stored.py their tensors. Matrices stay integers for compiled
kernels (`numbers`), and fp8 for Triton kernels (`fused_fp8`). For all others, a projection reads as if the checkpoint
had it in float32 (`read`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.api.errors import CheckpointError
from engine.models.parts import Model
from engine.models.schemes import AWQ_ORDER, CHANNEL_GROUP, Quantization, Scheme, alike, alike_fp8
from engine.models.sources import join, sources
from engine.models.stored import FP8, stored_tensors
from engine.weights.files import Weights
from engine.weights.fp8 import fused_fp8, restored
from engine.weights.random import RandomWeights
from engine.weights.slot import Slots
from kernels.fp8 import Fp8Weight
from kernels.quantisation import Int4Weight, Int8Weight

Numbers = Int4Weight | Int8Weight
MIDDLE = {4: 8, 8: 128}  # zero point of unsigned integers without stored zero points
BLOCK = 32  # inputs per block of Q4_0 and Q8_0


class QuantizedWeights:
    """Same interface as `Weights`. `shapes`: shapes of the declared tensors."""

    def __init__(
        self, weights: Weights | RandomWeights, quantization: Quantization, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.schemes = quantization.schemes
        self.read_names: set[str] = set()
        self._weights, self._shapes = weights, shapes

    def read(self, name: str) -> Tensor:
        """Return a declared tensor; a quantized weight is dequantized to float32."""
        self.read_names.add(name)
        path = name.removesuffix(".weight")
        scheme = self.schemes.get(path) if path != name else self._turned_bias(name)
        if scheme is None:
            return self._weights.read(name)
        if scheme.form == "fp8":
            return restored(self._weights.read, path, scheme)
        if not scheme.bits:
            return _turned(self._restored(name), scheme.heads)
        return self.numbers(path).restored()

    def release(self) -> None:
        """Make the pages of all tensors read so far non-resident."""
        self._weights.release()

    def restores(self, path: str) -> bool:
        """Return whether a weight is dequantized when it is read."""
        scheme = self.schemes.get(path)
        return scheme is not None and scheme.form != "turned"

    def numbers(self, path: str) -> Numbers:
        """Return the integers of a projection. Raises CheckpointError if they contradict the declaration."""
        scheme, shape = self.schemes[path], self._shapes[f"{path}.weight"]
        self.read_names.add(f"{path}.weight")
        self._check_bias(path)
        match scheme.form:
            case "gptq":
                return self._gptq(path, scheme, *shape)
            case "awq":
                return self._awq(path, scheme, *shape)
            case "packed":
                return self._packed(path, scheme, *shape)
            case "int8":
                weight = self._weights.read(f"{path}.weight")
                return _eight(weight, self._weights.read(f"{path}.weight_scale"), scheme.group, None)
            case "gguf" | "turned":
                return self._blocks(path, scheme, *shape)
            case "fp8":
                raise AssertionError(f"{path} is in fp8, which has no integers")

    def fused_fp8(self, path: str, matrix: Slots, device: torch.device) -> Fp8Weight | None:
        """Return a rank's share of a fused fp8 matrix. None if some source is not fp8, or sources have different forms.
        Raises CheckpointError if the share would divide blocks."""
        names = [join(path, piece.source) for piece in matrix.pieces]
        if not alike_fp8(self.schemes.get(name) for name in names):
            return None
        self.read_names |= {f"{name}.weight" for name in names}
        return fused_fp8(self._weights.read, path, matrix, self.schemes, device)

    def fused(self, path: str, matrix: Slots) -> Numbers | None:
        """Return a rank's share of a fused matrix, or None if a source is dequantized or the sources' forms differ."""
        names = [join(path, piece.source) for piece in matrix.pieces]
        if not alike(self.schemes.get(name) for name in names):
            return None
        found = {name: self.numbers(name) for name in dict.fromkeys(names)}
        pieces = [
            self._share(name, found[name], slice(piece.start, piece.start + piece.rows), matrix)
            for name, piece in zip(names, matrix.pieces, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else self._joined(names, pieces)

    def _share(self, name: str, whole_matrix: Numbers, rows: slice, matrix: Slots) -> Numbers:
        numbers = _rows(whole_matrix, rows)
        first, count, whole = matrix.first_input, matrix.inputs, numbers.values.shape[1]
        if count == whole:
            return numbers
        values = numbers.values[:, first : first + count].contiguous()
        if numbers.order is not None or (self.schemes[name].group is not None and count % numbers.group):
            raise CheckpointError(
                f"{self._file(name)}: {name}: a rank's {count} of {whole} inputs are not whole groups of "
                f"{numbers.group}; set hardware.kernels to torch, or lower parallelism.tensor"
            )
        # With one scale per output, all groups are equal, and new ones start at the rank's first input.
        groups = slice(first // numbers.group, first // numbers.group + -(-count // numbers.group))
        if self.schemes[name].group is None:
            groups = slice(-(-count // numbers.group))
        cut = {"values": values, "scales": numbers.scales[:, groups].contiguous()}
        if isinstance(numbers, Int4Weight) and numbers.zeros is not None:
            cut["zeros"] = numbers.zeros[:, groups].contiguous()
        return replace(numbers, **cut)

    def _joined(self, names: list[str], pieces: list[Numbers]) -> Numbers:
        values = torch.cat([piece.values for piece in pieces])
        kinds = {piece.scales.dtype for piece in pieces}
        wide = kinds.pop() if len(kinds) == 1 else torch.float32
        scales = torch.cat([piece.scales.to(wide) for piece in pieces])
        first = pieces[0]
        if any(not _same(piece.order, first.order) for piece in pieces):
            raise CheckpointError(
                f"{self._file(names[0])}: {', '.join(dict.fromkeys(names))} group the same inputs in different orders "
                "(act order), which compiled kernels do not support; set hardware.kernels to torch"
            )
        zeros = None
        if isinstance(first, Int4Weight):
            fours = [piece for piece in pieces if isinstance(piece, Int4Weight)]
            if any(piece.zeros is not None for piece in fours):
                zeros = torch.cat([_zeros_of(piece) for piece in fours])
            return Int4Weight(values, scales, zeros, first.group, first.order)
        return Int8Weight(values, scales, first.group, first.order)

    def _gptq(self, path: str, scheme: Scheme, rows: int, inputs: int) -> Numbers:
        read = self._weights.read
        # [words of inputs, outputs]: transposed first, so that the inputs of an output are contiguous
        values = _unpacked(read(f"{path}.qweight").T, scheme.bits)[:, :inputs]
        zeros = _unpacked(read(f"{path}.qzeros"), scheme.bits)[:, :rows].T.to(torch.int16) + scheme.zero_offset
        return self._numbers(path, scheme, values, read(f"{path}.scales").T, zeros, f"{path}.g_idx")

    def _awq(self, path: str, scheme: Scheme, rows: int, inputs: int) -> Numbers:
        read = self._weights.read
        places = [AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))]

        def outputs(name: str) -> Tensor:
            return _unpacked(read(name), 4).unflatten(1, (-1, len(places)))[:, :, places].flatten(1)[:, :rows].T

        zeros = outputs(f"{path}.qzeros").to(torch.int16)
        return self._numbers(path, scheme, outputs(f"{path}.qweight"), read(f"{path}.scales").T, zeros, None)

    def _packed(self, path: str, scheme: Scheme, rows: int, inputs: int) -> Numbers:
        read, shape = self._weights.read, f"{path}.weight_shape"
        if shape in self._weights.tensors and read(shape).tolist() != [rows, inputs]:
            raise CheckpointError(
                f"{self._file(path)}: {shape} is {read(shape).tolist()}, but config.json makes it {[rows, inputs]}"
            )
        values = _unpacked(read(f"{path}.weight_packed"), scheme.bits)[:, :inputs]
        zeros = None
        if scheme.zeros:
            zeros = _unpacked(read(f"{path}.weight_zero_point").T, scheme.bits)[:, :rows].T.to(torch.int16)
        return self._numbers(path, scheme, values, read(f"{path}.weight_scale"), zeros, f"{path}.weight_g_idx")

    def _numbers(
        self, path: str, scheme: Scheme, values: Tensor, scales: Tensor, zeros: Tensor | None, index: str | None
    ) -> Numbers:
        """Assemble the integers. values: [outputs, inputs] unsigned. scales, zeros: [outputs, groups]. index: name of
        the
        optional tensor with the group of each input."""
        middle = MIDDLE[scheme.bits]
        if zeros is not None and not scheme.zeros and bool((zeros == middle).all()):
            zeros = None
        order = None if index is None else self._order(path, scheme, index, values.shape[1])
        values = values if order is None else values[:, order.long()]
        if scheme.bits == 8:
            if zeros is not None:
                raise CheckpointError(
                    f"{self._file(path)}: {path} has zero points other than {middle}, though its settings say that it "
                    "is symmetric; 8 bits are supported without"
                )
            return _eight((values.to(torch.int16) - middle).to(torch.int8), scales, scheme.group, order)
        group = scheme.group
        if group is None:
            group, groups = CHANNEL_GROUP, -(-values.shape[1] // CHANNEL_GROUP)
            scales = scales.expand(-1, groups)
            zeros = None if zeros is None else zeros.expand(-1, groups)
        kept = None if zeros is None else zeros.to(torch.uint8).contiguous()
        return Int4Weight(values.contiguous(), scales.contiguous(), kept, group, order)

    def _order(self, path: str, scheme: Scheme, index: str, inputs: int) -> Tensor | None:
        """Return the inputs in group order, [inputs] int32; None if groups are contiguous or there is only one."""
        if scheme.group is None or index not in self._weights.tensors:
            return None
        groups = self._weights.read(index).long()
        order = groups.argsort(stable=True)
        wanted = torch.arange(inputs) // scheme.group
        if not torch.equal(groups[order], wanted):
            raise CheckpointError(
                f"{self._file(path)}: {index} does not put {scheme.group} inputs in each group, which is not supported"
            )
        if torch.equal(groups, wanted):
            return None
        if not scheme.ordered:
            raise CheckpointError(
                f"{self._file(path)}: {index} has groups that are not contiguous, but quantization_config says "
                "desc_act: false; set it to true if the file is right"
            )
        return order.to(torch.int32)

    def _blocks(self, path: str, scheme: Scheme, rows: int, inputs: int) -> Numbers:
        """Read ggml blocks: a float16 scale and the integers. Q4_0 has the first half of them in the low four bits of
        its
        bytes and the second half in the high ones; Q8_0 has int8."""
        raw = self._weights.read(f"{path}.weight").view(rows, inputs // BLOCK, -1)
        scales = raw[:, :, :2].contiguous().view(torch.float16)[:, :, 0]
        body = raw[:, :, 2:]
        scales = _turned(scales, scheme.heads)
        if scheme.bits == 8:
            return Int8Weight(_turned(body.contiguous().view(torch.int8).flatten(1), scheme.heads), scales, BLOCK)
        values = torch.cat((body & 15, body >> 4), 2).flatten(1)
        return Int4Weight(_turned(values, scheme.heads), scales, None, BLOCK)

    def _restored(self, name: str) -> Tensor:
        """Return a tensor of a GGUF file: a plain one in its own type, others dequantized to float32 by ggml's
        formulas."""
        info = self._weights.tensors[name]
        raw = self._weights.read(name)
        if raw.dtype != torch.uint8:
            return raw
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = raw.view(info.shape[0], -1).numpy()
        try:
            return torch.from_numpy(dequantize(rows, GGMLQuantizationType[info.dtype]))
        except (KeyError, NotImplementedError) as error:
            raise CheckpointError(f"{info.file}: {name} is of type {info.dtype}; gguf cannot dequantize it") from error

    def _turned_bias(self, name: str) -> Scheme | None:
        """Return the scheme of a bias whose rows are permuted like those of its weight."""
        scheme = self.schemes.get(name.removesuffix(".bias"))
        return replace(scheme, bits=0) if scheme is not None and scheme.heads and name.endswith(".bias") else None

    def _check_bias(self, path: str) -> None:
        name = f"{path}.bias"
        if name not in self._shapes and name in self._weights.tensors and bool(self._weights.read(name).any()):
            raise CheckpointError(f"{self._file(path)}: has {name}, but config.json makes {path} without a bias")

    def _file(self, path: str) -> Path:
        return next(info.file for name, info in self._weights.tensors.items() if name.startswith(f"{path}."))


def random_weights(
    model: Model, quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> RandomWeights | QuantizedWeights:
    """Return random weights in the checkpoint's form if that is fp8, else plain ones."""
    schemes = {} if quantization is None else quantization.schemes
    eight = {path: scheme for path, scheme in schemes.items() if scheme.form == "fp8"}
    if not eight or quantization is None:
        return RandomWeights(sources(model), dtype, device)
    own = replace(quantization, schemes=eight)
    stored = stored_tensors(model, own)
    shapes = {name: one.shape for name, one in stored.items()}
    fp8 = frozenset(name for name, one in stored.items() if one.types == FP8)
    return QuantizedWeights(RandomWeights(shapes, dtype, device, fp8), own, sources(model))


def _eight(values: Tensor, scales: Tensor, group: int | None, order: Tensor | None) -> Numbers:
    if group is None:
        group, scales = CHANNEL_GROUP, scales.expand(-1, -(-values.shape[1] // CHANNEL_GROUP))
    return Int8Weight(values.contiguous(), scales.contiguous(), group, order)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack [rows, words] int32 to [rows, 32 / bits numbers per word, lowest bits first] uint8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), 2).flatten(1)


def _turned(rows: Tensor, heads: int) -> Tensor:
    """Permute rows from interleaved pairs back to the two halves of each head; heads 0: unchanged."""
    if not heads:
        return rows
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _rows(numbers: Numbers, rows: slice) -> Numbers:
    values, scales = numbers.values[rows], numbers.scales[rows]
    if isinstance(numbers, Int4Weight):
        return replace(
            numbers, values=values, scales=scales, zeros=None if numbers.zeros is None else numbers.zeros[rows]
        )
    return replace(numbers, values=values, scales=scales)


def _zeros_of(numbers: Int4Weight) -> Tensor:
    return numbers.zeros if numbers.zeros is not None else torch.full(numbers.scales.shape, 8, dtype=torch.uint8)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
