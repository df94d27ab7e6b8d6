"""Checkpoints with Mistral's tekken.json and no chat template: prompts are those of mistral_common; thoughts and calls
are parsed. tests/engine/text/golden/mistral_prompts.json was written with mistral_common 1.13.1."""

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

GOLDEN = json.loads((Path(__file__).parents[3] / "engine" / "text" / "golden" / "mistral_prompts.json").read_text())
VERSIONS = tuple(GOLDEN["prompts"])
SPECIAL = 40  # ids before those of the vocabulary
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REPLIES = {
    "v7": ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]', ""),
    "v11": ('[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', ""),
    "v13": ('[THINK]The weather.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', "The weather."),
}


def write_tekken(directory: Path, version: str) -> None:
    names = GOLDEN["special_tokens"][version]
    special = [names[rank] if rank < len(names) else f"<SPECIAL_{rank}>" for rank in range(SPECIAL)]
    size = {"default_vocab_size": 256 + SPECIAL, "default_num_special_tokens": SPECIAL}
    written = {
        "config": {"pattern": PATTERN, "num_vocab_tokens": 256 + SPECIAL, **size, "version": version},
        "vocab": [{"rank": one, "token_bytes": base64.b64encode(bytes([one])).decode()} for one in range(256)],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)],
    }
    (directory / "tekken.json").write_text(json.dumps(written))
    (directory / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"]}))


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gateway(version: str, make_gateway: Callable[..., Any], tmp_path: Path) -> Any:
    write_tekken(tmp_path, version)
    return make_gateway(model=str(tmp_path), vocab_size=256 + SPECIAL, max_context=4096)


def test_prompts_are_those_of_mistral_common(gateway: Any, version: str) -> None:
    gateway.says("ok")
    for name, given in GOLDEN["conversations"].items():
        body = {"messages": given["messages"], "tools": given["tools"]}
        status, reply = gateway.post("/v1/chat/completions", copy.deepcopy(body))
        assert status == 200, reply
        ids = list(gateway.submits[-1].prompt)
        assert gateway.tokenizer.decode(ids, skip_special_tokens=False) == GOLDEN["prompts"][version][name], name
        if name == "later":
            assert ids == GOLDEN["ids"][version]


@pytest.mark.parametrize("each", [1, 1000])
def test_thoughts_and_calls_are_parsed_whole_and_streamed(gateway: Any, version: str, each: int) -> None:
    text, thought = REPLIES[version]
    gateway.says(text, each=each)
    given = GOLDEN["conversations"]["tools"]

    async def both(client: openai.AsyncOpenAI) -> Any:
        body: Any = {"model": "qwen", "messages": given["messages"], "tools": given["tools"]}
        whole = await client.chat.completions.create(**body)
        stream = await client.chat.completions.create(**body, stream=True)
        return whole.choices[0].message, [chunk.choices[0].delta async for chunk in stream if chunk.choices]

    message, deltas = gateway.openai(both)
    (call,) = message.tool_calls
    pieces = [piece.function for delta in deltas for piece in delta.tool_calls or []]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert "".join(piece.name or "" for piece in pieces) == "get_weather"
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"city": "Oslo"}
    assert (getattr(message, "reasoning", None) or "") == thought
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == thought
    assert not message.content
