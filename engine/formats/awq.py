"""awq: integers packed along the outputs, eight per word in ORDER (version gemm). Source: AutoAWQ."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, group_size, refuse, words
from engine.formats.integers import unpacked, unsigned
from engine.formats.native import Groups

if TYPE_CHECKING:
    from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each four bits of a word, from the lowest bits on


@dataclass(frozen=True)
class Awq(Format):
    native: Groups

    matrix: ClassVar[str] = "qweight"
    scale: ClassVar[str] = "scales"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        groups = words(inputs, self.native.group or inputs)
        return {
            "qweight": Stored((inputs, words(rows, len(ORDER))), ("I32",)),
            "qzeros": Stored((groups, words(rows, len(ORDER))), ("I32",)),
            "scales": Stored((groups, rows), SCALES),
            # Some exporters write a bias of zeros for a projection without bias.
            "bias": Stored((rows,), optional=True),
        }

    def unpack(self, matrix: StoredMatrix) -> Any:
        import torch

        places = [ORDER.index(output) for output in range(len(ORDER))]

        def outputs(suffix: str) -> "Tensor":
            words_of = matrix.read(suffix)
            numbers = unpacked(words_of, 4).view(len(words_of), -1, len(places))
            return numbers[:, :, places].flatten(1)[:, : matrix.rows].T

        zeros = outputs("qzeros").to(torch.int16)
        return unsigned(matrix, self.native, outputs("qweight"), matrix.read("scales").T, zeros, "")


def _format(settings: Settings, group: str) -> Awq:
    if settings.get("bits", 4) != 4:
        refuse("bits", settings["bits"], "awq is supported with 4 bits")
    version = settings.get("version", "gemm")
    if str(version).lower() != "gemm":
        refuse("version", version, "supported is gemm")
    if settings.get("zero_point", True) is not True:
        refuse("zero_point", settings["zero_point"], "it must be true")
    return Awq(Groups(4, group_size(settings.get("group_size", 128), "group_size"), zeros=True))


METHOD = Method(name="awq", format=_format, table=(("awq", "4 bits, version gemm", "4 bits"),))
