"""anthropic, through Messages."""

import anthropic
import pytest
from conftest import ASK_WEATHER, SUM, WEATHER

TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}


@pytest.fixture
def client(url, key):
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


@pytest.mark.shows("anthropic", "messages")
def test_a_message(client):
    reply = client.messages.create(
        model="demo", max_tokens=200, messages=[{"role": "user", "content": SUM}], extra_body={"temperature": 0}
    )
    assert "42" in reply.content[0].text and reply.stop_reason == "end_turn"


@pytest.mark.shows("anthropic", "streaming")
def test_a_stream(client):
    with client.messages.stream(
        model="demo", max_tokens=200, messages=[{"role": "user", "content": SUM}], extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "42" in text and final.content[0].text == text and final.usage.output_tokens > 0


@pytest.mark.shows("anthropic", "tools")
def test_a_tool_is_called_and_its_result_used(client):
    asked = [{"role": "user", "content": ASK_WEATHER}]
    settings = {"model": "demo", "max_tokens": 200, "tools": [TOOL], "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=asked, **settings)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and call.input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny"}'}
    last = client.messages.create(
        messages=[*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}],
        **settings,
    )
    assert last.stop_reason == "end_turn" and "sunny" in last.content[0].text


@pytest.mark.shows("anthropic", "counting tokens")
def test_tokens_are_counted_as_they_are_used(client):
    messages = [{"role": "user", "content": SUM}]
    counted = client.messages.count_tokens(model="demo", messages=messages).input_tokens
    used = client.messages.create(model="demo", max_tokens=1, messages=messages).usage
    assert counted == used.input_tokens + used.cache_creation_input_tokens + used.cache_read_input_tokens


@pytest.mark.shows("anthropic", "errors")
def test_errors_are_its_own_exceptions(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="demo", max_tokens=0, messages=[{"role": "user", "content": "x"}])
