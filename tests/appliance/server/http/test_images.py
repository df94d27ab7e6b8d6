"""Images in chat, Responses and Messages requests: prompts and items of media against processors, and faults."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from engine.media.families import read_processors
from engine.media.processor import process
from tests.appliance.server.http.image_models import EXPANDED, MODELS, data_url, picture, png, write

PATH = "/v1/chat/completions"
ONE, OTHER = data_url(png(picture())), data_url(png(picture(seed=1)))
IMAGE_ID = {"llava": "<image>", "gemma3": "<image_soft_token>", "qwen2_vl": "<|image_pad|>"}


@pytest.fixture(scope="session")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(name, checkpoint, tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.fixture
def make(make_gateway: Callable[..., Any], models: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    made = []

    def build(name: str = "qwen2_vl", **fields: Any) -> Any:
        made.append(make_gateway(**{"model": str(models[name]), "modalities": ("image",), **fields}))
        return made[-1].says("a cat")

    yield build
    for gateway in made:
        gateway.service.media.close()


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def asked(*parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"messages": [{"role": "user", "content": texts}]}


def refused(gateway: Any, body: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    status, reply = gateway.post(path, body)
    assert status == 400, reply
    assert not gateway.submits
    fault: dict[str, Any] = reply["error"]
    return fault


@pytest.mark.parametrize("name", MODELS)
def test_chat_expands_images_and_sends_them_to_the_engine(make: Callable[..., Any], name: str, models: Any) -> None:
    """The prompt equals the text with all image tokens, tokenized at once."""
    gateway = make(name)
    status, reply = gateway.post(PATH, asked(part(ONE), "what is\n\nthis?"))
    assert status == 200, reply
    (submit,) = gateway.submits
    text = f"<|im_start|>user\n{EXPANDED[name]}what is\n\nthis?<|im_end|>\n<|im_start|>assistant\n"
    assert list(submit.prompt) == gateway.ids(text)
    assert reply["usage"]["prompt_tokens"] == len(submit.prompt)
    (item,) = submit.media
    (image_id,) = gateway.ids(IMAGE_ID[name])
    at = [place for place, token in enumerate(submit.prompt) if token == image_id]
    assert [place for first, count in item.spans for place in range(first, first + count)] == at
    processor = read_processors(models[name]).image
    assert processor is not None
    expected = process(processor, picture())
    assert (item.modality, item.digest, item.tensors) == ("image", expected.digest, expected.tensors)


def test_images_of_several_messages_keep_their_order(make: Callable[..., Any]) -> None:
    gateway = make()
    content = asked("a", part(OTHER), "b", part(ONE))["messages"][0]["content"]
    body = {
        "messages": [
            {"role": "user", "content": [part(ONE)]},
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": content},
        ]
    }
    assert gateway.post(PATH, body)[0] == 200
    first, second, third = gateway.submits[0].media
    assert first.digest == third.digest != second.digest
    assert first.spans < second.spans < third.spans
    assert gateway.service.media.processed == 2


@pytest.mark.parametrize("name", MODELS)
def test_text_is_rendered_for_templates_that_accept_only_parts(make: Callable[..., Any], name: str) -> None:
    gateway = make(name)
    assert gateway.post(PATH, {"messages": [{"role": "user", "content": "hello"}]})[0] == 200
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(gateway.submits[0].prompt) == gateway.ids(text) and gateway.submits[0].media == ()


def test_a_repeated_image_is_processed_once(make: Callable[..., Any]) -> None:
    """The cache is used by further requests, and has a size."""
    gateway = make()
    for _ in range(3):
        assert gateway.post(PATH, asked(part(ONE), part(ONE)))[0] == 200
    assert gateway.service.media.processed == 1
    small = make(**{"limits.media.cache": 1000})
    for _ in range(2):
        assert small.post(PATH, asked(part(ONE)))[0] == 200
    assert small.service.media.processed == 2


def test_each_request_has_the_times_of_its_images(make: Callable[..., Any]) -> None:
    """OBS-05 a record of each concurrent request, stage sum within the wall time; none for text"""
    gateway = make()
    texts = {f"m{number}": [part(data_url(png(picture(seed=number)))) for _ in range(2)] for number in range(4)}
    later = {"m4": texts["m0"], "m5": ["only text"]}
    began_s = time.monotonic()

    async def send(client: httpx.AsyncClient, name: str, parts: list[Any]) -> None:
        reply = await client.post(PATH, json=asked(*parts), headers={"x-request-id": name})
        assert reply.status_code == 200, reply.text

    async def work() -> None:
        async with gateway.client() as client:
            await asyncio.gather(*(send(client, name, parts) for name, parts in texts.items()))
            for name, parts in later.items():
                await send(client, name, parts)

    asyncio.run(work())
    wall_s = time.monotonic() - began_s
    pairs = zip(gateway.submits, gateway.router.placements, strict=True)
    loads = {submit.id.partition("-")[0]: where.media for submit, where in pairs}
    assert set(loads) == {*texts, *later} and loads["m5"] is None
    for name in (*texts, "m4"):
        ((fetch_s, process_s),) = loads[name].stages
        assert loads[name].start_s >= began_s and 0 < fetch_s + process_s <= wall_s
        assert (process_s > 0) == (name != "m4"), "it was processed before"
    kept = gateway.service.metrics.histograms
    assert sum(kept["media_fetch_seconds"][()].counts) == 5 and sum(kept["media_process_seconds"][()].counts) == 4


def test_tokenize_counts_image_tokens(make: Callable[..., Any]) -> None:
    gateway = make()
    status, reply = gateway.post("/tokenize", asked(part(ONE), "hello"))
    assert status == 200 and gateway.post(PATH, asked(part(ONE), "hello"))[0] == 200
    assert reply["tokens"] == [*gateway.submits[0].prompt][: reply["count"]]
    assert reply["count"] >= 20


def test_the_official_client_sends_an_image(make: Callable[..., Any]) -> None:
    gateway = make()
    body = asked(part(ONE), "hello")
    reply = gateway.openai(lambda client: client.chat.completions.create(model="qwen", **body))
    assert reply.choices[0].message.content == "a cat" and len(gateway.submits[0].media) == 1


def test_responses_accept_images(make: Callable[..., Any]) -> None:
    gateway = make()
    content = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": ONE, "detail": "auto"}]
    given = [{"role": "user", "content": content}]
    reply = gateway.openai(lambda client: client.responses.create(model="qwen", input=given))
    assert reply.output_text == "a cat"
    assert len(gateway.submits[0].media) == 1
    count = gateway.openai(lambda client: client.responses.input_tokens.count(model="qwen", input=given))
    assert count.input_tokens == len(gateway.submits[0].prompt)


def test_responses_accept_images_in_outputs_of_tools(make: Callable[..., Any]) -> None:
    gateway = make()
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": ONE}]}
    status, reply = gateway.post("/v1/responses", {"input": [{"role": "user", "content": "go"}, call, output]})
    assert status == 200, reply
    assert len(gateway.submits[0].media) == 1


def claude(gateway: Any, messages: list[dict[str, Any]], method: str = "create", **fields: Any) -> Any:
    """Return the reply to the official client of the Messages API."""

    async def call() -> Any:
        transport = httpx2.ASGITransport(gateway.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as http:
            client = anthropic.AsyncAnthropic(api_key="none", base_url="http://gateway", http_client=http)
            return await getattr(client.messages, method)(model="qwen", messages=messages, **fields)

    return asyncio.run(call())


def block(url: str = ONE) -> dict[str, Any]:
    data = url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_messages_accept_images(make: Callable[..., Any]) -> None:
    gateway = make()
    messages = [{"role": "user", "content": [block(), {"type": "text", "text": "what?"}]}]
    reply = claude(gateway, messages, max_tokens=9)
    assert reply.content[0].text == "a cat"
    assert len(gateway.submits[0].media) == 1
    counted = claude(gateway, messages, "count_tokens")
    assert counted.input_tokens == len(gateway.submits[0].prompt) == reply.usage.input_tokens


def test_images_of_tool_results_follow_in_a_user_message(make: Callable[..., Any]) -> None:
    gateway = make()
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block()]}]},
    ]
    claude(gateway, messages, max_tokens=9)
    text = gateway.tokenizer.decode(gateway.submits[0].prompt, skip_special_tokens=False)
    assert "<|im_start|>tool\n<|im_end|>\n<|im_start|>user\n<|vision_start|>" in text


@pytest.mark.parametrize(
    "url,reason",
    [
        ("data:image/png;base64,AAAA", "not an image"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png,abc", "a data URL must have the form"),
        ("https://example.com/a.png", "does not fetch URLs"),
        ("http://example.com/a.png", "must begin with"),
        ("file:///etc/passwd", "file URLs are not allowed"),
        ("ftp://example.com/a.png", "must begin with"),
        ("cat.png", "must begin with"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(make: Callable[..., Any], url: str, reason: str) -> None:
    """The fault names the field, and the gateway continues."""
    gateway = make()
    fault = refused(gateway, asked("a", part(url)))
    assert fault["param"] == "messages.0.content.1.image_url"
    assert fault["message"].startswith("messages.0.content.1.image_url: ") and reason in fault["message"]
    assert gateway.post(PATH, asked(part(ONE)))[0] == 200


@pytest.mark.parametrize("name", MODELS)
def test_placeholders_in_texts_are_refused(make: Callable[..., Any], name: str) -> None:
    gateway = make(name)
    placeholder = {"llava": "<image>", "gemma3": "<start_of_image>"}.get(name, "<|image_pad|>")
    for text in {placeholder, IMAGE_ID[name]}:
        for parts in ((text,), (part(ONE), text)):
            assert refused(gateway, asked(*parts))["param"] == "messages"


def test_more_images_than_allowed_are_refused(make: Callable[..., Any]) -> None:
    """Image=1 with two images gives 400."""
    fault = refused(make(**{"limits.media.images": 1}), asked(part(ONE), part(ONE)))
    assert fault["param"] == "messages.0.content.1.image_url" and "limits.media.images" in fault["message"]


def test_images_count_as_tokens_of_the_context(make: Callable[..., Any]) -> None:
    fault = refused(make(max_context=24), asked(part(ONE)))
    assert "maximum context length is 24" in fault["message"]


def test_a_prompt_with_images_is_not_truncated(make: Callable[..., Any]) -> None:
    fault = refused(make(), {**asked(part(ONE)), "truncate_prompt_tokens": 5})
    assert fault["param"] == "truncate_prompt_tokens"


def test_images_times_choices_are_limited(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = make()
    body = {**asked(part(ONE)), "temperature": 1}
    assert gateway.post(PATH, {**body, "n": 3})[0] == 200
    size = sum(len(tensor.data) for tensor in gateway.submits[0].media[0].tensors.values())
    monkeypatch.setattr("appliance.server.chat.sequences.MAX_MEDIA", 2 * size)
    gateway.submits.clear()
    assert refused(gateway, {**body, "n": 3})["param"] == "n"
    assert gateway.post(PATH, {**body, "n": 2})[0] == 200


@pytest.mark.parametrize("url", [None, "", 3, {"url": None}, {}])
def test_a_part_without_url_is_refused(make: Callable[..., Any], url: Any) -> None:
    fault = refused(make(), asked({"type": "image_url", "image_url": url}))
    assert fault["param"] == "messages.0.content.0.image_url"


def test_text_models_refuse_images_as_before(gateway: Any) -> None:
    gateway.says("a")
    assert "parts of type 'image_url' are not supported" in refused(gateway, asked(part(ONE)))["message"]
    given = [{"role": "user", "content": [{"type": "input_image", "image_url": ONE}]}]
    assert "the model accepts only text" in refused(gateway, {"input": given}, "/v1/responses")["message"]
    messages = [{"role": "user", "content": [block()]}]
    body = {"model": "qwen", "max_tokens": 3, "messages": messages}
    assert "the model accepts only text" in refused(gateway, body, "/v1/messages")["message"]


def test_other_media_are_refused(make: Callable[..., Any]) -> None:
    gateway = make()
    for kind in ("video_url", "input_audio", "file"):
        assert "not supported" in refused(gateway, asked({"type": kind, kind: {"url": ONE}}))["message"]


def test_a_faulty_image_in_the_messages_api_is_named(make: Callable[..., Any]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [block("x,AAAA")]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude(make(), messages, max_tokens=9)
    assert "messages.0.content.0.source: " in str(caught.value)
    messages[0]["content"] = [{"type": "image", "source": {"type": "file", "file_id": "f"}}]
    with pytest.raises(anthropic.BadRequestError, match="base64 or url"):
        claude(make(), messages, max_tokens=9)


def test_other_requests_are_served_while_an_image_is_processed(make: Callable[..., Any]) -> None:
    """An image does not block the event loop."""
    gateway = make()
    large = data_url(png(picture(8, 8).resize((3000, 3000))))

    async def work() -> list[str]:
        ended: list[str] = []
        async with gateway.client() as client:

            async def send(name: str, body: dict[str, Any]) -> None:
                reply: httpx.Response = await client.post(PATH, json=body)
                assert reply.status_code == 200, reply.text
                ended.append(name)

            slow = asyncio.create_task(send("image", asked(part(large))))
            await asyncio.sleep(0)
            await send("text", {"messages": [{"role": "user", "content": "hello"}]})
            await slow
        return ended

    assert asyncio.run(work()) == ["text", "image"]
