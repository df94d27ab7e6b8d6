"""Tests of structured output combined with the other request options, in each API of the demo service."""

import json
import re

import jsonschema
import pytest

from tests.tiers import NIGHTLY, paired

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
QUESTION = {"role": "user", "content": "What is 17 + 25?"}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def ask(demo, path, **fields):
    prompt = {CHAT: {"messages": [QUESTION]}, COMPLETIONS: {"prompt": "17 + 25 ="}, RESPONSES: {"input": "17 + 25?"}}
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    reply = demo.client.post(path, json={"model": "demo", limit: 60, **prompt[path], **fields})
    return reply.status_code, reply.json()


def texts(path, reply):
    """Text and why it ended, of each choice; an end of the Responses API in the words of the others."""
    if path == RESPONSES:
        (text,) = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
        return [(text, {"completed": "stop", "incomplete": "length"}[reply["status"]])]
    return [
        (choice["text"] if path == COMPLETIONS else choice["message"]["content"], choice["finish_reason"])
        for choice in reply["choices"]
    ]


def regex(expression):
    return {"structured_outputs": {"regex": expression}}


@pytest.mark.parametrize(("path", "temperature"), paired([CHAT, COMPLETIONS, RESPONSES], [0.0, 1.0]))
def test_stops_lengths_and_limits_beside_a_language(demo, path, temperature):
    limit = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    cases = {
        "a stop string within": ({**regex("ab{4}c"), "stop": ["bb"]}, "a", "stop"),
        "a stop string over the end": ({**regex("ab{2}c"), "stop": ["cd"]}, "abbc", "stop"),
        "a stop string that is the end": ({**regex("ab{2}c"), "stop": ["bc"]}, "ab", "stop"),
        "more tokens than there are": ({**regex("abc"), "min_tokens": 30}, "abc", "stop"),
        "ends that are ignored": ({**regex("(abc){2}"), "ignore_eos": True}, "abcabc", "stop"),
        "a length within": ({**regex("[0-9]{50}"), limit: 16, "ignore_eos": True}, None, "length"),
    }
    for name, (fields, expected, finish) in cases.items():
        status, reply = ask(demo, path, temperature=temperature, seed=3, **fields)
        assert status == 200, (name, reply)
        ((text, ended),) = texts(path, reply)
        assert ended == finish, (name, reply)
        assert text == expected if expected is not None else re.fullmatch("[0-9]{16,49}", text), (name, text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_choices_with_logprobs_penalties_and_biases_stay_in_the_language(demo, path):
    """STR-01, TOK-02: characters of several tokens, in the text and in the strings of logprobs"""
    pattern = "(你|好|😀|né ){3,6}-[0-9]{2}"
    asked = {**regex(pattern), "temperature": 1.3, "seed": 11, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
    scores = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
    status, reply = ask(demo, path, **asked, **scores, n=4, logit_bias={"100": 50, "0": -50})
    assert status == 200, reply
    found = texts(path, reply)
    assert len({text for text, _ in found}) > 1
    for number, (choice, (text, finish)) in enumerate(zip(reply["choices"], found, strict=True)):
        assert finish == "stop" and re.fullmatch(pattern, text), text
        assert "\ufffd" not in json.dumps(choice, ensure_ascii=False)
        assert "NaN" not in json.dumps(choice["logprobs"])
        alone = {**asked, "seed": 11 + number}
        status, other = ask(demo, path, **alone, logit_bias={"100": 50, "0": -50})
        assert texts(path, other) == [(text, finish)], "a choice is the reply to its own seed"


def test_an_echo_and_a_prefix_are_no_part_of_the_language(demo):
    status, reply = ask(demo, COMPLETIONS, **regex("[0-9]{3}"), echo=True, logprobs=1, temperature=0)
    (choice,) = reply["choices"]
    assert status == 200 and re.fullmatch(r"17 \+ 25 =[0-9]{3}", choice["text"])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    messages = [QUESTION, {"role": "assistant", "content": "The answer is 4"}]
    goes_on = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    status, reply = ask(demo, CHAT, **regex("[0-9]{2}!"), **goes_on, temperature=0)
    assert status == 200, reply
    ((text, finish),) = texts(CHAT, reply)
    assert re.fullmatch("[0-9]{2}!", text) and finish == "stop"


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_schema_begins_behind_the_reasoning_or_at_the_first_token(demo, thinks, stream):
    """STR-02"""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    fields = {
        "model": "demo",
        "messages": [QUESTION],
        "response_format": form,
        "chat_template_kwargs": {"enable_thinking": thinks},
        "temperature": 0,
        "max_tokens": 300,
    }
    if stream:
        with demo.client.stream("POST", CHAT, json={**fields, "stream": True}) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
        deltas = [choice for line in lines for choice in json.loads(line)["choices"]]
        content = "".join(each["delta"].get("content") or "" for each in deltas)
        reasoning = "".join(each["delta"].get("reasoning") or "" for each in deltas)
        finish = deltas[-1]["finish_reason"]
    else:
        (choice,) = demo.client.post(CHAT, json=fields).json()["choices"]
        content, reasoning = choice["message"]["content"], choice["message"].get("reasoning") or ""
        finish = choice["finish_reason"]
    assert finish == "stop" and bool(reasoning) is thinks
    jsonschema.validate(json.loads(content), SCHEMA)


def sampled_fields(path, seed):
    """A request for JSON of `SCHEMA` at temperature 1, with room for whitespace at every place that may have it."""
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    fields = {"model": "demo", "temperature": 1, "seed": seed, "chat_template_kwargs": {"enable_thinking": False}}
    if path == RESPONSES:
        return {**fields, "input": "What is 17 + 25?", "max_output_tokens": 400, "text": {"format": form}}
    if path == MESSAGES:
        schema = {"format": {"type": "json_schema", "schema": SCHEMA}}
        return {**fields, "messages": [QUESTION], "max_tokens": 400, "output_config": schema}
    named = {"type": "json_schema", "json_schema": {name: form[name] for name in ("name", "schema", "strict")}}
    return {**fields, "messages": [QUESTION], "max_tokens": 400, "response_format": named}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 8), marks=NIGHTLY)], ids=["first", "others"])
def test_sampled_json_ends_before_its_length_limit(demo, path, seeds):
    """`answer` is a number, so 400 tokens hold every layout but unlimited whitespace."""
    for seed in seeds:
        reply = demo.client.post(path, json=sampled_fields(path, seed)).json()
        if path == MESSAGES:
            text, finish = reply["content"][0]["text"], {"end_turn": "stop"}.get(reply["stop_reason"])
        else:
            ((text, finish),) = texts(path, reply)
        assert finish == "stop", (seed, reply)
        assert sorted(json.loads(text)) == ["answer", "sure"]


@pytest.mark.parametrize(
    ("path", "language"),
    paired([CHAT, COMPLETIONS, RESPONSES], [regex("(yes|no)"), {"structured_outputs": {"choice": ["yes", "no"]}}]),
)
def test_wishes_that_leave_no_token_are_refused_and_the_next_request_is_served(demo, path, language):
    status, reply = ask(demo, path, **language, allowed_token_ids=[0])
    assert status == 400 and "no token is possible here" in reply["error"]["message"], reply
    status, reply = ask(demo, path, **language)
    assert status == 200 and texts(path, reply)[0][0] in ("yes", "no")


def test_a_grammar_without_a_way_on_ends_its_stream_with_an_error(demo):
    """After the first token a logit bias leaves no valid token: the sent text stays, and the service keeps running."""
    (yes,) = demo.client.post("/tokenize", json={"model": "demo", "prompt": "b", "add_special_tokens": False}).json()[
        "tokens"
    ]
    fields = {"model": "demo", "prompt": "a", "max_tokens": 9, "stream": True, "temperature": 0}
    grammar = {"structured_outputs": {"grammar": 'start: "aa" "b"'}}
    with demo.client.stream("POST", COMPLETIONS, json={**fields, **grammar, "logit_bias": {str(yes): -100}}) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1] if '"text"' in line) == "aab"
    banned = {**fields, **grammar, "bad_words": ["b"]}
    with demo.client.stream("POST", COMPLETIONS, json=banned) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    errors = [json.loads(line)["error"] for line in lines if line.startswith('{"error"')]
    assert len(errors) == 1 and "no token is possible" in errors[0]["message"] and lines[-1] == "[DONE]"
    assert ask(demo, COMPLETIONS, **regex("ab"))[0] == 200
