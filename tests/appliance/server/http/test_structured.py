"""Structured output on the wire: every spelling in both routes, as the language that reaches the engine."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from engine.structured.grammar import Compiler, Matcher

ROUTES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {"begin": "<tool_call>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "<|im_end|>"},
        ],
    },
}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.fixture(scope="module")
def compiler(checkpoint: Any) -> Any:
    made = Compiler(checkpoint, 420)
    yield made
    made.close()


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json_schema": (form(PERSON), ['{"age": 3}', '{"age": 3, "x": []}'], ["{}", '{"age": "3"}', "3"]),
    "json_schema, true": (form(True), ["3", "[]"], ["x"]),
    "json_object": ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1]}'], ["[]", "3"]),
    "json": (outputs(json=PERSON), ['{"age": 3}'], ["{}"]),
    "json as text": (outputs(json=json.dumps(PERSON)), ['{"age": 3}'], ["{}"]),
    "json without white space": (outputs(json=PERSON, disable_any_whitespace=True), ['{"age":3}'], ['{"age": 3}']),
    "json with white space": (outputs(json=PERSON, whitespace_pattern="[ ]{2}"), ['{"age":  3}'], ['{"age":\t3}']),
    "json, closed": (outputs(json=PERSON, disable_additional_properties=True), ['{"age": 3}'], ['{"age": 3, "x": 1}']),
    "outputs' json_object": (outputs(json_object=True), ["{}"], ["[]"]),
    "regex": (outputs(regex="^a/b+$"), ["a/bb"], ["a/", "xa/b"]),
    "choice": (outputs(choice=["yes", 'n"o']), ["yes", 'n"o'], ["no", "yesyes"]),
    "Lark": (outputs(grammar='start: "a" B\nB: /[0-9]+/'), ["a1"], ["a"]),
    "GBNF": (outputs(grammar='root ::= "a" [0-9]+'), ["a1"], ["a"]),
    "structural_tag": (
        {"response_format": TAG},
        ['so <tool_call>{"age": 3}<|im_end|>'],
        ['<tool_call>{"age": 3}'],
    ),
    "outputs' structural_tag": (outputs(structural_tag=json.dumps(TAG)), ["so"], ["<tool_call>so"]),
    "an older tag": ({"response_format": {"type": "structural_tag", **OLD_TAG}}, ['<f>{"age": 1}</f>'], ["<f>"]),
    "an older tag in outputs": (outputs(structural_tag=json.dumps(OLD_TAG)), ['<f>{"age": 1}</f>'], ["<f>"]),
    "loose": (form({"type": "array", "uniqueItems": True}), ["[1, 1]"], ["3"]),
    "strict": (form({"type": "array", "uniqueItems": False}, strict=True), ["[1, 1]"], ["3"]),
}


def takes(compiler: Compiler, gateway: Any, grammar: Any, text: str) -> bool:
    end = gateway.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    matcher: Matcher = compiler.compile(grammar, [end])
    for token in gateway.ids(text):
        if not matcher.mask()[token // 32] >> token % 32 & 1:
            return False
        matcher.advance(token)
    return bool(matcher.mask()[end // 32] >> end % 32 & 1)


@pytest.mark.parametrize("path", ROUTES)
def test_each_form_selects_its_grammar(gateway: Any, compiler: Compiler, path: str) -> None:
    """SO-01, RE-05, STR-02: alone, and after reasoning where the model supports reasoning"""
    for name, (body, right, wrong) in CASES.items():
        status, reply = gateway.says("x").post(path, {**ROUTES[path], **body, "n": 2, "temperature": 1})
        assert status == 200, (name, reply)
        one, other = (submit.grammar for submit in gateway.submits[-2:])
        assert one == other
        for text in right:
            assert takes(compiler, gateway, one, text), (name, text)
            if "chat" in path:
                assert takes(compiler, gateway, one, f"<think>\nso\n</think>\n\n{text}"), (name, text)
        for text in wrong:
            assert not takes(compiler, gateway, one, text), (name, text)
            if "chat" in path:
                assert not takes(compiler, gateway, one, f"<think>\nso\n</think>\n\n{text}"), (name, text)


@pytest.mark.parametrize("path", ROUTES)
def test_text_is_no_language(gateway: Any, path: str) -> None:
    assert gateway.says("x").post(path, {**ROUTES[path], "response_format": {"type": "text"}})[0] == 200
    assert gateway.submits[-1].grammar is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "strict": (form({"type": "array", "uniqueItems": True}, strict=True), "uniqueItems at $ cannot be enforced"),
    "outputs are strict": (
        outputs(json={"properties": {"a": {"not": {}}}}),
        "not at $.properties.a cannot be",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "needs json_schema with a schema"),
    "no value at all": (form(False), "Unsatisfiable"),
    "wrong type": (form({"type": "nothing"}), "nothing"),
    "regex": (outputs(regex="[.*"), "unclosed character class"),
    "NUL": (outputs(regex="a\0"), "NUL"),
    "grammar": (outputs(grammar="start: missing"), "missing"),
    "choice": (outputs(choice=[]), "empty"),
    "nesting": (form(json.loads('{"items":' * 150 + "{}" + "}" * 150)), "nested too deep"),
    "backend": (outputs(regex="a", _backend="outlines"), "Leave _backend out"),
    "both kinds of white space": (outputs(json={}, disable_any_whitespace=True, whitespace_pattern=" "), "combined"),
    "tag": ({"response_format": {"type": "structural_tag"}}, "format must be an object whose type"),
    "tag as text": (outputs(structural_tag="[1"), "not valid JSON"),
    "size": (outputs(choice=["x" * 5000]), "limits.grammar_size allows 4096"),
}


@pytest.mark.parametrize("path", ROUTES)
def test_invalid_grammars_are_refused_before_anything_runs(make_gateway: Callable[..., Any], path: str) -> None:
    """SO-02"""
    gateway = make_gateway(**{"limits.grammar_size": 4096})
    for name, (body, words) in REFUSED.items():
        status, reply = gateway.says("x").post(path, {**ROUTES[path], **body})
        assert status == 400, (name, reply)
        assert words in reply["error"]["message"], (name, reply)
        assert reply["error"]["param"] == next(iter(body)), (name, reply)
    assert not gateway.submits


def test_keywords_dropped_from_a_loose_schema_are_logged(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"properties": {"a": {"uniqueItems": True}}}
    with caplog.at_level(logging.WARNING):
        assert gateway.says("x").post("/v1/completions", {"prompt": "a", **form(schema)})[0] == 200
    assert "$.properties.a.uniqueItems" in caplog.text


def test_tools_are_loose_unless_they_are_strict(gateway: Any, compiler: Compiler) -> None:
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    }
    body = {**ROUTES["/v1/chat/completions"], "tool_choice": "required"}
    asked = {**body, "tools": [{"type": "function", "function": function}]}
    assert gateway.says("x").post("/v1/chat/completions", asked)[0] == 200
    call = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>'
    assert takes(compiler, gateway, gateway.submits[-1].grammar, call)
    asked = {**body, "tools": [{"type": "function", "function": {**function, "strict": True}}]}
    status, reply = gateway.post("/v1/chat/completions", asked)
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert "uniqueItems at $.properties.a" in reply["error"]["message"]


def test_calls_or_a_text_of_the_language(gateway: Any, compiler: Compiler) -> None:
    """tool_choice auto together with a schema"""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {**ROUTES["/v1/chat/completions"], **form(PERSON, strict=True), "tools": tools}
    assert gateway.says("x").post("/v1/chat/completions", body)[0] == 200
    grammar = gateway.submits[-1].grammar
    assert takes(compiler, gateway, grammar, '{"age": 3}')
    assert takes(compiler, gateway, grammar, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert not takes(compiler, gateway, grammar, "so")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_call_wins_over_a_response_format(gateway: Any, compiler: Compiler, choice: Any, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {**ROUTES["/v1/chat/completions"], **form(PERSON, strict=True), "tools": tools, "tool_choice": choice}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    gateway.says(call)
    if stream:
        deltas = [
            choice["delta"] for record in gateway.stream("/v1/chat/completions", body) for choice in record["choices"]
        ]
        assert any(delta.get("tool_calls") for delta in deltas)
    else:
        status, reply = gateway.post("/v1/chat/completions", body)
        assert status == 200 and reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    grammar = gateway.submits[-1].grammar
    assert takes(compiler, gateway, grammar, call) and not takes(compiler, gateway, grammar, '{"age": 3}')
    several = {name: value for name, value in body.items() if name != "response_format"} | outputs(json=PERSON)
    status, reply = gateway.post("/v1/chat/completions", several)
    assert status == 400 and "cannot be combined" in reply["error"]["message"]


def test_forced_call_wins_in_every_api(gateway: Any, compiler: Compiler) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = {"role": "user", "content": "a"}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    schema = {"type": "json_schema", "schema": PERSON}
    bodies = {
        "/v1/messages": {
            **{"model": "qwen", "max_tokens": 9, "messages": [message], "tools": [tool]},
            **{"tool_choice": {"type": "any"}, "output_config": {"format": schema}},
        },
        "/v1/responses": {
            **{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
            **{"tool_choice": "required", "text": {"format": {**schema, "name": "p"}}},
        },
    }
    for path, body in bodies.items():
        status, reply = gateway.says(call).post(path, body)
        assert status == 200, reply
        assert takes(compiler, gateway, gateway.submits[-1].grammar, call)
