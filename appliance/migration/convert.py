"""Conversion of settings to values of a manifest, with a reason for each that has none."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.config.keys import find, path_keys
from appliance.migration.llama_cpp import LLAMA_CPP
from appliance.migration.options import Setting, is_boolean
from appliance.migration.read import Source
from appliance.migration.rules import Key, Keys, Missing, NoEquivalent, NothingToSet, Unneeded
from appliance.migration.values import CALL_PART, REASONING_PART, REPOSITORY, SOURCE_PATH, accepted, by_type
from appliance.migration.values import source as source_of
from appliance.migration.words import Unreadable

UNKNOWN = "an unknown option; docs/migration.md lists the known ones"
NOTHING_DIFFERS = "this value makes no difference here"
CONTEXT, RUNNING, NAMES = "model.max_context", "engine.scheduling.max_running", "model.names"
HOST, PORT = "endpoints.host", "endpoints.port"
_UNEXPANDED = re.compile(r"\$\{?[A-Za-z_]")
_REFERENCES = ("endpoints.api_keys", "secrets.clients.env", "secrets.clients.file", CALL_PART, REASONING_PART)
"""Names that the schema of values does not check: references, and parts of a key."""


@dataclass(frozen=True)
class Value:
    """A value of the manifest, and the option that it comes from."""

    value: Any
    origin: str
    note: str = ""
    """Remaining difference."""


@dataclass
class Migration:
    """Result of a conversion."""

    kind: str
    values: dict[str, Value] = field(default_factory=dict)
    """Values by the names of their keys."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Options without an equivalent, each with the reason."""
    unneeded: list[tuple[str, str]] = field(default_factory=list)
    """Options that need no key, each with the reason."""


def migrate(source: Source, home: Path, model: str = "") -> Migration:
    """Convert a source. home: folder of the manifest; model: replaces the model of the source, unless it is empty.

    Raise Unreadable with the position of a malformed value, or if there is no model.
    """
    made = Migration(source.kind)
    for one in source.settings:
        if model and isinstance(one.rule, Keys) and one.rule.keys == ("model.source",):
            made.unneeded.append((one.shown, f"replaced by MODEL, {model}"))
        else:
            _apply(made, one)
    if model:
        try:
            made.values |= {key: Value(value, "MODEL") for key, value in source_of(_path_or_name(model)).items()}
        except ValueError as error:
            raise Unreadable(f"{model}: {error}") from error
    if not any(key.startswith("model.source.") and key.split(".")[-1] in _KINDS for key in made.values):
        raise Unreadable(f"{source.kind} names no model; name it: slipway init MODEL --from …")
    _complete(made, source)
    _locate(made, source, home, bool(model))
    _drop_defaults(made)
    return made


_KINDS = ("path", "repo", "uri")


def _path_or_name(model: str) -> str:
    """Return the model of the command line; an existing folder is a path, even without `./`."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _apply(made: Migration, one: Setting) -> None:
    """Add the result of one setting."""
    match one.rule:
        case None:
            made.missing.append((one.shown, UNKNOWN))
        case Unneeded(reason=reason):
            (made.unneeded if one.enabled else made.missing).append((one.shown, reason))
        case Missing(reason=reason, neutral=neutral):
            off = bool(one.values) and all(value in neutral for value in one.values) or not one.enabled
            (made.unneeded if off else made.missing).append((one.shown, NOTHING_DIFFERS if off else reason))
        case Key() | Keys() as rule:
            try:
                _set(made, one, _converted(rule, one))
            except NoEquivalent as reason:
                made.missing.append((one.shown, str(reason)))
            except NothingToSet as reason:
                made.unneeded.append((one.shown, str(reason)))
            except ValueError as error:
                raise Unreadable(f"{one.place}: {one.shown}: {error}") from error


def _converted(rule: Key | Keys, one: Setting) -> Mapping[str, Any]:
    text = "\n".join(one.values)
    secret = isinstance(rule, Keys) and rule.secret
    if _UNEXPANDED.search(text) and not secret and "{" not in text.replace("${", ""):
        raise ValueError("contains a variable of the shell; write its value")
    if isinstance(rule, Keys):
        return rule.convert(text)
    if rule.flag or (is_boolean(rule) and not one.values):
        off = one.values and one.values[0].lower() == "false"
        if off or not one.enabled:
            if rule.value is True or is_boolean(rule):
                return {rule.key: False}
            raise NoEquivalent("the opposite is the default")
        return {rule.key: rule.value}
    if text in rule.automatic:
        return {rule.key: "auto"} if "auto" in _key(rule).choices else {}
    value = (rule.convert or by_type(_key(rule)))(text)
    value = [value] if "array" in _key(rule).types and not isinstance(value, list) else value
    return {rule.key: accepted(rule.key, value)}


def _key(rule: Key) -> Any:
    found = find(tuple(rule.key.split(".")))
    assert found is not None, rule.key
    return found


def _set(made: Migration, one: Setting, values: Mapping[str, Any]) -> None:
    if not values:
        made.unneeded.append((one.shown, "automatic here, too"))
    note = one.rule.note if isinstance(one.rule, Key) else ""
    for key, value in values.items():
        before = made.values.get(key)
        if before is not None and before.value != value:
            if key.startswith("quantization."):
                made.missing.append((one.shown, f"{key} is {before.value}, from {before.origin}"))
                continue
            made.unneeded.append((before.origin, f"replaced by {one.shown}"))
            before = None
        made.values[key] = Value(value, f"{before.origin} {one.shown}" if before else one.shown, note)


def _complete(made: Migration, source: Source) -> None:
    """Add values that clients depend on and that the source does not contain: names, port, API."""
    values, server = made.values, source.server
    parts = [values.pop(name) for name in (CALL_PART, REASONING_PART) if name in values]
    if parts:
        names = "+".join(dict.fromkeys(one.value for one in parts))
        values["model.format"] = Value(names, " ".join(one.origin for one in parts))
    if server is LLAMA_CPP and isinstance((context := values.get(CONTEXT, Value("", ""))).value, int):
        running = values.get(RUNNING)
        if running is not None and isinstance(running.value, int) and running.value > 1:
            origin = f"{context.origin}, divided among the slots of {running.origin}"
            values[CONTEXT] = Value(max(context.value // running.value, 2), origin)
    if PORT not in values:
        port = server.image_port if source.contained and server.image_port else server.port
        values[PORT] = Value(port, f"the default of {server.name}")
    if server.local and not source.contained and HOST not in values:
        values[HOST] = Value("127.0.0.1", f"the default of {server.name}")
    if server.full_name and NAMES not in values:
        model = next((values[key] for key in (REPOSITORY, SOURCE_PATH) if key in values), None)
        if model is not None:
            values[NAMES] = Value([model.value], f"the default of {server.name}")
    if server.vllm_api:
        values["endpoints.compat"] = Value("vllm", "fields of replies that differ between vLLM and OpenAI")
    if "model.source.huggingface.revision" in values and REPOSITORY not in values:
        revision = values.pop("model.source.huggingface.revision")
        made.missing.append((revision.origin, "only repositories of the hub have revisions"))


def _locate(made: Migration, source: Source, home: Path, replaced: bool) -> None:
    """Rewrite relative paths, because the paths in a manifest start at its folder."""
    for path in path_keys():
        key = ".".join(path)
        if (one := made.values.get(key)) is None or source.contained and not (replaced and key == SOURCE_PATH):
            continue
        folder = Path() if replaced and key == SOURCE_PATH else source.folder
        whole = (folder / Path(one.value).expanduser()).resolve()
        above = home.resolve()
        text = str(whole.relative_to(above)) if whole.is_relative_to(above) and whole != above else str(whole)
        made.values[key] = Value(text, one.origin)


def _drop_defaults(made: Migration) -> None:
    for name in list(made.values):
        key = find(tuple(name.split(".")))
        if key is None or key.required or name in _REFERENCES:
            continue
        if made.values[name].value == key.default:
            one = made.values.pop(name)
            if not one.origin.startswith("the default of"):
                made.unneeded.append((one.origin, f"the default of {name}"))
