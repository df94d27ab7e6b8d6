"""Argument checks of `LLM` and `Params`, with messages that name the Python argument.

The engine's messages name manifest keys and request fields, because they are written for a service. `renamed` replaces
them by the argument for callers from Python.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.api.config import EngineConfig
from engine.api.errors import ConfigError, EngineError, RequestError

OTHER_NAMES = {
    "model.path": "model",
    "quantization.group_size": "weight_group",
    "quantization.folder": "weight_cache",
    "quantization.kv_cache": "kv_dtype",
    "hardware.batch_invariant": "invariant",
    "memory.kv_cache": "kv_bytes",
    "memory.kv_cache_measured": "kv_measured",
    "memory.weights": "weight_bytes",
    "memory.workspace": "workspace_bytes",
    "memory.graphs": "graph_bytes",
    "memory.ranks": "planned",
    "cache.prefix": "prefix_cache",
    "cache.media": "media_cache",
    "speculation.method": "speculation",
    "speculation.model": "draft_model",
    "speculation.tokens": "draft_tokens",
    "speculation.adaptive": "adaptive_drafts",
    "lifecycle.heartbeat": "pulse",
    "observability.profiler_folder": "profiler",
}
"""Field of EngineConfig -> argument of `LLM`, unless that is the last part of the field's path."""


def _fields() -> Iterator[str]:
    for one in msgspec.structs.fields(EngineConfig):
        inner = msgspec.structs.fields(one.type) if hasattr(one.type, "__struct_fields__") else ()
        yield from (f"{one.name}.{field.name}" for field in inner) if inner else (one.name,)


ARGUMENTS = {OTHER_NAMES.get(field, field.rpartition(".")[2]): field for field in _fields()}
"""Argument of `LLM` and of `engine_config` -> field of EngineConfig."""

SECTIONS = (
    "model",
    "adapter_loading",
    "quantization",
    "parallelism",
    "hardware",
    "memory",
    "speculation",
    "lifecycle",
    "observability",
)  # all others are in `engine`


def _manifest_key(field: str) -> str:
    return field if field.split(".")[0] in SECTIONS else f"engine.{field}"


NAMES = {_manifest_key(field): argument for argument, field in ARGUMENTS.items()} | {
    "model.source.path": "path",
    "model.source": "path",
    "model.pooling": "task",
    "model.text_only": "task.text_only",
    "model.media.encoder_only": "task.encoder_only",
    "model.media.accept_embeddings": "task.accepts_embeddings",
    "limits.media": "task",
    "limits.media.frames": "the limit of frames",
    "model.pooling.pool": "task.pool",
    "model.pooling.dimensions": "task.dimensions",
    "model.pooling.score_tokens": "task.score_tokens",
    "hardware.kv_cache_memory": "kv_bytes",
    "lifecycle.self_test.prompts": "self_test.prompts",
}
"""Manifest key in messages of the engine -> argument of `LLM` with the same meaning."""

FIELDS = {"structured_outputs": "grammar", "response_format": "grammar", "decoder_prompt": "prompt"}
"""Request field -> its name in Python, where they differ."""

_KEYS = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in sorted(NAMES, key=len, reverse=True) if "." in key))
_WORDS = re.compile("|".join(rf"\b{field}\b" for field in FIELDS))
_PLACE = re.compile(r"^(?P<what>.*?) - at `\$\.(?P<name>[^`]*)`$", re.DOTALL)


def renamed(message: str) -> str:
    """Return the message with manifest keys and request fields replaced by Python arguments."""
    message = _KEYS.sub(lambda found: NAMES[found[0]], message)
    return _WORDS.sub(lambda found: FIELDS[found[0]], message)


@contextmanager
def python_names() -> Iterator[None]:
    """Re-raise errors from the block with messages that name Python arguments."""
    try:
        yield
    except RequestError as error:
        raise type(error)(renamed(str(error)), FIELDS.get(error.param or "", error.param)) from error
    except EngineError as error:
        raise type(error)(renamed(str(error))) from error


def engine_config(**arguments: Any) -> EngineConfig:
    """Return the configuration with these values of `ARGUMENTS`. Raises ConfigError for a value of a wrong type or out
    of range."""
    values: dict[str, Any] = {"model": {}, "memory": {}}
    for argument, value in arguments.items():
        section, _, name = ARGUMENTS[argument].rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    try:
        return msgspec.convert(values, EngineConfig, from_attributes=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(_sentence(arguments, str(error))) from None


def _sentence(arguments: Mapping[str, Any], message: str) -> str:
    """Rewrite msgspec's message as ``max_running='8': expected `int`, got `str` ``."""
    found = _PLACE.match(message)
    if found is None:
        return message
    what = found["what"][:1].lower() + found["what"][1:]
    for argument, field in ARGUMENTS.items():
        if re.fullmatch(re.escape(field) + r"\b.*", found["name"]):
            return f"{argument}={arguments.get(argument)!r}: {what}"
    return message
