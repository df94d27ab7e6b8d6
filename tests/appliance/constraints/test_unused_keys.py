"""Keys without effect for a model are refused at their position; keys that only state a fact are accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.config.keys import find
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.constraints.unused_keys import ANY, ENCODER_DECODER, UNUSED_KEYS
from appliance.hardware.described import hardware
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from tests.appliance.planned_engines.test_pooled import TOKENIZER, folder  # noqa: F401
from tests.appliance.planned_engines.test_reality import HOST
from tests.engine.layers.conftest import random_model
from tests.engine.layers.families import random_family, save_family
from tests.engine.media_models import FAMILIES as MULTIMODAL
from tests.engine.sourced import save

VALUES = {
    "model.generation_config": "ignore",
    "model.format": "hermes",
    "model.chat_template": __file__,
    "endpoints.trust_request_chat_template": "true",
    "observability.log_outputs": "final",
    "lifecycle.journal.folder": "journal",
    "lifecycle.self_test.at_start": "true",
    "quantization.kv_cache": "float16",
    "engine.cache.prefix": "true",
    "model.pooling.score_tokens": "['no', 'yes']",
    "lifecycle.self_test.tolerance": "0.5",
    "engine.sampling.temperature": "0.5",
    "engine.sampling.top_p": "0.5",
    "engine.sampling.min_p": "0.5",
    "model.pooling.max_input": "9000",
    "hardware.graphs": "true",
    "engine.return_routed_experts": "true",
    "quantization.weights": "int8",
    "quantization.group_size": "64",
    "quantization.embedding": "int6",
}
SERVED = {  # of each row of the table, a model that it is about
    "models other than decoders with experts": ("decoder", ()),
    "pooling models": ("bert", ()),
    "models with bidirectional attention": ("bert", ()),
    "decoders that pool all states of a prompt": ("decoder", ("model.task=embed", "model.pooling.pool=mean")),
    "models that do not embed": ("decoder", ()),
    "encoder-decoder models": ("bart", ()),
    "models without attention": ("mamba2", ()),
    "models other than rerankers (`model.task: score`)": ("decoder", ("model.task=embed",)),
    "models with `model.media.encoder_only`": ("eyes", ("model.media.encoder_only=true",)),
}
WRITTEN = [(one.models, key, so) for one in UNUSED_KEYS for key, so in one.keys.items()]


@pytest.fixture(scope="module")
def checkpoint(folder: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:  # noqa: F811
    decoder, experts = (tmp_path_factory.mktemp("idle") / name for name in ("qwen3", "qwen3-moe"))
    for path in (decoder, experts):
        random_model(path.name).save_pretrained(path)
        (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    bart = save(tmp_path_factory.mktemp("idle") / "bart").path
    mamba2 = tmp_path_factory.mktemp("idle") / "mamba2"
    save_family("mamba2", random_family("mamba2"), mamba2)
    (mamba2 / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    eyes = MULTIMODAL["llava"][0](tmp_path_factory.mktemp("idle")).folder
    (eyes / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    known = {"decoder": decoder, "experts": experts, "bart": bart, "mamba2": mamba2, "eyes": eyes}
    return lambda name: known.get(name) or folder(name)


def value_of(key: str) -> str:
    return VALUES.get(key, "7")


def planned(tmp_path: Path, path: Path, *sets: str, beside: str = "", host: Machine = HOST) -> Plan:
    file = tmp_path / "m.yaml"
    file.write_text(f"apiVersion: slipway/v2\n{beside}model: {{source: {{path: {path}}}}}\n")
    return validate(Given(file, tuple(Option("--set", *one.split("=", 1)) for one in sets), {}), host)


@pytest.mark.parametrize(("models", "key", "so"), WRITTEN, ids=[f"{key} of {models}" for models, key, _ in WRITTEN])
def test_a_key_without_an_effect_is_refused(
    tmp_path: Path, checkpoint: Callable, models: str, key: str, so: Any
) -> None:
    name, sets = SERVED[models]
    with pytest.raises(Refused) as found:
        planned(tmp_path, checkpoint(name), *sets, f"{key}={value_of(key)}")
    (problem,) = found.value.problems
    assert (problem.key, problem.place.source) == (key, "--set")
    assert "has no effect" in problem.message and problem.message.endswith("leave it out")


def test_only_generated_text_is_returned_with_experts(tmp_path: Path, checkpoint: Callable) -> None:
    key = "engine.return_routed_experts=true"
    assert planned(tmp_path, checkpoint("experts"), key).engines[0].return_routed_experts
    with pytest.raises(Refused, match="has no effect"):
        planned(tmp_path, checkpoint("experts"), "model.task=embed", key)


def test_values_that_describe_the_model_are_allowed(tmp_path: Path, checkpoint: Callable) -> None:
    said = {key: so for one in UNUSED_KEYS[:7] for key, so in one.keys.items() if so is not ANY}
    words = {key: str(so).lower() for key, so in said.items()}
    words |= dict.fromkeys(("model.format", "quantization.kv_cache", "engine.cache.block_tokens"), "auto")
    words |= {"limits.max_output_tokens": "null", "lifecycle.self_test.tolerance": "auto"}
    assert len(words) > 12
    planned(tmp_path, checkpoint("bert"), *(f"{key}={word}" for key, word in words.items()))


def test_values_that_describe_an_encoder_decoder_are_allowed(tmp_path: Path, checkpoint: Callable) -> None:
    said = {
        key: so for one in UNUSED_KEYS if one.models == ENCODER_DECODER for key, so in one.keys.items() if so is not ANY
    }
    made = planned(tmp_path, checkpoint("bart"), *(f"{key}={str(so).lower()}" for key, so in said.items()))
    assert len(said) == 4 and not made.engines[0].cache.prefix


def test_keys_are_accepted_for_models_that_use_them(tmp_path: Path, checkpoint: Callable) -> None:
    elsewhere = ("hardware.kv_cache_memory", "hardware.graphs")
    first = [key for one in UNUSED_KEYS[:8] for key in one.keys if key not in elsewhere]
    planned(tmp_path, checkpoint("decoder"), *(f"{key}={value_of(key)}" for key in dict.fromkeys(first)))
    planned(tmp_path, checkpoint("decoder"), "hardware.graphs=true", host=hardware("h200x1"))
    cached = ("engine.cache.prefix=true", "engine.cache.block_tokens=7", "quantization.kv_cache=float16")
    planned(tmp_path, checkpoint("decoder"), "model.task=embed", "model.pooling.max_input=90000", *cached)
    planned(tmp_path, checkpoint("decoder"), "model.task=score", "model.pooling.score_tokens=['no', 'yes']", *cached)


def test_all_unused_keys_are_reported_together_with_places(tmp_path: Path, checkpoint: Callable) -> None:
    beside = "engine:\n  sampling: {top_k: 3}\n  cache: {block_tokens: 8}\n"
    with pytest.raises(Refused) as found:
        planned(tmp_path, checkpoint("bert"), beside=beside)
    file = tmp_path / "m.yaml"
    assert [str(problem).split(": ")[:3] for problem in found.value.problems] == [
        [f"{file}:3:21", "engine.sampling.top_k", "3 has no effect"],
        [f"{file}:4:25", "engine.cache.block_tokens", "8 has no effect"],
    ]


def test_unused_keys_of_a_shared_file_are_only_warnings(tmp_path: Path, checkpoint: Callable) -> None:
    (tmp_path / "site.yaml").write_text("limits: {max_stop: 4}\nengine: {cache: {prefix: true}}\n")
    made = planned(tmp_path, checkpoint("bert"), beside="extends: site.yaml\n")
    told = [(str(problem.place), problem.key, problem.level, problem.fix) for problem in made.notices]
    site = tmp_path / "site.yaml"
    assert told == [
        (f"{site}:1:20", "limits.max_stop", "warning", None),
        (f"{site}:2:26", "engine.cache.prefix", "warning", None),
    ]
    assert "extended by" in made.notices[0].text


def test_max_input_within_one_window_is_an_error(tmp_path: Path, checkpoint: Callable) -> None:
    with pytest.raises(Refused, match=r"max_input: 16 has no effect, because model.max_context is 16"):
        planned(tmp_path, checkpoint("bert"), "model.max_context=16", "model.pooling.max_input=16")
    planned(tmp_path, checkpoint("bert"), "model.max_context=16", "model.pooling.max_input=17")


def test_the_table_names_keys_that_there_are() -> None:
    assert all(find(tuple(key.split("."))) is not None for one in UNUSED_KEYS for key in one.keys)
