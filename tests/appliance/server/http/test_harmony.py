"""CH-20: a model that writes in channels. Text outside the final channel never becomes content."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from tokenizers import AddedToken, Tokenizer

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
THOUGHT = "<|channel|>analysis<|message|>The user greets 中文.<|end|>"
ASIDE = "<|start|>assistant<|channel|>commentary<|message|>I look that up.<|end|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello 🎉<|return|>"


class Said(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


WEATHER = (("get_weather", '{"city": "Oslo"}'),)
REPLIES = {
    "thought, answer": (THOUGHT + FINAL, Said("Hello 🎉", "The user greets 中文.")),
    "aside, answer": (
        ASIDE.removeprefix("<|start|>assistant") + FINAL,
        Said("Hello 🎉", "I look that up."),
    ),
    "thought, aside, answer": (THOUGHT + ASIDE + FINAL, Said("Hello 🎉", "The user greets 中文.\nI look that up.")),
    "thought, aside, call": (
        f"{THOUGHT}{ASIDE}<|start|>assistant{CALL}",
        Said("", "The user greets 中文.\nI look that up.", WEATHER),
    ),
    "call to a recipient before the channel": (
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        Said("", "", WEATHER),
    ),
    "call on the channel of thoughts": (
        CALL.replace("commentary", "analysis"),
        Said("", "", WEATHER),
    ),
    "answer, thought, answer": (
        "<|channel|>final<|message|>Hello<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>More.<|end|><|start|>assistant<|channel|>final<|message|> again<|return|>",
        Said("Hello again", "More."),
    ),
    "a channel of its own": (
        f"<|channel|>critique<|message|>Is that kind?<|end|>{FINAL}",
        Said("Hello 🎉", "Is that kind?"),
    ),
    "thought without an end": ("<|channel|>analysis<|message|>The user", Said("", "The user")),
    "aside without an end": ("<|channel|>commentary<|message|>I look", Said("", "I look")),
    "header without an end": (f"{THOUGHT}<|start|>assistant<|channel|>comm", Said("", "The user greets 中文.")),
    "call without its arguments": (
        f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.get_weather",
        Said("", "The user greets 中文."),
    ),
    "thought alone": (THOUGHT, Said("", "The user greets 中文.")),
}


@pytest.fixture(scope="module", params=["special", "spelled"])
def gpt_oss(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose markers are special tokens, as in gpt-oss, or several tokens each."""
    directory = shutil.copytree(checkpoint, tmp_path_factory.mktemp("harmony") / "model")
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if request.param == "special":
        backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory


@pytest.fixture
def gateway(make_gateway: Callable[..., Any], gpt_oss: Path) -> Any:
    return make_gateway(model=str(gpt_oss), vocab_size=430)


def joined(deltas: list[Any]) -> Said:
    calls: dict[int, list[str]] = {}
    for piece in (call for delta in deltas for call in delta.tool_calls or []):
        one = calls.setdefault(piece.index, ["", ""])
        one[0] += piece.function.name or ""
        one[1] += piece.function.arguments or ""
    return Said(
        "".join(delta.content or "" for delta in deltas),
        "".join(getattr(delta, "reasoning", None) or "" for delta in deltas),
        tuple((name, arguments) for name, arguments in calls.values()),
    )


def asked(gateway: Any, body: dict[str, Any]) -> tuple[Said, Said]:
    """Return the official client's view of a complete reply and of the same reply as a stream."""

    async def both(client: openai.AsyncOpenAI) -> Any:
        whole = await client.chat.completions.create(model="qwen", **body)
        stream = await client.chat.completions.create(model="qwen", stream=True, **body)
        return whole.choices[0].message, [chunk.choices[0].delta async for chunk in stream if chunk.choices]

    message, deltas = gateway.openai(both)
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or [])
    return Said(message.content or "", getattr(message, "reasoning", None) or "", calls), joined(deltas)


@pytest.mark.parametrize("each", [1, 3, 1000])
@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.sampled(3)
def test_only_the_final_channel_is_content(gateway: Any, name: str, each: int) -> None:
    text, expected = REPLIES[name]
    finish = "stop" if text.endswith(("<|return|>", "<|call|>", "<|end|>")) else "length"
    gateway.says(text, finish=finish, each=each)
    whole, streamed = asked(gateway, {**BODY, "tools": [TOOL]})
    assert whole == expected
    assert streamed == expected


@pytest.mark.parametrize("name", ["thought, aside, answer", "thought, aside, call", "a channel of its own"])
def test_omitted_reasoning_is_not_content(gateway: Any, name: str) -> None:
    """No reasoning that the client did not request, and no calls in a request without tools."""
    text, expected = REPLIES[name]
    gateway.says(text)
    for said in asked(gateway, {**BODY, "tools": [TOOL], "extra_body": {"include_reasoning": False}}):
        assert said == expected._replace(reasoning="")
    for said in asked(gateway, BODY):
        assert (said.content, said.calls) == (expected.content, ())
        assert said.reasoning.startswith(expected.reasoning)
