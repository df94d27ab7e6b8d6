"""A grammar in llguidance's own form, and what its compilation may cost. Free of numpy: the gateway's checks import it.

Forced text is not cut into tokens beforehand (`no_forcing`): every way to write it is allowed, so that masks are exact,
and a text forced over billions of characters costs nothing.
"""

import json
import math
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits

from engine.api.errors import RequestError
from engine.api.messages import Grammar

PARAM: Final = "structured_outputs"
MAX_TEXT: Final = 1 << 24  # bytes of a grammar's source that an engine takes; what a request may send is the gateway's
KINDS: Final = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

# Fuel is llguidance's own measure of work; these end a compilation within half a second and a mask within 20 ms.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=20_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,  # the long form shows the parser's inner state, which tells a caller nothing
)
# At most one space, or one line break and its indentation: without a bound a model can write whitespace until its
# length limit. The same bound as in llama.cpp's grammars of JSON schemas, with one line break instead of two.
WHITESPACE: Final = r" |\n[ \t]{0,20}"
_OPTIONS: Final = "x-guidance"  # llguidance's own options, at the root of a schema
_EXACT: Final = '\n%llguidance {"no_forcing": true}'  # at the end, so that errors name lines as they were written
_MESSAGE: Final = 600  # characters of the compiler's message; some repeat the whole grammar


def definition(grammar: Grammar) -> str:
    """The grammar as Lark. Raises RequestError for what is none at all."""
    if len(grammar.text) > MAX_TEXT:
        raise RequestError(f"the grammar has {len(grammar.text)} characters; at most {MAX_TEXT} are allowed", PARAM)
    if "\0" in grammar.text:
        raise RequestError("the grammar contains a NUL character", PARAM)
    match grammar.kind:
        case "json_schema":
            return f"start: {json_expression(_parsed(grammar.text))}{_EXACT}"
        case "regex":
            lark: str = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]["lark_grammar"]
            return lark + _EXACT
        case "lark":
            return grammar.text + _EXACT


def json_expression(schema: dict[str, Any] | bool) -> str:
    """Return JSON of this schema as an expression of a Lark rule. Whitespace is bounded by `WHITESPACE`, unless the
    schema has options of llguidance's (`x-guidance`) at its root. Raises ValueError for numbers that JSON cannot
    hold."""
    if schema is False:
        return "%json false"
    whole = {} if schema is True else schema
    # Options come last: the compiler merges keywords in their order, and another order gives other languages.
    bounded = whole if _OPTIONS in whole else {**whole, _OPTIONS: {"whitespace_pattern": WHITESPACE}}
    return "%json " + json.dumps(bounded, ensure_ascii=False, allow_nan=False)


def _parsed(text: str) -> dict[str, Any] | bool:
    try:
        schema: Any = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"invalid JSON schema: {error}", PARAM) from error
    if not isinstance(schema, dict | bool):
        raise RequestError("invalid JSON schema: it must be an object, true or false", PARAM)
    return schema


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def reason(kind: str, error: str) -> str:
    """llguidance's message without the dump of its state and without the place in the definition that it read."""
    text = error.split("\n<state>")[0].split("\n<non-verbose/>")[0].strip()
    if kind == "json_schema":
        text = text.removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ")
        first, *others = text.split("\n")
        cause = next((line for line in others if line.startswith("error: ")), "")  # of an expression in it
        text = f"{first} {cause.removeprefix('error: ')}".strip()
    if len(text) > _MESSAGE:
        text = f"{text[:_MESSAGE]}…"
    return f"invalid {KINDS[kind]}: {text}"
