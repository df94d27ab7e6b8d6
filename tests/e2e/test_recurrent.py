"""A tiny Qwen3-Next, with recurrent state and drafts: replies equal transformers', also when the engine crashes."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.conftest import ROOT, Appliance

PROMPT = [5 + 7 * number % 900 for number in range(45)]  # two blocks and a part of the third
TOKENS = 150
CONFIG: dict[str, Any] = {
    "vocab_size": 1257,  # of the demo's tokenizer
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mlp_only_layers": [0, 1],
    "max_position_embeddings": 1024,
    "eos_token_id": 1252,
    "pad_token_id": 1250,
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig(**CONFIG)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            scale = 0.5 if "conv" in name else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0))
    return made


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    """The greedy reply of transformers."""
    settings = transformers.GenerationConfig(eos_token_id=None, pad_token_id=1250, max_new_tokens=TOKENS)
    with torch.no_grad():
        ids = model.generate(torch.tensor([PROMPT]), generation_config=settings, do_sample=False)
    return ids[0, len(PROMPT) :].tolist()


@pytest.fixture(scope="module")
def appliance(launch: Callable[..., Appliance], model: Any, tmp_path_factory: pytest.TempPathFactory) -> Appliance:
    folder = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "manifests" / "demo" / name, folder / "model" / name)
    manifest = folder / "m.yaml"
    more = "engine: {scheduling: {max_running: 4}}\nspeculation: {method: ngram, tokens: 3}\n"
    manifest.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: model}}, names: [hybrid]}}\n{more}")
    made = launch(manifest)
    made.wait_ready()
    return made


BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.nightly("tests/engine/layers/test_families.py::test_cached_prefixes_and_preemption_change_nothing")
def test_a_repeated_prompt_starts_from_its_snapshot(appliance: Appliance, expected: list[int]) -> None:
    for cached in (0, 32):
        reply = appliance.client.post("/v1/completions", json=BODY).json()
        assert reply["choices"][0]["token_ids"] == expected and len(set(expected)) > 5
        assert (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == cached


@pytest.mark.nightly("tests/engine/test_killed.py::test_recurrent_replies_with_drafts_continue_after_a_kill")
def test_a_stream_goes_on_when_its_engine_is_killed(appliance: Appliance, expected: list[int]) -> None:
    victim, found = appliance.pids()["engine-0"], list[int]()
    with appliance.client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["token_ids"]
                if victim and len(found) > 20:
                    os.kill(victim, signal.SIGKILL)
                    victim = 0
    assert found == expected
    assert appliance.metric("slipway_request_interruptions_total") > 0
    assert appliance.metric("slipway_draft_tokens_total") > 0
