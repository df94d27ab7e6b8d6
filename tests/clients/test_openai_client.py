"""openai, in the version that other clients still ask for (the newest one is in the project's own tests)."""

import json

import openai
import pytest
from conftest import ASK_WEATHER, SUM, WEATHER
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


@pytest.fixture
def client(url, key):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.mark.shows("openai", "models")
def test_models(client):
    assert client.models.list().data[0].id == "demo"


@pytest.mark.shows("openai", "chat")
def test_chat(client):
    reply = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": SUM}], temperature=0)
    assert "42" in reply.choices[0].message.content


@pytest.mark.shows("openai", "streaming")
def test_a_stream_with_usage(client):
    with client.chat.completions.stream(
        model="demo", messages=[{"role": "user", "content": SUM}], stream_options={"include_usage": True}, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert "42" in final.choices[0].message.content and final.usage.completion_tokens > 0


@pytest.mark.shows("openai", "tools")
def test_a_tool_is_called_and_its_result_used(client):
    messages = [{"role": "user", "content": ASK_WEATHER}]
    tools = [{"type": "function", "function": WEATHER}]
    first = client.chat.completions.create(model="demo", messages=messages, tools=tools, temperature=0)
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny"}'},
    ]
    last = client.chat.completions.create(model="demo", messages=messages, tools=tools, temperature=0)
    assert last.choices[0].finish_reason == "stop" and "sunny" in last.choices[0].message.content


@pytest.mark.shows("openai", "structured output")
def test_a_reply_of_a_schema(client):
    reply = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "JSON please: name is Ann, age is 30"}],
        response_format=Person,
        temperature=0,
        max_tokens=300,
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


@pytest.mark.shows("openai", "completions")
def test_completions(client):
    reply = client.completions.create(model="demo", prompt="Hello", max_tokens=4, logprobs=2, echo=True)
    assert reply.choices[0].text.startswith("Hello") and len(reply.choices[0].logprobs.tokens) >= 5


@pytest.mark.shows("openai", "errors")
def test_errors_are_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}], temperature=9)


@pytest.mark.shows("openai", "responses")
def test_responses_chained_and_streamed(client):
    first = client.responses.create(model="demo", input=SUM, temperature=0)
    assert "42" in first.output_text
    with client.responses.stream(model="demo", input=SUM, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == first.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text
    chained = client.responses.create(model="demo", input="And again?", previous_response_id=first.id)
    assert chained.previous_response_id == first.id
