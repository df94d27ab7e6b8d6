"""Explanations of keys and sections of the manifest: value, default, syntax, consequences of a change, rules."""

import re

from appliance.cli.explanations.layout import field, filled, lead
from appliance.config.aliases import flat, foreign_keys, other_names
from appliance.config.deprecated import DEPRECATED
from appliance.config.effects import effects
from appliance.config.effects_format import in_sentences
from appliance.config.keys import PROFILES, Key, keys, leaves
from appliance.config.overrides import PREFIX, variable
from appliance.config.spelling import spell
from appliance.constraints import variables
from appliance.constraints.rules import RULES

_KINDS = {"section": "a section", "map": "names of your choice", "layer": "in files only"}


def explain_key(word: str) -> str:
    """Explain all keys and sections that match the word: by path, flag, variable, last part, or another server's
    name."""
    said, found = _meant(word)
    explainers = {"value": _value, "layer": _layer}
    return said + "\n\n".join(explainers.get(key.kind, _section)(key) for key in found)


def _meant(word: str) -> tuple[str, list[Key]]:
    """Return an introduction and the matching keys."""
    named, table = word.removeprefix("--").replace("-", "_"), {key.name: key for key in keys().values()}
    if word.upper().startswith(PREFIX):
        named = next((key.name for key in leaves() if variable(key.path) == word.upper()), named)
    if named in table:
        return "", [table[named]]
    for row in DEPRECATED:
        if named == row.old:
            return f"{row.old} was renamed to {row.new} in {row.since}\n\n", [table[row.new]]
    if meant := [key for key in table.values() if flat(key.path[-1]) == flat(named)]:
        return "", meant
    foreign = foreign_keys().get(flat(named))
    return (f"{word} of other servers is {foreign} here\n\n", [table[foreign]]) if foreign else ("", [])


def _value(key: Key) -> str:
    example = key.examples[0] if key.examples else _other(key)
    shown = spell(example, key.form)
    lines = [key.name, filled(key.text, "  ", "  "), ""]
    lines += [field("value", key.allowed), field("default", key.default_text())]
    if key.examples:
        lines.append(field("examples", "; ".join(spell(value, key.form) for value in key.examples)))
    lines.append(lead("in YAML") + _in_yaml(key.path, shown))
    if "*" not in key.path:
        lines.append(field("flag", f"--{key.name.replace('_', '-')} {shown}"))
        lines.append(field("variable", f"{variable(key.path)}={shown}"))
    if key.name in effects():
        lines.append(field("a change", " ".join(in_sentences(effects()[key.name]))))
    lines += _together(key)
    if names := other_names(key.name):
        lines.append(field("elsewhere", names))
    if others := _related(key):
        lines.append(field("see also", ", ".join(others)))
    return "\n".join(lines)


def _in_yaml(path: tuple[str, ...], shown: str) -> str:
    """Return one line of flow style: `hardware: {profiles: [{name: h200}]}`, `secrets: {NAME: {file: keys}}`."""
    text = shown
    for depth in range(len(path) - 1, -1, -1):
        if path[depth] == "*" and path[:depth] == PROFILES:
            text = f"[{text}]"
        else:
            text = f"{path[depth].replace('*', 'NAME')}: {text}"
            text = f"{{{text}}}" if depth else text
    return text


def _layer(key: Key) -> str:
    """Explain a key that composes files."""
    lines = [f"{key.name}, in files only", filled(key.text, "  ", "  "), "", field("value", key.allowed)]
    lines += [lead("in YAML") + _in_yaml(key.path, spell(value, key.form)) for value in key.examples]
    below = [other.name for other in keys().values() if other.path[:-2] == key.path and other.path[-2] == "*"]
    return "\n".join([*lines, *([field("below it", ", ".join(below))] if below else [])])


def _together(key: Key) -> list[str]:
    """Explain what `auto` prefers, and the rules that involve the key."""
    tied = next((one for one in variables.VARIABLES if one.key == key.name), None)
    if tied is None:
        return []
    names = ", ".join(rule.name for rule in RULES if tied.name in rule.keys)
    prefers = f"{tied.prefers}; values that the rules exclude are skipped".replace("`", "")
    lines = [] if tied.sole else [field("auto", prefers)]
    return [*lines, *([field("rules", f"{names}: see `slipway explain` for each")] if names else [])]


def _other(key: Key) -> object:
    """Return an allowed value that is not the default."""
    if key.types == {"boolean"}:
        return not key.default
    return next((word for word in key.choices if word != key.default), key.default)


def _related(key: Key) -> list[str]:
    """Return the keys that this key's text mentions, and those whose texts mention it."""

    def names(text: str, other: Key) -> bool:
        last = other.path[-1]
        return other.name in text or ("_" in last and re.search(rf"\b{re.escape(last)}\b", text) is not None)

    return [o.name for o in leaves() if o != key and (names(key.text, o) or names(o.text, key))]


def _section(key: Key) -> str:
    lines = [
        f"{key.name}, a section" if key.kind == "section" else f"{key.name}, a mapping of names",
        f"  {key.text}",
        "",
    ]
    for other in keys().values():
        if other.path[:-1] == key.path and other.path[-1] != "*":
            default = other.default_text().strip("()") if other.kind == "value" else _KINDS[other.kind]
            lines.append(f"  {other.path[-1]} ({default})")
            lines.append(filled(other.text, "      ", "      "))
    if key.kind == "map":
        below = [f"'{other.name}'" for other in leaves() if other.path[: len(key.path)] == key.path]
        lines.append(f"  see slipway explain {' or '.join(below)}")
    return "\n".join(lines).rstrip()
