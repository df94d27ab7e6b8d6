"""Floats of 4 and 8 bits with shared scales: w = number · scale of its block · second scale of the matrix.

e4m3, e5m2  one byte. Source: OCP 8-bit Floating Point Specification (OFP8) 1.0
e2m1        two per byte, the low half first; twice a number is an integer. Source: OCP Microscaling Formats (MX) 1.0

Scales are float numbers, e4m3, or powers of two (e8m0: 2^(byte - 127), 255 is NaN). MXFP4 and MXFP8 have e8m0 for each
output and 32 inputs; NVFP4 has e4m3 for 16 inputs and a float32 number for the matrix. Triton kernels multiply by
these three as they are, compiled kernels by MXFP4, because the others have no product of whole numbers with one scale
for 32 inputs. All other kinds are dequantized.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from engine.formats.format import SCALES, Format, Stored, StoredMatrix, words
from engine.formats.integers import signed
from engine.formats.native import Executor, GgmlBlocks, Groups, Native

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ggml_blocks import BlockWeight

MX_GROUP, NV_GROUP = 32, 16
Number = Literal["e4m3", "e5m2", "e2m1"]
Scale = Literal["float", "e4m3", "e8m0"]
NUMBER_TYPES: dict[Number, tuple[str, ...]] = {"e4m3": ("F8_E4M3",), "e5m2": ("F8_E5M2",), "e2m1": ("U8",)}
SCALE_TYPES: dict[Scale, tuple[str, ...]] = {"float": SCALES, "e4m3": ("F8_E4M3",), "e8m0": ("U8", "F8_E8M0")}
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the number of each e2m1 code
MX_BLOCKS = GgmlBlocks("MXFP4")
_KINDS: dict[tuple[str, tuple[int | None, int | None], str], str] = {
    ("e2m1", (1, MX_GROUP), "e8m0"): "MXFP4",
    ("e4m3", (1, MX_GROUP), "e8m0"): "MXFP8",
    ("e2m1", (1, NV_GROUP), "e4m3"): "NVFP4",
}
NOT_A_NUMBER = 255  # e8m0 of NaN


@dataclass(frozen=True)
class Floats(Format):
    number: Number = "e4m3"
    block: tuple[int | None, int | None] = (None, None)  # outputs and inputs that share a scale, None for all
    scales: Scale = "float"
    names: tuple[str, str] = ("weight_scale", "")  # tensors of the scales and of the second scale; "": none
    divides: bool = False  # the second scale is a divisor
    input_factor: str = ""  # tensor [inputs] by which the activations are multiplied before the product; "": none
    unread: tuple[str, ...] = ()  # scales of activations, which are not quantized

    scale_type: ClassVar[str] = "BF16"  # has the range of e8m0

    def __str__(self) -> str:
        outputs, inputs = self.block
        if inputs is None:
            shared = f"one scale per {'matrix' if outputs is None else 'output'}"
        else:
            shared = f"groups of {inputs}" if outputs == 1 else f"blocks of {outputs} x {inputs}"
        return f"{'4 bits' if self.number == 'e2m1' else 'fp8'} ({self.number}), {shared}"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        outputs, group = self.block
        scale, second = self.names
        found = {
            self.matrix: Stored((rows, words(inputs, self._per_byte)), NUMBER_TYPES[self.number]),
            scale: Stored((words(rows, outputs or rows), words(inputs, group or inputs)), SCALE_TYPES[self.scales]),
        }
        if group is None:
            found[scale] = Stored((rows, 1) if outputs == 1 else (1,), SCALE_TYPES[self.scales], flat=True)
        if second:
            found[second] = Stored((1,), SCALES)
        if self.input_factor:
            found[self.input_factor] = Stored((inputs,), SCALES, optional=True)
        return found | {name: Stored((1,), SCALES, optional=True) for name in self.unread}

    def named(self, path: str, tensors: Container[str]) -> Format | None:
        lacks = self.input_factor and f"{path}.{self.input_factor}" not in tensors
        return replace(self, input_factor="") if lacks else self

    def on(self, executor: Executor) -> Native | None:
        own = GgmlBlocks(self._kind) if self._kind else None
        return own if own is not None and own.roles(executor) else super().on(executor)

    def blocks(self, matrix: StoredMatrix) -> "BlockWeight":
        match self._kind:
            case "MXFP8":
                return _mxfp8_blocks(matrix, self.matrix, self.names[0])
            case "NVFP4":
                whole = matrix.read(self.names[1]).float()
                return _nvfp4_blocks(matrix, self.matrix, self.names[0], 1 / whole if self.divides else whole)
        return mx_blocks(matrix, self.matrix, self.names[0])

    def unpack(self, matrix: StoredMatrix) -> Any:
        """Only for the product of `Groups`: e2m1 with scales in e8m0."""
        import torch

        scales = power_of_two(matrix, self.names[0]).to(torch.bfloat16) / 2
        return signed(doubled(matrix.read(self.matrix))[:, : matrix.inputs], scales, MX_GROUP)

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        raw, (scale, second) = matrix.read(self.matrix), self.names
        values = raw.float() if self._per_byte == 1 else doubled(raw)[:, : matrix.inputs].float() / 2
        stored = power_of_two(matrix, scale) if self.scales == "e8m0" else matrix.read(scale).float()
        factors = spread(stored, matrix, self.block)
        if second:
            whole = matrix.read(second).float().view(1, 1)
            factors = factors / whole if self.divides else factors * whole
        values = values * factors
        if self.input_factor and matrix.has(self.input_factor):
            values *= matrix.read(self.input_factor).float()
        return values

    @property
    def _kind(self) -> str:
        """Type of the blocks that kernels multiply by, or ""."""
        return "" if self.input_factor else _KINDS.get((self.number, self.block, self.scales), "")

    @property
    def _per_byte(self) -> int:
        return 2 if self.number == "e2m1" else 1


def mxfp4(**more: Any) -> Floats:
    """Return MXFP4 under the names of `more`."""
    return Floats(Groups(8, MX_GROUP), "e2m1", (1, MX_GROUP), "e8m0", **more)


def spread(scales: "Tensor", matrix: StoredMatrix, block: tuple[int | None, int | None]) -> "Tensor":
    """Return a scale for each number, [outputs, inputs], or a shape that broadcasts to it. scales: one per block."""
    outputs, inputs = block
    if inputs is None:
        return scales.reshape(-1, 1)
    found = scales if outputs == 1 else scales.repeat_interleave(outputs or matrix.rows, 0)[: matrix.rows]
    return found.repeat_interleave(inputs, 1)[:, : matrix.inputs]


def doubled(raw: "Tensor") -> "Tensor":
    """Return twice the e2m1 numbers of bytes, [rows, bytes] → [rows, 2 · bytes] int8."""
    import torch

    codes = torch.stack((raw & 15, raw >> 4), 2).flatten(1)
    return torch.tensor(DOUBLED, dtype=torch.int8)[codes.int()]


def mx_blocks(matrix: StoredMatrix, numbers: str, scales: str) -> "BlockWeight":
    """Return MXFP4 in blocks of ggml, whose bytes have numbers 16 inputs apart. Raises CheckpointError for NaN."""
    import torch

    from kernels.ggml_blocks import BlockWeight

    power_of_two(matrix, scales)
    raw = matrix.read(numbers).flatten(1)
    raw = torch.nn.functional.pad(raw, (0, -raw.shape[1] % (MX_GROUP // 2))).view(len(raw), -1, MX_GROUP // 2)
    codes = torch.stack((raw & 15, raw >> 4), 3).flatten(2)
    halves = codes[:, :, : MX_GROUP // 2] | codes[:, :, MX_GROUP // 2 :] << 4
    blocks = torch.cat((matrix.read(scales).view(torch.uint8).unsqueeze(2), halves), 2)
    return BlockWeight(blocks.flatten(1), MX_BLOCKS.type, matrix.inputs)


def _mxfp8_blocks(matrix: StoredMatrix, numbers: str, scales: str) -> "BlockWeight":
    """Return MXFP8 in blocks (kernels/ggml_layout.py). Raises CheckpointError for NaN."""
    power_of_two(matrix, scales)
    return _side_by_side(matrix, "MXFP8", matrix.read(numbers), matrix.read(scales), MX_GROUP)


def _nvfp4_blocks(matrix: StoredMatrix, numbers: str, scales: str, whole: "Tensor") -> "BlockWeight":
    """Return NVFP4 in blocks (kernels/ggml_layout.py), whose table has doubled numbers. whole: factor of the matrix."""
    made = _side_by_side(matrix, "NVFP4", matrix.read(numbers), matrix.read(scales), NV_GROUP // 2)
    return replace(made, factors=(whole.view(1) / 2).repeat(matrix.rows))


def _side_by_side(matrix: StoredMatrix, kind: str, raw: "Tensor", scales: "Tensor", size: int) -> "BlockWeight":
    """Return blocks of a scale and `size` bytes."""
    import torch

    from kernels.ggml_blocks import BlockWeight

    octets = raw.view(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -octets.shape[1] % size)).reshape(len(octets), -1, size)
    blocks = torch.cat((scales.view(torch.uint8).unsqueeze(2), octets), 2)
    return BlockWeight(blocks.flatten(1), kind, matrix.inputs)


def power_of_two(matrix: StoredMatrix, name: str) -> "Tensor":
    """Return scales of type e8m0 as float32. Raises CheckpointError for NaN."""
    import torch

    raw = matrix.read(name).view(torch.uint8)
    if bool((raw == NOT_A_NUMBER).any()):
        raise matrix.error(f"{matrix.path}.{name} has the byte {NOT_A_NUMBER}, which is not a number")
    return raw.view(torch.float8_e8m0fnu).float()
