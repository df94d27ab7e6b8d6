"""Types of ggml, as in GGUF files: blocks of numbers, each with its scale. Source: gguf 0.19.

Q4_0                  blocks of 32 with a float16 scale, kept as integers of 4 bits
Q8_0, Q8_K            blocks of 32 and 256, kept as integers of 8 bits
Q2_K … Q6_K           blocks of 256 with sub-blocks of 16 or 32, which have a scale and some of them a minimum
Q4_1, Q5_0, Q5_1      blocks of 32 with a float16 scale, and a minimum if they end in 1
IQ4_NL, IQ4_XS        blocks of 32 and 256; codes are indices of a table of 16 integers
MXFP4                 blocks of 32 with a power of two
others                dequantized by the package gguf
F32, F16, BF16        plain numbers; a format only if their rows are permuted

Kernels multiply by the types from Q2_K to MXFP4 in their own format: compiled kernels by blocks as in the file
(kernels/ggml_layout.py), Triton kernels by the same bits in planes (kernels/plane_layout.py).

llama.cpp's converter permutes the rows of Llama's q and k from halves to interleaved pairs in each head; `heads` is the
number of heads of such a matrix.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.formats.format import PLAIN, Format, Stored, StoredMatrix
from engine.formats.native import Executor, GgmlBlocks, Groups, Native
from kernels.ggml_layout import LAYOUTS

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ggml_blocks import BlockWeight
    from kernels.stored_codes import StoredCodes

BLOCK = 32


@dataclass(frozen=True)
class Permuted(Format):
    """Numbers of any type. heads: rows of this many heads are permuted; 0: no."""

    heads: int = 0

    is_quantized: ClassVar[bool] = False

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        return self.rows(matrix.read("weight"))

    def bias(self, bias: "Tensor") -> "Tensor":
        return self.rows(bias)

    def rows(self, rows: "Tensor") -> "Tensor":
        """Permute rows from interleaved pairs back to the two halves of each head."""
        if not self.heads:
            return rows
        return rows.reshape(self.heads, -1, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2).contiguous()


@dataclass(frozen=True)
class Blocks(Permuted):
    """Blocks of a type that the package gguf dequantizes. type: multiplied by kernels, or ""."""

    type: str = ""

    is_quantized: ClassVar[bool] = True
    float16_pages: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.type or "other types"

    @property
    def quantizable(self) -> bool:
        return True

    def on(self, executor: Executor) -> Native | None:
        own = GgmlBlocks(self.type) if self.type else None
        return own if own is not None and own.roles(executor) else super().on(executor)

    def blocks(self, matrix: StoredMatrix) -> "BlockWeight":
        from kernels.ggml_blocks import BlockWeight

        return BlockWeight(self.rows(matrix.read("weight").view(matrix.rows, -1)), self.type, matrix.inputs)

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        return self.rows(_restored(matrix, "weight", matrix.inputs).view(matrix.rows, matrix.inputs))


@dataclass(frozen=True)
class LatentHalves(Format):
    """The projection from the latent vector to keys and values (MLA) as two tensors of any type: of the keys
    (transposed), [heads, inputs, keys], and of the values [heads, values, inputs]. keys, values: elements of a head."""

    heads: int = 0
    keys: int = 0
    values: int = 0

    matrix: ClassVar[str] = "k_b"

    def __str__(self) -> str:
        return "two tensors, of keys and of values"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        shapes = {"k_b": (self.heads, inputs, self.keys), "v_b": (self.heads, self.values, inputs)}
        return {name: Stored(shape, ()) for name, shape in shapes.items()}

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        import torch

        keys = _restored(matrix, "k_b", self.keys).view(self.heads, matrix.inputs, self.keys).transpose(1, 2)
        values = _restored(matrix, "v_b", matrix.inputs).view(self.heads, self.values, matrix.inputs)
        return torch.cat((keys, values), 1).flatten(0, 1)


@dataclass(frozen=True)
class IntegerBlocks(Blocks):
    """Blocks of `size` numbers in `bytes` bytes, whose integers and scales kernels multiply by."""

    native: Groups = Groups(8, BLOCK)

    size: ClassVar[int] = BLOCK

    def __str__(self) -> str:
        return self.type or str(self.native)

    def integers(self, raw: "Tensor") -> "tuple[StoredCodes, Tensor]":
        """Return the integers and the scales, [outputs, groups]. raw: [outputs, blocks, bytes]."""
        raise NotImplementedError

    def unpack(self, matrix: StoredMatrix) -> Any:
        from kernels.quantisation import Int4Weight, Int8Weight

        raw = self.rows(matrix.read("weight").view(matrix.rows, matrix.inputs // self.size, -1))
        values, scales = self.integers(raw)
        assert self.native.group is not None, "blocks have scales of their own"
        if self.native.bits == 4:
            return Int4Weight(values, scales, None, self.native.group)
        return Int8Weight(values, scales, self.native.group)

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        return Format.dequantize(self, matrix)


class Q4_0(IntegerBlocks):
    def integers(self, raw: "Tensor") -> "tuple[StoredCodes, Tensor]":
        from kernels.stored_codes import StoredCodes

        return StoredCodes(raw[:, :, 2:], "halves", 4, raw.shape[1] * self.size), _half_float(raw)


class Q8_0(IntegerBlocks):
    def integers(self, raw: "Tensor") -> "tuple[StoredCodes, Tensor]":
        return _signed(raw[:, :, 2:]), _half_float(raw)


class Q8K(IntegerBlocks):
    """A float32 scale, 256 integers, and their sums, which are not needed."""

    size: ClassVar[int] = 256
    scale_type: ClassVar[str] = "F32"

    def integers(self, raw: "Tensor") -> "tuple[StoredCodes, Tensor]":
        import torch

        return _signed(raw[:, :, 4:260]), raw[:, :, :4].contiguous().view(torch.float32).flatten(1)


def _signed(octets: "Tensor") -> "StoredCodes":
    """Return the integers of [outputs, blocks, integers]."""
    import torch

    from kernels.stored_codes import StoredCodes

    return StoredCodes(octets.view(torch.int8), "signed", 8, octets.shape[1] * octets.shape[2])


def _restored(matrix: StoredMatrix, suffix: str, inputs: int) -> "Tensor":
    """Return the values of a tensor of any type, [rows, inputs] float32. Raises CheckpointError if the package gguf
    does not know its type."""
    import torch

    kind, raw = matrix.type(suffix), matrix.read(suffix)
    if kind in PLAIN:
        return raw.float().reshape(-1, inputs)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        values = dequantize(raw.view(-1, inputs // block * size).numpy(), GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError) as error:
        raise matrix.error(f"{matrix.path}.{suffix} is of type {kind}; gguf cannot dequantize it") from error
    return torch.from_numpy(values)


def _half_float(raw: "Tensor") -> "Tensor":
    """Return the float16 at the beginning of each block, [outputs, blocks]."""
    import torch

    return raw[:, :, :2].contiguous().view(torch.float16).flatten(1)


INTEGERS: dict[str, tuple[type[IntegerBlocks], Groups]] = {
    "Q4_0": (Q4_0, Groups(4, BLOCK)),
    "Q8_0": (Q8_0, Groups(8, BLOCK)),
    "Q8_K": (Q8K, Groups(8, 256)),
}
UNREAD = ("Q8_1", "Q1_0", "I8", "I16", "I32", "I64")  # types of matrices that neither kernels nor the package read


def format_of(kind: str, heads: int) -> Format | None:
    """Return the format of a matrix of a ggml type, or None for plain numbers in their own order."""
    if kind in PLAIN:
        return Permuted(heads=heads) if heads else None
    if kind in INTEGERS:
        made, native = INTEGERS[kind]
        return made(native, heads)
    return Blocks(heads=heads, type=kind if kind in LAYOUTS else "")
