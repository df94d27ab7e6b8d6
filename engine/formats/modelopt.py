"""ModelOpt's FP8, which has the tensors of AutoFP8. Older exporters write the settings to a file of their own:

    {"producer": {"name": "modelopt", …}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"]}}

All projections are quantized except those that match a shell pattern under one of EXCLUDED. Source: modelopt's exporter
for Hugging Face checkpoints.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from engine.api.errors import CheckpointError
from engine.formats.format import Method, Settings, refuse
from engine.formats.fp8 import Fp8
from engine.formats.layers import entries
from engine.formats.native import E4M3

EXCLUDED = ("exclude_modules", "ignore")


def _format(settings: Settings, group: str) -> Fp8:
    algorithm = settings.get("quant_algo")
    if algorithm != "FP8":
        refuse("quant_algo", algorithm, "supported for modelopt is FP8")
    return Fp8(E4M3("tensor", "static"))


def _groups(settings: Settings, paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    if settings.get("quant_algo") is None and settings.get("kv_cache_quant_algo"):
        return {}  # only the KV cache is quantized
    excluded = [entry for key in EXCLUDED for entry in entries(settings, key, where)]
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
    table=(
        (
            "modelopt",
            "`quant_algo: FP8` in `config.json` or `hf_quant_config.json`: scales per matrix, static activations",
            "fp8",
        ),
    ),
)
