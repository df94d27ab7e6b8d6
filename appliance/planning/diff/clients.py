"""Effects of a manifest change on clients: model names, API keys, addresses and limits."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.config.keys import find, spell
from appliance.planning.diff.config_snapshot import ConfigSnapshot, Value

# Limits by key, and what happens to a request beyond the limit. null means unlimited, and so does -1 if allowed.
LIMITS: dict[str, str] = {
    "model.max_context": "longer prompts get 400, longer replies end earlier",
    "limits.max_waiting": "more requests get 503 under load",
    "limits.max_waiting_tokens": "more requests get 503 under load",
    "limits.max_body": "larger bodies get 413",
    "limits.max_output_tokens": "longer replies are cut",
    "limits.max_choices": "a larger n gets 400",
    "limits.max_prompts": "more prompts in a request get 400",
    "limits.max_logprobs": "requests for more get 400",
    "limits.max_stop": "more stop strings get 400",
    "endpoints.connections.max": "more connections get 503",
    "endpoints.connections.max_idle": "more idle connections are closed",
    "endpoints.connections.max_per_address": "more connections of one address get 503",
    "endpoints.connections.max_head": "larger request heads get 431",
    "endpoints.connections.max_headers": "more header fields get 431",
    "endpoints.connections.head_timeout": "slower request heads get 408",
    "endpoints.connections.body_timeout": "slower request bodies get 408",
    "limits.grammar_size": "larger schemas and grammars get 400",
    "limits.grammar_time": "schemas and grammars that take longer to compile get 400",
    "limits.grammar_memory": "schemas and grammars that take more memory to compile get 400",
}
# Other keys with an effect on clients, and the effect.
CLIENT_EFFECTS: dict[str, str] = {
    "model.chat_template": "another chat template renders conversations",
    "model.format": "tool calls and reasoning are parsed and constrained by another format",
    "model.generation_config": "sampling defaults and end tokens may change",
    "endpoints.host": "the service listens on another address",
    "endpoints.port": "the service is reached on another port",
    "endpoints.compat": "usage, reasoning field names, the request ID header and some errors follow another API",
    "endpoints.unknown_fields": "unknown request fields are rejected, logged or ignored",
    "endpoints.invocations_without_key": "POST /invocations needs an API key or none",
    "lifecycle.restart.hold": "new requests wait for a crashed engine for another time",
    "lifecycle.journal.folder": "responses and replies with an Idempotency-Key are stored elsewhere or not at all",
    "lifecycle.journal.keep": "replies with an Idempotency-Key are kept for another time",
    "lifecycle.journal.linger": "requests with an Idempotency-Key continue without their client for another time",
    "endpoints.responses.keep": "stored responses are kept for another time",
    "endpoints.responses.size": "another number of responses is stored before the oldest are dropped",
    "endpoints.responses.count": "another number of responses is stored before the oldest are dropped",
    "endpoints.keep_alive": "idle connections are closed after another time",
    "endpoints.stream_keep_alive": "silent streams send keep-alive comments at another interval",
}
# Switches: effect for clients when off, and when on.
SWITCHES: dict[str, tuple[str, str]] = {
    "endpoints.docs": ("/docs and /openapi.json get 404", "/docs and /openapi.json are served"),
    "endpoints.page": ("the page at / gets 404", "the page at / is served"),
    "endpoints.trust_request_chat_template": (
        "requests with a chat_template get 400",
        "requests may contain a chat_template",
    ),
}


def affected(
    before: ConfigSnapshot, after: ConfigSnapshot, changed: Mapping[str, tuple[Value | None, Value | None]]
) -> Iterator[str]:
    """Yield one line for each effect that a client may notice, in the order of the manifest's keys."""
    for key, (old, new) in changed.items():
        if old is None or new is None:
            continue
        if key == "model.names":
            yield from _names(old.effective, new.effective)
        elif key.startswith("model.source.") and changed.get("model.names") is None:
            yield f"{key}: another checkpoint answers under the same names"
        elif key in LIMITS:
            yield from _limit(key, old.effective, new.effective)
        elif key == "endpoints.api_keys":
            yield _keys(old.effective, new.effective)
        elif key == "endpoints.cors_origins":
            yield from _origins(old.effective, new.effective)
        elif key in SWITCHES:
            yield f"{key}: {SWITCHES[key][bool(new.effective)]}"
        elif key in CLIENT_EFFECTS:
            yield f"{key}: {old.text} → {new.text}; {CLIENT_EFFECTS[key]}"
        elif key.startswith("engine.sampling."):
            name = key.rpartition(".")[2]
            yield f"{key}: {old.text} → {new.text} for requests without {name}"
    yield from _secrets(before, after, changed)
    if before.plan and after.plan and before.outputs_sha256 != after.outputs_sha256:
        old_mark, new_mark = (snapshot.plan.gateway.system_fingerprint for snapshot in (before, after) if snapshot.plan)
        yield f"system_fingerprint of replies: {old_mark} → {new_mark}"


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


def _limit(key: str, old: Any, new: Any) -> Iterator[str]:
    if "auto" in (old, new) or limit(new) == limit(old):
        return  # the value of auto is unknown without a plan
    declared = find(tuple(key.split(".")))
    form = declared.form if declared else ""
    text = f"{key}: {spell(old, form)} → {spell(new, form)}"
    yield f"{text}, tighter: {LIMITS[key]}" if limit(new) < limit(old) else f"{text}, wider"


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
