"""Rules of quantization_config that select the quantized projections.

Most methods quantize all projections except the head and those in a list under one of SKIPPED, whose entries are the
beginning of a path or a regular expression, up to a dot, or the end of a path. Source:
transformers.quantizers.quantizers_utils.should_convert_module.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.api.errors import CheckpointError

SKIPPED = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")


def all_but_skipped(settings: Mapping[str, Any], paths: Sequence[str], head: str, where: str) -> dict[str, str]:
    """Return all projections except the head and those that the settings skip, as one group."""
    return not_skipped(settings, paths, [head], where)


def not_skipped(settings: Mapping[str, Any], paths: Sequence[str], more: list[str], where: str) -> dict[str, str]:
    """Return all projections except those that the settings or `more` skip, as one group."""
    skipped = [*more, *(entry for key in SKIPPED for entry in entries(settings, key, where))]
    return {path: "" for path in paths if not _skips(skipped, path, where)}


def entries(settings: Mapping[str, Any], key: str, where: str) -> list[str]:
    """Return a list of names and patterns, empty if it is missing. Raises CheckpointError."""
    found = settings.get(key)
    listed = [] if found is None else found
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise CheckpointError(f"{where}.{key} is {found!r}; it must be a list of names and patterns of layers")
    return listed


def pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{where}: {text!r} is not a regular expression: {error}") from error


def _skips(skipped: list[str], path: str, where: str) -> bool:
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(path.endswith(entry) or pattern(f"(?:{entry}){boundary}", where).match(path) for entry in skipped)
