"""Types of ggml, as in GGUF files: blocks of numbers, each with its scale. Source: gguf 0.19.

Q4_0, Q8_0      blocks of 32 with a float16 scale, kept as integers
other types     dequantized by the package gguf
F32, F16, BF16  plain numbers; a format only if their rows are permuted

llama.cpp's converter permutes the rows of Llama's q and k from halves to interleaved pairs in each head; `heads` is the
number of heads of such a matrix.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.formats.format import PLAIN, Format, StoredMatrix
from engine.formats.native import Groups

if TYPE_CHECKING:
    from torch import Tensor

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
    """Blocks of a type that the package gguf dequantizes."""

    is_quantized: ClassVar[bool] = True
    float16_pages: ClassVar[bool] = True
    requires: ClassVar[str] = "gguf"

    def __str__(self) -> str:
        return "other types"

    @property
    def quantizable(self) -> bool:
        return True

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind, raw = matrix.type("weight"), matrix.read("weight")
        try:
            values = dequantize(raw.view(matrix.rows, -1).numpy(), GGMLQuantizationType[kind])
        except (KeyError, NotImplementedError) as error:
            raise matrix.error(f"{matrix.path}.weight is of type {kind}; gguf cannot dequantize it") from error
        return self.rows(torch.from_numpy(values))


@dataclass(frozen=True)
class IntegerBlocks(Blocks):
    """A float16 scale and the integers of each block. Q4_0 has the first half of them in the low four bits of its bytes
    and the second half in the high ones; Q8_0 has int8."""

    native: Groups = Groups(4, BLOCK)

    requires: ClassVar[str] = ""

    def __str__(self) -> str:
        return str(self.native)

    def unpack(self, matrix: StoredMatrix) -> Any:
        import torch

        from kernels.quantisation import Int4Weight, Int8Weight

        raw = matrix.read("weight").view(matrix.rows, matrix.inputs // BLOCK, -1)
        scales, body = raw[:, :, :2].contiguous().view(torch.float16)[:, :, 0], raw[:, :, 2:]
        scales = self.rows(scales)
        if self.native.bits == 8:
            return Int8Weight(self.rows(body.contiguous().view(torch.int8).flatten(1)), scales, BLOCK)
        values = torch.cat((body & 15, body >> 4), 2).flatten(1)
        return Int4Weight(self.rows(values), scales, None, BLOCK)

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        return Format.dequantize(self, matrix)


INTEGERS = {"Q4_0": Groups(4, BLOCK), "Q8_0": Groups(8, BLOCK)}


def format_of(kind: str, heads: int) -> Format | None:
    """Return the format of a matrix of a ggml type, or None for plain numbers in their own order."""
    if kind in PLAIN:
        return Permuted(heads=heads) if heads else None
    return IntegerBlocks(INTEGERS[kind], heads) if kind in INTEGERS else Blocks(heads=heads)
