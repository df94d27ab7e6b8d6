"""bitsandbytes: NF4 and FP4 with a scale for consecutive numbers of the matrix, and LLM.int8 with one per output.

4 bits  w = absmax of the block · code of 4 bits, two per byte, the high half first; blocks cross rows. The 16 codes are
        in quant_map, the size of a block in quant_state (JSON as bytes). With double quantization absmax is itself
        nested_quant_map[byte] · nested_absmax of its block + nested_offset.
8 bits  w = q · SCB / 127

Triton kernels multiply by the codes of 4 bits, by blocks of 64 inputs of an output, so a matrix whose blocks cross rows
is dequantized; compiled kernels do not, because the numbers of the codes are no whole numbers.

Projections without the tensors of the format are plain: loaders skip layers that no list names. Source: bitsandbytes
0.50, functional.QuantState and nn.Linear8bitLt; transformers integrations/bitsandbytes.py.
"""

import json
import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from engine.formats.format import Format, Method, Settings, Stored, StoredMatrix, one_of, refuse, words
from engine.formats.integers import signed
from engine.formats.native import Executor, GgmlBlocks, Groups, Native
from kernels.ggml_layout import layout_of
from kernels.plane_layout import FP4, NF4

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.ggml_blocks import BlockWeight

BLOCK, NESTED_BLOCK = 64, 256  # the library's defaults
BYTES = ("U8", "I8", "BF16", "F16", "F32")  # types in which `bnb_4bit_quant_storage` may store the bytes
SIZES = {"uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
LARGEST = 127


@dataclass(frozen=True)
class FourBits(Format):
    kind: str = "nf4"
    nested: bool = False
    storage: str = "uint8"
    crosses_rows: bool = False  # blocks do

    needs_inputs: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"4 bits ({self.kind}), groups of {BLOCK}{', with quantized scales' if self.nested else ''}"

    def for_inputs(self, inputs: int) -> Format:
        return replace(self, crosses_rows=inputs % BLOCK > 0)

    def named(self, path: str, tensors: Container[str]) -> Format | None:
        return self if f"{path}.{self._state}" in tensors else None

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        blocks = words(rows * inputs, BLOCK)
        found = {
            "weight": Stored((words(rows * inputs, 2 * SIZES[self.storage]), 1), BYTES, flat=True),
            "weight.absmax": Stored((blocks,), ("U8",) if self.nested else ("F32",), any_shape=True),
            "weight.quant_map": Stored((16,), ("F32",)),
            self._state: Stored((128,), ("U8",), any_shape=True),
        }
        if self.nested:
            found["weight.nested_absmax"] = Stored((words(blocks, NESTED_BLOCK),), ("F32",), any_shape=True)
            found["weight.nested_quant_map"] = Stored((256,), ("F32",))
        return found

    def on(self, executor: Executor) -> Native | None:
        own = GgmlBlocks(self.kind.upper())
        return own if own.roles(executor) and not self.crosses_rows else None

    def blocks(self, matrix: StoredMatrix) -> "BlockWeight":
        """Raises CheckpointError for blocks that cross rows, and for other numbers of the codes than usual."""
        import torch

        from kernels.ggml_blocks import BlockWeight

        kind, inputs = self.kind.upper(), layout_of(self.kind.upper()).inputs
        scales, size = self._scales(matrix)
        if matrix.inputs % size or size % inputs:
            self._refuse(matrix, f"has blocks of {size} numbers and {matrix.inputs} inputs")
        if matrix.read("weight.quant_map").tolist() != torch.tensor(NF4 if self.kind == "nf4" else FP4).tolist():
            self._refuse(matrix, f"has other numbers than those of {self.kind} in quant_map")
        raw = self._octets(matrix)
        turned = (raw << 4 | raw >> 4).view(matrix.rows, -1, inputs // 2)
        each = scales.repeat_interleave(size // inputs).view(matrix.rows, -1, 1)
        blocks = torch.cat((each.float().contiguous().view(torch.uint8), turned), 2)
        return BlockWeight(blocks.flatten(1), kind, matrix.inputs)

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        import torch

        count, raw = matrix.rows * matrix.inputs, self._octets(matrix)
        codes = torch.stack((raw >> 4, raw & 15), 1).flatten()[:count]
        values = matrix.read("weight.quant_map")[codes.int()]
        scales, size = self._scales(matrix)
        return (values * _blocks(matrix, "absmax", scales, size, count)).view(matrix.rows, matrix.inputs)

    def _octets(self, matrix: StoredMatrix) -> "Tensor":
        import torch

        return matrix.read("weight").contiguous().view(torch.uint8).flatten()

    def _scales(self, matrix: StoredMatrix) -> "tuple[Tensor, int]":
        """Return the scales of the blocks, and the size of a block."""
        state, scales = self._read_state(matrix), matrix.read("weight.absmax").flatten()
        if self.nested:
            wide = _spread(matrix, "nested_absmax", state["nested_blocksize"], len(scales))
            table = matrix.read("weight.nested_quant_map")
            scales = table[scales.int()] * wide + state["nested_offset"]
        return scales, state["blocksize"]

    def _refuse(self, matrix: StoredMatrix, what: str) -> NoReturn:
        raise matrix.error(
            f"{matrix.path} {what}, by which Triton kernels do not multiply; set hardware.kernels to torch"
        )

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def _read_state(self, matrix: StoredMatrix) -> dict[str, Any]:
        needed: dict[str, type] = {"blocksize": int, "shape": list}
        needed |= {"nested_blocksize": int, "nested_offset": float} if self.nested else {}
        try:
            state = json.loads(bytes(matrix.read(self._state).tolist()))
            whole = all(isinstance(state[key], of) for key, of in needed.items())
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole or state["blocksize"] < 1 or (self.nested and state["nested_blocksize"] < 1):
            raise matrix.error(f"{matrix.path}.{self._state} lacks {', '.join(needed)}, or is damaged; copy it again")
        if state["shape"] != [matrix.rows, matrix.inputs]:
            raise matrix.error(
                f"{matrix.path}.{self._state} says shape {state['shape']}, but config.json implies "
                f"{[matrix.rows, matrix.inputs]}"
            )
        return dict(state)


def _spread(matrix: StoredMatrix, name: str, size: int, count: int) -> "Tensor":
    return _blocks(matrix, name, matrix.read(f"weight.{name}").flatten(), size, count)


def _blocks(matrix: StoredMatrix, name: str, scales: "Tensor", size: int, count: int) -> "Tensor":
    """Return the scale of each of `count` numbers."""
    if len(scales) != math.ceil(count / size):
        raise matrix.error(f"{matrix.path}.weight.{name} has {len(scales)} scales for {count:,} in blocks of {size}")
    return scales.repeat_interleave(size)[:count]


@dataclass(frozen=True)
class EightBits(Format):
    native: Groups = Groups(8, None)

    scale: ClassVar[str] = "SCB"
    scale_type: ClassVar[str] = "F32"

    def named(self, path: str, tensors: Container[str]) -> Format | None:
        return self if f"{path}.SCB" in tensors else None

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        return {
            "weight": Stored((rows, inputs), ("I8",)),
            "SCB": Stored((rows,), ("F32", "F16")),
            "weight_format": Stored((1,), ("U8",), optional=True),
        }

    def unpack(self, matrix: StoredMatrix) -> Any:
        if matrix.has("weight_format") and bool(matrix.read("weight_format").any()):
            raise matrix.error(
                f"{matrix.path}.weight_format is not 0: its rows are tiled for a GPU; save the checkpoint with "
                "bitsandbytes 0.45 or newer"
            )
        return signed(matrix.read("weight"), matrix.read("SCB").float().view(-1, 1) / LARGEST, None)


def _format(settings: Settings, group: str) -> Format:
    if settings.get("load_in_8bit"):
        return EightBits()
    if not settings.get("load_in_4bit"):
        refuse("load_in_4bit", settings.get("load_in_4bit"), "it or load_in_8bit must be true")
    kind = one_of("bnb_4bit_quant_type", settings.get("bnb_4bit_quant_type", "fp4"), ("nf4", "fp4"))
    storage = one_of("bnb_4bit_quant_storage", settings.get("bnb_4bit_quant_storage") or "uint8", tuple(SIZES))
    return FourBits(None, kind, settings.get("bnb_4bit_use_double_quant") is True, storage)


METHOD = Method(
    name="bitsandbytes",
    format=_format,
    advice="bitsandbytes",
    table=(
        (
            "bitsandbytes, `load_in_4bit`",
            "nf4 and fp4, also with double quantization",
            "4 bits on GPUs; on a CPU, and with blocks that cross rows, dequantized",
        ),
        ("bitsandbytes, `load_in_8bit`", "8 bits per output; activations as with all integers", "8 bits"),
    ),
)
