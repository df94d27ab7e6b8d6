"""Values that reach the configuration of a process unchanged, by the `target` that their key declares."""

from collections.abc import Mapping
from typing import Any

from appliance.config.keys import metadata
from appliance.config.manifest import Manifest
from appliance.planning.choice import Choice


def passed_on(manifest: Manifest, section: str, choices: Mapping[str, Choice[Any]] | None = None) -> dict[str, Any]:
    """Return the fields of a configuration that get the value of a key.

    `section` is `engine`, `gateway` or a nested part such as `gateway.connections`. A value in `choices`, by key,
    replaces the value in the manifest.
    """
    found = {}
    for key, declared in metadata().items():
        for target in declared.targets:
            place, _, field = target.rpartition(".")
            if place == section:
                choice = choices.get(key) if choices else None
                found[field] = _value(manifest, key) if choice is None else choice.value
    return found


def _value(manifest: Manifest, key: str) -> Any:
    value: Any = manifest
    for part in key.split("."):
        value = getattr(value, part)
    return value
