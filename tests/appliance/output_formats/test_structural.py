"""Structural tags: the grammar of each node accepts exactly the intended texts."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from appliance.output_formats.constraint import Constraint, Language
from appliance.output_formats.formats import THINK
from appliance.output_formats.structural import structural_grammar
from appliance.server.chat.language import read_language
from appliance.server.schema.common import ResponseFormat, StructuredOutputs
from engine.api.errors import RequestError
from engine.structured.definition import definition

CALL, END, STOP = 257, 258, 256
SPECIAL = {"<|call|>": CALL, "<|end|>": END}


class Bytes:
    """Single bytes and two special tokens."""

    bos_token_id = None
    eos_token_id = STOP
    special_token_ids = (STOP, CALL, END)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<|call|>", b"<|end|>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=len(Bytes.tokens), eos_token=STOP, slices=[])


def ids(text: str) -> list[int]:
    """Encode special tokens by their names and all other text byte by byte."""
    out: list[int] = []
    while text:
        name = next((each for each in SPECIAL if text.startswith(each)), None)
        out += [SPECIAL[name]] if name else text[0].encode()
        text = text[len(name) if name else 1 :]
    return out


def takes(tokenizer: LLTokenizer, grammar: Any, text: str) -> bool:
    matcher = LLMatcher(tokenizer, definition(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.try_consume_tokens([token]) == 1 for token in ids(text)) and bool(matcher.is_accepting())


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
LETTERS = {"type": "regex", "pattern": "[a-z/]+"}
ANY = {"type": "any_text"}
F, G = tag("<f=1>", INT, "</f>"), tag("<g>", LETTERS, "</g>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [F, tag("<f=2>", LETTERS, "</f>"), G]}

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": (const('a"b\n'), ['a"b\n'], ["a", 'a"b', 'a"b\nc']),
    "json_schema": (INT, ["1", "-20"], ["x", "1.5", ""]),
    "regex": (LETTERS, ["a/b"], ["A", ""]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["x", "12"]),
    "any_text": (ANY, ["", "any\nthing <f> é"], []),
    "any_text but": ({"type": "any_text", "excludes": ["<", "no"]}, ["", "yes n o"], ["a < b", "annoy"]),
    "tag": (F, ["<f=1>12</f>"], ["<f=1>x</f>", "<f=1>12", "12</f>", "<f=2>1</f>"]),
    "tag of text": (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>b</b></a>"], ["<a>", "<a></a></a>", "<a>x</a>y"]),
    "tag with ends": (tag("<a>", LETTERS, ["</a>", "."]), ["<a>b</a>", "<a>b."], ["<a>b", "<a>.", "<a></a"]),
    "tag of a regex that may end": (tag("", {"type": "regex", "pattern": "(?s:.)*"}, "!"), ["a!", "!"], ["a", "a!b"]),
    "special tag": (tag("<|call|>f ", INT, "<|end|>"), ["<|call|>f 3<|end|>"], ["<|call|>3<|end|>", "<|call|>f 3"]),
    "special tag of text": (
        tag("<|call|>", ANY, "<|end|>"),
        ["<|call|>any<|end|>", "<|call|><|end|>"],
        ["<|call|>any"],
    ),
    "sequence": (
        {"type": "sequence", "elements": [const("x"), INT, const(";")]},
        ["x5;"],
        ["x5", "5;", "x;"],
    ),
    "text, then a tag": (
        {"type": "sequence", "elements": [ANY, F, const("!")]},
        ["<f=1>2</f>!", "so <f <f=1>2</f>!"],
        ["so", "so <f=1>2</f>", "so <f=1>x</f>!"],
    ),
    "or": ({"type": "or", "elements": [INT, const("no")]}, ["3", "no"], ["3no", "yes"]),
    "optional": ({"type": "optional", "content": INT}, ["", "3"], ["a"]),
    "star": ({"type": "star", "content": const("ab")}, ["", "ab", "abab"], ["a", "aba"]),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    "repeat": ({"type": "repeat", "content": const("a"), "min": 2, "max": 3}, ["aa", "aaa"], ["a", "aaaa"]),
    "repeat without end": ({"type": "repeat", "content": const("a"), "min": 2, "max": -1}, ["aa", "a" * 9], ["a"]),
    "token": ({"type": "sequence", "elements": [{"type": "token", "token": "<|end|>"}]}, ["<|end|>"], ["", "a"]),
    "triggered_tags": (
        TRIGGERED,
        ["", "text", "a <f=1>1</f> b <g>x</g>", "<f=2>ab</f>", "1 < 2", "<g>a</g><g>b</g>"],
        ["a <f", "a <f=3>1</f>", "<g>1</g>", "a <f=1>1</f> <g", "<f=1>a</f>"],
    ),
    "triggered, at least one": (
        {**TRIGGERED, "at_least_one": True},
        ["<g>x</g>", "a <g>x</g> b", "<f=1>1</f><g>x</g>"],
        ["", "text"],
    ),
    "triggered, the first ends": (
        {**TRIGGERED, "stop_after_first": True},
        ["", "text", "a <g>x</g>"],
        ["a <g>x</g> b", "<g>x</g><g>x</g>"],
    ),
    "triggered, exactly one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["a <g>x</g>", "<f=1>1</f>"],
        ["", "a", "<g>x</g>b"],
    ),
    "triggered by a special token": (
        {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [tag("<|call|>f:", INT, "<|end|>")]},
        ["", "text", "a<|call|>f:1<|end|>b<|call|>f:2<|end|>"],
        ["a<|call|>", "<|call|>g:1<|end|>"],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [F, G], "separator": ", "},
        ["", "<g>x</g>", "<g>x</g>, <f=1>1</f>, <g>y</g>"],
        ["<g>x</g><g>y</g>", "<g>x</g>, ", "text"],
    ),
    "separated, at least one, the first ends": (
        {
            "type": "tags_with_separator",
            "tags": [F, G],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<g>x</g>"],
        ["", "<g>x</g>,<g>x</g>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_node_accepts_exactly_its_texts(tokenizer: LLTokenizer, name: str) -> None:
    """SO-01"""
    form, right, wrong = CASES[name]
    grammar = Language("structural_tag", {"type": "structural_tag", "format": form}, "p").grammar(SPECIAL.get)
    for text in right:
        assert takes(tokenizer, grammar, text), text
    for text in wrong:
        assert not takes(tokenizer, grammar, text), text


def test_structures_and_triggers_mean_triggered_tags(tokenizer: LLTokenizer) -> None:
    """Both ways to send them, in both fields."""
    old = {
        "structures": [{"begin": "<f=1>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    asked = [
        read_language(ResponseFormat.model_validate({"type": "structural_tag", **old}), None),
        read_language(None, StructuredOutputs(structural_tag=json.dumps(old))),
        read_language(None, StructuredOutputs(structural_tag={"type": "structural_tag", **old})),
    ]
    for language in asked:
        assert language is not None
        grammar = language.grammar(SPECIAL.get)
        assert takes(tokenizer, grammar, "so <f=1>12</f> and")
        assert not takes(tokenizer, grammar, "so <f=1>x</f> and")


def test_a_tag_begins_behind_the_reasoning(tokenizer: LLTokenizer) -> None:
    """RE-05"""
    language = Language("structural_tag", {"format": F}, "p")
    grammar = Constraint(SPECIAL.get, THINK).reply(language)
    assert takes(tokenizer, grammar, "<think>\n<f=1>no</f></think>\n<f=1>3</f>")
    assert not takes(tokenizer, grammar, "<think>\nso</think>\n<f=1>no</f>")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (None, "format must be an object whose type is one of const_string"),
        ({"type": "nothing"}, "'nothing'"),
        ({"type": ["tag"]}, "whose type"),
        ({"type": "sequence", "elements": []}, r"format.elements must be a list that is not empty"),
        ({"type": "sequence", "elements": [ANY, INT]}, r"format.elements\[0\]: only const_string or tag"),
        ({"type": "sequence", "elements": [const("a"), {"type": "tag", "begin": 3}]}, r"elements\[1\].begin"),
        (tag("a", INT, None), r"format.end"),
        (tag("a", {"type": "json_schema", "json_schema": {"not": {}}}, ""), r"not at \$ cannot be enforced"),
        ({**TRIGGERED, "triggers": ["<f"]}, r"tags\[2\].begin must start with one of the triggers"),
        ({**TRIGGERED, "triggers": ["<f", "<g", "a<g"]}, "another trigger inside"),
        ({**TRIGGERED, "at_least_one": 1}, "at_least_one must be true or false"),
        ({"type": "grammar", "grammar": 'root ::= "'}, "neither Lark nor GBNF"),
        ({"type": "repeat", "content": INT, "min": 3, "max": 2}, "max at least min"),
        ({"type": "token", "token": "<|none|>"}, "special token of this model"),
        (json.loads('{"type": "optional", "content":' * 40 + "{}" + "}" * 40), "nested deeper"),
    ],
)
def test_an_invalid_tag_is_reported_with_its_place(form: Any, words: str) -> None:
    """SO-02"""
    with pytest.raises(RequestError, match=words) as caught:
        structural_grammar({"format": form}, "response_format", SPECIAL.get)
    assert caught.value.param == "response_format"
