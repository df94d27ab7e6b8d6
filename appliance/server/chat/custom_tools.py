"""Custom tools: their calls have one text input, and the model sees each as a function with one string argument."""

from collections.abc import Mapping
from typing import Any, Final

from engine.api.errors import RequestError

CUSTOM_INPUT: Final = "input"
"""Name of the function's only argument."""


def custom_parameters(form: Any, where: str) -> dict[str, Any]:
    """Return the parameter schema of the function.

    `form` is the tool's `format`: free text, or a grammar with syntax regex that constrains the text. A Lark grammar is
    not possible, because quotes and line ends are escaped within a JSON string.
    """
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
    """Return the regular expression of a grammar. Chat completions nest it in `grammar`, the Responses API does not."""
    grammar = form.get("grammar", form)
    syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
    if syntax != "regex" or not isinstance(grammar.get("definition"), str):
        raise RequestError(
            f"{where}.format: grammars of syntax {str(syntax)[:100]!r} are not supported. Use regex, with the "
            "expression in definition.",
            "tools",
        )
    return str(grammar["definition"])
