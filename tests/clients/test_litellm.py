"""litellm, as a client of each of the three dialects."""

import json

import litellm
import pytest
from conftest import ASK_WEATHER, SUM, WEATHER

TOOLS = [{"type": "function", "function": WEATHER}]
ASKED = [{"role": "user", "content": ASK_WEATHER}]


@pytest.fixture
def settings(url, key):
    return {"api_base": f"{url}/v1", "api_key": key, "temperature": 0, "num_retries": 0, "max_tokens": 200}


@pytest.mark.shows("litellm", "chat")
def test_chat(settings):
    reply = litellm.completion("openai/demo", messages=[{"role": "user", "content": SUM}], **settings)
    assert "42" in reply.choices[0].message.content


@pytest.mark.shows("litellm", "streaming")
def test_stream(settings):
    chunks = list(
        litellm.completion("openai/demo", messages=[{"role": "user", "content": SUM}], stream=True, **settings)
    )
    assert "42" in litellm.stream_chunk_builder(chunks).choices[0].message.content


@pytest.mark.shows("litellm", "tools")
@pytest.mark.parametrize("stream", [False, True])
def test_tools(settings, stream):
    reply = litellm.completion("openai/demo", messages=ASKED, tools=TOOLS, stream=stream, **settings)
    message = (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}


@pytest.mark.shows("litellm", "messages")
@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_dialect(settings, url, stream):
    settings = {**settings, "api_base": url}
    reply = litellm.completion("anthropic/demo", messages=ASKED, tools=TOOLS, stream=stream, **settings)
    message = (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}


@pytest.mark.shows("litellm", "responses")
def test_responses(settings):
    settings = {name: value for name, value in settings.items() if name not in ("num_retries", "max_tokens")}
    reply = litellm.responses(model="openai/demo", input=SUM, **settings)
    assert "42" in reply.output[-1].content[0].text


@pytest.mark.shows("litellm", "errors")
def test_errors(settings):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion("openai/nobody", messages=ASKED, **settings)
