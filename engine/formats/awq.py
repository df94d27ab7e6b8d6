"""awq: integers packed eight per word, with zero points. Source: AutoAWQ, modules/linear; GPTQModel 7.7.

gemm  along the outputs, in ORDER: qweight [inputs, outputs / 8], qzeros and scales [groups, outputs]
gemv  along the inputs, in their order: qweight [outputs, inputs / 8]; qzeros and scales [outputs, groups], padded
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, group_size, refuse, words
from engine.formats.integers import Integers, Numbers, unpacked
from engine.formats.native import Groups

if TYPE_CHECKING:
    from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each four bits of a word, from the lowest bits on


@dataclass(frozen=True)
class Awq(Integers):
    matrix: ClassVar[str] = "qweight"
    scale: ClassVar[str] = "scales"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        groups = words(inputs, self.stored.group or inputs)
        return {
            "qweight": Stored((inputs, words(rows, len(ORDER))), ("I32",)),
            "qzeros": Stored((groups, words(rows, len(ORDER))), ("I32",)),
            "scales": Stored((groups, rows), SCALES),
            # Some exporters write a bias of zeros for a projection without bias.
            "bias": Stored((rows,), optional=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        places = [ORDER.index(output) for output in range(len(ORDER))]

        def outputs(suffix: str) -> "Tensor":
            words_of = matrix.read(suffix)
            numbers = unpacked(words_of, 4).view(len(words_of), -1, len(places))
            return numbers[:, :, places].flatten(1)[:, : matrix.rows].T

        return Numbers(outputs("qweight"), matrix.read("scales").T, outputs("qzeros").to(torch.int16))


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
        values = unpacked(matrix.read("qweight"), 4)[:, : matrix.inputs]
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
