"""A quantization format as another package declares it: w = (q - 128) · 2^e with q in bytes and e for 32 inputs."""

from dataclasses import dataclass
from typing import Any

from engine.formats.format import Format, Method, Settings, Stored, StoredMatrix, one_of, words
from engine.formats.native import Groups

GROUP = 32


@dataclass(frozen=True)
class Toy(Format):
    def __str__(self) -> str:
        return "8 bits, powers of two"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        return {
            "weight": Stored((rows, inputs), ("U8",)),
            "exponents": Stored((rows, words(inputs, GROUP)), ("I8",)),
        }

    def unpack(self, matrix: StoredMatrix) -> Any:
        import torch

        from kernels.quantisation import Int8Weight

        values = (matrix.read("weight").to(torch.int16) - 128).to(torch.int8)
        return Int8Weight(values, torch.exp2(matrix.read("exponents").float()).half(), GROUP)


def _format(settings: Settings, group: str) -> Toy:
    one_of("scales", settings.get("scales"), ("exponents",))
    if settings.get("wide"):  # kernels need two groups together, so ranks must not divide them
        return Toy(Groups(8, 2 * GROUP))
    return Toy(Groups(8, GROUP) if settings.get("products", True) else None)


METHOD = Method("toy", _format)
