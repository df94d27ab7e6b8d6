"""AMD Quark: fp8 (e4m3, e5m2), OCP-MX (fp4, fp8) and int8, by `global_quant_config` and `layer_quant_config`.

fp8   weight, weight_scale of the matrix or [outputs]
MX    weight with two e2m1 per byte, or e4m3; weight_scale with e8m0 for 32 inputs (floats.py)
int8  weight, weight_scale [outputs]

Entries of `exclude` are paths, `re:` and a regular expression, or shell patterns, as are the keys of
layer_quant_config. Source: Quark 0.13, torch/export; transformers quantizers/quantizer_quark.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from engine.api.errors import CheckpointError
from engine.formats.floats import MX_GROUP, Floats, Number, mxfp4
from engine.formats.format import SCALES, Format, Method, Settings, Stored, StoredMatrix, one_of, refuse
from engine.formats.integers import Integers, Numbers, signed_codes
from engine.formats.layers import entries, pattern
from engine.formats.native import Groups

FLOATS: Mapping[str, Number] = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
SCHEMES = {"per_tensor": None, "per_channel": 1}
UNREAD = ("input_scale", "output_scale")


@dataclass(frozen=True)
class QuarkInt8(Integers):
    scale: ClassVar[str] = "weight_scale"

    def tensors(self, rows: int, inputs: int) -> dict[str, Stored]:
        return {
            "weight": Stored((rows, inputs), ("I8",)),
            "weight_scale": Stored((rows, 1), SCALES, flat=True),
            "weight_zero_point": Stored((rows, 1), ("I8", "I32"), optional=True, flat=True),
            "input_scale": Stored((1,), SCALES, optional=True),
            "input_zero_point": Stored((1,), ("I8", "I32"), optional=True),
        }

    def numbers(self, matrix: StoredMatrix) -> Numbers:
        import torch

        zeros = None
        if matrix.has("weight_zero_point"):
            zeros = matrix.read("weight_zero_point").to(torch.int16).view(-1, 1) + 128
        return Numbers(signed_codes(matrix.read("weight")), matrix.read("weight_scale").view(-1, 1), zeros)


def _format(settings: Settings, group: str) -> Format:
    """group: key of layer_quant_config, or ""."""
    where = f"layer_quant_config.{group}" if group else "global_quant_config"
    own = settings["layer_quant_config"][group] if group else settings.get("global_quant_config")
    weight = own.get("weight") if isinstance(own, dict) else None
    weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
    if not isinstance(weight, dict):
        refuse(f"{where}.weight", weight, "it must be an object with one dtype")
    packing = (settings.get("export") or {}).get("weight_format", "real_quantized")
    one_of("export.weight_format", packing, ("real_quantized",))
    kind, scheme = str(weight.get("dtype")), str(weight.get("qscheme"))
    if scheme == "per_group":
        one_of(f"{where}.weight.scale_format", weight.get("scale_format"), ("e8m0",))
        if weight.get("group_size") != MX_GROUP:
            refuse(f"{where}.weight.group_size", weight.get("group_size"), f"supported is {MX_GROUP}")
        one_of(f"{where}.weight.dtype", kind, ("fp4", *FLOATS))
        return (
            mxfp4(unread=UNREAD) if kind == "fp4" else Floats(None, FLOATS[kind], (1, MX_GROUP), "e8m0", unread=UNREAD)
        )
    one_of(f"{where}.weight.qscheme", scheme, (*SCHEMES, "per_group"))
    if kind == "int8" and scheme == "per_channel":
        return QuarkInt8.of(Groups(8, None, zeros=weight.get("symmetric") is False))
    one_of(f"{where}.weight.dtype", kind, tuple(FLOATS))
    return Floats(None, FLOATS[kind], (SCHEMES[scheme], None), unread=UNREAD)


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    layers = settings.get("layer_quant_config") or {}
    if not isinstance(layers, dict):
        raise CheckpointError(f"{where}.layer_quant_config must be an object of settings by layer")
    excluded = entries(settings, "exclude", where)
    found = [path for path in paths if not any(_matches(one, path, where) for one in excluded)]
    return {path: next((name for name in layers if _matches(name, path, where)), "") for path in found}


def _matches(entry: str, path: str, where: str) -> bool:
    if entry.startswith("re:"):
        return pattern(entry[3:], where).match(path) is not None
    return fnmatchcase(path, entry)


METHOD = Method(
    name="quark",
    format=_format,
    groups=_groups,
    table=(
        ("quark, fp8", "per matrix or output; activations unquantized", "dequantized"),
        ("quark, mxfp8", "activations unquantized", "its own blocks on GPUs; on a CPU dequantized"),
        ("quark, mxfp4", "activations unquantized", "its own blocks"),
        ("quark, int8", "per output; activations as with all integers", "8 bits"),
    ),
)
