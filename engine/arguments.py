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

ARGUMENTS = {
    "model.source.path": "path",
    "model.source": "path",
    "model.max_context": "max_context",
    "model.dtype": "dtype",
    "model.trust_remote_code": "trust_remote_code",
    "model.task": "task",
    "model.pooling": "task",
    "model.pooling.pool": "task.pool",
    "model.pooling.dimensions": "task.dimensions",
    "model.pooling.score_tokens": "task.score_tokens",
    "quantization.weights": "weights",
    "quantization.group_size": "weight_group",
    "quantization.head": "head",
    "quantization.kv_cache": "kv_dtype",
    "parallelism.tensor": "tensor",
    "hardware.device": "device",
    "hardware.kernels": "kernels",
    "hardware.threads": "threads",
    "hardware.cpus": "cpus",
    "hardware.kv_cache_memory": "kv_bytes",
    "hardware.batch_invariant": "invariant",
    "engine.scheduling.max_running": "max_running",
    "engine.scheduling.max_step_tokens": "max_step_tokens",
    "engine.scheduling.policy": "policy",
    "engine.scheduling.overlap": "overlap",
    "engine.cache.block_tokens": "block_tokens",
    "engine.record": "record",
    "lifecycle.self_test.prompts": "self_test.prompts",
}
"""Manifest key in messages of the engine -> argument of `LLM` with the same meaning."""

FIELDS = {"structured_outputs": "grammar", "response_format": "grammar", "decoder_prompt": "prompt"}
"""Request field -> its name in Python, where they differ."""

_KEYS = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in sorted(ARGUMENTS, key=len, reverse=True)))
_WORDS = re.compile("|".join(rf"\b{field}\b" for field in FIELDS))
_PLACE = re.compile(r"^(?P<what>.*?) - at `\$\.(?P<name>\w+)(?P<rest>[^`]*)`$", re.DOTALL)


def renamed(message: str) -> str:
    """Return the message with manifest keys and request fields replaced by Python arguments."""
    message = _KEYS.sub(lambda found: ARGUMENTS[found[0]], message)
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


def checked_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the configuration from arguments. Raises ConfigError for a value of a wrong type or out of range."""
    try:
        return msgspec.convert(dict(values), EngineConfig, from_attributes=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(_sentence(values, str(error))) from None


def _sentence(values: Mapping[str, Any], message: str) -> str:
    """Rewrite msgspec's message as ``max_running='8': expected `int`, got `str` ``."""
    found = _PLACE.match(message)
    if found is None:
        return message
    what = found["what"][:1].lower() + found["what"][1:]
    return f"{found['name']}={values.get(found['name'])!r}: {what}"
