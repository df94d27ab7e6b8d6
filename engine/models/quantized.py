"""Which projections of a model a checkpoint's quantization_config covers.

compressed-tensors: a projection is quantized if a `targets` entry of some group names it and no entry of `ignore` does;
an entry is a module's path, `re:` and a regular expression from the path's start, or a class of torch. The others (fp8,
awq, gptq, bitsandbytes …): all but the head and those of a list under one of SKIPPED, whose entries are the start of a
path or a regular expression, up to a dot, or the end of a path. Sources: compressed_tensors.utils.match,
transformers.quantizers.quantizers_utils.should_convert_module.
"""

import re
from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.parts import Model
from engine.models.sources import linear_paths

SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
_CLASSES = ("Linear", "Module")


def refuse_quantized(config: Mapping[str, Any], model: Model, file: str) -> None:
    """Raises CheckpointError that names the method and the layers if any projection is quantized. A checkpoint whose
    list of exceptions covers all of them is a plain one."""
    settings = config.get("quantization_config")
    if settings is None:
        return
    where = f"{file}: quantization_config"
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where} is {settings!r}; it must be an object with quant_method, or be left out")
    paths = linear_paths(model)
    found = quantized_paths(settings, paths, model.head.name, where)
    if not found:
        return
    rest = [path for path in paths if path not in found]
    plain = f", but not {_listed(rest)}" if rest else ""
    raise CheckpointError(
        f"{file}: the checkpoint is quantized ({settings.get('quant_method', 'unknown')}), which is not served: "
        f"{len(found)} of {len(paths)} projections are, such as {found[0]}{plain}; "
        "use the float32, bfloat16 or float16 checkpoint of the same model"
    )


def quantized_paths(settings: Mapping[str, Any], paths: tuple[str, ...], head: str, where: str) -> tuple[str, ...]:
    """Those of the paths that are quantized. `where` begins the message of a CheckpointError about the settings."""
    if settings.get("quant_method") == "compressed-tensors":
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError(f"{where}.config_groups must be an object of groups")
        inner = [(group, f"{where}.config_groups.{name}") for name, group in groups.items()]
        targets = [entry for group, place in inner for entry in _entries(group, "targets", place)]
        ignored = _entries(settings, "ignore", where)
        return tuple(path for path in paths if _matches(targets, path, where) and not _matches(ignored, path, where))
    skipped = [head, *(entry for key in SKIPPED for entry in _entries(settings, key, where))]
    return tuple(path for path in paths if not _skips(skipped, path, where))


def _entries(settings: Mapping[str, Any], key: str, where: str) -> list[str]:
    found = settings.get(key)
    entries = [] if found is None else found
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"{where}.{key} is {found!r}; it must be a list of names and patterns of layers")
    return entries


def _matches(entries: list[str], path: str, where: str) -> bool:
    """By the rules of compressed-tensors."""
    return any(
        _pattern(entry[3:], where).match(path) is not None if entry.startswith("re:") else entry in (path, *_CLASSES)
        for entry in entries
    )


def _skips(entries: list[str], path: str, where: str) -> bool:
    """By the rules of transformers."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(path.endswith(entry) or _pattern(f"(?:{entry}){boundary}", where).match(path) for entry in entries)


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{where}: {text!r} is no regular expression: {error}") from error


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
