"""hqq: w = (q - zero) · scale with zero points that are not whole numbers, so no kernel multiplies by it.

The matrix is cut into groups of consecutive numbers: axis 1 has a group in each row of [groups, group_size], axis 0 in
each column of [group_size, groups]. Rows of this matrix are packed, the first part of the rows in the highest bits:

8, 4, 2, 1 bits  a byte has 8 / bits numbers
3 bits           an int32 has 10 numbers, from bit 27 on down; missing rows are zeros

Settings are in quant_config, for all projections or by the end of their paths. Source: hqq 0.2.8, core/bitpack.py.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from engine.api.errors import CheckpointError
from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, refuse, whole_number, words
from engine.formats.layers import entries, not_skipped

if TYPE_CHECKING:
    from torch import Tensor

EACH = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # numbers of a stored one, by bits
UNIFORM = "weight_quant_params"
# Tensors that describe the matrix to the library; the settings say the same.
DESCRIPTIONS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
ANY = ("U8", "I32", "I64", "F32", "BOOL")


@dataclass(frozen=True)
class Hqq(Format):
    bits: int = 4
    group: int = 64
    axis: int = 1

    matrix: ClassVar[str] = "W_q"

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group}"

    def named(self, path: str, tensors: Container[str]) -> Format | None:
        return self if f"{path}.W_q" in tensors else None

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        groups = words(rows * inputs, self.group)
        height, width = (groups, self.group) if self.axis == 1 else (self.group, groups)
        shared = (groups, 1) if self.axis == 1 else (1, groups)
        found = {
            "W_q": Stored((words(height, EACH[self.bits]), width), ("I32",) if self.bits == 3 else ("U8",)),
            "scale": Stored(shared, SCALES),
            "zero": Stored(shared, SCALES),
        }
        return found | {name: Stored((1,), ANY, optional=True, any_shape=True) for name in DESCRIPTIONS}

    def dequantize(self, matrix: StoredMatrix) -> "Tensor":
        import torch

        count, width = EACH[self.bits], self.bits
        stored = matrix.read("W_q")
        parts = [stored >> (width * (count - 1 - part)) & ((1 << width) - 1) for part in range(count)]
        height = self.group if self.axis == 0 else words(matrix.rows * matrix.inputs, self.group)
        values = torch.cat(parts)[:height].float()
        values = (values - matrix.read("zero").float()) * matrix.read("scale").float()
        return values.reshape(matrix.rows, matrix.inputs)


def _params(settings: Settings) -> Mapping[str, Any]:
    """Return the settings of quantized projections by the ends of their paths; "": all."""
    found = settings.get("quant_config")
    if not isinstance(found, dict) or not found:
        return {"": settings}
    if UNIFORM in found:
        return {"": found}
    return found


def _format(settings: Settings, group: str) -> Hqq:
    own = _params(settings)[group]
    params = own.get(UNIFORM, own)
    for key in ("scale_quant_params", "zero_quant_params"):
        if own.get(key):
            refuse(key, own[key], "it must be left out")
    bits, axis = params.get("nbits", 4), params.get("axis", 1)
    if bits not in EACH:
        refuse("nbits", bits, f"supported are {', '.join(map(str, sorted(EACH)))}")
    if axis not in (0, 1):
        refuse("axis", axis, "supported are 0 and 1")
    return Hqq(None, bits, whole_number(params.get("group_size"), "group_size"), axis)


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    params = _params(settings)
    if not all(one is None or isinstance(one, dict) for one in params.values()):
        raise CheckpointError(f"{where}.quant_config must be an object of settings, or of settings by layer")
    ends = tuple(name for name, one in params.items() if one is not None)
    found = not_skipped(settings, paths, [head, *entries(settings, "skip_modules", where)], where)
    first = {path: next((name for name in ends if path.endswith(name)), None) for path in found}
    return {path: name for path, name in first.items() if name is not None}


METHOD = Method(
    name="hqq",
    format=_format,
    groups=_groups,
    table=(("hqq", "1, 2, 3, 4 and 8 bits, both axes; also settings by layer", "dequantized"),),
)
