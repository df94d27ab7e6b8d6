"""ModelOpt: fp8 with the tensors of AutoFP8, NVFP4, MXFP4 and MXFP8 (floats.py), by `quant_algo`. Exporters write the
settings to config.json, or to a file of their own:

    {"producer": {"name": "modelopt", …}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"]}}

All projections are quantized except those that match a shell pattern under one of EXCLUDED. With MIXED_PRECISION,
`quantized_layers` has the algorithm of each one. Source: ModelOpt 0.47, torch/export.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.floats import MX_GROUP, NV_GROUP, Floats, Number, Scale, mxfp4
from engine.formats.format import Format, Method, Settings, one_of, refuse
from engine.formats.fp8 import Fp8
from engine.formats.layers import entries
from engine.formats.native import E4M3

EXCLUDED = ("exclude_modules", "ignore")
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True)
class PackedNvfp4(Floats):
    """With an optional factor of each input, by which AWQ scales the activations."""

    number: Number = "e2m1"
    block: tuple[int | None, int | None] = (1, NV_GROUP)
    scales: Scale = "e4m3"
    names: tuple[str, str] = ("weight_scale", "weight_scale_2")
    input_factor: str = "pre_quant_scale"
    unread: tuple[str, ...] = ("input_scale",)


_UNREAD = ("input_scale",)
_NVFP4_AWQ = PackedNvfp4()
_NVFP4 = replace(_NVFP4_AWQ, input_factor="")
ALGORITHMS: Mapping[str, Format] = {
    "FP8": Fp8(E4M3("tensor", "static")),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(E4M3("channel", "dynamic")),
    "FP8_PB_WO": Fp8(E4M3("block", None)),
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4_AWQ,
    "W4A16_NVFP4": _NVFP4_AWQ,
    "W4A8_NVFP4_FP8": _NVFP4,
    "MXFP4": mxfp4(unread=_UNREAD),
    "W4A8_MXFP4_FP8": mxfp4(unread=_UNREAD),
    "MXFP8": Floats(None, "e4m3", (1, MX_GROUP), "e8m0", unread=_UNREAD),
}
_SIZES = {"NVFP4": NV_GROUP, "NVFP4_AWQ": NV_GROUP, "W4A16_NVFP4": NV_GROUP, "W4A8_NVFP4_FP8": NV_GROUP}


def _format(settings: Settings, group: str) -> Format:
    """group: path of a layer with an algorithm of its own, or ""."""
    own = _layers(settings)[group] if group else settings
    where = f"quantized_layers.{group}." if group else ""
    algorithm = one_of(f"{where}quant_algo", own.get("quant_algo"), tuple(ALGORITHMS))
    if algorithm in _SIZES and own.get("group_size", NV_GROUP) != NV_GROUP:
        refuse(f"{where}group_size", own["group_size"], f"supported with {algorithm} is {NV_GROUP}")
    return ALGORITHMS[algorithm]


def _layers(settings: Settings) -> Mapping[str, Any]:
    found = settings.get("quantized_layers")
    return found if isinstance(found, dict) else {}


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    if settings.get("quant_algo") is None and (settings.get("kv_cache_quant_algo") or settings.get("kv_cache_scheme")):
        return {}  # only the KV cache is quantized
    excluded = [entry for key in EXCLUDED for entry in entries(settings, key, where)]
    if settings.get("quant_algo") == MIXED:
        layers = _layers(settings)
        if not layers or not all(isinstance(one, dict) for one in layers.values()):
            raise CheckpointError(f"{where}.quantized_layers must be an object with the quant_algo of each layer")
        return {path: path for path in paths if path in layers and layers[path].get("quant_algo") is not None}
    return {path: "" for path in paths if not any(fnmatchcase(path, one) for one in excluded)}


def _file_settings(values: Settings, file: str) -> dict[str, Any]:
    settings = values.get("quantization")
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: quantization is {settings!r}; it must be an object with quant_algo")
    return {**settings, "quant_method": METHOD.name}


METHOD = Method(
    name="modelopt",
    format=_format,
    groups=_groups,
    file="hf_quant_config.json",
    file_settings=_file_settings,
    advice="ModelOpt's FP8 or NVFP4",
    table=(
        (
            "modelopt",
            "`quant_algo: FP8` in `config.json` or `hf_quant_config.json`: scales per matrix, static activations; also "
            "`FP8_PER_CHANNEL_PER_TOKEN` and `FP8_PB_WO`",
            "fp8",
        ),
        (
            "modelopt, `NVFP4`, `NVFP4_AWQ`, `W4A16_NVFP4`, `MXFP8`",
            "weights; activations unquantized",
            "its own blocks on GPUs; on a CPU, and with `pre_quant_scale`, dequantized",
        ),
        ("modelopt, `MXFP4`", "weights; activations unquantized", "its own blocks"),
        ("modelopt, `MIXED_PRECISION`", "any of these for each layer", "as above"),
    ),
)
