"""`slipway explain WORD`: a key or section of the manifest, an exit code, a kind of problem, an error of the API."""

import difflib
import re
import sys
import textwrap

from appliance import exits
from appliance.declare.codes import CODES
from appliance.declare.effects import EFFECTS
from appliance.declare.effects_told import in_sentences
from appliance.declare.keys import Key, keys, leaves, spell
from appliance.declare.settings import PREFIX, variable
from appliance.declare.suggest import FOREIGN_KEYS, flat

WIDTH = 100
_LABEL = 11


def explain(word: str) -> int:
    """Prints what the word stands for. Ends with the code of a wrong command line where it stands for nothing."""
    found = [text for look in (_key, _exit, _problem) if (text := look(word))]
    if found := found or [text for text in [_api_error(word)] if text]:
        print("\n\n".join(found))
        return exits.OK.number
    print(f"slipway explain: {_unknown(word)}", file=sys.stderr)
    return exits.MANIFEST.number


def _field(label: str, text: str) -> str:
    lead = f"  {label:<{_LABEL}}"
    return _filled(text, lead, " " * len(lead))


def _filled(text: str, first: str, others: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- codes ------------------------------------------------------------------------------------------------------------


def _exit(word: str) -> str:
    for one in exits.EXITS:
        if word.lower() in (str(one.number), one.name):
            head = f"exit code {one.number}, {one.name}"
            return "\n".join([head, _field("cause", one.cause), _field("cure", one.cure)])
    return ""


def _problem(word: str) -> str:
    if word.lower() not in CODES:
        return ""
    meaning, cure = CODES[word.lower()]
    head = f"{word.lower()}, a kind of problem of a manifest"
    return "\n".join([head, _field("meaning", meaning), _field("cure", cure)])


# By the name of the class in appliance.http.errors: what it means, and what to do.
API: dict[str, tuple[str, str]] = {
    "ApiError": (
        "The server failed in a way that nobody foresaw.",
        "The gateway's log has the traceback beside the request's id (error.request_id).",
    ),
    "BadRequest": (
        "The request is well formed and cannot be served as it stands.",
        "Change the field that error.param names; limits.* and model.max_context are the operator's to change.",
    ),
    "InvalidBody": (
        "The body is no JSON, or has a field of the wrong type.",
        "Compare the field that error.param names with /openapi.json.",
    ),
    "Unauthorized": (
        "The route wants an API key, and the request has none, or another one.",
        "Send `Authorization: Bearer KEY` with a key of the list that endpoints.api_keys names.",
    ),
    "NotFound": (
        "There is no such path, or the request names a model that is not served.",
        "GET /v1/models lists the names; model.names gives them.",
    ),
    "MethodNotAllowed": ("The path takes another method.", "The Allow header names it."),
    "TooLarge": ("The body is larger than limits.max_body.", "Send less, or raise limits.max_body."),
    "Unavailable": (
        "The service cannot take requests now: its engines load or restart, or it is being stopped.",
        "Send the same request again after Retry-After; /ready says how far the engines are.",
    ),
    "Overloaded": (
        "As many requests wait as limits.max_waiting allows, or as many prompt tokens as limits.max_waiting_tokens.",
        "Send the same request again after Retry-After; add engines (parallelism.data) if it is often so.",
    ),
    "EngineFailed": (
        "The engine ended, or gave up, under this request.",
        "Send it again: the engine is restarted. Read the last lines of its log for the cause.",
    ),
    "NotSupported": ("The server does not do this, and no retry will help.", "docs/http.md says what is served."),
}


def _api_error(word: str) -> str:
    """Errors by their status or type; loads the gateway's modules, so it is the last to be asked."""
    from appliance.http.errors import ApiError

    def below(kind: type[ApiError]) -> list[type[ApiError]]:
        return [kind, *(inner for one in kind.__subclasses__() for inner in below(one))]

    lines = []
    for kind in below(ApiError):
        if flat(word) in (str(kind.status), flat(kind.type), flat(kind.__name__)):
            meaning, cure = API[kind.__name__]
            lines += [f"HTTP {kind.status}, error.type {kind.type!r}", _field("meaning", meaning), _field("cure", cure)]
    return "\n".join(lines)


# -- keys -------------------------------------------------------------------------------------------------------------


def _key(word: str) -> str:
    named = word.removeprefix("--").replace("-", "_")
    if word.upper().startswith(PREFIX):
        named = next((key.name for key in leaves() if variable(key.path) == word.upper()), named)
    table = {key.name: key for key in keys().values()}
    key = table.get(named)
    if key is None:
        meant = [key for key in keys().values() if key.path[-1] == named or flat(key.path[-1]) == flat(named)]
        if not meant and (foreign := FOREIGN_KEYS.get(flat(named))):
            said = f"{word} of other servers is {foreign} here\n\n"
            return said + (_section(table[foreign]) if table[foreign].kind != "value" else _value(table[foreign]))
        if len(meant) > 1:
            return "\n\n".join(_value(key) if key.kind == "value" else _section(key) for key in meant)
        key = meant[0] if meant else None
    if key is None:
        return ""
    return _value(key) if key.kind == "value" else _section(key)


def _value(key: Key) -> str:
    example = key.examples[0] if key.examples else _other(key)
    shown = spell(example, key.form)
    below, last = [part.replace("*", "NAME") for part in key.path[:-1]], f"{key.path[-1]}: {shown}"
    lines = [key.name, _filled(key.text, "  ", "  "), ""]
    lines += [_field("value", key.allowed), _field("default", key.default_text())]
    if key.examples:
        lines.append(_field("examples", "; ".join(spell(value, key.form) for value in key.examples)))
    lines.append(_field("in YAML", f"{': {'.join(below)}: {{{last}{'}' * len(below)}" if below else last))
    if "*" not in key.path:
        lines.append(_field("flag", f"--{key.name.replace('_', '-')} {shown}"))
        lines.append(_field("variable", f"{variable(key.path)}={shown}"))
    if key.name in EFFECTS:
        lines.append(_field("a change", " ".join(in_sentences(EFFECTS[key.name]))))
    if others := _related(key):
        lines.append(_field("see also", ", ".join(others)))
    return "\n".join(lines)


def _other(key: Key) -> object:
    """Something that the key takes and that is not its default."""
    if key.types == {"boolean"}:
        return not key.default
    return next((word for word in key.choices if word != key.default), key.default)


def _related(key: Key) -> list[str]:
    """Keys that this one's text names, and whose texts name it."""

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
            default = other.default_text().strip("()") if other.kind == "value" else "a section"
            lines.append(f"  {other.path[-1]} ({default})")
            lines.append(_filled(other.text, "      ", "      "))
    if key.kind == "map":
        below = [other.path[-1] for other in leaves() if other.path[: len(key.path)] == key.path]
        lines.append(f"  each with {' or '.join(below)}; slipway explain {key.name}.*.{below[0]}")
    return "\n".join(lines).rstrip()


# -- nothing ----------------------------------------------------------------------------------------------------------


def _unknown(word: str) -> str:
    """What to say of a word that stands for nothing, with those that are near."""
    named = word.removeprefix("--").replace("-", "_").lower()
    words: dict[str, str] = {key.name: key.name for key in keys().values() if "*" not in key.path}
    words |= {key.path[-1]: key.name for key in leaves()}
    words |= {code.replace("-", "_"): code for code in CODES} | {one.name: one.name for one in exits.EXITS}
    near = list(dict.fromkeys(words[found] for found in difflib.get_close_matches(named, words, 3, 0.65)))
    hint = f"did you mean {' or '.join(near)}?" if near else "try slipway explain model, or an exit code such as 11"
    return f"{word}: no key, section, exit code, kind of problem or error of the API; {hint}"
