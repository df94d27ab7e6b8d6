"""Custom tools, whose calls have a text and no arguments: to the model each is a function of one string."""

from collections.abc import Mapping
from typing import Any, Final

from engine.api.errors import RequestError

CUSTOM_INPUT: Final = "input"
"""The one argument of the function."""


def custom_parameters(form: Any, where: str) -> dict[str, Any]:
    """Return the schema of the function. `form` is the tool's `format`: a text, or a grammar of syntax regex, which
    binds the text. A Lark grammar cannot be within a string of JSON, where quotes and line ends are escaped."""
    form = form or {"type": "text"}
    text: dict[str, Any] = {"type": "string"}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise RequestError(f"{where}.format.type must be text or grammar.", "tools")
    if form["type"] == "grammar":
        text["pattern"] = f"^(?:{_expression(form, where)})$"
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _expression(form: Mapping[str, Any], where: str) -> str:
    """Chat completions put syntax and definition into `grammar`, responses into the format itself."""
    grammar = form.get("grammar", form)
    syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
    if syntax != "regex" or not isinstance(grammar.get("definition"), str):
        raise RequestError(
            f"{where}.format: grammars of syntax {str(syntax)[:100]!r} are not possible; possible is regex, with the "
            "expression in definition.",
            "tools",
        )
    return str(grammar["definition"])
