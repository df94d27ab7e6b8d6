"""Problems of a manifest with their source locations, reported together in one message.

A line has the form `file:line:column: path.of.key: given value; allowed values; suggestion`. Values below `secrets`,
and values elsewhere that look like secrets, are never shown, because a secret may be written there by mistake.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from appliance.config import exits
from appliance.config.document import is_hidden, is_secret, masked, names_secret
from appliance.config.fix import Add, Fix, Hint, Move, Write
from appliance.config.keys import Key, children, find, takes
from appliance.config.suggest import hint_for_key, suggest_key, suggest_name, suggest_value
from appliance.config.yaml_loader import Fault, Path, Place, Tree, dotted, read_value

MAX_GIVEN = 60
WARNINGS = ("deprecated", "no-effect", "clear-text")
NOT_SHOWN = "the value given (not shown)"
IN_CLEAR_TEXT = (
    "put a secret into a file or a variable: secrets: {NAME: {file: PATH}} or {env: VARIABLE}, and write NAME"
)


@dataclass(frozen=True)
class Problem:
    """One problem of a manifest."""

    place: Place
    key: str
    message: str  # full message without the layers of the place
    given: str = ""  # given value, as part of the message
    allowed: str = ""  # allowed values, as part of the message
    hint: str = ""  # suggestion, as part of the message
    fix: Fix | None = None  # fix of the problem
    certain: bool = True  # True if no other fix is plausible
    code: str = "impossible"  # one of CODES
    fix_at: Place | None = None  # place of the fix, if the value was written elsewhere
    related: tuple[tuple[str, Place], ...] = ()  # other keys of a conflict, with their places

    @property
    def level(self) -> str:
        """Return "warning" or "error". Only errors refuse the manifest."""
        return "warning" if self.code in WARNINGS else "error"

    @property
    def text(self) -> str:
        return _join(self.message, self.place.through())

    def __str__(self) -> str:
        source = self.place.source.replace("-", "_")  # a flag writes the underscores of its key as dashes
        said = not self.key or (self.place.line == 0 and source.endswith(self.key))
        return f"{self.place}: {self.text}" if said else f"{self.place}: {self.key}: {self.text}"


class Refused(Exception):
    """Raised for a manifest that cannot be served.

    `problems` are in file order: a file before the files that it extends, options and variables last. `cause`
    determines the exit code of a command.
    """

    def __init__(self, problems: Iterable[Problem], cause: exits.Exit = exits.MANIFEST) -> None:
        self.cause = cause
        self.problems = sorted(problems, key=_order)
        super().__init__("\n".join(map(str, self.problems)))


def _order(problem: Problem) -> tuple[bool, int, str, int, int]:
    place = problem.place
    return place.line == 0, len(place.via), place.source if place.line else "", place.line, place.column


def from_fault(fault: Fault) -> Problem | None:
    """Return the problem of a YAML fault, or None if the key accepts this word, so that it is unambiguous.

    Example: `log_outputs: off`.
    """
    key = find(fault.path) if fault.path else None
    name = dotted(fault.path)
    if not fault.readings:
        message = _join(fault.message, fault.hint)
        hint = Hint(fault.hint, fault.fix, fault.certain)
        return _said(fault.place, fault.path, message, hint, code=fault.code)
    raw = fault.readings[-1][1].strip('"')
    if key and raw in key.choices:
        return None
    item = bool(fault.path) and isinstance(fault.path[-1], int)
    types = frozenset({"string"}) if item else key.types if key else frozenset()
    fitting = [text for kind, text in fault.readings if kind in types or (kind == "integer" and "number" in types)]
    fitting = [text for text in fitting if key is None or _is_taken(key, fault.path, text)]
    if is_secret(fault.path):
        message = "ambiguous (value not shown); put it in quotes"
        return Problem(fault.place, name, message, hint="put it in quotes", code="ambiguous")
    if key and not fitting:
        hint, message = _in_base_60(key, raw), _join(fault.message, f"must be {key.allowed}")
        return _said(fault.place, fault.path, _join(message, hint.text), hint, raw, key.allowed, code="ambiguous")
    words = "write " + " or ".join(fitting or [text for _, text in fault.readings])
    hint = Hint(words, Write(fitting[0]) if fitting else None, len(fitting) == 1)
    return _said(fault.place, fault.path, _join(fault.message, words), hint, raw, code="ambiguous")


def _is_taken(key: Key, path: Path, text: str) -> bool:
    """Return whether a key accepts the value of a YAML text. Items of a list are always accepted."""
    read = read_value(text, Place(""), (), Tree(value={}))
    return isinstance(path[-1], int) or "*" in key.path or takes(key.path, read)


def _in_base_60(key: Key, text: str) -> Hint:
    """Suggest a duration for a text such as 12:30."""
    parts = text.split(":")
    if key.form != "duration" or not all(part.isdecimal() for part in parts) or len(parts) > 3:
        return Hint()
    seconds = sum(int(part[:9]) * 60**place for place, part in enumerate(reversed(parts)))
    return Hint(f"did you mean {seconds}s?", Write(f"{seconds}s"), certain=False)


def from_validation(error: ValidationError, tree: Tree) -> list[Problem]:
    """Return one problem for each invalid place. Places with YAML faults are skipped."""
    faulty = {fault.path for fault in tree.faults} | tree.unknown
    details = [(detail, _path(detail, tree.value)) for detail in error.errors(include_url=False)]
    unread = any(detail["type"] == "extra_forbidden" and _is_extends(path) for detail, path in details)
    found: dict[Path, Problem] = {}
    for detail, path in details:
        if any(path[: len(known)] == known for known in faulty if known) or path in found:
            continue
        if path[:1] == ("secrets",) and any(known[: len(path)] == path for known in faulty):
            continue
        # Report each mistake once: a misspelled key is reported at its own place, not as missing.
        if detail["type"] != "missing" or not unread and not _misspelt(path, tree):
            found[path] = _problem(detail, path, tree)
    return list(found.values())


def _is_extends(path: Path) -> bool:
    """Return whether an unknown key was meant as `extends`; missing keys may then be in the file that was not read."""
    return ("extends",) in suggest_key(path)[1]


def _misspelt(path: Path, tree: Tree) -> bool:
    """Return whether an unknown sibling of a missing key was meant as that key, or as a part of it."""
    return any(meant[: len(path)] == path for other in _siblings(path, tree) for meant in suggest_key(other)[1])


def _path(detail: ErrorDetails, value: Any) -> Path:
    """Return the manifest path of a pydantic location, which also names union members and validators."""
    path: Path = ()
    for part in detail["loc"]:
        if path[:1] == ("secrets",) and len(path) == 2:
            break  # neither kind of secret fits: report one problem, not four
        inside = isinstance(value, dict) and part in value or isinstance(value, list) and isinstance(part, int)
        if not inside:
            return (*path, part) if detail["type"] == "missing" else path
        path, value = (*path, part), value[part]
    return path


def _of_an_item(allowed: str) -> str:
    """Return the allowed form of an item, for a key that takes a list."""
    return "a whole number" if allowed.endswith("of whole numbers") else "text"


def _problem(detail: ErrorDetails, path: Path, tree: Tree) -> Problem:
    if path[:1] == ("secrets",):
        return _secret_problem(path, tree)
    match detail["type"]:
        case "missing":
            return _missing(path, tree)
        case "extra_forbidden":
            place, hint = tree.keys.get(path, _above(path, tree)), hint_for_key(path, tree)
            return _said(place, path, unknown_key(path), hint, given(path, _at(path, tree)), code="unknown-key")
        case "unknown_secret":
            return _unknown_secret(tuple(detail["ctx"]["key"].split(".")), tree)
        case "unsuitable_key":
            inner = (*path, str(detail["ctx"]["key"]))
            return Problem(
                tree.keys.get(inner, _above(inner, tree)), dotted(inner), detail["ctx"]["instead"], code="wrong-value"
            )
        case "one_kind":
            return _not_one_kind(str(detail["msg"]), path, tree)
    key, value = find(path), _at(path, tree)
    place = tree.values.get(path, _above(path, tree))
    if key is None:
        return Problem(place, dotted(path), str(detail["msg"]), code="wrong-value")
    item = bool(path) and isinstance(path[-1], int) and key.kind != "section"
    allowed = _of_an_item(key.allowed) if item else key.allowed
    if item and detail["type"] == "value_error":  # a validator's own message, which starts with "must be"
        allowed = str(detail["ctx"]["error"]).removeprefix("must be ")
    spelled = tree.interpolated.get(path)
    hint = Hint() if is_hidden(path, value) else suggest_value(key, value, item=item)
    said = given(path, value, spelled.text if spelled else "")
    message = _join(said, f"must be {allowed}", hint.text)
    return _said(place, path, message, hint, said, allowed, code="wrong-value")


def _said(
    place: Place, path: Path, message: str, hint: Hint, said: str = "", allowed: str = "", *, code: str
) -> Problem:
    return Problem(place, dotted(path), message, said, allowed, hint.text, hint.fix, certain=hint.certain, code=code)


def _missing(path: Path, tree: Tree) -> Problem:
    key = find(path)
    allowed = key.allowed if key else ""
    hint = Hint()
    if key and len(path) == 1 and len(key.choices) == 1:
        hint = Hint(f"write {key.name}: {key.choices[0]}", Add(key.name, key.choices[0]))
    message = _join("missing", f"must be {allowed}", hint.text)
    return _said(_above(path, tree), path, message, hint, allowed=allowed, code="missing-key")


def unknown_key(path: Path) -> str:
    """Return the message for an unknown key: the intended key, else all keys of the section."""
    hint, _ = suggest_key(path)
    if hint:
        return _join("unknown key", hint)
    known = ", ".join(children(path[:-1]))
    where = dotted(path[:-1]) or "the manifest"
    return _join("unknown key", f"{where} has {known}" if known else f"{where} has no keys below it")


def _not_one_kind(message: str, path: Path, tree: Tree) -> Problem:
    """Return the problem of a section that must contain exactly one key."""
    inside = _at(path, tree) or {}
    empty = [name for name, value in inside.items() if value is None and not children((*path, name))]
    if len(inside) == 1 and empty:
        inner, hint = (*path, empty[0]), Hint(f"write {empty[0]}: {{}}", Write("{}"))
        return _said(tree.values[inner], inner, _join("empty", hint.text), hint, "empty", "{}", code="wrong-value")
    allowed = f"exactly one of {', '.join(children(path))}"
    place = tree.values.get(path, _above(path, tree))
    return _said(place, path, message, Hint(), given(path, inside), allowed, code="wrong-value")


def _unknown_secret(path: Path, tree: Tree) -> Problem:
    names, value = list(tree.value.get("secrets", {})), str(_at(path, tree))
    spelled = tree.interpolated.get(path)
    said = given(path, value, spelled.text if spelled else "", open=names_secret(value, names))
    near = suggest_name(value, names)
    hint = Hint(f"did you mean {near}?", Write(near)) if near else Hint(IN_CLEAR_TEXT if said == NOT_SHOWN else "")
    allowed = ", ".join(names) or "no names"
    message = _join(f"{said} is not a name in secrets", f"secrets has {allowed}", hint.text)
    place = tree.values.get(path, _above(path, tree))
    return _said(place, path, message, hint, said, allowed, code="unknown-secret")


_FORMS = "a secret is {file: path} or {env: NAME}, never the value itself"


def _secret_problem(path: Path, tree: Tree) -> Problem:
    path = path[:2]
    value = _at(path, tree)
    here = tree.values.get(path, _above(path, tree))
    if len(path) == 1:
        return _said(here, path, f"must be a mapping of names; {_FORMS}", Hint(), allowed=_FORMS, code="wrong-secret")
    if not isinstance(value, dict):
        kind, code = ("empty", "wrong-secret") if value is None else ("a literal value", "literal-secret")
        return _said(here, path, f"{kind} (not shown); {_FORMS}", Hint(), NOT_SHOWN, _FORMS, code=code)
    for name, inner in value.items():
        inside = (*path, name)
        place = tree.keys.get(inside, _above(inside, tree))
        if name not in ("file", "env"):
            hint = hint_for_key(inside, tree)
            code = "wrong-secret" if hint.fix else "literal-secret"
            return _said(place, inside, _join("unknown key", _FORMS, hint.text), hint, allowed=_FORMS, code=code)
        if not isinstance(inner, str):
            return _said(place, inside, "must be text (value not shown)", Hint(), allowed="text", code="wrong-secret")
    place = tree.keys.get(path, _above(path, tree))
    if len(value) != 1:
        message = f"{'both file and env' if value else 'nothing in it'}; {_FORMS}"
        return _said(place, path, message, Hint(), allowed=_FORMS, code="wrong-secret")
    if "env" in value and not _is_variable(value["env"]):
        wrong_name = "not a name of an environment variable (not shown; the secret itself must not be written here)"
        at = tree.values.get((*path, "env"), place)
        return _said(at, (*path, "env"), wrong_name, Hint(), NOT_SHOWN, "a name", code="literal-secret")
    return _said(place, path, *_wrong_name(path), allowed=f"text that matches {NAME_PATTERN}", code="wrong-secret")


NAME_PATTERN = "^[a-z0-9][a-z0-9._-]{0,62}$"
_NAME, _VARIABLE = re.compile(NAME_PATTERN), re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_variable(name: str) -> bool:
    return bool(_VARIABLE.fullmatch(name))


def _wrong_name(path: Path) -> tuple[str, Hint]:
    lower = str(path[-1]).lower().replace(" ", "-")
    hint = Hint(f"did you mean {lower}?", Move((path[0], lower)), certain=False) if _NAME.match(lower) else Hint()
    return _join(f"not a name for a secret; must match {NAME_PATTERN}", hint.text), hint


def unread(place: Place, path: Path, what: str, hint: Hint | None = None) -> Problem:
    """Return the problem of a file or variable that the manifest names and that is missing or invalid."""
    hint = hint or Hint()
    return _said(place, path, _join(what, hint.text), hint, code="unread")


_ONE_NAME = re.compile(r"\$\{[\w.]+\}")


def given(path: Path, value: Any, spelled: str = "", *, open: bool = False) -> str:
    """Format a given value briefly, with its text in the file if it is interpolated.

    A value that may be a secret is hidden unless `open`.
    """
    if is_secret(path) and not open:
        return NOT_SHOWN + (f" (from {spelled})" if _ONE_NAME.fullmatch(spelled) else "")
    match value:
        case None:
            text = "empty"
        case bool():
            text = "true" if value else "false"
        case str():
            text = f'"{masked(value)}"'
        case dict():
            text = "a mapping" + (f" with {', '.join(map(str, value))}" if value else "")
        case list():
            text = f"a list of {len(value)}"
        case _:
            text = str(value)
    return short(text) + (f" (from {short(masked(spelled))})" if spelled else "")


def short(text: str) -> str:
    return text if len(text) <= MAX_GIVEN else f"{text[: MAX_GIVEN - 1]}…"


def _at(path: Path, tree: Tree) -> Any:
    value = tree.value
    for part in path:
        value = value[part]
    return value


def _above(path: Path, tree: Tree) -> Place:
    """Return the location of the nearest parent that was written."""
    for length in range(len(path) - 1, 0, -1):
        table = tree.values if isinstance(path[length - 1], int) else tree.keys
        if place := table.get(path[:length]):
            return place
    return tree.values.get((), Place("manifest"))


def _siblings(path: Path, tree: Tree) -> list[Path]:
    try:
        value = _at(path[:-1], tree)
    except (KeyError, TypeError):
        return []
    return [(*path[:-1], name) for name in value if find((*path[:-1], name)) is None] if isinstance(value, dict) else []


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
