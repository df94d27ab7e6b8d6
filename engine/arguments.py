"""Arguments of `LLM` and `Params`: values are checked, and messages name the Python argument.

Messages of the engine name keys of the manifest and fields of a request, because a service shows them. `renamed` puts
the argument in their place for those who call the engine from Python.
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
"""Keys of the manifest that messages of the engine name, with the argument of `LLM` that has the same meaning."""

FIELDS = {"structured_outputs": "grammar", "response_format": "grammar", "decoder_prompt": "prompt"}
"""Fields of a request with another name in Python."""

_KEYS = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in sorted(ARGUMENTS, key=len, reverse=True)))
_WORDS = re.compile("|".join(rf"\b{field}\b" for field in FIELDS))
_PLACE = re.compile(r"^(?P<what>.*?) - at `\$\.(?P<name>\w+)(?P<rest>[^`]*)`$", re.DOTALL)


def renamed(message: str) -> str:
    """The message with Python arguments in place of keys of the manifest and fields of a request."""
    message = _KEYS.sub(lambda found: ARGUMENTS[found[0]], message)
    return _WORDS.sub(lambda found: FIELDS[found[0]], message)


@contextmanager
def python_names() -> Iterator[None]:
    """Raise errors of the block again, with messages that name Python arguments."""
    try:
        yield
    except RequestError as error:
        raise type(error)(renamed(str(error)), FIELDS.get(error.param or "", error.param)) from error
    except EngineError as error:
        raise type(error)(renamed(str(error))) from error


def checked_config(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration of these arguments. Raises ConfigError for one of a wrong type or out of range."""
    try:
        return msgspec.convert(dict(values), EngineConfig, from_attributes=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(_sentence(values, str(error))) from None


def _sentence(values: Mapping[str, Any], message: str) -> str:
    """``max_running='8': expected `int`, got `str` `` of msgspec's message."""
    found = _PLACE.match(message)
    if found is None:
        return message
    what = found["what"][:1].lower() + found["what"][1:]
    return f"{found['name']}={values.get(found['name'])!r}: {what}"
