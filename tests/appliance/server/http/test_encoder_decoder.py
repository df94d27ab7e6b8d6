"""Encoder-decoder models: a completion's prompt is the encoder input, and the decoder has a separate prompt."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from appliance.config.gateway import EncoderLimits, SamplingDefaults
from appliance.server.routing.refused import content_hash

PATH = "/v1/completions"
SOURCES = EncoderLimits(max_input=20, reply=30, decoder_start_ids=(7, 8))


@pytest.fixture
def sourced(make_gateway: Callable[..., Any]) -> Any:
    """A context of 40 tokens: with a long encoder input, fewer than the 30 positions are left for the reply."""
    return make_gateway(encoder=SOURCES, max_context=40).says(" yes")


def reply(gateway: Any, **body: Any) -> dict[str, Any]:
    status, found = gateway.post(PATH, {"prompt": "hello", **body})
    assert status == 200, found
    whole: dict[str, Any] = found
    return whole


def error(gateway: Any, path: str = PATH, **body: Any) -> dict[str, Any]:
    status, found = gateway.post(path, {"prompt": "hello", **body} if path == PATH else body)
    assert status == 400, found
    assert not gateway.submits
    fault: dict[str, Any] = found["error"]
    return fault


def test_the_prompt_is_the_encoder_input_and_the_reply_starts_with_checkpoint_tokens(sourced: Any) -> None:
    source = sourced.tokenizer.encode("hello world")
    found = reply(sourced, prompt="hello world")
    (submit,) = sourced.submits
    assert submit.prompt == (*source, 7, 8) and submit.source == len(source)
    assert found["choices"][0]["text"] == " yes"
    assert found["usage"]["prompt_tokens"] == len(source)


def test_ids_are_a_source_as_they_are(sourced: Any) -> None:
    found = reply(sourced, prompt=[5, 6, 9], return_token_ids=True)
    assert (sourced.submits[0].prompt, sourced.submits[0].source) == ((5, 6, 9, 7, 8), 3)
    assert found["choices"][0]["prompt_token_ids"] == [5, 6, 9]


def test_several_prompts_and_choices_have_a_source_each(sourced: Any) -> None:
    found = reply(sourced, prompt=[[5], [6, 9]], n=2, temperature=1.0, decoder_prompt=[3])
    assert [(one.prompt, one.source) for one in sourced.submits] == [((5, 3), 1)] * 2 + [((6, 9, 3), 2)] * 2
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 1 + 1 + 2 + 1


def test_a_decoder_prompt_replaces_the_forced_token(sourced: Any) -> None:
    found = reply(sourced, prompt=[5, 6], decoder_prompt="hello world")
    begin = sourced.ids("hello world")
    assert sourced.submits[0].prompt == (5, 6, 7, *begin)
    assert found["usage"]["prompt_tokens"] == 2 + len(begin)


def test_a_name_of_a_language_is_one_token_of_it(sourced: Any) -> None:
    """Language names are special tokens, as in the tokenizers of mBART and NLLB."""
    reply(sourced, prompt=[5], decoder_prompt="<|im_start|>")
    assert sourced.submits[0].prompt == (5, 7, sourced.tokenizer.convert_tokens_to_ids("<|im_start|>"))


def test_an_empty_text_leaves_the_first_token_alone(sourced: Any) -> None:
    reply(sourced, prompt=[5], decoder_prompt="")
    assert sourced.submits[0].prompt == (5, 7)


def test_ids_are_all_of_the_beginning(sourced: Any) -> None:
    found = reply(sourced, prompt=[5], decoder_prompt=[9, 9, 4])
    assert sourced.submits[0].prompt == (5, 9, 9, 4) and found["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("value", [[], [1.5], ["x"], 7, {"a": 1}, [True]])
def test_inputs_other_than_text_and_ids_are_refused_by_name(sourced: Any, value: Any) -> None:
    assert error(sourced, decoder_prompt=value)["param"] == "decoder_prompt"


def test_ids_out_of_the_vocabulary_are_refused_by_name(sourced: Any) -> None:
    fault = error(sourced, decoder_prompt=[10**6])
    assert fault["param"] == "decoder_prompt" and "out of vocabulary" in fault["message"]


def test_another_model_has_no_such_field(gateway: Any) -> None:
    fault = error(gateway, decoder_prompt="hello")
    assert fault["param"] == "decoder_prompt" and "Leave it out" in fault["message"]
    assert reply(gateway.says("x"), decoder_prompt=None)["choices"] and gateway.submits[0].source == 0


def test_a_reply_may_fill_the_remaining_context(sourced: Any) -> None:
    """A reply is limited by its own positions or by the context left after a long encoder input, minus its prefix."""
    for source, room in ((1, 28), (10, 28), (11, 27), (20, 18)):
        reply(sourced, prompt=[5] * source)
        assert sourced.submits[-1].max_tokens == room
        reply(sourced, prompt=[5] * source, max_tokens=1000 % 39)
        assert sourced.submits[-1].max_tokens == min(room, 1000 % 39)
    assert error_after(sourced, max_tokens=0)["param"] == "max_tokens"
    assert error_after(sourced, max_tokens=41)["param"] == "max_tokens"


def error_after(gateway: Any, **body: Any) -> dict[str, Any]:
    gateway.submits.clear()
    return error(gateway, **body)


def test_a_default_of_the_checkpoint_bounds_it(make_gateway: Callable[..., Any]) -> None:
    made = make_gateway(encoder=SOURCES, max_context=50, sampling=SamplingDefaults(max_tokens=12)).says("x")
    reply(made)
    assert made.submits[0].max_tokens == 12


@pytest.mark.parametrize("prompt", [[5] * 21, "hello " * 21, "hello " * 100_000])
def test_a_source_that_is_too_long_is_refused_with_the_limit(sourced: Any, prompt: Any) -> None:
    fault = error(sourced, prompt=prompt)
    assert "20" in fault["message"] and fault["param"] in ("input_tokens", "input_text")


def test_the_longest_source_is_read(sourced: Any) -> None:
    assert reply(sourced, prompt=[5] * 20)["usage"]["prompt_tokens"] == 20


def test_a_source_is_cut_where_the_request_asks_for_it(sourced: Any) -> None:
    reply(sourced, prompt=list(range(3, 43)), truncate_prompt_tokens=-1, truncation_side="right")
    assert sourced.submits[0].prompt == (*range(3, 23), 7, 8)
    reply(sourced, prompt=list(range(3, 43)), truncate_prompt_tokens=4, truncation_side="left")
    assert sourced.submits[1].prompt == (39, 40, 41, 42, 7, 8)


@pytest.mark.parametrize("side", ["left", "right"])
def test_special_tokens_at_the_ends_of_a_source_are_not_cut_off(sourced: Any, side: str) -> None:
    """They mark the language and the end of a text for the encoder."""
    start, end = (sourced.tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>"))
    ids = [start, *range(20, 60), end, end]
    reply(sourced, prompt=ids, truncate_prompt_tokens=-1, truncation_side=side)
    kept = range(20, 37) if side == "right" else range(43, 60)
    assert sourced.submits[0].prompt == (start, *kept, end, end, 7, 8)
    reply(sourced, prompt=ids, truncate_prompt_tokens=3, truncation_side=side)
    assert len(sourced.submits[1].prompt) == 3 + 2


def test_a_beginning_that_leaves_no_room_is_refused_by_name(sourced: Any) -> None:
    assert error(sourced, decoder_prompt=[5] * 30)["param"] == "decoder_prompt"
    reply(sourced, prompt=[5], decoder_prompt=[5] * 29)
    assert sourced.submits[0].max_tokens == 1
    assert error_after(sourced, prompt=[5] * 20, decoder_prompt=[5] * 20)["param"] == "decoder_prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "hello", "truncate_prompt_tokens": 0}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_options_that_exclude_an_encoder_are_rejected(sourced: Any, body: dict[str, Any], param: str) -> None:
    assert error(sourced, **body)["param"] == param


def test_logprobs_are_those_of_the_reply(sourced: Any) -> None:
    lists = reply(sourced, logprobs=1)["choices"][0]["logprobs"]
    assert "".join(lists["tokens"][:-1]) == " yes" and lists["text_offset"][0] == 0


def test_a_stop_string_and_a_schema_act_on_the_reply(sourced: Any) -> None:
    assert reply(sourced, prompt="hello yes", stop="es")["choices"][0]["text"] == " y"
    reply(sourced, structured_outputs={"choice": ["yes", "no"]})
    assert sourced.submits[-1].grammar is not None and sourced.submits[-1].source > 0


def test_tokens_that_no_reply_may_have_are_banned(make_gateway: Callable[..., Any]) -> None:
    banned = EncoderLimits(max_input=20, reply=30, decoder_start_ids=(7,), banned=((1,), (5, 6)))
    made = make_gateway(encoder=banned, max_context=50).says("x")
    reply(made, bad_words=["hello"])
    assert made.submits[0].sampling.bad_words[-2:] == ((1,), (5, 6)) and len(made.submits[0].sampling.bad_words) > 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"model": "qwen", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_conversations_are_refused_with_the_route_to_use(sourced: Any, path: str, body: dict[str, Any]) -> None:
    """Although the checkpoint has a chat template."""
    assert "Use /v1/completions" in error(sourced, path, **body)["message"]


def test_labels_are_those_that_may_begin_a_reply(sourced: Any) -> None:
    body = {"query": "hello ", "items": ["world"], "label_token_ids": [7, 9]}
    status, found = sourced.post("/generative_scoring", body)
    assert status == 200, found
    (submit,) = sourced.submits
    assert submit.prompt == (*sourced.ids("hello world"), 7, 8) and submit.source == len(submit.prompt) - 2
    assert found["usage"]["prompt_tokens"] == submit.source


def test_texts_are_tokenized_and_models_listed_with_their_limits(sourced: Any) -> None:
    status, found = sourced.post("/tokenize", {"prompt": "hello"})
    assert status == 200 and found["max_model_len"] == 40

    async def listed() -> Any:
        async with sourced.client() as client:
            reply = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
            return reply.json()["data"][0]

    card = asyncio.run(listed())
    assert (card["max_model_len"], card["max_input_tokens"], card["max_tokens"]) == (40, 20, 30)


def test_streams_and_the_official_client_give_the_same(sourced: Any) -> None:
    async def asked(client: openai.AsyncOpenAI) -> str:
        more = {"decoder_prompt": "hello"}
        stream = await client.completions.create(model="qwen", prompt="hello", stream=True, extra_body=more)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert sourced.openai(asked) == " yes"
    assert sourced.submits[0].prompt[sourced.submits[0].source :] == (7, *sourced.ids("hello"))


def test_the_first_space_of_a_reply_is_that_of_a_beginning(sourced: Any) -> None:
    """The reply's text follows the decoder prompt, not the encoder input: half a character there changes nothing."""
    half = sourced.ids("中")[:1]
    sourced.gives(sourced.ids("yes"))
    assert reply(sourced, prompt=[5, *half])["choices"][0]["text"] == "yes"


def test_requests_with_other_sources_are_not_one_to_the_quarantine(sourced: Any) -> None:
    reply(sourced, prompt=[5, 6], decoder_prompt=[9])
    reply(sourced, prompt=[5], decoder_prompt=[6, 9])
    first, second = sourced.submits
    assert first.prompt == second.prompt and content_hash(first) != content_hash(second)
    assert content_hash(first) == content_hash(msgspec.structs.replace(first, id="other"))


def test_the_description_of_the_api_has_the_field(sourced: Any) -> None:
    async def described() -> Any:
        async with sourced.client() as client:
            return (await client.get("/openapi.json")).json()["paths"][PATH]["post"]["requestBody"]

    schema = asyncio.run(described())["content"]["application/json"]["schema"]["properties"]["decoder_prompt"]
    assert {"type": "string"} in schema["anyOf"]
