"""fp8: w = scale · q with q in float8_e4m3fn; one scale per matrix, per output or per block of 128 x 128. Numbers in
e5m2 and other blocks are dequantized (floats.py).

Used by method fp8 of transformers and AutoFP8, by compressed-tensors (float-quantized) and by ModelOpt's FP8. Source:
transformers 5, AutoFP8, compressed-tensors 0.20.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from engine.formats.floats import Floats, Number
from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, one_of, refuse, words
from engine.formats.native import E4M3, FP8_BLOCK

NAMES = ("weight_scale", "input_scale")
INVERSES = ("weight_scale_inv", "activation_scale")  # transformers' names; the values are scales, not inverses
NUMBERS = ("F8_E4M3",)
_NUMBERS: dict[str, Number] = {"e4m3": "e4m3", "float8_e4m3fn": "e4m3", "e5m2": "e5m2", "float8_e5m2": "e5m2"}


@dataclass(frozen=True)
class Fp8(Format):
    native: E4M3
    names: tuple[str, str] = NAMES  # tensors of the weight's and the activations' scale

    def named(self, path: str, tensors: Container[str]) -> "Fp8":
        """Scales of entire matrices have either name."""
        inverse = f"{path}.{INVERSES[0]}" in tensors and f"{path}.{NAMES[0]}" not in tensors
        return replace(self, names=INVERSES) if self.native.scales == "tensor" and inverse else self

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        blocks = words(rows, FP8_BLOCK), words(inputs, FP8_BLOCK)
        shape = {"block": blocks, "channel": (rows, 1), "tensor": (1,)}[self.native.scales]
        scale = Stored(shape, (*SCALES, "F8_E8M0") if self.native.scales == "block" else SCALES, flat=True)
        found = {"weight": Stored((rows, inputs), NUMBERS), self.names[0]: scale}
        return found | ({self.names[1]: Stored((1,), SCALES)} if self.native.inputs == "static" else {})

    def unpack(self, matrix: StoredMatrix) -> Any:
        from kernels.fp8 import Fp8Weight

        scales, unit = matrix.read(self.names[0]).float(), 1
        if self.native.scales == "tensor":
            scales, unit = scales.view(1, 1), matrix.rows
        elif self.native.scales == "block":
            scales, unit = scales.view(-1, words(matrix.inputs, FP8_BLOCK)), FP8_BLOCK
        else:
            scales = scales.view(-1, 1)
        static = matrix.read(self.names[1]).float().view(1) if self.native.inputs == "static" else None
        return Fp8Weight(matrix.read("weight"), scales, unit, self.native.inputs is not None, static)


def block_size(key: str, value: Any) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that share a scale."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        refuse(key, value, "it must be a list of two whole numbers above 0, such as [128, 128]")
    return value[0], value[1]


def _format(settings: Settings, group: str) -> Format:
    number = one_of("fmt", settings.get("fmt", "e4m3"), tuple(_NUMBERS))
    one_of("expert_dtype", settings.get("expert_dtype", "fp8"), ("fp8",))
    if settings.get("modules_to_convert"):
        refuse("modules_to_convert", settings["modules_to_convert"], "it must be left out")
    scheme = str(settings.get("activation_scheme", "dynamic")).lower()
    inputs: Any = one_of("activation_scheme", scheme, ("dynamic", "static"))
    block = settings.get("weight_block_size")
    size = (None, None) if block is None else block_size("weight_block_size", block)
    if _NUMBERS[number] == "e4m3" and size == (None, None):
        return Fp8(E4M3("tensor", inputs))
    if _NUMBERS[number] == "e4m3" and size == (FP8_BLOCK, FP8_BLOCK):
        return Fp8(E4M3("block", inputs), INVERSES)
    names = NAMES if block is None else INVERSES
    powers = size[0] == 1 and settings.get("scale_fmt") == "ue8m0"
    return Floats(None, _NUMBERS[number], size, "e8m0" if powers else "float", (names[0], ""), unread=names[1:])


METHOD = Method(
    name="fp8",
    format=_format,
    advice="fp8",
    table=(
        (
            "fp8 (transformers, AutoFP8)",
            "fp8 with scales per matrix or block; activations dynamic or static",
            "fp8",
        ),
        ("fp8", "`e5m2`, and blocks of other sizes", "dequantized"),
    ),
)
