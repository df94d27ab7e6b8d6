"""Grammars of every format: accepted text parses as calls with valid arguments, and free text stays unconstrained."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from appliance.output_formats.constraint import Constraint
from appliance.output_formats.declaration import Function, OutputFormat
from appliance.output_formats.events import CallArguments, CallStart, Content, Event, ReasoningText, joined
from appliance.output_formats.formats import CALLS, HARMONY, REASONINGS, THINK
from appliance.output_formats.reader import reader_of
from engine.structured.definition import LIMITS, definition
from tests.appliance.output_formats.goldens import FUNCTIONS as GOLDEN_FUNCTIONS
from tests.appliance.output_formats.goldens import GOLDENS
from tests.appliance.output_formats.walks import Vocabulary, matcher_of, walk

HARD = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 9},
        "mode": {"enum": ["fast", 'slow "er"', "a\nb"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "maybe": {"type": ["integer", "null"], "minimum": -4, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "point": {"$ref": "#/$defs/point"},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 12}},
    },
    "required": ["mode", "point", "maybe"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "tag": {"type": "string"}, "on": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
FUNCTIONS = (
    Function("plan.trip", HARD, strict=True),
    Function("now", {}),
    Function("any_thing", {"type": "object"}),
    Function(
        "set",
        {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "n": {"type": "integer"}, "s": {"type": "string"}},
            "additionalProperties": False,
        },
    ),
)
BY_NAME = {function.name: function for function in FUNCTIONS}
FORMATS = {calls.name: OutputFormat(None, calls) for calls in CALLS} | {"harmony": HARMONY}
FIELDS = (*HARD["properties"], *HARD["$defs"]["point"]["properties"], "item", "n", "s")  # type: ignore[misc,index]
WALKS = 4


def read(form: OutputFormat, text: str, **options: Any) -> list[Event]:
    reader = reader_of(form, functions=FUNCTIONS, **options)
    return joined([*reader.feed(text), *reader.finish()])


def check_calls(events: list[Event], text: str) -> int:
    """All calls name an offered function, with arguments of its schema."""
    starts = {event.index: event.name for event in events if isinstance(event, CallStart)}
    arguments = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    assert starts.keys() == arguments.keys(), text
    for index, name in starts.items():
        try:
            value = json.loads(arguments[index])
        except ValueError as error:
            raise AssertionError(f"{error}: {arguments[index]} of {text}") from error
        jsonschema.validate(value, {"type": "object", **BY_NAME[name].parameters})
    return len(starts)


def constraint(form: OutputFormat, vocabulary: Vocabulary, **options: Any) -> Constraint:
    return Constraint(vocabulary.special_id, channels=form.channels, **options)


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(3)
def test_required_calls_are_always_valid(name: str, special: bool) -> None:
    form = FORMATS[name]
    assert form.calls is not None
    vocabulary, chance = Vocabulary(form, special, FIELDS), random.Random(f"{name} {special}")
    for one_call in (False, True):
        grammar = constraint(form, vocabulary).calls(form.calls, FUNCTIONS, one_call=one_call)
        assert not LLMatcher.validate_grammar(definition(grammar), limits=LIMITS)
        matcher = matcher_of(vocabulary, grammar)
        for _ in range(WALKS):
            text = walk(vocabulary, matcher, chance)
            events = read(form, text)
            assert not [event for event in events if isinstance(event, Content | ReasoningText)], text
            count = check_calls(events, text)
            assert count == 1 if one_call else count >= 1, text


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """The longest tokens first, as a tokenizer cuts markers out."""
    ids: list[int] = []
    while text:
        mark = max((mark for mark in vocabulary.marks if text.startswith(mark)), key=len, default="")
        ids += [256 + vocabulary.marks.index(mark)] if mark else list(text[0].encode())
        text = text[len(mark) or 1 :]
    return ids


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_grammars_accept_the_outputs_of_models(name: str, special: bool) -> None:
    """The golden calls: a grammar must accept the spelling that the model uses."""
    form = FORMATS[name]
    assert form.calls is not None
    vocabulary = Vocabulary(form, special)
    grammar = constraint(form, vocabulary).calls(form.calls, GOLDEN_FUNCTIONS, one_call=False)
    for text in (GOLDENS[name].one, GOLDENS[name].none):
        if form.channels is not None:
            text = text.removesuffix("<|call|>")  # an end token
        if name in ("pythonic", "llama4_pythonic", "lfm2", "olmo3"):
            text = text.replace("'", '"')  # a grammar writes JSON's quotes
        matcher = matcher_of(vocabulary, grammar)
        ids = tokens_of(vocabulary, text)
        used = matcher.try_consume_tokens(ids)
        assert used == len(ids), text.encode()[:used]
        assert matcher.is_accepting(), text


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])
def test_text_is_free_until_a_call_begins(name: str, special: bool) -> None:
    """`auto` with strict tools: any text, then calls, which are valid."""
    form = FORMATS[name]
    assert form.calls is not None
    vocabulary, chance = Vocabulary(form, special, FIELDS), random.Random(name)
    matcher = matcher_of(
        vocabulary, constraint(form, vocabulary).text_with_calls(form.calls, FUNCTIONS, one_call=False)
    )
    for text in ("", "Hello < world", "中 <b> }] ``` {\n\n", "<tool", "a [TOOL"):
        matcher.reset()
        ids = list(text.encode())
        assert matcher.try_consume_tokens(ids) == len(ids), text
        assert matcher.is_accepting(), text
    for _ in range(2):
        text = walk(vocabulary, matcher, chance)
        check_calls(read(form, text), text)
    begun = "" if form.calls.bare else "So: "
    call = walk(
        vocabulary,
        matcher_of(vocabulary, constraint(form, vocabulary).calls(form.calls, FUNCTIONS, one_call=True)),
        chance,
    )
    matcher.reset()
    ids = tokens_of(vocabulary, begun + call)
    assert matcher.try_consume_tokens(ids) == len(ids), call
    assert matcher.is_accepting(), call
    for function in BY_NAME:
        if function in call:
            wrong = tokens_of(vocabulary, begun + call.replace(function, "nobody"))
            matcher.reset()
            assert matcher.try_consume_tokens(wrong) < len(wrong), call


def test_channels_are_free_until_a_call_begins() -> None:
    form = HARMONY
    assert form.calls is not None
    vocabulary, chance = Vocabulary(form, True), random.Random(1)
    grammar = constraint(form, vocabulary).text_with_calls(form.calls, FUNCTIONS, one_call=False)
    matcher = matcher_of(vocabulary, grammar)
    for _ in range(20):
        text = walk(vocabulary, matcher, chance)
        check_calls(read(form, text), text)
    free = "<|channel|>analysis<|message|>any {<tool_call>} text<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    matcher.reset()
    assert matcher.try_consume_tokens(tokens_of(vocabulary, free)) == len(tokens_of(vocabulary, free))
    wrong = tokens_of(vocabulary, GOLDENS["harmony"].one)
    matcher.reset()
    assert matcher.try_consume_tokens(wrong) < len(wrong), "weather is no function here"


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("reasons", [False, True], ids=["asked", "opened"])
@pytest.mark.parametrize("reasoning", REASONINGS, ids=lambda reasoning: reasoning.name)
@pytest.mark.sampled(3)
def test_calls_may_follow_any_reasoning(reasoning: Any, reasons: bool, special: bool) -> None:
    """RE-05: the constraint begins after the reasoning, and the reader finds the same boundary."""
    hermes = FORMATS["hermes"].calls
    assert hermes is not None
    form = OutputFormat(reasoning, hermes)
    vocabulary, chance = Vocabulary(form, special), random.Random(reasoning.name)
    grammar = constraint(form, vocabulary, reasoning=reasoning, reasons=reasons).calls(
        hermes, FUNCTIONS, one_call=False
    )
    matcher = matcher_of(vocabulary, grammar)
    thought = f"{'' if reasons else reasoning.start}\nfree {{ thought\n{reasoning.end}\n\n"
    for text in (thought + GOLDENS["hermes"].none.replace("weather", "now"), thought + "no call"):
        ids = tokens_of(vocabulary, text)
        matcher.reset()
        fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert fits == ("no call" not in text), text
    events = read(form, thought + GOLDENS["hermes"].none, reasons=reasons)
    assert events[0] == ReasoningText("free { thought")
    assert check_calls(events, thought) == 1
    for _ in range(2):
        text = walk(vocabulary, matcher, chance)
        assert check_calls(read(form, text, reasons=reasons), text) >= 1, text


def test_channels_keep_thoughts_before_a_call() -> None:
    assert HARMONY.calls is not None
    vocabulary, chance = Vocabulary(HARMONY, True), random.Random(2)
    for reasons in (False, True):
        grammar = constraint(HARMONY, vocabulary, reasoning=THINK, reasons=reasons).calls(
            HARMONY.calls, FUNCTIONS, one_call=True
        )
        matcher = matcher_of(vocabulary, grammar)
        for _ in range(8):
            text = walk(vocabulary, matcher, chance)
            assert check_calls(read(HARMONY, text, reasons=reasons), text) == 1
