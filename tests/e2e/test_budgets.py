"""Thinking budgets over a real socket, asked by the official clients: a model that never stops to think by itself."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import anthropic
import openai
import pytest
from safetensors.torch import load_file, save_file

from tests.appliance.server.http.anthropic.order import assembled, records
from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[2]
NEVER = ("<|endoftext|>", "<|im_end|>", "</think>")
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def ids(checkpoint):
    return {
        token["content"]: token["id"]
        for token in json.loads((checkpoint / "tokenizer.json").read_text())["added_tokens"]
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The demo, for which the tokens that end something have the logit 0, far below the highest: greedily drawn, they
    never come. Its template opens the reasoning."""
    directory = shutil.copytree(ROOT / "manifests" / "demo", tmp_path_factory.mktemp("tireless") / "demo")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][[ids(directory)[token] for token in NEVER]] = 0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    closed = "{%- if not enable_thinking %}"
    assert closed in config["chat_template"]
    config["chat_template"] = config["chat_template"].replace(
        closed, "{%- if enable_thinking %}{{- '<think>\\n' }}{%- else %}"
    )
    path.write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def appliance(launch, checkpoint):
    manifest = checkpoint.parent / "tireless.yaml"
    manifest.write_text("apiVersion: slipway/v2\nmodel:\n  source: {path: demo}\n  names: [tireless]\n")
    appliance = launch(manifest)
    appliance.wait_ready()
    return appliance


@pytest.fixture(scope="module")
def client(appliance):
    with openai.OpenAI(base_url=f"{appliance.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client, tokens, budget, **fields):
    extra = {**THINK, **({} if budget is None else {"thinking_token_budget": budget}), "return_token_ids": True}
    return client.chat.completions.create(
        **{"model": "tireless", "messages": QUESTION, "max_tokens": tokens, "temperature": 0, **fields},
        extra_body=extra,
    )


def together(*calls):
    """Return the results of calls that run side by side: a step computes the tokens of all of them."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def test_without_a_budget_it_thinks_to_the_end(client):
    """Control: the other tests only mean something if the model never stops thinking by itself."""
    for reply in together(*(partial(chat, client, 150, budget) for budget in (None, -1, 200))):
        assert reply.choices[0].message.content is None and reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens_details.reasoning_tokens == 150


@pytest.mark.parametrize("budget", thinned([0, 1, 7, 100], kept=[0, 7]))
def test_a_chat_thinks_for_exactly_its_budget(client, checkpoint, budget):
    """C.9: check complete and streamed replies, both the tokens and the usage."""
    usage = {"include_usage": True}
    whole, chunks = together(
        partial(chat, client, 150, budget),
        lambda: list(chat(client, 150, budget, stream=True, stream_options=usage)),
    )
    choice = whole.choices[0]
    assert choice.token_ids.index(ids(checkpoint)["</think>"]) == budget
    assert choice.message.content and bool(choice.message.reasoning) == (budget > 0)
    assert "think>" not in choice.message.content + (choice.message.reasoning or "")
    assert whole.usage.completion_tokens_details.reasoning_tokens == budget
    assert whole.usage.completion_tokens == 150
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == (choice.message.reasoning or "")
    cached = {"prompt_tokens_details": None}  # by whom depends on what ran before
    assert chunks[-1].usage.model_copy(update=cached) == whole.usage.model_copy(update=cached)


@pytest.mark.parametrize(
    "budget,thought,counted", [(10, "17 + 25: 7", 10), (200, "17 + 25: 7 + 5 = 12, 1 + 2 + 1 = 4.", 31)]
)
def test_a_model_that_opens_its_reasoning_itself_is_held_to_it(demo, budget, thought, counted):
    """C.9: the marker that begins it is no thought; what ends by itself is left alone"""
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        reply = chat(client, 150, budget, model="demo")
    assert reply.choices[0].message.reasoning == thought and reply.choices[0].message.content
    assert reply.usage.completion_tokens_details.reasoning_tokens == counted
    special = ids(ROOT / "manifests" / "demo")
    assert reply.choices[0].token_ids[0] == special["<think>"]
    assert reply.choices[0].token_ids.index(special["</think>"]) == 1 + counted


def test_each_choice_has_the_whole_budget(client, checkpoint):
    """C.9: with n = 3, each with noise of its own"""
    asked = {"messages": [{"role": "user", "content": "zq zq zq"}], "n": 3, "temperature": 1.4, "seed": 11}
    reply, chunks = together(
        partial(chat, client, 90, 50, **asked), lambda: list(chat(client, 90, 50, stream=True, **asked))
    )
    close = ids(checkpoint)["</think>"]
    thoughts = [tuple(choice.token_ids[: choice.token_ids.index(close)]) for choice in reply.choices]
    assert [len(thought) for thought in thoughts] == [50, 50, 50]
    assert len(set(thoughts)) == 3
    assert reply.usage.completion_tokens_details.reasoning_tokens == 150
    for choice in reply.choices:
        told = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(told) == choice.message.content


def test_a_schema_holds_behind_the_budget(client):
    """C.9, RE-05"""
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "enum": [41, 42]}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema | {"additionalProperties": False}}}
    reply = chat(client, 150, 9, response_format=form)
    assert json.loads(reply.choices[0].message.content)["sum"] in (41, 42)
    assert reply.usage.completion_tokens_details.reasoning_tokens == 9


def test_a_response_thinks_for_exactly_its_budget(client):
    """C.9: a stream has the same items and usage as the complete response."""
    asked = {
        "model": "tireless",
        "input": QUESTION,
        "max_output_tokens": 150,
        "temperature": 0,
        "extra_body": {**THINK, "thinking_token_budget": 33},
    }
    whole, stream = together(
        lambda: client.responses.create(**asked), lambda: list(client.responses.create(**asked, stream=True))
    )
    final = stream[-1].response
    assert [item.type for item in whole.output] == ["reasoning", "message"] and whole.output_text
    assert whole.usage.output_tokens_details.reasoning_tokens == 33 and whole.usage.output_tokens == 150
    assert [item.content[0].text for item in final.output] == [item.content[0].text for item in whole.output]
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    for kind, item in zip(("reasoning_text", "output_text"), whole.output, strict=True):
        told = [event.delta for event in stream if event.type == f"response.{kind}.delta"]
        assert len(told) > 1 and "".join(told) == item.content[0].text


def test_a_message_thinks_for_exactly_its_budget(appliance):
    """C.9: `thinking.budget_tokens`, by the client's helper and by an order of our own"""
    fields = {"model": "tireless", "max_tokens": 1060, "messages": QUESTION}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    greedy = {"extra_body": {"temperature": 0}}
    body = {**fields, "temperature": 0, "stream": True}

    def streamed_message() -> anthropic.types.Message:
        with client.messages.stream(**fields, **greedy) as stream:
            return stream.get_final_message()

    with anthropic.Anthropic(base_url=appliance.url, api_key="none", max_retries=0) as client:
        whole, streamed, reply = together(
            lambda: client.messages.create(**fields, **greedy),
            streamed_message,
            lambda: appliance.client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}),
        )
    ours = assembled(records(reply.text))
    assert [block.type for block in whole.content] == ["thinking", "text"] and whole.content[1].text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 1060)
    assert whole.usage.to_dict()["output_tokens_details"] == {"thinking_tokens": 1024}
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert [block["type"] for block in ours["content"]] == ["thinking", "text"]
    assert ours["content"][0]["thinking"] == whole.content[0].thinking
    assert ours["content"][1]["text"] == whole.content[1].text


@pytest.mark.nightly("tests/e2e/test_survive.py::test_no_request_notices_that_its_engine_was_killed")
def test_a_budget_counts_on_over_an_engine_that_was_killed_in_the_midst_of_thinking(appliance, client, checkpoint):
    """C.9: the next engine has the tokens that the last one gave"""
    expected = chat(client, 700, 600)
    victim, found, thoughts, content = appliance.pids()["engine-0"], [], "", ""
    for chunk in chat(client, 700, 600, stream=True):
        choice = chunk.choices[0]
        found += getattr(choice, "token_ids", None) or []
        thoughts += getattr(choice.delta, "reasoning", None) or ""
        content += choice.delta.content or ""
        if victim and len(found) > 100:
            os.kill(victim, signal.SIGKILL)
            victim = 0
    assert appliance.metric("slipway_request_interruptions_total") == 1
    assert found == expected.choices[0].token_ids
    assert found.index(ids(checkpoint)["</think>"]) == 600
    assert (thoughts, content) == (expected.choices[0].message.reasoning, expected.choices[0].message.content)
