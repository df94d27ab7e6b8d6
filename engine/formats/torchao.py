"""torchao: tensors of integers and fp8 as safetensors have them, each part of a weight under a name of its own.

_weight_qdata       int8 [outputs, inputs], also for fewer bits; or float8_e4m3fn
_weight_scale       [outputs, groups]
_weight_zero_point  int8 [outputs, groups], absent or 0 where the mapping is symmetric

Integers of GPU layouts (Int4WeightOnlyConfig) are refused. Source: torchao 0.18, prototype/safetensors; transformers
quantizers/quantizer_torchao.py.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.api.errors import CheckpointError
from engine.formats.floats import Floats
from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, refuse, whole_number, words
from engine.formats.integers import MANY, Integers, Numbers, signed_codes
from engine.formats.layers import not_skipped
from engine.formats.native import Groups

PREFIX = "_weight_"
INTEGER_BITS = {f"int{bits}": bits for bits in range(2, 9)}
INTEGER_CONFIGS = {
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
    "IntxWeightOnlyConfig": 0,  # its weight_dtype says
    "Int8DynamicActivationIntxWeightConfig": 0,
}
FLOAT_CONFIGS = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
DEFAULT = "_default"


@dataclass(frozen=True)
class AoIntegers(Integers):
    matrix: ClassVar[str] = f"{PREFIX}qdata"
    scale: ClassVar[str] = f"{PREFIX}scale"

    def named(self, path: str, tensors: Container[str]) -> Format | None:
        return self if f"{path}.{self.matrix}" in tensors else None

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        shape = rows, words(inputs, self.stored.group or inputs)
        return {
            self.matrix: Stored((rows, inputs), ("I8",)),
            self.scale: Stored(shape, SCALES, flat=True),
            f"{PREFIX}zero_point": Stored(shape, ("I8", "I32"), optional=not self.stored.zeros, flat=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        middle, zero = 1 << (self.stored.bits - 1), f"{PREFIX}zero_point"
        stored = matrix.read(self.matrix)
        values = signed_codes(stored) if self.stored.bits == MANY else (stored.to(torch.int16) + middle).to(torch.uint8)
        zeros = None
        if matrix.has(zero):
            zeros = matrix.read(zero).to(torch.int16).view(matrix.rows, -1) + middle
        return Numbers(values, matrix.read(self.scale).view(matrix.rows, -1), zeros)


@dataclass(frozen=True)
class AoFloats(Floats):
    matrix: ClassVar[str] = f"{PREFIX}qdata"

    def named(self, path: str, tensors: Container[str]) -> Format | None:
        return self if f"{path}.{self.matrix}" in tensors else None


def _config(settings: Settings) -> Mapping[str, Any]:
    """Return {"_type": …, "_data": …} of quant_type."""
    found = settings.get("quant_type")
    own = found.get("default") if isinstance(found, dict) else None
    if not isinstance(own, dict) or not isinstance(own.get("_type"), str) or not isinstance(own.get("_data"), dict):
        refuse("quant_type", found, "supported are the settings of torchao's configuration classes")
    return own


def _by_name(config: Mapping[str, Any]) -> Mapping[str, Any]:
    data = config["_data"]
    return data.get("fqn_to_config") or data.get("module_fqn_to_config") or {}


def _format(settings: Settings, group: str) -> Format:
    """group: name of the projection in FqnToConfig, or ""."""
    config = _config(settings)
    config = _by_name(config)[group] if group else config
    kind, data = config["_type"], config["_data"]
    if kind in FLOAT_CONFIGS:
        return AoFloats(None, "e4m3", (_float_outputs(data), None), names=(f"{PREFIX}scale", ""))
    if kind not in INTEGER_CONFIGS:
        supported = ", ".join((*INTEGER_CONFIGS, *FLOAT_CONFIGS))
        refuse("quant_type", kind, f"its tensors have the layout of a GPU kernel; supported are {supported}")
    weight = (data.get("weight_dtype") or {}).get("_data", "int8")
    bits = INTEGER_CONFIGS[kind] or INTEGER_BITS.get(weight, 0)
    if not bits:
        refuse("weight_dtype", weight, f"supported are {', '.join(INTEGER_BITS)}")
    mapping = data.get("mapping_type") or data.get("weight_mapping_type") or {}
    asymmetric = mapping.get("_data", "SYMMETRIC") == "ASYMMETRIC"
    return AoIntegers.of(Groups(bits, _group(data), zeros=asymmetric))


def _granularity(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    own = data.get("weight_granularity") or data.get("granularity") or {}
    own = own[-1] if isinstance(own, list) and own else own  # of activations and weights
    return (own.get("_type", "PerRow"), own.get("_data") or {}) if isinstance(own, dict) else ("PerRow", {})


def _group(data: Mapping[str, Any]) -> int | None:
    kind, more = _granularity(data)
    size = data.get("group_size") or more.get("group_size")
    if kind == "PerGroup" or size:
        return whole_number(size, "group_size")
    if kind not in ("PerRow", "PerAxis"):
        refuse("granularity", kind, "supported are PerRow, PerAxis and PerGroup")
    return None


def _float_outputs(data: Mapping[str, Any]) -> int | None:
    kind, _ = _granularity(data)
    if kind not in ("PerRow", "PerTensor"):
        refuse("granularity", kind, "supported are PerRow and PerTensor")
    return 1 if kind == "PerRow" else None


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    kept = [] if settings.get("include_input_output_embeddings") else [head]
    found = not_skipped(settings, paths, kept, where)
    quant_type = settings.get("quant_type")
    config = quant_type.get("default") if isinstance(quant_type, dict) else None
    if not isinstance(config, dict) or config.get("_type") not in BY_NAME:
        return found
    try:
        named = _by_name(config)
        names = {
            path: next((name for name in (f"{path}.weight", path, DEFAULT) if name in named), "") for path in found
        }
        return {path: name for path, name in names.items() if name and named[name] is not None}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}.quant_type.default is damaged: {error!r}; copy config.json again") from error


METHOD = Method(
    name="torchao",
    format=_format,
    groups=_groups,
    table=(
        (
            "torchao, integers of 2 to 8 bits",
            "safetensors, per output or group",
            "4 bits, from 5 bits on 8; dequantized with zero points of 8 bits",
        ),
        ("torchao, float8", "safetensors, per output or matrix; activations unquantized", "dequantized"),
    ),
)
