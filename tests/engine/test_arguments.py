"""Arguments of `Params` and `LLM`: the ranges and messages of HTTP, and names that a Python program knows."""

import ast
import math
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from appliance.config.gateway import GatewayConfig
from appliance.config.keys import keys, metadata
from appliance.config.sections.limits import Limits
from appliance.server.chat.sampling import logprob_count, resolve, stop_strings
from appliance.server.chat.window import tokens_within
from appliance.server.schema.completions import CompletionRequest
from engine.api.errors import ConfigError, OutOfMemory, RequestError
from engine.arguments import ARGUMENTS, NAMES
from engine.llm import LLM, Params

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "manifests" / "demo"
EDGES = {
    "temperature": [-5.0, -1e-9, 0.0, 0.005, 2.0, 2.0001],
    "top_p": [-1.0, 0.0, 1e-9, 1.0, 1.0001],
    "min_p": [-0.1, 0.0, 1.0, 1.1],
    "top_k": [-2, -1, 0, 1, 10**6],
    "presence_penalty": [-2.1, -2, 2, 2.1],
    "frequency_penalty": [-2.1, -2, 2, 2.1],
    "repetition_penalty": [-1.0, 0.0, 1e-300, 1e-5, 1e-4, 1e4, 1e5],
    "min_tokens": [-1, 0, 16, 17],
    "max_tokens": [-1, 0, 1, 16],
    "logprobs": [-2, -1, 0, 5],
    "prompt_logprobs": [-2, -1, 0, 5],
    "stop": ["", "END", ["a", ""], ["a", "b"]],
    "allowed_token_ids": [[], [1, 2]],
    "seed": [-(2**63), 2**63 - 1],
}


def over_http(name: str, value: object) -> str | None:
    """The message with which HTTP refuses a field, or None."""
    settings = GatewayConfig(
        names=("m",), model="m", engines=("e",), max_context=64, vocab_size=99, limits=Limits(max_logprobs=-1)
    )
    body = CompletionRequest.model_validate({"prompt": "x", "max_tokens": 16, name: value})
    try:
        most = tokens_within(100, body.max_tokens, settings)
        asked = logprob_count("sample", "logprobs", body.logprobs, settings)
        prompt = logprob_count("prompt", "prompt_logprobs", body.prompt_logprobs, settings)
        stop_strings(body.stop, settings)
        limits = {"max_tokens": most, "asked_tokens": body.max_tokens}
        resolve(body, settings, None, logprobs=asked, prompt_logprobs=prompt, **limits)
    except RequestError as error:
        assert error.param == name
        return str(error)
    return None


def in_python(name: str, value: object) -> str | None:
    try:
        Params(**{name: value})
    except RequestError as error:
        assert error.param == name
        return str(error)
    return None


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDGES.items() for value in values])
def test_params_take_and_refuse_the_same_values_as_http_with_the_same_message(name, value):
    assert in_python(name, value) == over_http(name, value)


@pytest.mark.parametrize(("name", "value"), [("temperature", math.nan), ("top_p", math.nan), ("min_p", math.inf)])
def test_params_refuse_numbers_that_are_not_finite(name, value):
    with pytest.raises(RequestError, match=f"^{name} must be"):
        Params(**{name: value})
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "x", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "1"), ("temperature", None), ("max_tokens", 1.5), ("top_k", True), ("seed", "7"), ("seed", 2**63)],
)
def test_params_of_a_wrong_type_are_refused_by_the_name_of_the_argument(name, value):
    with pytest.raises(RequestError, match=f"^{name} must be .*, got {re.escape(repr(value))}") as caught:
        Params(**{name: value})
    assert caught.value.param == name


def test_one_text_is_one_stop_string():
    assert Params(stop="END").stop == ("END",) == Params(stop=["END"]).stop


def test_values_are_used_as_http_uses_them():
    sampling = Params(temperature=0.001, top_k=-1, logit_bias={3: 1000.0}, seed=1).sampling()
    assert (sampling.temperature, sampling.top_k, sampling.logit_bias) == (0.01, 0, {3: 100.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_running": 0}, r"^max_running=0: must be at least 1$"),
        ({"max_running": "8"}, r"^max_running='8': expected `int`, got `str`$"),
        ({"threads": 1.5}, r"^threads=1\.5: expected `int`, got `float`"),
        ({"device": "tpu"}, r"^device='tpu': "),
        ({"dtype": "float8"}, r"^dtype='float8': "),
        ({"policy": "lifo"}, r"^policy='lifo': invalid enum value 'lifo'$"),
        ({"max_contxt": 3}, r"^max_contxt: unknown argument; allowed are .*max_context"),
    ],
)
def test_a_wrong_argument_of_llm_is_named_with_its_value(arguments, message):
    with pytest.raises(ConfigError, match=message):
        LLM(DEMO, **arguments)


def test_messages_of_the_engine_name_arguments_and_no_keys_of_a_manifest():
    with pytest.raises(OutOfMemory, match="raise kv_bytes to that or lower max_context$"):
        LLM(DEMO, kv_bytes=1000, max_context=100)
    with pytest.raises(ConfigError, match="set kernels to triton$"):
        LLM(DEMO, kernels="torch", invariant=True)


def test_every_key_of_a_manifest_in_messages_of_the_engine_has_an_argument():
    known = {".".join(key.path) for key in keys().values() if len(key.path) > 1}
    found = set()
    for path in sorted((ROOT / "engine").rglob("*.py")):
        if path.name == "__main__.py" or path.parent.name in ("whatif",):
            continue  # of a program, which has a manifest
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                words = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", " ".join(text for text in texts if isinstance(text, str)))
                found |= known & set(words)
    assert len(found) > 8, "the messages were not found"
    assert found <= NAMES.keys()


def test_arguments_are_the_fields_that_the_keys_of_a_manifest_declare_as_their_target():
    compared = 0
    for key, declared in metadata().items():
        for target in declared.targets:
            config, _, field = target.partition(".")
            if config == "engine" and not field.startswith(("model.task.", "lifecycle.self_test.")):
                assert ARGUMENTS[NAMES[key]] == field, key
                compared += 1
    assert compared > 10
