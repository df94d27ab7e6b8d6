"""Manifest settings that affect the scheduler, applied to its configuration."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.api.errors import ConfigError
from engine.core.config import SchedulerConfig

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Settings:
    """Settings of a simulation."""

    config: SchedulerConfig
    depth: int = 2  # maximum number of steps in flight


def changed(settings: Settings, assignments: list[str]) -> Settings:
    """Apply `key=value` assignments. Raises ConfigError for an unsupported key or value."""
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        change = CHANGES.get(key.replace("-", "_"))
        if not equals or change is None:
            raise ConfigError(f"{assignment}: must be KEY=VALUE; the keys are {', '.join(CHANGES)}")
        try:
            settings = change(settings, value)
        except ValueError as error:
            raise ConfigError(f"{assignment}: {error}") from None
    return settings


def _count(value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return int(value)


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"{value!r} must be true or false")
    return value == "true"


def _bytes(value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)", value)
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _policy(value: str) -> Any:
    if value not in ("fcfs", "priority", "fair"):
        raise ValueError(f"{value!r} is not one of fcfs, priority and fair")
    return value


def _with(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, config=replace(settings.config, **changes))


def _block_tokens(settings: Settings, value: str) -> Settings:
    """Change the block size. The pool keeps its size in bytes."""
    config = settings.config
    layout = replace(config.layout, block_tokens=_count(value))
    blocks = layout.blocks(config.blocks * config.layout.block_bytes)
    return _with(settings, layout=layout, blocks=_at_least_one(blocks))


def _pool(settings: Settings, value: str) -> Settings:
    return _with(settings, blocks=_at_least_one(settings.config.layout.blocks(_bytes(value))))


def _at_least_one(blocks: int) -> int:
    if blocks < 2:
        raise ValueError("the KV cache would have no block")
    return blocks


CHANGES: dict[str, Callable[[Settings, str], Settings]] = {
    "engine.cache.block_tokens": _block_tokens,
    "engine.cache.prefix": lambda settings, value: _with(settings, prefix_cache=_boolean(value)),
    "engine.scheduling.max_running": lambda settings, value: _with(settings, max_running=_count(value)),
    "engine.scheduling.max_step_tokens": lambda settings, value: _with(settings, max_step_tokens=_count(value)),
    "engine.scheduling.policy": lambda settings, value: _with(settings, policy=_policy(value)),
    "engine.scheduling.overlap": lambda settings, value: replace(settings, depth=2 if _boolean(value) else 1),
    "hardware.kv_cache_memory": _pool,
    "model.max_context": lambda settings, value: _with(settings, max_context=_count(value)),
}
