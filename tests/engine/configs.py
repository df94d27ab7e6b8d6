"""Configurations of engines by the flat arguments of `LLM`."""

from functools import reduce
from typing import Any

from engine.api.config import EngineConfig, with_values
from engine.arguments import ARGUMENTS


def with_arguments(config: EngineConfig, **arguments: Any) -> EngineConfig:
    """Return the configuration with these values."""
    return with_values(config, {ARGUMENTS[name]: value for name, value in arguments.items()})


def arguments_of(config: EngineConfig) -> dict[str, Any]:
    """Return the value of every argument of `LLM` except the model."""
    found = {name: reduce(getattr, field.split("."), config) for name, field in ARGUMENTS.items() if name != "model"}
    return {**found, "adapters": {adapter.name: adapter.path for adapter in config.adapters}}
