"""Interpolation of environment variables and `variables` in the texts of a manifest file.

    ${NAME}              environment variable            ${var.name}    value from `variables`
    ${NAME:-default}     default if unset or empty       $$             a dollar sign

A default may contain references. A value that consists of a single `${…}` has the type of its text as an unquoted YAML
scalar (8000 is a number), or the type of the variable. If the key accepts only text, the value is text.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.config.document import is_secret_variable
from appliance.config.fix import Replace
from appliance.config.keys import find
from appliance.config.merge import at, merged
from appliance.config.scalar import read_plain
from appliance.config.yaml_loader import Fault, Interpolated, Path, Place, Tree

_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"[a-z][a-z0-9_]*")
MAX_TEXT = 65_536  # characters of one text, before and after interpolation
MAX_WHOLE = 1_048_576  # characters of all interpolated texts of a manifest
MAX_DEFAULTS = 20  # nesting depth of defaults


@dataclass(frozen=True)
class Reference:
    """One `${name}` or `${name:-default}`."""

    name: str
    default: tuple["Part", ...] | None
    dollar: int  # number of $ characters before it in the text
    text: str  # the reference as written


Part = str | Reference


class Unreadable(Exception):
    """Raised if a text cannot be interpolated, because of its `dollar`-th $.

    An empty message means that the cause was reported elsewhere. `instead` is the text at the $ and its replacement;
    `certain` is true if no other replacement is plausible.
    """

    def __init__(
        self,
        dollar: int,
        message: str = "",
        hint: str = "",
        instead: tuple[str, str] | None = None,
        *,
        certain: bool = True,
        code: str = "interpolation",
    ) -> None:
        super().__init__(message)
        self.dollar, self.message, self.hint, self.code = dollar, message, hint, code
        self.fix, self.certain = Replace(*instead) if instead else None, certain

    def fault(self, path: Path, dollars: tuple[Place, ...]) -> Fault:
        return Fault(path, dollars[self.dollar], self.message, (), self.hint, self.code, self.fix, self.certain)


# -- parsing ----------------------------------------------------------------------------------------------------------


def parse(text: str) -> tuple[Part, ...]:
    """Split a text into parts. Raise Unreadable for a $ that starts none of the forms above."""
    if len(text) > MAX_TEXT:
        what = f"a text of {len(text):,} characters; at most {MAX_TEXT:,} are searched for $"
        raise Unreadable(0, what, code="wrong-layer")
    return _parts(text, 0, 0)[0]


def _parts(text: str, start: int, depth: int) -> tuple[tuple[Part, ...], int]:
    """Return the parts up to the end or to the brace that closes a default, and the position there.

    `depth` is the nesting depth of defaults.
    """
    nested = depth > 0
    parts: list[Part] = []
    plain, index = "", start
    while index < len(text) and not (nested and text[index] == "}"):
        after = text[index + 1 : index + 2]
        if text[index] != "$":
            plain, index = plain + text[index], index + 1
        elif after == "$":
            plain, index = plain + "$", index + 2
        elif after == "{":
            reference, index = _reference(text, index, depth)
            parts, plain = [*parts, *([plain] if plain else []), reference], ""
        elif match := _ENVIRONMENT.match(text, index + 1):
            name = match[0]
            hint = f"write ${{{name}}}, or $${name} for the text ${name}"
            instead = (f"${name}", f"${{{name}}}")
            raise Unreadable(text.count("$", 0, index), f"${name}", hint, instead, certain=False)
        else:
            plain, index = plain + "$", index + 1
    return (*parts, *([plain] if plain else [])), index


def _reference(text: str, start: int, depth: int) -> tuple[Reference, int]:
    dollar = text.count("$", 0, start)
    match = re.compile(r"[^${}:\n]*").match(text, start + 2)
    assert match, "the pattern matches every text"
    name, index, default = match[0], match.end(), None
    if text[index : index + 2] == ":-":
        if depth == MAX_DEFAULTS:
            raise Unreadable(dollar, f"more than {MAX_DEFAULTS} defaults within defaults", code="wrong-layer")
        default, index = _parts(text, index + 2, depth + 1)
    if text[index : index + 1] in ("", "\n"):
        shown = text[start:].partition("\n")[0]
        hint = f"write ${{{name or 'NAME'}}}, or $${{ for the text ${{"
        instead = (shown, f"{shown}}}") if shown == f"${{{name}" and name else None
        raise Unreadable(dollar, f"{shown} has no closing }}", hint, instead, certain=False)
    if text[index] != "}":
        hint = f"write ${{{name or 'NAME'}:-default}}"
        raise Unreadable(dollar, f"{text[start : index + 1]}… is not a valid interpolation", hint)
    written = text[start : index + 1]
    _check_name(name, dollar, written)
    return Reference(name, default, dollar, written), index + 1


def _check_name(name: str, dollar: int, written: str) -> None:
    kind, dot, rest = name.partition(".")
    if not dot and _ENVIRONMENT.fullmatch(name) or kind == "var" and _VARIABLE.fullmatch(rest):
        return
    meant, certain = "", True
    if kind in ("env", "ENV") and _ENVIRONMENT.fullmatch(rest):
        meant = f"${{{rest}}}"
    elif kind in ("vars", "variables", "variable") and _VARIABLE.fullmatch(rest):
        meant = f"${{var.{rest}}}"
    elif match := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)([-?+=])(.*)", name):
        # Default syntax of a POSIX shell. `-` and `=` have an equivalent here; `?` and `+` do not.
        meant, certain = f"${{{match[1]}:-{match[3]}}}" if match[2] in "-=" else f"${{{match[1]}}}", match[2] in "-="
    elif _ENVIRONMENT.fullmatch(name.strip()):
        meant = f"${{{name.strip()}}}"
    hint = f"write {meant or '${NAME} for an environment variable, ${var.name} for one of variables'}"
    message = f"{written}: {f'{name!r} is not a valid name' if name else 'the name is missing'}"
    raise Unreadable(dollar, message, hint, (written, meant) if meant else None, certain=certain)


# -- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """Names that a text can refer to."""

    environ: Mapping[str, str]
    variables: Mapping[str, Any]
    broken: frozenset[str] = frozenset()  # variables with a fault
    written: Mapping[str, Interpolated] = field(default_factory=dict)  # source of each variable's value
    shared: frozenset[str] = frozenset()  # variables that several texts refer to


def interpolate(tree: Tree, names: Names) -> Tree:
    """Return the tree with all texts interpolated. A failure is a fault at its `$` and leaves the value unchanged."""
    done = merged(tree)
    done.dollars = {}
    size = 0
    for path, places in tree.dollars.items():
        text = at(tree, path)
        if not isinstance(text, str):
            continue
        _resolve_at(done, path, text, places, names)
        size += len(str(at(done, path)))
        if size > MAX_WHOLE:
            what = f"all interpolated texts together have more than {MAX_WHOLE:,} characters"
            done.faults.append(Fault(path, tree.values[path], what, hint="use shorter variables", code="wrong-layer"))
            done.unknown |= {path, *tree.dollars}
            break
    return done


def _resolve_at(tree: Tree, path: Path, text: str, places: tuple[Place, ...], names: Names) -> None:
    try:
        parts = parse(text)
        value = value_of(parts, names, text_only=_is_text_only(path))
    except Unreadable as error:
        if error.message:
            tree.faults.append(error.fault(path, places))
        tree.unknown.add(path)
        return
    holder = at(tree, path[:-1])
    holder[path[-1]] = value.value
    if any(isinstance(part, Reference) for part in parts):
        tree.interpolated[path] = written(text, parts, names, tree.values[path])
    if value.trap:
        message = f'"{value.value}" (from {text}): {value.trap}'
        tree.faults.append(Fault(path, tree.values[path], message, value.readings, code="ambiguous"))


def _is_text_only(path: Path) -> bool:
    key = find(path)
    item = bool(path) and isinstance(path[-1], int)
    return key is not None and (item or key.types <= {"string", "null"})


@dataclass(frozen=True)
class Value:
    """An interpolated value."""

    value: Any
    trap: str = ""  # why YAML versions read the text differently; "" if they agree
    readings: tuple[tuple[str, str], ...] = ()  # unambiguous spellings


def value_of(parts: tuple[Part, ...], names: Names, *, text_only: bool) -> Value:
    """Return the value of a text. Raise Unreadable for a name that has no value."""
    found = join(parts, names)
    if isinstance(found, _Text):
        return Value(str(found) or None) if text_only else Value(*read_plain(str(found)))
    return Value(_spell(found) if text_only else found)


def join(parts: tuple[Part, ...], names: Names) -> Any:
    """Join the parts. A single reference keeps the type of its value. Raise Unreadable."""
    if len(parts) == 1 and isinstance(parts[0], Reference):
        return _part(parts[0], names)
    text = ""
    for part in parts:
        text += _spell(_part(part, names))
        if len(text) > MAX_TEXT:
            dollar = part.dollar if isinstance(part, Reference) else 0
            what = f"a text of more than {MAX_TEXT:,} characters, because variables contain one another"
            raise Unreadable(dollar, what, "use fewer variables", code="wrong-layer")
    return text


def written(text: str, parts: tuple[Part, ...], names: Names, place: Place) -> Interpolated:
    """Return the source of the value of a text at `place`."""
    interpolated = Interpolated(text)
    if len(parts) != 1 or not isinstance(reference := parts[0], Reference):
        return interpolated
    kind, dot, name = reference.name.rpartition(".")
    value = (names.variables if dot else names.environ).get(name)
    if value is not None and value != "" or reference.default is None:
        if not dot:
            return replace(interpolated, definition=Place(name))
        return replace(names.written.get(name, interpolated), text=text, shared=name in names.shared)
    if all(isinstance(part, str) for part in reference.default):
        return replace(interpolated, definition=place, default="".join(map(str, reference.default)))
    return written(text, reference.default, names, place)


class _Text(str):
    """Text from the environment or from a default, whose type is not yet known."""


def _part(part: Part, names: Names) -> Any:
    if isinstance(part, str):
        return part
    _refuse_secret(part)
    kind, dot, name = part.name.rpartition(".")
    table = names.variables if dot else names.environ
    if dot and name in names.broken:
        raise Unreadable(part.dollar)
    value = table.get(name)
    if value is not None and value != "":
        return value if dot else _Text(value)
    if part.default is not None:
        return _Text(_spell(join(part.default, names)))
    if value == "":
        return value if dot else _Text("")
    hint, meant = _near(part, bool(dot), name, names)
    instead = (part.text, meant) if meant and part.text == f"${{{part.name}}}" else None
    certain, code = bool(dot) and meant[2:6] == "var.", "interpolation" if dot else "unset"
    raise Unreadable(part.dollar, f"{part.text} is not set", hint, instead, certain=certain, code=code)


def _refuse_secret(part: Reference) -> None:
    name = part.name.removeprefix("var.")
    if not is_secret_variable(name):
        return
    example = name if part.name == name else "NAME"
    raise Unreadable(
        part.dollar,
        f"${{{part.name}}} has the name of a secret, and secrets cannot be values",
        f"name it below secrets, as in secrets: {{name: {{env: {example}}}}}",
    )


def _near(part: Reference, is_variable: bool, name: str, names: Names) -> tuple[str, str]:
    """Return a hint and a suggestion for a name that has no value."""
    other = names.environ if is_variable else names.variables
    match = next((known for known in other if known.lower() == name.lower()), None)
    if match is not None:
        meant = f"${{{match if is_variable else f'var.{match}'}}}"
        return f"did you mean {meant}?", meant
    own = names.variables if is_variable else names.environ
    same = {known.lower(): known for known in own if not is_secret_variable(known)}
    if close := difflib.get_close_matches(name.lower(), same, 1, 0.7):
        meant = f"${{{'var.' if is_variable else ''}{same[close[0]]}}}"
        return f"did you mean {meant}?", meant
    if is_variable:
        known = ", ".join(names.variables) or "nothing"
        return f"variables has {known}", ""
    return f"set it, or write ${{{name}:-default}}", ""


def _spell(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
