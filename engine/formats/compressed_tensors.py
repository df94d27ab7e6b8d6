"""compressed-tensors, by group of projections and format:

pack-quantized                    q + 2^(bits - 1) packed along the inputs, scales [outputs, groups or 1]
int-quantized, naive-quantized    plain int8
float-quantized, naive-quantized  fp8 (fp8.py)
nvfp4-pack-quantized              e2m1 with scales in e4m3 and a divisor of the matrix (floats.py)
mxfp4-pack-quantized, mxfp8-quantized  e2m1 and e4m3 with scales in e8m0 (floats.py)

A projection is quantized if it matches a `targets` entry of a group and no entry of `ignore`. An entry is a module's
path, `re:` and a regular expression that matches from the start of the path, or a torch class. Source:
compressed-tensors 0.20, compressed_tensors.utils.match.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from engine.api.errors import CheckpointError
from engine.formats.floats import MX_GROUP, NV_GROUP, Floats
from engine.formats.format import (
    SCALES,
    Format,
    Method,
    Settings,
    Stored,
    StoredMatrix,
    UnsupportedFormat,
    group_size,
    one_of,
    refuse,
    whole_number,
    words,
)
from engine.formats.fp8 import Fp8, block_size
from engine.formats.integers import Integers, Numbers, codes_of, packed_words, signed_codes, unpacked, words_of
from engine.formats.layers import entries, pattern
from engine.formats.native import E4M3, FP8_BLOCK, Groups

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.quantisation import Int4Weight, Int8Weight

_CLASSES = ("Linear", "Module")
_BITS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Packed(Integers):
    matrix: ClassVar[str] = "weight_packed"
    scale: ClassVar[str] = "weight_scale"
    index: ClassVar[str] = "weight_g_idx"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        bits, groups = self.stored.bits, words(inputs, self.stored.group or inputs)
        found = {
            "weight_packed": Stored((rows, words_of(inputs, bits)), ("I32",)),
            "weight_scale": Stored((rows, groups), SCALES),
            "weight_shape": Stored((2,), ("I64", "I32"), optional=True),
        }
        if self.stored.zeros:
            found["weight_zero_point"] = Stored((words_of(rows, bits), groups), ("I32",))
        if self.stored.ordered:
            found["weight_g_idx"] = Stored((inputs,), ("I32", "I64"))
        return found

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        read, bits, declared = matrix.read, self.stored.bits, [matrix.rows, matrix.inputs]
        if matrix.has("weight_shape") and read("weight_shape").tolist() != declared:
            raise matrix.error(
                f"{matrix.path}.weight_shape is {read('weight_shape').tolist()}, but config.json makes it {declared}"
            )
        values = codes_of(read("weight_packed"), bits, matrix.inputs)
        zeros = None
        if self.stored.zeros:
            zeros = unpacked(read("weight_zero_point").T, bits)[:, : matrix.rows].T.to(torch.int16)
        return Numbers(values, read("weight_scale"), zeros)


@dataclass(frozen=True)
class Int8(Integers):
    scale: ClassVar[str] = "weight_scale"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        groups = words(inputs, self.stored.group or inputs)
        found = {"weight": Stored((rows, inputs), ("I8",)), "weight_scale": Stored((rows, groups), SCALES)}
        if self.stored.zeros:
            found["weight_zero_point"] = Stored((rows, groups), ("I8",))
        given = self.stored.inputs == "static"
        found["input_scale"] = Stored((1,), SCALES, optional=not given)
        return found | {"input_zero_point": Stored((1,), ("I8",), optional=True)}

    def static_scale(self, matrix: StoredMatrix) -> "Tensor | None":
        return matrix.read("input_scale").float().view(1) if self.stored.inputs == "static" else None

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        zeros = matrix.read("weight_zero_point").to(torch.int16) + 128 if self.stored.zeros else None
        return Numbers(signed_codes(matrix.read("weight")), matrix.read("weight_scale"), zeros)


def _format(settings: Settings, name: str) -> Format:
    group = settings["config_groups"][name]
    form = group.get("format") or settings.get("format")
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and settings[key].get("format") != "dense":
            refuse(key, settings[key], "it must be left out")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if isinstance(weights, dict) and weights.get("type") == "float":
        return _floats(group, form, name)
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        refuse(f"{name}.weights", weights, "supported are whole numbers, and float of 8 bits")
    if inputs is not None and (inputs.get("num_bits") != 8 or inputs.get("type") != "int"):
        refuse(f"{name}.input_activations", inputs, "supported are none, and int8")
    bits, symmetric, strategy = weights.get("num_bits"), weights.get("symmetric", True), weights.get("strategy")
    if strategy not in ("group", "channel"):
        refuse(f"{name}.weights.strategy", strategy, "supported are group and channel")
    size = None if strategy == "channel" else group_size(weights.get("group_size"), f"{name}.weights.group_size")
    ordered = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")
    if form == "pack-quantized" and bits in _BITS:
        return Packed.of(Groups(bits, size, zeros=not symmetric, ordered=ordered))
    if form in ("int-quantized", "naive-quantized") and bits == 8 and not ordered:
        return Int8.of(Groups(8, size, zeros=not symmetric, inputs=_int8_inputs(inputs, size, symmetric=symmetric)))
    raise UnsupportedFormat(
        f"config_groups.{name} is {form} of {bits} bits; supported are pack-quantized of {_BITS[0]} to {_BITS[-1]} "
        "bits, and int-quantized of 8"
    )


@dataclass(frozen=True)
class PackedFloats(Floats):
    matrix: ClassVar[str] = "weight_packed"


_INPUT_SCALES = ("input_scale", "input_global_scale")
# Formats of floats with scales of groups, and the sizes of their groups.
_GROUPED: Mapping[str, tuple[int, Floats]] = {
    "nvfp4-pack-quantized": (
        NV_GROUP,
        PackedFloats(
            None,
            "e2m1",
            (1, NV_GROUP),
            "e4m3",
            ("weight_scale", "weight_global_scale"),
            divides=True,
            unread=_INPUT_SCALES,
        ),
    ),
    "mxfp4-pack-quantized": (
        MX_GROUP,
        PackedFloats(Groups(8, MX_GROUP), "e2m1", (1, MX_GROUP), "e8m0", unread=_INPUT_SCALES),
    ),
    "mxfp8-quantized": (MX_GROUP, Floats(None, "e4m3", (1, MX_GROUP), "e8m0", unread=_INPUT_SCALES)),
}


def _floats(group: Settings, form: Any, name: str) -> Format:
    weights, inputs = group["weights"], group.get("input_activations")
    if weights.get("symmetric", True) is not True or weights.get("dynamic"):
        refuse(f"{name}.weights", weights, "supported are symmetric ones that are stored")
    if group.get("output_activations"):
        refuse(f"{name}.output_activations", group["output_activations"], "it must be left out")
    if form in _GROUPED:
        size, format = _GROUPED[form]
        if weights.get("group_size") != size:
            refuse(f"{name}.weights.group_size", weights.get("group_size"), f"{form} has groups of {size}")
        return format
    if form not in ("float-quantized", "naive-quantized") or weights.get("num_bits") != 8:
        raise UnsupportedFormat(
            f"config_groups.{name} is {form} of {weights.get('num_bits')} bits in floats; supported are "
            f"float-quantized of 8, {', '.join(_GROUPED)}"
        )
    scales = one_of(f"{name}.weights.strategy", weights.get("strategy"), ("tensor", "channel", "group", "block"))
    if scales == "group":
        size = whole_number(weights.get("group_size"), f"{name}.weights.group_size")
        return Floats(None, "e4m3", (1, size), unread=_INPUT_SCALES)
    rounded = None if inputs is None else _fp8_inputs(inputs, name)
    if scales == "block":
        block = block_size(f"{name}.weights.block_structure", weights.get("block_structure"))
        if block != (FP8_BLOCK, FP8_BLOCK):
            return Floats(None, "e4m3", block, unread=_INPUT_SCALES)
    return Fp8(E4M3(scales, rounded))


def _int8_inputs(inputs: Settings | None, size: int | None, *, symmetric: bool) -> Literal["static", "dynamic"] | None:
    """Return how activations are rounded for products of int8. None for products with unrounded activations, which are
    more precise: groups of inputs, zero points, and settings without a product of int8."""
    if inputs is None or size is not None or not symmetric or inputs.get("symmetric", True) is not True:
        return None
    if inputs.get("dynamic") is True:
        return "dynamic" if inputs.get("strategy", "token") == "token" else None
    return "static" if not inputs.get("dynamic") and inputs.get("strategy") == "tensor" else None


def _fp8_inputs(inputs: Settings, name: str) -> Literal["static", "dynamic"]:
    key = f"{name}.input_activations"
    if inputs.get("num_bits") != 8 or inputs.get("type") != "float" or inputs.get("symmetric", True) is not True:
        refuse(key, inputs, "with fp8 weights, supported are none, and symmetric float of 8 bits")
    if inputs.get("dynamic") is True:
        return "dynamic"
    if inputs.get("dynamic") or inputs.get("strategy") != "tensor":
        refuse(key, inputs, "supported are dynamic ones, and static ones of strategy tensor")
    return "static"


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    """Return the quantized paths, each with the first of the config_groups that matches it."""
    groups: Mapping[str, Any] = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{where}.config_groups must be an object of groups")
    targets = {name: entries(one, "targets", f"{where}.config_groups.{name}") for name, one in groups.items()}
    ignored = entries(settings, "ignore", where)
    found = {path: next((n for n, own in targets.items() if _matches(own, path, where)), None) for path in paths}
    return {path: name for path, name in found.items() if name is not None and not _matches(ignored, path, where)}


def _matches(listed: list[str], path: str, where: str) -> bool:
    return any(
        pattern(entry[3:], where).match(path) is not None if entry.startswith("re:") else entry in (path, *_CLASSES)
        for entry in listed
    )


# Writing


def written_tensors(
    rows: int, inputs: int, bits: int, group: int, scale_type: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return types and shapes of the tensors of a matrix without zero points, by the last component of their names."""
    return {
        "weight_packed": ("I32", (rows, words_of(inputs, bits))),
        "weight_scale": (scale_type, (rows, words(inputs, group))),
        "weight_shape": ("I64", (2,)),
    }


def written_numbers(weight: "Int4Weight | Int8Weight") -> "dict[str, Tensor]":
    """Return the tensors of `written_tensors`."""
    import torch

    from kernels import stored_codes
    from kernels.quantisation import Int4Weight

    bits, values = 4, stored_codes.unpacked(weight.values)
    if not isinstance(weight, Int4Weight):
        bits, values = 8, (values.to(torch.int16) + 128).to(torch.uint8)
    shape = torch.tensor(values.shape, dtype=torch.int64)
    return {"weight_packed": packed_words(values, bits), "weight_scale": weight.scales, "weight_shape": shape}


def written_settings(groups: Mapping[tuple[int, int], Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config. groups: paths of matrices by bits and group size. ignored: plain matrices."""
    made = {}
    for number, ((bits, size), paths) in enumerate(groups.items()):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": size,
            "dynamic": False,
        }
        made[f"group_{number}"] = {"targets": list(paths), "format": "pack-quantized", "weights": weights}
    return {
        "quant_method": METHOD.name,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": made,
        "ignore": list(ignored),
    }


METHOD = Method(
    name="compressed-tensors",
    format=_format,
    groups=_groups,
    advice="compressed-tensors (pack-quantized, int-quantized or float-quantized)",
    table=(
        (
            "compressed-tensors, pack-quantized",
            "2 to 8 bits; also `actorder`",
            "4 bits, from 5 bits on 8; dequantized with zero points of 8 bits",
        ),
        (
            "compressed-tensors, int-quantized",
            "8 bits; activations unquantized or int8",
            "8 bits, on GPUs with int8 activations as stored (W8A8); dequantized with zero points",
        ),
        (
            "compressed-tensors, float-quantized",
            "scales per matrix, output or block; activations plain, dynamic or static",
            "fp8",
        ),
        ("compressed-tensors, float-quantized", "scales per group; blocks of other sizes", "dequantized"),
        (
            "compressed-tensors, nvfp4-pack-quantized, mxfp8-quantized",
            "activations unquantized",
            "its own blocks on GPUs; on a CPU dequantized",
        ),
        (
            "compressed-tensors, mxfp4-pack-quantized",
            "activations unquantized",
            "its own blocks",
        ),
    ),
)
