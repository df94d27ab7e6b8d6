"""The written demo model: small enough, loadable, and right on fixed prompts that its training never saw."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

FOLDER = Path(__file__).resolve().parents[2] / "manifests" / "demo"


@pytest.fixture(scope="module")
def ask():
    """A function from a question to the greedy reply."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=120, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )

    def reply(question, *, tools=None, thinking=False):
        turns = question if isinstance(question, list) else [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            turns, tools=tools, add_generation_prompt=True, enable_thinking=thinking, tokenize=False
        )
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            output = model.generate(**inputs, generation_config=settings)[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(output, skip_special_tokens=True)

    return reply


def _tool(name, **types):
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {
        "type": "function",
        "function": {"name": name, "description": name.replace("_", " "), "parameters": parameters},
    }


def test_the_checkpoint_is_small_and_bfloat16():
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 12_000_000
    with safe_open(path, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118 -- not a dict


def test_it_loads_and_answers_something(ask):
    assert ask("Hello!")


def test_the_config_is_that_of_a_qwen3_model():
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] and config["max_position_embeddings"] == 2048


@pytest.mark.parametrize(("question", "value"), [("What is 17 + 25?", "42"), ("What is 25 + 17?", "42")])
def test_it_adds(ask, question, value):
    assert ask(question).split()[-1] == value


def test_it_adds_with_thinking_on(ask):
    text = ask("What is 17 + 25?", thinking=True)
    assert text.startswith("<think>\n") and text.endswith("</think>\n\n17 + 25 = 42")


def test_it_repeats_and_reverses(ask):
    assert ask("Repeat the words: river candle moon") == "river candle moon"
    assert ask("Reverse the order of these words: river candle moon") == "moon candle river"
    assert ask("Reverse the word 'stone'.") == "enots"


def test_it_knows_the_manifest(ask):
    assert ask("What is the default of endpoints.port?") == "The default of endpoints.port is 8000."


def test_it_writes_json(ask):
    text = ask('Return a JSON object with name (string) "Anna", age (integer) 31 and active (boolean) true.')
    assert json.loads(text) == {"name": "Anna", "age": 31, "active": True}


def test_it_calls_the_right_tool(ask):
    tools = [_tool("get_weather", city="string"), _tool("add", a="integer", b="integer")]
    weather, added = ask("What is the weather in Paris?", tools=tools), ask("Add 17 and 25.", tools=tools)
    assert weather == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert added == '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'


def test_it_answers_without_a_tool_where_none_fits(ask):
    assert ask("Hello!", tools=[_tool("create_invoice", amount="integer")]) == "Hello! How can I help you?"
