"""Formats to which `quantization.weights` and `quantization.head` quantize plain matrices while they are loaded.

int8, int4  integers in groups of inputs, for compiled and Triton kernels (kernels/quantisation.py)
int6        blocks of 64 inputs, for compiled kernels (kernels/ggml_blocks.py)
fp8         float8_e4m3fn with a scale for each output, for Triton kernels (kernels/fp8.py)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.formats.native import E4M3, Executor, GgmlBlocks, Groups, Native, Role
from kernels.ggml_layout import LAYOUTS

if TYPE_CHECKING:
    from torch import Tensor

SCALE_SIZE = 2  # bytes of a group's scale: float16 with 4 bits, bfloat16 with 8
ROUNDED_ROWS = 4096  # most rows that are quantized at a time (kernels/quantisation.py)


@dataclass(frozen=True)
class LoadFormat:
    """A format that is computed from plain numbers. A group is the number of inputs that share a scale."""

    native: Callable[[int], Native]  # the product for a group
    quantize: Callable[["Tensor", int], Any]  # weight [outputs, inputs] and group: the numbers for the product
    loading_bytes: Callable[[int, int, int], int]
    """Return the additional memory for quantizing a matrix: rows, inputs and bytes of a stored number."""
    small_groups: bool = False  # groups are small by default, because few bits need the accuracy
    head: str = "stored"  # format of the head by default
    group: int | None = None  # inputs that share a scale if the format has one size only

    def roles(self, executor: Executor) -> tuple[Role, ...]:
        """Return the matrices that an executor multiplies by in this format."""
        return self.native(0).roles(executor)


def _to_int8(weight: "Tensor", group: int) -> Any:
    from kernels.quantisation import to_int8

    return to_int8(weight, group)


def _to_int4(weight: "Tensor", group: int) -> Any:
    from kernels.cpu.quantize import search_scales
    from kernels.quantisation import to_int4

    return to_int4(weight, group, search_scales)


def _to_int6(weight: "Tensor", group: int) -> Any:
    from kernels.cpu.quantize import search_scales
    from kernels.ggml_blocks import to_int6

    return to_int6(weight, search_scales)


def _to_fp8(weight: "Tensor", group: int) -> Any:
    from kernels.fp8 import to_fp8

    return to_fp8(weight)


def _integer_bytes(rows: int, inputs: int, stored_bytes: int, copies: int) -> int:
    """The matrix twice in its stored type, then its integers in several layouts, and some rows of it in float32 several
    times."""
    elements = rows * inputs
    chunk = min(rows, ROUNDED_ROWS) * inputs * 4 * copies
    return max(2 * stored_bytes * elements, (stored_bytes + 1) * elements + chunk, 6 * elements)


LOAD_FORMATS: Mapping[str, LoadFormat] = MappingProxyType(
    {
        "int8": LoadFormat(
            native=lambda group: Groups(8, group),
            quantize=_to_int8,
            loading_bytes=lambda rows, inputs, stored: _integer_bytes(rows, inputs, stored, 3),
            head="int8",
        ),
        "int6": LoadFormat(
            native=lambda group: GgmlBlocks("INT6"),
            quantize=_to_int6,
            loading_bytes=lambda rows, inputs, stored: _integer_bytes(rows, inputs, stored, 9),
            head="int8",
            group=LAYOUTS["INT6"].inputs,
        ),
        # The head has 8 bits by default, because it selects the token.
        "int4": LoadFormat(
            native=lambda group: Groups(4, group),
            quantize=_to_int4,
            loading_bytes=lambda rows, inputs, stored: _integer_bytes(rows, inputs, stored, 9),
            small_groups=True,
            head="int8",
        ),
        "fp8": LoadFormat(
            native=lambda group: E4M3("channel", "dynamic"),
            quantize=_to_fp8,
            loading_bytes=lambda rows, inputs, stored: inputs * (rows * stored + min(rows, ROUNDED_ROWS) * 4 * 3),
        ),
    }
)


def load_formats(executor: Executor) -> tuple[str, ...]:
    """Return the formats that an executor multiplies by."""
    return tuple(name for name, one in LOAD_FORMATS.items() if one.roles(executor))
