"""Fields outside a route's schema: read as aliases, accepted if they have no effect, otherwise refused by name."""

import json
import logging
import runpy
from pathlib import Path
from typing import Any

import pytest

from appliance.server.http.fields import MAX_REPORTED
from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.fields.tables import TABLES
from appliance.server.schema.messages import MessagesRequest
from appliance.server.schema.responses import ResponsesRequest

ROOT = Path(__file__).resolve().parents[4]
MESSAGE = {"messages": [{"role": "user", "content": "hello"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGE,
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**MESSAGE, "model": "qwen", "max_tokens": 9},
}
SCHEMAS = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
GENERATE = {path: TABLES[schema] for path, schema in zip(ROUTES, SCHEMAS, strict=True)}
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def post(gateway: Any, path: str, **fields: Any) -> tuple[int, Any]:
    status, reply = gateway.says("x").post(path, {**ROUTES[path], **fields})
    return status, reply


def message(reply: Any) -> str:
    return str(reply["error"]["message"])


@pytest.mark.parametrize("path", ROUTES)
def test_each_refused_field_is_named_and_its_neutral_values_are_accepted(gateway: Any, path: str) -> None:
    for name, field in GENERATE[path].items():
        assert post(gateway, path, **{name: None})[0] == 200, name
        for value in field.neutral if field.reason else ("anything",) if field.neutral and not field.alias else ():
            status, reply = post(gateway, path, **{name: value})
            assert status == 200, (name, value, reply)
        if field.reason:
            status, reply = post(gateway, path, **{name: "a value that is not neutral"})
            assert status == 400 and name in message(reply), (name, reply)
            assert field.reason in message(reply)
            if path != "/v1/messages":
                assert reply["error"]["param"] == name


@pytest.mark.parametrize("value", [True, "0", 2, [1], {"a": 1}])
def test_values_of_other_types_are_not_neutral(gateway: Any, value: Any) -> None:
    """`true` is not 1, and "0" is not 0."""
    assert post(gateway, "/v1/chat/completions", mirostat=value)[0] == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        ({"guided_json": PERSON}, {"json": PERSON}),
        ({"guided_json": json.dumps(PERSON)}, {"json": PERSON}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_json_object": True}, {"json_object": True}),
        (
            {"guided_json": PERSON, "guided_whitespace_pattern": " ?"},
            {"json": PERSON, "whitespace_pattern": " ?"},
        ),
        ({"json_schema": PERSON}, {"json": PERSON}),
        ({"json_schema": json.dumps(PERSON)}, {"json": PERSON}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a" | "b"'}, {"grammar": 'root ::= "a" | "b"'}),
        ({"grammar": 'root ::= "a" | "b"'}, {"grammar": 'root ::= "a" | "b"'}),
        ({"structural_tag": json.dumps({"format": {"type": "const_string", "value": "a"}})}, None),
    ],
)
@pytest.mark.sampled(3)
def test_structured_output_under_other_names(gateway: Any, path: str, fields: Any, outputs: Any) -> None:
    """vLLM's, SGLang's and llama.cpp's names give the grammar that structured_outputs gives."""
    status, reply = post(gateway, path, **fields)
    assert status == 200, reply
    found = gateway.submits[-1].grammar
    assert found is not None
    if outputs is not None:
        assert post(gateway, path, structured_outputs=outputs)[0] == 200
        assert gateway.submits[-1].grammar == found


def test_two_names_of_one_field_are_refused(gateway: Any) -> None:
    status, reply = post(gateway, "/v1/completions", guided_regex="a", regex="b")
    assert status == 400 and "are the same field" in message(reply)
    status, reply = post(gateway, "/v1/completions", guided_regex="a", structured_outputs={"choice": ["b"]})
    assert status == 400 and "one kind" in message(reply)
    status, reply = post(gateway, "/v1/completions", max_tokens=3, max_new_tokens=4)
    assert status == 400 and reply["error"]["param"] == "max_new_tokens"


def test_lengths_and_seeds_under_other_names(gateway: Any) -> None:
    assert post(gateway, "/v1/completions", max_new_tokens=7, min_new_tokens=2, sampling_seed=5)[0] == 200
    submit = gateway.submits[-1]
    assert (submit.max_tokens, submit.sampling.min_tokens, submit.sampling.seed) == (7, 2, 5)
    assert post(gateway, "/v1/completions", n_predict=6)[0] == 200
    assert gateway.submits[-1].max_tokens == 6


def prompt(gateway: Any, **fields: Any) -> str:
    status, reply = post(gateway, "/v1/chat/completions", **fields)
    assert status == 200, reply
    return str(gateway.tokenizer.decode(gateway.submits[-1].prompt, skip_special_tokens=False))


def test_thinking_is_switched_by_other_names(gateway: Any) -> None:
    off = prompt(gateway, chat_template_kwargs={"enable_thinking": False})
    assert off != prompt(gateway)
    for fields in (
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
    ):
        assert prompt(gateway, **fields) == off, fields
    assert prompt(gateway, enable_thinking=True) == prompt(gateway)
    assert post(gateway, "/v1/chat/completions", enable_thinking="no")[0] == 400


def test_reasoning_object_hides_and_limits_reasoning(gateway: Any) -> None:
    reply = gateway.says("<think>\nso\n</think>\n\nx").post(
        "/v1/chat/completions", {**MESSAGE, "reasoning": {"exclude": True, "effort": "high", "max_tokens": 8}}
    )[1]
    assert reply["choices"][0]["message"]["reasoning"] is None
    assert gateway.submits[-1].thinking is not None
    for wrong in ("high", {"depth": 3}, {"enabled": "no"}, {"effort": "most"}):
        assert post(gateway, "/v1/chat/completions", reasoning=wrong)[0] == 400, wrong


def test_best_of_may_be_n(gateway: Any) -> None:
    assert post(gateway, "/v1/completions", best_of=3, n=3, temperature=1)[0] == 200
    assert post(gateway, "/v1/completions", best_of=3, n=1)[0] == 400


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_fields_follow_the_manifest(make_gateway: Any, path: str, caplog: Any) -> None:
    for setting, status, lines in (("refuse", 400, 0), ("warn", 200, 1), ("ignore", 200, 0)):
        gateway = make_gateway(**{"endpoints.unknown_fields": setting})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                found, reply = post(gateway, path, unheard_of=1)
                assert found == status, reply
        assert sum("'unheard_of'" in record.getMessage() for record in caplog.records) == lines, setting
        if status == 400:
            assert "unheard_of" in message(reply) and "endpoints.unknown_fields" in message(reply)


def test_unknown_fields_cannot_fill_the_log_or_forge_a_line(gateway: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        post(gateway, "/v1/completions", **{"a\n\x1b[2J\u2028" + "x" * 5000: 1})
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.isprintable() and len(line) < 250
        post(gateway, "/v1/completions", **{f"field{number}": 1 for number in range(2 * MAX_REPORTED)})
    assert len(caplog.records) == MAX_REPORTED


@pytest.mark.parametrize("compat", ["openai", "vllm"])
def test_numbers_and_flags_as_text(make_gateway: Any, compat: str) -> None:
    gateway = make_gateway(**{"endpoints.compat": compat})
    for fields in ({"n": "2"}, {"temperature": "0.5"}, {"echo": "true"}, {"max_tokens": "3"}):
        assert post(gateway, "/v1/completions", **fields)[0] == (400 if compat == "openai" else 200), fields


@pytest.mark.parametrize("compat", ["openai", "vllm"])
@pytest.mark.parametrize("path", ROUTES)
def test_true_is_no_number(make_gateway: Any, compat: str, path: str) -> None:
    gateway = make_gateway(**{"endpoints.compat": compat})
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for name in (limit, "temperature", "top_k", "seed", "priority"):
        status, reply = post(gateway, path, **{name: True})
        assert status == 400 and name in message(reply), (name, reply)
    if path != "/v1/messages":
        assert post(gateway, path, stop_token_ids=[True])[0] == 400
        assert post(gateway, path, logit_bias={"1": True})[0] == 400


def test_page_of_the_tables_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "fields_page.py"))["fields_page"]()
    assert (ROOT / "docs" / "request-fields.md").read_text() == page, "run python tools/fields_page.py"
