"""Effects of a manifest change on clients: model names, API keys, addresses and limits."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.config.key import Limit, Note, Switch
from appliance.config.keys import find, metadata
from appliance.config.spelling import spell
from appliance.planning.diff.config_snapshot import ConfigSnapshot, Value


def affected(
    before: ConfigSnapshot, after: ConfigSnapshot, changed: Mapping[str, tuple[Value | None, Value | None]]
) -> Iterator[str]:
    """Yield one line for each effect that a client may notice, in the order of the manifest's keys."""
    for key, (old, new) in changed.items():
        if old is None or new is None or key.startswith("secrets."):
            continue
        if key == "model.names":
            yield from _names(old.effective, new.effective)
        elif key.startswith("model.source.") and changed.get("model.names") is None:
            yield f"{key}: another checkpoint answers under the same names"
        elif key == "endpoints.api_keys":
            yield _keys(old.effective, new.effective)
        elif key == "endpoints.cors_origins":
            yield from _origins(old.effective, new.effective)
        elif key.startswith("engine.sampling."):
            name = key.rpartition(".")[2]
            yield f"{key}: {old.text} → {new.text} for requests without {name}"
        else:
            yield from _declared(key, old, new)
    yield from _secrets(before, after, changed)
    if before.plan and after.plan and before.outputs_sha256 != after.outputs_sha256:
        old_mark, new_mark = (snapshot.plan.gateway.system_fingerprint for snapshot in (before, after) if snapshot.plan)
        yield f"system_fingerprint of replies: {old_mark} → {new_mark}"


def _declared(key: str, old: Value, new: Value) -> Iterator[str]:
    """Yield the note that the key declares."""
    match metadata()[key].clients:
        case Limit(beyond):
            yield from _limit(key, old.effective, new.effective, beyond)
        case Switch(off, on):
            yield f"{key}: {on if new.effective else off}"
        case Note(text):
            yield f"{key}: {old.text} → {new.text}; {text}"


def _names(old: list[str], new: list[str]) -> Iterator[str]:
    gone, added = [name for name in old if name not in new], [name for name in new if name not in old]
    if gone:
        yield f"model.names: requests for {', '.join(gone)} get 404"
    if added:
        yield f"model.names: {', '.join(added)} can be requested"
    if old and new and old[0] != new[0]:
        yield f"model.names: `model` in replies is {new[0]} instead of {old[0]}"


def limit(value: Any) -> float:
    """Return a limit as a number; infinity if there is no limit."""
    return math.inf if value is None or value == -1 else float(value)


def _limit(key: str, old: Any, new: Any, beyond: str) -> Iterator[str]:
    if "auto" in (old, new) or limit(new) == limit(old):
        return  # the value of auto is unknown without a plan
    declared = find(tuple(key.split(".")))
    form = declared.form if declared else ""
    text = f"{key}: {spell(old, form)} → {spell(new, form)}"
    yield f"{text}, tighter: {beyond}" if limit(new) < limit(old) else f"{text}, wider"


def _keys(old: str | None, new: str | None) -> str:
    if old is None:
        return "endpoints.api_keys: requests without a key get 401"
    if new is None:
        return "endpoints.api_keys: no key is required any more"
    return f"endpoints.api_keys: the keys of {new} are valid instead of those of {old}"


def _origins(old: list[str], new: list[str]) -> Iterator[str]:
    if "*" not in new and (gone := [origin for origin in old if origin not in new]):
        yield f"endpoints.cors_origins: browsers of {', '.join(gone)} are rejected"
    if added := [origin for origin in new if origin not in old]:
        yield f"endpoints.cors_origins: browsers of {', '.join(added)} are allowed"


def _secrets(before: ConfigSnapshot, after: ConfigSnapshot, changed: Mapping[str, object]) -> Iterator[str]:
    """Yield a line if the API keys have the same name but are read from another place."""
    name = after.settings.manifest.endpoints.api_keys
    if name is None or name != before.settings.manifest.endpoints.api_keys:
        return
    if any(key.startswith(f"secrets.{name}.") for key in changed):
        yield f"endpoints.api_keys: the keys of {name} are read from another place"
