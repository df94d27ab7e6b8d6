"""Suggestions for misspelled keys, values and names."""

import difflib
import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from appliance.config.aliases import flat, foreign_keys
from appliance.config.document import is_hidden
from appliance.config.fix import Hint, Move, Remove, RepairYaml, Write
from appliance.config.keys import PROFILES, Key, children, find, keys, takes
from appliance.config.scalar import read_plain
from appliance.config.yaml_loader import Path, Place, Tree, read_value

FOREIGN_WORDS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "warn": "warning",
    "err": "error",
    "trace": "debug",
    "fifo": "fcfs",
    "plain": "text",
    "none": "off",
    "false": "off",
    "v1": "slipway/v2",
    "v2": "slipway/v2",
}
_UNITS = {
    "size": {"b": "B", "k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB", "kb": "KB", "mb": "MB", "gb": "GB", "tb": "TB"}
    | {f"{u}i": f"{u.upper()}iB" for u in "kmgt"}
    | {f"{u}ib": f"{u.upper()}iB" for u in "kmgt"},
    "duration": dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), "s")
    | dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m")
    | dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h")
    | dict.fromkeys(("ms", "msec", "millis"), "ms"),
}


# Identifying numbers: the nearest allowed number is not a useful suggestion.
_NAMING = ("endpoints.port",)


LEAVE_OUT = "leave it out"


@cache
def suggest_key(path: Path) -> tuple[str, tuple[Path, ...]]:
    """Return a hint for an unknown key, and the keys it may stand for.

    The order is: the same word in this section, also in the plural, elsewhere and in other servers, then a similar word
    here and elsewhere.
    """
    above, name = path[:-1], str(path[-1])
    here = children(above)
    word = flat(name.removeprefix("option."))  # DJL Serving writes option.NAME
    for known in here:
        if flat(known) in (word, f"{word}s"):
            return f"did you mean {known}?", ((*above, known),)
    if above[: len(PROFILES)] == PROFILES:
        return _in_profile(above, name)
    if elsewhere := _by_word().get(word):
        return f"it belongs to {' or '.join(_section(key) for key in elsewhere)}", tuple(k.path for k in elsewhere)
    if (target := foreign_keys().get(word)) is not None:
        if not target:
            return LEAVE_OUT, ()
        return f"the name here is {target}", (tuple(target.split(".")),)
    if close := difflib.get_close_matches(name.lower(), here, 1, 0.6):
        return f"did you mean {close[0]}?", ((*above, close[0]),)
    if close := difflib.get_close_matches(word, _by_word(), 1, 0.75):
        nearest = _by_word()[close[0]][-1]
        return f"did you mean {nearest.name}?", (nearest.path,)
    return "", ()


@cache
def _by_word() -> dict[str, list[Key]]:
    """Return the keys by their normalised last names."""
    table: dict[str, list[Key]] = {}
    for key in keys().values():
        if "*" not in key.path:
            table.setdefault(flat(key.path[-1]), []).append(key)
    return table


def _in_profile(above: Path, name: str) -> tuple[str, tuple[Path, ...]]:
    """Return a hint for an unknown key in a profile, where manifest keys are only allowed below `set`."""
    if len(above) == len(PROFILES) + 1 and (name,) in keys():
        return "write it below set", ((*above, "set", name),)
    close = difflib.get_close_matches(name.lower(), children(above), 1, 0.6)
    return (f"did you mean {close[0]}?", ((*above, close[0]),)) if close else ("", ())


def _section(key: Key) -> str:
    return ".".join(key.path[:-1]) + f": {key.path[-1]}" if len(key.path) > 1 else "the top level"


def hint_for_key(path: Path, tree: Tree) -> Hint:
    """Return the hint for an unknown key of a manifest."""
    text, targets = suggest_key(path)
    if text == LEAVE_OUT:
        return Hint(text, Remove())
    if len(targets) != 1 or _stands_beside(tree, targets[0], path):
        return Hint(text)
    target, value = targets[0], tree.value
    for part in path:
        value = value[part]
    if (key := find(target)) is None or "secrets" in path:
        return Hint(text, Move(target))
    certain = flat(str(path[-1])) in (flat(key.path[-1]), *foreign_keys()) or _alone(str(path[-1]), path[:-1])
    if key.kind in ("section", "map"):
        return Hint(text, Move(target) if isinstance(value, dict) else None, certain)
    if takes(key.path, value):
        return Hint(text, Move(target), certain)
    inner = Hint() if is_hidden(path, value) else suggest_value(key, value)
    return Hint(text, Move(target, inner.fix.text) if isinstance(inner.fix, Write) else None, certain)


def _stands_beside(tree: Tree, path: Path, other: Path) -> bool:
    """Return whether a key is given in the same layer as another, which then cannot be renamed to it."""
    here, there = tree.keys.get(path), tree.keys.get(other)
    return here is not None and there is not None and (here.source, here.base) == (there.source, there.base)


def _alone(name: str, above: Path) -> bool:
    """Return whether no second key is as similar as the first."""
    close = difflib.get_close_matches(name.lower(), children(above), 2, 0.6)
    ratios = [difflib.SequenceMatcher(None, word, name.lower()).ratio() for word in close]
    return len(ratios) < 2 or ratios[0] - ratios[1] > 0.05


def suggest_value(key: Key, value: Any, item: bool = False) -> Hint:
    """Return a hint for an invalid value, empty if nothing is similar. Its fix is a value that the key accepts."""
    text, write, certain = _value(key, value, item)
    if not write:
        return Hint(text, Remove() if text.startswith("leave the key out") else None)
    read = read_value(write, Place(""), (), Tree(value={}))
    fits = isinstance(read, str) if item else takes(key.path, read)
    fix = RepairYaml() if text.startswith("a space must follow") else Write(write)
    return Hint(text, fix if fits else None, certain)


def _value(key: Key, value: Any, item: bool) -> tuple[str, str, bool]:
    """Return the hint's text, the YAML text to write, and whether no other fix is plausible."""
    if item:
        return _say("write", quoted(_plain(value))) if isinstance(value, int | float) else NOTHING
    if isinstance(value, str):
        return _text(key, value.strip())
    if isinstance(value, bool):
        if "off" in key.choices and not value:
            return _mean("off")
        if key.types == {"string"} and not key.choices:
            return _say("write", quoted(_plain(value)))
        if key.types == {"array"}:
            return _say("write", f"[{quoted(_plain(value))}]")
        return _mean("auto" if value else "none") if {"auto", "none"} <= {*key.choices} else NOTHING
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, list) and "array" not in key.types and len(value) == 1:
        if isinstance(value[0], list | dict):
            return NOTHING
        return f"write {_plain(value[0])}, without brackets", scalar(value[0]), True
    if value is None and "object" in key.types:
        return "leave the key out, or write keys below it", "", True
    if value is None and not key.required:
        return "leave the key out, or write a value", "", True
    return NOTHING


def _number(key: Key, value: float) -> tuple[str, str, bool]:
    whole = isinstance(value, float) and value.is_integer()
    if whole and "integer" in key.types and "number" not in key.types:
        return _say("write", str(int(value)))
    if key.types == {"boolean"}:
        return _say("write", {0: "false", 1: "true"}[int(value)]) if value in (0, 1) else NOTHING
    if key.types == {"array"}:
        return _say("write", f"[{quoted(_plain(value))}]")
    if key.allowed.startswith("a number") and key.above == 0 and key.most == 1 and 1 < value <= 100:
        return f"write {value / 100:g} for {value:g} %", f"{value / 100:g}", True
    if key.most is not None and value > key.most and key.name not in _NAMING:
        return "", f"{key.most:g}", False  # the message already states the allowed range
    if key.least is not None and value < key.least and key.name not in _NAMING:
        return "", f"{key.least:g}", False
    if "string" in key.types and not key.choices and not key.form:
        return _say("write", quoted(_plain(value)))
    return NOTHING


NOTHING = ("", "", True)


def _say(verb: str, text: str) -> tuple[str, str, bool]:
    return f"{verb} {text}", text, True


def _mean(text: str, certain: bool = True) -> tuple[str, str, bool]:
    return f"did you mean {text}?", text, certain


def _plain(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def scalar(value: Any) -> str:
    """Return a value as YAML text, quoted if needed."""
    if not isinstance(value, str):
        return _plain(value)
    simple = re.fullmatch(r"[A-Za-z0-9_./~][\w./ +~%@-]*", value) and value == value.strip()
    return value if simple and read_plain(value) == (value, "", ()) else quoted(value)


def _text(key: Key, text: str) -> tuple[str, str, bool]:
    if key.kind == "section":
        if match := re.match(r"([A-Za-z_]\w*):(?!//)(\S.*)", text):
            inside = f"{match[1]}: {match[2]}"
            return f"a space must follow the colon: {inside}", f"{{{inside}}}", True
        return _source(key.name, text)
    if "array" in key.types:
        return _say("write", f"[{', '.join(scalar(part.strip()) for part in text.split(','))}]")
    if key.choices and (near := _word(key.choices, text)):
        return _mean(*near)
    if key.form and (near_quantity := _quantity(key.form, text)):
        return _mean(near_quantity)
    if "boolean" in key.types:
        if text.lower() in ("true", "yes", "on", "1", "enabled", "enable", "y"):
            return "write true, without quotes", "true", True
        if text.lower() in ("false", "no", "off", "0", "disabled", "disable", "none", "n"):
            return "write false, without quotes", "false", True
        return NOTHING
    if match := re.fullmatch(r"([\d.]+)\s*%", text):
        return _say("write", f"{float(match[1]) / 100:g}") if "number" in key.types else NOTHING
    if {"integer", "number"} & key.types:
        if re.fullmatch(r"-?\d+(\.\d+)?", text):
            return f"write {text}, without quotes", text, True
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmM])", text):
            return _say("write", str(int(float(match[1]) * (1024 if match[2] in "kK" else 1024**2))))
        if re.fullmatch(r"\d{1,3}([, ]\d{3})+", text):
            return _say("write", re.sub("[, ]", "", text))
        if "null" in key.types and text.lower() in ("none", "off", "auto", "default", "unlimited"):
            return "leave the key out", "", True
        if "auto" in key.choices and text.lower() in ("none", "off", "default", "max", "all", "-1"):
            return _mean("auto")
    return NOTHING


def _source(section: str, text: str) -> tuple[str, str, bool]:
    """Return the source for a text in place of a section: an address, a hub repository, or a folder."""
    if section not in ("model", "model.source"):
        return NOTHING
    kinds = {"s3": "s3: {uri", "gs": "gs: {uri", "az": "az: {uri", "http": "http: {url", "https": "http: {url"}
    kind = kinds.get(text.partition("://")[0]) if "://" in text else None
    if kind is None and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text):
        kind = "huggingface: {repo"
    source = f"{{{kind}: {scalar(text)}}}}}" if kind else f"{{path: {scalar(text)}}}"
    source = f"{{source: {source}}}" if section == "model" else source
    return f"write {source}", source, not kind or "://" in text


def nearest_word(choices: tuple[str, ...], text: str) -> str:
    """Return the intended word, or "" if none is similar."""
    near = _word(choices, text)
    return near[0] if near else ""


def _word(choices: tuple[str, ...], text: str) -> tuple[str, bool] | None:
    """Return the intended word, and True if the text is another spelling of it rather than merely similar."""
    lowered = text.lower()
    if lowered in choices:
        return lowered, True
    if FOREIGN_WORDS.get(lowered) in choices:
        return FOREIGN_WORDS[lowered], True
    if same := [word for word in choices if flat(word) == flat(text)]:
        return same[0], True
    close = difflib.get_close_matches(lowered, choices, 2, 0.6)
    return (close[0], len(close) == 1) if close else None


def _quantity(form: str, text: str) -> str:
    if form.endswith(" range"):
        size = "" if form == "size range" else r"\s*$"
        return f'">={text}"' if re.match(r"\d+(\.\d+)?" + size, text) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS[form].get(match[2].lower()) if match else None
    if match and form == "duration" and match[2].lower() in ("d", "day", "days"):
        return f"{float(match[1]) * 24:g}h"
    return f"{match[1]}{unit}" if match and unit else ""


def suggest_name(word: str, names: Iterable[str]) -> str:
    """Return the intended name of a secret, overlay, profile or model, or "" if none is similar."""
    known = list(names)
    same = [name for name in known if flat(name) == flat(word)]
    close = same or difflib.get_close_matches(word.lower(), [name.lower() for name in known], 1, 0.6)
    return next((name for name in known if close and name.lower() == close[0].lower()), "")
