"""Output formats: whole replies, every split of them, and the grammars built from the same declaration."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from appliance.output_formats.constraint import Constraint, Language
from appliance.output_formats.declaration import Function, OutputFormat
from appliance.output_formats.events import CallArguments, CallBroken, CallStart, Content, Event, ReasoningText, joined
from appliance.output_formats.formats import HERMES, PLAIN, THINK, named_call, recognise
from appliance.output_formats.json_text import JsonValue
from appliance.output_formats.reader import ReplyReader, reader_of
from engine.api.messages import Grammar

QWEN3 = OutputFormat(THINK, HERMES)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
HARD = '{"s": "q\\"uo\\\\te\\n\\u00e9", "o": {"l": [1, -2.5e3, true, null, {}]}, "ü": "中"}'

CASES: dict[str, tuple[str, list[Event]]] = {
    "nothing": ("", []),
    "text": ("Hello <b>world</b> 1 < 2", [Content("Hello <b>world</b> 1 < 2")]),
    "blank": (" \n", [Content(" \n")]),
    "call": (CALL, F),
    "leading text": (f"Let me see.\n{CALL}", [Content("Let me see.\n"), *F]),
    "leading blank": (f"\n\n{CALL}\n", F),
    "trailing text": (f"{CALL}\nDone.", [*F, Content("\nDone.")]),
    "two calls": (f"{CALL}\n{CALL}", [*F, CallStart(1, "f"), CallArguments(1, '{"a": 1}')]),
    "thought": ("<think>\nhm\n\nyes\n</think>\n\nIt is 42.\n", [ReasoningText("hm\n\nyes"), Content("It is 42.\n")]),
    "empty thought": ("<think>\n\n</think>\n\nHi", [Content("Hi")]),
    "thought and call": (f"<think>\nx\n</think>\n\n{CALL}", [ReasoningText("x"), *F]),
    "call in open thought": (f"<think>\nx\n{CALL}", [ReasoningText("x"), *F]),
    "unfinished thought": ("<think>\nonly this\n", [ReasoningText("only this")]),
    "marker after text": ("About <think>: it is a tag", [Content("About <think>: it is a tag")]),
    "half a marker": ("a <tool_cal", [Content("a <tool_cal")]),
    "hard arguments": (
        f'<tool_call>{{"name":"g","arguments":{HARD}}}</tool_call>',
        [CallStart(0, "g"), CallArguments(0, HARD)],
    ),
    "empty arguments": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [F[0], CallArguments(0, "{}")]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [F[0], CallArguments(0, "{}")]),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [F[0], CallArguments(0, "{}")]),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', F),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', F),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}, "id": 7}</tool_call>', F),
    "no JSON": ("<tool_call>f(a=1)</tool_call> so", [Content("<tool_call>f(a=1)</tool_call> so")]),
    "wrong header": ('<tool_call>{"name": 3}</tool_call>', [Content('<tool_call>{"name": 3}</tool_call>')]),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', [Content('<tool_call>{"arguments": {}}</tool_call>')]),
    "wrong arguments": (
        'Ok <tool_call>{"name": "f", "arguments": {"a": }</tool_call> then',
        [
            Content("Ok "),
            F[0],
            CallArguments(0, '{"a": '),
            CallBroken(0, '<tool_call>{"name": "f", "arguments": {"a": }</tool_call>'),
            Content(" then"),
        ],
    ),
    "unfinished call": ('<tool_call>{"name": "f", "arguments": {"a": "x', [F[0], CallArguments(0, '{"a": "x')]),
    "unfinished header": ('So <tool_call>{"name": "f', [Content("So ")]),
    "unclosed call": ('<tool_call>{"name": "f", "arguments": {"a": 1}}', F),
    "spare brace": ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>ok', [*F, Content("ok")]),
}


def read(text: str, pieces: list[str] | None = None, form: OutputFormat = QWEN3, **options: Any) -> list[Event]:
    reader = reader_of(form, **options)
    events = [event for piece in (pieces if pieces is not None else [text]) for event in reader.feed(piece)]
    return joined([*events, *reader.finish()])


@pytest.mark.parametrize("text,events", CASES.values(), ids=CASES.keys())
def test_whole_replies_are_read(text: str, events: list[Event]) -> None:
    """TC-01 TC-02 TC-03 TC-05 TC-06: the canonical text, several calls, hard arguments, faults, any function name."""
    assert read(text) == events


@pytest.mark.parametrize("text,events", CASES.values(), ids=CASES.keys())
def test_every_split_reads_the_same(text: str, events: list[Event]) -> None:
    """TC-01: every split in two, single characters, and random pieces."""
    for cut in range(len(text) + 1):
        assert read(text, [text[:cut], text[cut:]]) == events, (text[:cut], text[cut:])
    assert read(text, list(text)) == events
    chance = random.Random(text)
    for _ in range(20):
        cuts = sorted(chance.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(text, pieces) == events


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                '{"name": "f", "arguments": ',
                "{",
                "}",
                "}}",
                '"a"',
                ": 1",
                "\n",
                " ",
                "x",
                "<",
            ]
        ),
        max_size=12,
    ),
    st.booleans(),
    st.sampled_from(
        [QWEN3, OutputFormat(THINK, None), OutputFormat(None, HERMES), OutputFormat(THINK, named_call("f"))]
    ),
)
def test_any_text_reads_the_same_whole_and_by_characters(parts: list[str], reasons: bool, form: OutputFormat) -> None:
    """TC-01: also texts that no model should write."""
    text = "".join(parts)
    whole = read(text, form=form, reasons=reasons)
    assert read(text, list(text), form=form, reasons=reasons) == whole
    assert read(text, parts, form=form, reasons=reasons) == whole


def test_a_prompt_that_opened_the_reasoning_needs_no_start_marker() -> None:
    """RE-02"""
    for pieces in (["\nhm\n</think>\n\nyes"], list("\nhm\n</think>\n\nyes")):
        assert read("", pieces, reasons=True) == [ReasoningText("hm"), Content("yes")]


def test_only_the_first_of_parallel_calls_is_kept_if_asked() -> None:
    assert read(f"{CALL}\n{CALL}\n{CALL}", one_call=True) == F


def test_a_bracket_that_is_not_a_marker_is_emitted_at_once() -> None:
    """TC-07: text waits only while it may still become a marker."""
    reader = ReplyReader(QWEN3)
    assert reader.feed("a <") == [Content("a ")]
    assert reader.feed("b") == [Content("<b")]
    assert reader.feed(" <tool_") == [Content(" ")]
    assert reader.feed("s>") == [Content("<tool_s>")]


def test_arguments_stream_as_they_come() -> None:
    """The name once and complete, then pieces."""
    reader = ReplyReader(QWEN3)
    assert reader.feed('<tool_call>\n{"name": "f", "argu') == [CallStart(0, "f")]
    assert reader.feed('ments": {"a"') == [CallArguments(0, '{"a"')]
    assert reader.feed(": 1") == [CallArguments(0, ": 1")]
    assert joined([*reader.feed("}}\n</tool_call>"), *reader.finish()]) == [CallArguments(0, "}")]


def test_a_plain_format_changes_nothing() -> None:
    for text, _ in CASES.values():
        assert read(text, list(text), PLAIN) == ([Content(text)] if text else [])


@pytest.mark.parametrize("text", ['{"a": [1, {"b": "c"}]}', " \n{}", '{"a": 1} and more'])
def test_a_named_functions_reply_is_its_arguments(text: str) -> None:
    """CH-24"""
    form = OutputFormat(THINK, named_call("f"))
    expected = [CallStart(0, "f"), CallArguments(0, text.strip().removesuffix(" and more"))]
    assert read(text, form=form) == read(text, list(text), form) == expected
    thought = f"<think>\nx\n</think>\n\n{text}"
    assert read(thought, form=form) == read(thought, list(thought), form) == [ReasoningText("x"), *expected]


JSON_TEXTS = ["{}", "[]", '{"a": 1}', "[1, 2]", '"x"', "-0.5e-7", "true", HARD, "[[[]]]", '{"a": {"b": [null]}}']


@pytest.mark.parametrize("text", JSON_TEXTS)
def test_json_values_end_where_they_end(text: str) -> None:
    for pieces in ([text + " "], list(text + " ")):
        value, used = JsonValue(), 0
        for piece in pieces:
            used += value.feed(piece)
        assert (value.status, used) == ("done", len(text))


@settings(deadline=None)
@given(st.text('{}[]",:\\ 01-.eEtrufalsn\n', max_size=9))
def test_invalid_json_is_never_complete(text: str) -> None:
    value = JsonValue()
    used = value.feed("[" + text)
    if value.status == "done":
        json.loads(("[" + text)[:used])
    else:
        with pytest.raises(ValueError):
            json.loads("[" + text)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_valid_json_is_read_to_its_end(value: Any) -> None:
    for text in (json.dumps([value]), json.dumps([value], ensure_ascii=False, indent=1)):
        reader = JsonValue()
        assert (reader.feed(text), reader.status) == (len(text), "done")


def test_templates_tell_the_format() -> None:
    qwen25 = '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
    assert recognise(qwen25) == OutputFormat(None, HERMES)
    assert recognise(qwen25 + "{{ '<think>\n\n</think>' }}") == QWEN3
    assert recognise("{% for message in messages %}{{ message.content }}{% endfor %}") == PLAIN
    assert recognise("<tool_call>{{ call }}</tool_call>") == PLAIN


# Grammars, judged by llguidance over a vocabulary of single bytes


class Bytes:
    """A tokenizer of 256 bytes, an end token and three markers as special tokens."""

    eos_token_id, bos_token_id, unk_token_id = 256, None, None
    special_token_ids = [256, 257, 258]
    tokens = [bytes([byte]) for byte in range(256)] + [b"<|end|>", b"<think>", b"</think>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def byte_tokenizer() -> LLTokenizer:
    from llguidance import TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(Bytes()))


def allows(tokenizer: LLTokenizer, grammar: Grammar, tokens: list[int]) -> bool:
    """Return True if the grammar accepts all these tokens and may end after them."""
    makers = {
        "lark": LLMatcher.grammar_from_lark,
        "regex": LLMatcher.grammar_from_regex,
        "json_schema": LLMatcher.grammar_from_json_schema,
    }
    matcher = LLMatcher(tokenizer, makers[grammar.kind](grammar.text))
    assert not matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = [Function("f", INTEGER), Function("g", {})]


def plain(marker: str) -> int | None:
    return None


def special(marker: str) -> int | None:
    return {"<think>": 257, "</think>": 258}.get(marker)


def test_the_reader_parses_required_calls(byte_tokenizer: LLTokenizer) -> None:
    """At least one call of an offered function with arguments of its schema."""
    constraint = Constraint(plain)
    many = constraint.calls(HERMES, FUNCTIONS, one_call=False)
    one = constraint.calls(HERMES, FUNCTIONS, one_call=True)
    other = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    wrong = ["", "hello", CALL.replace("1", '"x"'), CALL.replace('"f"', '"h"'), CALL + "x", f"x{CALL}"]
    assert read(CALL) == F
    for grammar in (many, one):
        assert allows(byte_tokenizer, grammar, list(CALL.encode()))
        assert allows(byte_tokenizer, grammar, list(other.encode()))
        assert not any(allows(byte_tokenizer, grammar, list(text.encode())) for text in wrong)
    assert allows(byte_tokenizer, many, list(f"{CALL}\n{other}".encode()))
    assert not allows(byte_tokenizer, one, list(f"{CALL}\n{other}".encode()))


@pytest.mark.parametrize("markers", [plain, special])
@pytest.mark.parametrize("reasons", [False, True])
def test_the_constraint_begins_behind_the_reasoning(byte_tokenizer: LLTokenizer, markers: Any, reasons: bool) -> None:
    """RE-05: whether the markers are special tokens or text, whether the prompt opened the reasoning or not."""
    grammar = Constraint(markers, THINK, reasons).reply(Language("choice", ["yes", "no"], "response_format"))
    start, end = ([257], [258]) if markers is special else (list(b"<think>"), list(b"</think>"))
    thought = ([] if reasons else start) + list(b"\nfree { thought\n") + end + list(b"\n\n")
    assert allows(byte_tokenizer, grammar, thought + list(b"yes"))
    assert not allows(byte_tokenizer, grammar, thought + list(b"maybe"))
    assert allows(byte_tokenizer, grammar, list(b"no")) != reasons


def test_strict_tools_bind_calls_and_leave_text_free(byte_tokenizer: LLTokenizer) -> None:
    grammar = Constraint(plain).text_with_calls(HERMES, FUNCTIONS, one_call=False)
    for text in ("hello < world", "", CALL, f"so: {CALL} and {CALL}\nDone"):
        assert allows(byte_tokenizer, grammar, list(text.encode())), text
    for text in (CALL.replace("1", '"x"'), "ok " + CALL.replace('"f"', '"h"')):
        assert not allows(byte_tokenizer, grammar, list(text.encode())), text


def test_calls_or_a_schema_allow_either(byte_tokenizer: LLTokenizer) -> None:
    grammar = Constraint(plain).calls(
        HERMES, FUNCTIONS, one_call=False, otherwise=Language("json_schema", INTEGER, "response_format")
    )
    assert allows(byte_tokenizer, grammar, list(CALL.encode()))
    assert allows(byte_tokenizer, grammar, list(b'{"a": 3}'))
    assert not allows(byte_tokenizer, grammar, list(b"hello"))


def test_a_named_function_accepts_bare_arguments(byte_tokenizer: LLTokenizer) -> None:
    grammar = Constraint(plain).calls(named_call("f"), FUNCTIONS[:1], one_call=True)
    assert allows(byte_tokenizer, grammar, list(b'{"a": 3}'))
    assert not allows(byte_tokenizer, grammar, list(b'{"a": "x"}'))


LANGUAGES = [
    (Language("regex", r"a/b\/[0-9]+", "p"), "a/b/42", "a/b/"),
    (Language("choice", ['say "hi"', "a\nb", "中"], "p"), "a\nb", "a"),
    (Language("grammar", 'start: "x" tail\ntail: /y+/', "p"), "xyy", "y"),
    (Language("grammar", 'root ::= "yes" | "no"', "p"), "no", "maybe"),
    (Language("json_schema", INTEGER, "p"), '{"a": 12}', '{"b": 1}'),
]


@pytest.mark.parametrize("language,right,wrong", LANGUAGES)
def test_languages_mean_the_same_alone_and_behind_reasoning(
    byte_tokenizer: LLTokenizer, language: Language, right: str, wrong: str
) -> None:
    """SO-01"""
    for grammar in (language.grammar(plain), Constraint(plain, THINK).reply(language)):
        assert allows(byte_tokenizer, grammar, list(right.encode()))
        assert not allows(byte_tokenizer, grammar, list(wrong.encode()))
