"""Calls of every format end even if each token is whitespace where whitespace is allowed."""

import random

import numpy as np
import pytest

from appliance.output_formats.constraint import Language
from appliance.output_formats.declaration import Function
from tests.appliance.output_formats.test_constraint import FORMATS, constraint
from tests.appliance.output_formats.walks import Vocabulary, matcher_of

PARAMETERS = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
        "inner": {
            "type": "object",
            "properties": {"n": {"enum": [7, 8]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
    "required": ["on", "list", "inner"],
    "additionalProperties": False,
}
FUNCTION = Function("f", PARAMETERS, strict=True)
WHITESPACE = frozenset(b" \t\r\n")
MOST = 1500  # tokens, mostly single bytes


def prefers_whitespace(vocabulary: Vocabulary, matcher, chance: random.Random) -> bytes:  # type: ignore[no-untyped-def]
    """Draw uniformly among the whitespace tokens that are allowed, else among all allowed tokens."""
    found, size = bytearray(), len(vocabulary.tokens)
    words = np.zeros(-(-size // 32), np.uint32)
    for _ in range(MOST):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        allowed = np.flatnonzero(bits).tolist()
        if vocabulary.eos_token_id in allowed:
            return bytes(found)
        assert allowed, f"no way on behind {bytes(found)!r}"
        token = chance.choice([each for each in allowed if each in WHITESPACE] or allowed)
        assert matcher.consume_token(token)
        found += vocabulary.tokens[token]
        if matcher.is_stopped():
            return bytes(found)
    raise AssertionError(f"no end within {MOST} tokens: {bytes(found)[:300]!r}")


@pytest.mark.parametrize("name", FORMATS)
def test_call_that_prefers_whitespace_ends(name: str) -> None:
    form, chance = FORMATS[name], random.Random(name)
    assert form.calls is not None
    vocabulary = Vocabulary(form, False, tuple(PARAMETERS["properties"]))  # type: ignore[arg-type]
    grammar = constraint(form, vocabulary).calls(form.calls, (FUNCTION,), one_call=True)
    for _ in range(3):
        prefers_whitespace(vocabulary, matcher_of(vocabulary, grammar), chance)


@pytest.mark.parametrize(
    "language",
    [
        Language("json_schema", PARAMETERS, "response_format"),
        Language(
            "structural_tag",
            {"format": {"type": "json_schema", "json_schema": PARAMETERS}},
            "response_format",
        ),
    ],
    ids=["schema", "structural tag"],
)
@pytest.mark.parametrize("calls", [False, True])
def test_language_that_prefers_whitespace_ends(language: Language, calls: bool) -> None:
    form, chance = FORMATS["hermes"], random.Random(1)
    assert form.calls is not None
    vocabulary = Vocabulary(form, False)
    limits = constraint(form, vocabulary)
    if calls:
        grammar = limits.calls(form.calls, (FUNCTION,), one_call=True, otherwise=language)
    else:
        grammar = limits.reply(language)
    for _ in range(3):
        prefers_whitespace(vocabulary, matcher_of(vocabulary, grammar), chance)
