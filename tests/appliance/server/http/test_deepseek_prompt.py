"""DeepSeek-V3.2, whose checkpoints have no chat template: prompts, reasoning and calls through the chat API.

Source of the expected texts: encoding/encoding_dsv32.py of the checkpoint deepseek-ai/DeepSeek-V3.2.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

USER = {"role": "user", "content": "hello"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
THINKS = {"chat_template_kwargs": {"thinking": True}}
CALL = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>"
)
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALLED = [
    {
        "role": "assistant",
        "content": "I look.\n\n",  # as replies have it; the empty line belongs to the calls
        "reasoning": "The weather.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "Rain"},
]
EARLIER = [USER, {"role": "assistant", "content": "Hi.", "reasoning": "A greeting."}]


@pytest.fixture(scope="module")
def deepseek(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = shutil.copytree(checkpoint, tmp_path_factory.mktemp("deepseek") / "model")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>", "eos_token": "</s>"}))
    (directory / "config.json").write_text(json.dumps({"architectures": ["DeepseekV32ForCausalLM"]}))
    return directory


@pytest.fixture
def gateway(make_gateway: Callable[..., Any], deepseek: Path) -> Any:
    return make_gateway(model=str(deepseek), vocab_size=430, max_context=4096)


def prompt(gateway: Any, messages: list[Any], **more: Any) -> str:
    gateway.says("ok")
    status, reply = gateway.post("/v1/chat/completions", {"messages": messages, **more})
    assert status == 200, reply
    status, reply = gateway.post("/detokenize", {"tokens": list(gateway.submits[-1].prompt)})
    assert status == 200, reply
    return str(reply["prompt"])


@pytest.mark.parametrize(
    ("messages", "more", "expected"),
    [
        ([USER], {}, "<s><｜User｜>hello<｜Assistant｜></think>"),
        ([USER], THINKS, "<s><｜User｜>hello<｜Assistant｜><think>"),
        ([USER], {"reasoning_effort": "high"}, "<s><｜User｜>hello<｜Assistant｜><think>"),
        (
            [{"role": "system", "content": "Be kind."}, *EARLIER, USER],
            THINKS,
            "<s>Be kind.<｜User｜>hello<｜Assistant｜></think>Hi.</s><｜User｜>hello<｜Assistant｜><think>",
        ),
        (
            [USER, *CALLED],
            THINKS,
            f"<s><｜User｜>hello<｜Assistant｜><think>The weather.</think>I look.{CALL}</s>"
            "\n\n<function_results>\n<result>Rain</result>\n</function_results>\n\n<think>",
        ),
        (
            [USER, *CALLED],
            {},
            f"<s><｜User｜>hello<｜Assistant｜></think>I look.{CALL}</s>"
            "\n\n<function_results>\n<result>Rain</result>\n</function_results>\n\n</think>",
        ),
    ],
)
def test_prompts_are_those_of_the_model_s_encoder(
    gateway: Any, messages: list[Any], more: dict[str, Any], expected: str
) -> None:
    assert prompt(gateway, messages, **more) == expected


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_tools_are_described_after_the_system_message(gateway: Any, system: list[Any]) -> None:
    found = prompt(gateway, [*system, USER], tools=[TOOL])
    before, _, rest = found.partition("\n\n## Tools\n\nYou have access to a set of tools")
    assert before == f"<s>{system[0]['content'] if system else ''}"
    described, _, after = rest.partition("\n<functions>\n")[2].partition("\n</functions>\n")
    assert json.loads(described)["name"] == "get_weather"
    assert after == "<｜User｜>hello<｜Assistant｜></think>"


@pytest.mark.parametrize("each", [1, 7, 1000])
def test_reasoning_and_calls_are_parsed_whole_and_streamed(gateway: Any, each: int) -> None:
    gateway.says(f"The weather.</think>I look.{CALL}", each=each)

    async def both(client: openai.AsyncOpenAI) -> Any:
        body: Any = {"model": "qwen", "messages": [USER], "tools": [TOOL], "extra_body": THINKS}
        whole = await client.chat.completions.create(**body)
        stream = await client.chat.completions.create(**body, stream=True)
        return whole.choices[0].message, [chunk.choices[0].delta async for chunk in stream if chunk.choices]

    message, deltas = gateway.openai(both)
    (call,) = message.tool_calls
    assert (message.reasoning, message.content.rstrip()) == ("The weather.", "I look.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    pieces = [call.function for delta in deltas for call in delta.tool_calls or []]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(piece.name or "" for piece in pieces) == "get_weather"
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == json.loads(ARGUMENTS)


def test_a_result_without_a_call_is_refused(gateway: Any) -> None:
    status, reply = gateway.post("/v1/chat/completions", {"messages": [USER, CALLED[1]]})
    assert status == 400
    assert "A result of a tool needs a call before it." in reply["error"]["message"]
