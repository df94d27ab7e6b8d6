"""The embedded model's tokenizer, template and output format against transformers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from appliance.chat_templates.template import load_template
from appliance.output_formats.formats import HERMES, THINK
from appliance.server.chat.conversation import Text
from appliance.server.chat.messages import template_messages
from engine.text import IncrementalDecoder, Tokenizer, decode_all

DEMO = Path(__file__).parents[4] / "manifests" / "demo"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "42", "reasoning_content": "17 + 25 = 42"},
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]


@pytest.fixture(scope="module")
def text() -> Text:
    tokenizer = Tokenizer(DEMO)
    return Text(tokenizer, load_template(tokenizer, None))


def test_its_template_is_recognised_as_reasoning_with_hermes_calls(text: Text) -> None:
    assert (text.output_format.reasoning, text.output_format.calls) == (THINK, HERMES)


@pytest.mark.parametrize("length", [2, 4, 6])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("thinking", [None, False, True])
def test_prompts_equal_transformers(text: Text, length: int, tools: Any, thinking: bool | None) -> None:
    oracle = AutoTokenizer.from_pretrained(DEMO)
    variables = {} if thinking is None else {"enable_thinking": thinking}
    assert text.template is not None
    rendered = text.template.render(
        template_messages(TALK[:length], text.template.text()), tools=tools, variables=variables
    )
    expected = oracle.apply_chat_template(
        TALK[:length], tools=tools, add_generation_prompt=True, tokenize=False, **variables
    )
    assert rendered == expected
    ids = text.tokenizer.encode(rendered, add_special_tokens=False)
    assert ids == oracle.encode(expected, add_special_tokens=False)
    assert decode_all(IncrementalDecoder(text.tokenizer, skip_special_tokens=False), ids) == expected
