"""One side of a comparison: a manifest, the value of every key, and the plan if there is one."""

from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from appliance.config.fingerprint import graphs_hash
from appliance.config.keys import Key, find, leaves
from appliance.config.problems import Refused
from appliance.config.settings import Given, Settings
from appliance.config.spelling import spell
from appliance.hardware.machine import Machine
from appliance.planning.memory import spell_bytes
from appliance.planning.plan import Plan, resolved_values
from appliance.planning.validate import resolve, validate


@dataclass(frozen=True)
class Value:
    """One key on one side."""

    written: Any  # value in the manifest
    effective: Any  # resolved value; equal to `written` without a plan
    text: str  # display text
    origin: str  # source location
    reason: str = ""  # why the plan resolved it to this value


@dataclass(frozen=True)
class ConfigSnapshot:
    """A manifest with its resolved keys and its plan."""

    given: Given
    settings: Settings
    values: dict[str, Value]
    plan: Plan | None = None
    refused: Refused | None = None  # why there is no plan: the checkpoint is missing, or this machine cannot serve it

    @staticmethod
    def of(given: Given, plan: Plan) -> "ConfigSnapshot":
        """Return the side of an existing plan of `given`."""
        settings, _ = resolve(given, plan.machine)
        return ConfigSnapshot(given, settings, _values(settings, plan), plan)

    @property
    def outputs_sha256(self) -> str | None:
        """Return the hash of all inputs that can change generated tokens, or None without a plan."""
        return self.plan.gateway.outputs_sha256 if self.plan else None

    @property
    def graphs_sha256(self) -> str | None:
        """Return the hash of all inputs of kernel compilation and CUDA graph capture, or None without a plan."""
        return graphs_hash(resolved_values(self.plan.effective)) if self.plan else None


def read_snapshot(given: Given, machine: Machine) -> ConfigSnapshot:
    """Read and plan one side. Raise Refused only if the manifest itself is invalid."""
    settings, _ = resolve(given, machine)
    try:
        plan = validate(given, machine)
    except Refused as refused:
        return ConfigSnapshot(given, settings, _values(settings, None), refused=refused)
    return ConfigSnapshot(given, settings, _values(settings, plan), plan)


def unplanned(snapshot: ConfigSnapshot) -> ConfigSnapshot:
    """Return the side with raw values, because a value resolved on one side only cannot be compared."""
    return replace(snapshot, values=_values(snapshot.settings, None))


def _values(settings: Settings, plan: Plan | None) -> dict[str, Value]:
    resolved = {one.key: one for one in plan.effective} if plan else {}
    dumped, paths = settings.manifest.model_dump(), settings.paths()
    found = {}
    for key in leaves():
        if "*" in key.path:
            continue
        written: Any = dumped
        for part in key.path:
            written = None if written is None else written[part]
        effective = resolved[key.name].resolved if key.name in resolved else written
        if key.name == "model.names" and not effective:
            effective = [_last_part(settings)]
        compared = str(settings.file(key.path)) if key.path in paths else effective
        text, reason = _text(key, written, effective), resolved[key.name].reason if key.name in resolved else ""
        found[key.name] = Value(_plain(written), _plain(compared), text, settings.origin(key), reason)
    for name, secret in settings.manifest.secrets.items():
        for field, value in secret.model_dump().items():
            place = settings.origin(("secrets", name, field))
            compared = str(settings.file(("secrets", name, "file"))) if field == "file" else value
            found[f"secrets.{name}.{field}"] = Value(value, compared, "(a reference)", place)
    return found


def _last_part(settings: Settings) -> str:
    """Return the last part of the checkpoint source's name."""
    value: Any = settings.manifest.model
    for part in settings.manifest.model.source.key[1:]:
        value = getattr(value, part)
    return PurePosixPath(str(value)).name


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(key: Key, written: Any, effective: Any) -> str:
    declared = find(key.path)
    form = declared.form if declared else ""
    shown = spell(written, form)
    if _plain(written) == _plain(effective):
        return shown
    came_to = spell_bytes(effective) if form == "size" else spell(effective, form)
    if written == "auto":
        return f"{came_to} (auto)"
    return came_to if written in (None, ()) else f"{shown}, here {came_to}"
