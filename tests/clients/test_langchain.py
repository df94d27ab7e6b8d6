"""langchain-openai: chat, streams, tools, structured output, Responses."""

import pytest
from conftest import ASK_WEATHER, SUM
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return f'{{"weather": "sunny in {city}"}}'


def model(url, key, **settings):
    return ChatOpenAI(
        model="demo", base_url=f"{url}/v1", api_key=key, temperature=0, max_retries=0, max_tokens=300, **settings
    )


@pytest.mark.shows("langchain-openai", "chat")
def test_invoke(url, key):
    reply = model(url, key).invoke(SUM)
    assert "42" in reply.content and reply.usage_metadata["output_tokens"] > 0


@pytest.mark.shows("langchain-openai", "streaming")
def test_stream(url, key):
    assert "42" in "".join(chunk.content for chunk in model(url, key, stream_usage=True).stream(SUM))


@pytest.mark.shows("langchain-openai", "tools")
def test_a_bound_tool_goes_round(url, key):
    bound = model(url, key).bind_tools([get_weather])
    first = bound.invoke(ASK_WEATHER)
    (call,) = first.tool_calls
    assert call["name"] == "get_weather" and call["args"] == {"city": "Oslo"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    last = bound.invoke([("user", ASK_WEATHER), first, result])
    assert "sunny" in last.content and not last.tool_calls


@pytest.mark.shows("langchain-openai", "structured output")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(url, key, method):
    found = model(url, key).with_structured_output(Person, method=method).invoke("JSON please: name is Ann, age is 30")
    assert isinstance(found, Person)


@pytest.mark.shows("langchain-openai", "completions")
def test_completions(url, key):
    text = OpenAI(model="demo", base_url=f"{url}/v1", api_key=key, max_tokens=8, temperature=0).invoke("Hello")
    assert isinstance(text, str) and text


@pytest.mark.shows("langchain-openai", "responses")
def test_responses(url, key):
    reply = model(url, key, use_responses_api=True).invoke(SUM)
    assert "42" in reply.text
