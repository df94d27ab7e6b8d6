"""gptq: integers packed along the inputs, zero points minus 1 (v1) or unchanged (gptq_v2), scales [groups, outputs].
With desc_act, g_idx has the group of each input. Source: AutoGPTQ, GPTQModel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, group_size, refuse, words
from engine.formats.integers import unpacked, unsigned
from engine.formats.layers import not_skipped
from engine.formats.native import Groups


@dataclass(frozen=True)
class Gptq(Format):
    native: Groups
    zero_offset: int = 0  # added to stored zero points

    matrix: ClassVar[str] = "qweight"
    scale: ClassVar[str] = "scales"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        each, groups = 32 // self.native.bits, words(inputs, self.native.group or inputs)
        return {
            "qweight": Stored((words(inputs, each), rows), ("I32",)),
            "qzeros": Stored((groups, words(rows, each)), ("I32",)),
            "scales": Stored((groups, rows), SCALES),
            "g_idx": Stored((inputs,), ("I32", "I64"), optional=not self.native.ordered),
            # Some exporters write a bias of zeros for a projection without bias.
            "bias": Stored((rows,), optional=True),
        }

    def unpack(self, matrix: StoredMatrix) -> Any:
        import torch

        read, bits = matrix.read, self.native.bits
        # [words of inputs, outputs]: transposed first, so that the inputs of an output are contiguous
        values = unpacked(read("qweight").T, bits)[:, : matrix.inputs]
        zeros = unpacked(read("qzeros"), bits)[:, : matrix.rows].T.to(torch.int16) + self.zero_offset
        return unsigned(matrix, self.native, values, read("scales").T, zeros, "g_idx")


def _format(settings: Settings, group: str) -> Gptq:
    bits: Any = settings.get("bits")
    symmetric = settings.get("sym", True) is True
    if bits not in (4, 8) or (bits == 8 and not symmetric):
        refuse("bits", bits, "gptq is supported with 4 bits, and with 8 if sym is true")
    version = settings.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        refuse("checkpoint_format", version, "supported are gptq and gptq_v2")
    for key in ("is_marlin_format", "dynamic", "modules_in_block_to_quantize"):
        if settings.get(key):
            refuse(key, settings[key], "it must be left out")
    size = group_size(settings.get("group_size", 128), "group_size")
    native = Groups(bits, size, zeros=not symmetric, ordered=settings.get("desc_act") is True)
    return Gptq(native, zero_offset=1 if version == "gptq" else 0)


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    return not_skipped(settings, paths, [] if settings.get("lm_head") is True else [head], where)


METHOD = Method(
    name="gptq",
    format=_format,
    groups=_groups,
    advice="gptq or awq of 4 bits",
    table=(
        ("gptq (`gptq`, `gptq_v2`)", "4 bits, and 8 if `sym` is true; also `desc_act`", "4 bits; 8 bits in groups"),
    ),
)
