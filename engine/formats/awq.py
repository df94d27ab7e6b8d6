"""awq: integers packed eight per word, with zero points. Source: AutoAWQ, modules/linear; GPTQModel 7.7.

gemm  along the outputs (`across` in kernels/stored_codes.py): qweight [inputs, outputs / 8], qzeros and scales
      [groups, outputs]
gemv  along the inputs, in their order: qweight [outputs, inputs / 8]; qzeros and scales [outputs, groups], padded
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, group_size, refuse, words
from engine.formats.integers import Integers, Numbers, codes_of, unpacked
from engine.formats.native import Groups

EACH = 8  # integers of a word


@dataclass(frozen=True)
class Awq(Integers):
    matrix: ClassVar[str] = "qweight"
    scale: ClassVar[str] = "scales"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        groups = words(inputs, self.stored.group or inputs)
        return {
            "qweight": Stored((inputs, words(rows, EACH)), ("I32",)),
            "qzeros": Stored((groups, words(rows, EACH)), ("I32",)),
            "scales": Stored((groups, rows), SCALES),
            # Some exporters write a bias of zeros for a projection without bias.
            "bias": Stored((rows,), optional=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        from kernels.stored_codes import StoredCodes

        def outputs(suffix: str) -> StoredCodes:
            packed = matrix.read(suffix)
            return StoredCodes(packed.T, "across", 4, len(packed))

        values, zeros = outputs("qweight"), outputs("qzeros").unsigned()[: matrix.rows].to(torch.int16)
        exact = values if matrix.rows % EACH == 0 else values.unsigned()[: matrix.rows]
        return Numbers(exact, matrix.read("scales").T, zeros)


@dataclass(frozen=True)
class Gemv(Integers):
    matrix: ClassVar[str] = "qweight"
    scale: ClassVar[str] = "scales"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        width = self._zero_words(inputs)
        return {
            "qweight": Stored((rows, words(inputs, 8)), ("I32",)),
            "qzeros": Stored((rows, width), ("I32",)),
            "scales": Stored((rows, 8 * width), SCALES),
            "bias": Stored((rows,), optional=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        groups = words(matrix.inputs, self.stored.group or matrix.inputs)
        zeros = unpacked(matrix.read("qzeros"), 4)[:, :groups].to(torch.int16)
        values = codes_of(matrix.read("qweight"), 4, matrix.inputs)
        return Numbers(values, matrix.read("scales")[:, :groups], zeros)

    def _zero_words(self, inputs: int) -> int:
        """Return the words for the zero points of an output, padded for the kernel (calculate_zeros_width)."""
        group = self.stored.group or inputs
        multiple = max(1, 128 // group)
        return words(words(inputs // group, 8), multiple) * multiple


VERSIONS = {"gemm": Awq, "gemv": Gemv}


def _format(settings: Settings, group: str) -> Format:
    if settings.get("bits", 4) != 4:
        refuse("bits", settings["bits"], "awq is supported with 4 bits")
    version = str(settings.get("version", "gemm")).lower()
    if version not in VERSIONS:
        refuse("version", settings["version"], f"supported are {' and '.join(VERSIONS)}")
    if settings.get("zero_point", True) is not True:
        refuse("zero_point", settings["zero_point"], "it must be true")
    stored = Groups(4, group_size(settings.get("group_size", 128), "group_size"), zeros=True)
    return VERSIONS[version].of(stored)


METHOD = Method(name="awq", format=_format, table=(("awq", "4 bits, versions gemm and gemv", "4 bits"),))
