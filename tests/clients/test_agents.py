"""openai-agents: an agent with a tool, through chat completions and through Responses."""

import agents
import pytest
from conftest import ASK_WEATHER
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
called: list[str] = []


@agents.function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    called.append(city)
    return '{"weather": "sunny"}'


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(agents.OpenAIChatCompletionsModel, marks=pytest.mark.shows("openai-agents", "tools")),
        pytest.param(agents.OpenAIResponsesModel, marks=pytest.mark.shows("openai-agents", "responses")),
    ],
)
def test_an_agent_calls_its_tool_and_answers(url, key, kind):
    called.clear()
    model = kind(model="demo", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0))
    agent = agents.Agent(
        name="demo",
        model=model,
        tools=[get_weather],
        model_settings=agents.ModelSettings(temperature=0, max_tokens=200),
    )
    result = agents.Runner.run_sync(agent, ASK_WEATHER, max_turns=3)
    assert called == ["Oslo"] and "sunny" in result.final_output


@pytest.mark.shows("openai-agents", "streaming")
def test_an_agent_streams(url, key):
    import asyncio

    async def run() -> list[str]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        model = agents.OpenAIResponsesModel(model="demo", openai_client=client)
        settings = agents.ModelSettings(temperature=0, max_tokens=200)
        agent = agents.Agent(name="demo", model=model, tools=[get_weather], model_settings=settings)
        result = agents.Runner.run_streamed(agent, ASK_WEATHER, max_turns=3)
        kinds = [event.type async for event in result.stream_events()]
        assert "sunny" in result.final_output
        return kinds

    assert "raw_response_event" in asyncio.run(run())
