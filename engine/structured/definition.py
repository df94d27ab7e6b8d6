"""Conversion of a grammar to llguidance's format, and limits of its compilation. Does not import numpy, because the
gateway's checks use it.

Forced text is not tokenized in advance (`no_forcing`): every tokenization of it is allowed, so that masks are exact,
and
a text that is forced over billions of characters costs nothing.
"""

import json
import math
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits

from engine.api.errors import RequestError
from engine.api.messages import Grammar

PARAM: Final = "structured_outputs"
MAX_TEXT: Final = 1 << 24  # limit of a grammar's source in the engine; the gateway has its own limit for requests
KINDS: Final = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}

# Fuel is llguidance's measure of work; these limits end a compilation within half a second and a mask within 20 ms.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=20_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,  # the verbose form shows the parser's internal state
)
# At most one space, or one line break with indentation: otherwise a model may write whitespace up to its length limit.
# The same limit as in llama.cpp's grammars of JSON schemas, with one line break instead of two.
WHITESPACE: Final = r" |\n[ \t]{0,20}"
_OPTIONS: Final = "x-guidance"  # llguidance's own options, at the root of a schema
_EXACT: Final = '\n%llguidance {"no_forcing": true}'  # at the end, so that line numbers in errors are correct
_MESSAGE: Final = 600  # maximum length of the compiler's message; some repeat the entire grammar


def definition(grammar: Grammar) -> str:
    """Return the grammar in Lark. Raises RequestError for an invalid one."""
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
    """Return a Lark expression for JSON of this schema. Whitespace is limited by `WHITESPACE`, unless the schema has
    llguidance options (`x-guidance`) at its root. Raises ValueError for numbers that JSON cannot represent."""
    if schema is False:
        return "%json false"
    whole = {} if schema is True else schema
    # Options come last: the compiler merges keywords in their order, and another order gives another language.
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
    """Return llguidance's message without the dump of its state and without the position in the definition."""
    text = error.split("\n<state>")[0].split("\n<non-verbose/>")[0].strip()
    if kind == "json_schema":
        text = text.removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ")
        first, *others = text.split("\n")
        cause = next((line for line in others if line.startswith("error: ")), "")  # of a nested expression
        text = f"{first} {cause.removeprefix('error: ')}".strip()
    if len(text) > _MESSAGE:
        text = f"{text[:_MESSAGE]}…"
    return f"invalid {KINDS[kind]}: {text}"
