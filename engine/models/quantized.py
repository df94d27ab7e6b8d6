"""Find which projections of a checkpoint are quantized, and in which form, from its quantization_config.

compressed-tensors: a projection is quantized if it matches a `targets` entry of a group and no entry of `ignore`. An
entry is a module's path, `re:` and a regular expression that matches from the start of the path, or a torch class.
modelopt: all projections except those that match a shell pattern under one of EXCLUDED. Other methods (fp8, awq, gptq,
bitsandbytes …): all projections except the head and those in a list under one of SKIPPED, whose entries are the
beginning of a path or a regular expression, up to a dot, or the end of a path. Sources:
compressed_tensors.utils.match, transformers.quantizers.quantizers_utils.should_convert_module, modelopt's exporter for
Hugging Face checkpoints.

Unsupported formats are refused with method, bits and reason (`engine.models.schemes`).
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.parts import Model
from engine.models.schemes import Quantization, Scheme, UnsupportedScheme, awq, compressed, fp8, gptq, modelopt
from engine.models.sources import linear_paths

SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
MODELOPT = "hf_quant_config.json"
EXCLUDED = ("exclude_modules", "ignore")
_CLASSES = ("Linear", "Module")
# Methods that store all projections in the same form.
_WHOLE = {"gptq": gptq, "awq": awq, "fp8": fp8, "modelopt": modelopt}
_INSTEAD = (
    "use a checkpoint in gptq or awq of 4 bits, fp8, compressed-tensors (pack-quantized, int-quantized or "
    "float-quantized) or GGUF, or the unquantized checkpoint (float32, bfloat16, float16)"
)


def read_quantization(config: Mapping[str, Any], model: Model, file: str) -> Quantization | None:
    """Return the form of each quantized projection, or None if no projection is quantized.

    Raises CheckpointError with the method and the layers of an unsupported format."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    where = f"{file}: quantization_config"
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where} is {settings!r}; it must be an object with quant_method, or be left out")
    paths = linear_paths(model)
    groups = _groups_of(settings, paths, "" if model.head is None else model.head.name, where)
    if not groups:
        return None
    method = str(settings.get("quant_method", "unknown"))
    try:
        return Quantization(method, _schemes(method, settings, groups))
    except UnsupportedScheme as reason:
        rest = [path for path in paths if path not in groups]
        plain = f", but not {_listed(rest)}" if rest else ""
        raise CheckpointError(
            f"{file}: the checkpoint is quantized ({_method(method, settings)}), which is not supported: {reason}; "
            f"{len(groups)} of {len(paths)} projections are quantized, such as {next(iter(groups))}{plain}; {_INSTEAD}"
        ) from reason


def modelopt_settings(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the quantization_config that corresponds to ModelOpt's own file. Newer exporters write config.json.

    {"producer": {"name": "modelopt", …}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"]}}. Raises CheckpointError.
    """
    settings = values.get("quantization")
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: quantization is {settings!r}; it must be an object with quant_algo")
    return {**settings, "quant_method": "modelopt"}


def _schemes(method: str, settings: Mapping[str, Any], groups: Mapping[str, str]) -> dict[str, Scheme]:
    if method == "compressed-tensors":
        known = {name: compressed(settings, name) for name in dict.fromkeys(groups.values())}
        return {path: known[name] for path, name in groups.items()}
    if method not in _WHOLE:
        raise UnsupportedScheme(f"supported are {', '.join((*_WHOLE, 'compressed-tensors'))}")
    return dict.fromkeys(groups, _WHOLE[method](settings))


def _method(method: str, settings: Mapping[str, Any]) -> str:
    bits = settings.get("bits")
    return f"{method}, {bits} bits" if bits is not None else method


def quantized_paths(settings: Mapping[str, Any], paths: tuple[str, ...], head: str, where: str) -> tuple[str, ...]:
    """Return the paths that are quantized. `where`: start of error messages about the settings."""
    return tuple(_groups_of(settings, paths, head, where))


def _groups_of(settings: Mapping[str, Any], paths: tuple[str, ...], head: str, where: str) -> dict[str, str]:
    """Return the quantized paths, each with the first of the config_groups that matches it."""
    if settings.get("quant_method") == "compressed-tensors":
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError(f"{where}.config_groups must be an object of groups")
        targets = {name: _entries(one, "targets", f"{where}.config_groups.{name}") for name, one in groups.items()}
        ignored = _entries(settings, "ignore", where)
        found = {path: next((n for n, own in targets.items() if _matches(own, path, where)), None) for path in paths}
        return {path: name for path, name in found.items() if name is not None and not _matches(ignored, path, where)}
    if settings.get("quant_method") == "modelopt":
        if settings.get("quant_algo") is None and settings.get("kv_cache_quant_algo"):
            return {}  # only the KV cache is quantized
        excluded = [entry for key in EXCLUDED for entry in _entries(settings, key, where)]
        return {path: "" for path in paths if not any(fnmatchcase(path, one) for one in excluded)}
    with_head = settings.get("quant_method") == "gptq" and settings.get("lm_head") is True
    skipped = [*([] if with_head else [head]), *(entry for key in SKIPPED for entry in _entries(settings, key, where))]
    return {path: "" for path in paths if not _skips(skipped, path, where)}


def _entries(settings: Mapping[str, Any], key: str, where: str) -> list[str]:
    found = settings.get(key)
    entries = [] if found is None else found
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"{where}.{key} is {found!r}; it must be a list of names and patterns of layers")
    return entries


def _matches(entries: list[str], path: str, where: str) -> bool:
    """Match by the rules of compressed-tensors."""
    return any(
        _pattern(entry[3:], where).match(path) is not None if entry.startswith("re:") else entry in (path, *_CLASSES)
        for entry in entries
    )


def _skips(entries: list[str], path: str, where: str) -> bool:
    """Match by the rules of transformers."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(path.endswith(entry) or _pattern(f"(?:{entry}){boundary}", where).match(path) for entry in entries)


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{where}: {text!r} is not a regular expression: {error}") from error


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
