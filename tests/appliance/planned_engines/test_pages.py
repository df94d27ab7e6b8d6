"""The default type of the KV cache: a plan and an engine in Python choose the same one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.constraints.facts import model_facts
from appliance.constraints.rule import Facts, View
from appliance.constraints.variables import VARIABLES
from appliance.hardware.machine import Machine
from engine.llm import _config, _kv_dtype
from engine.models.checkpoint import Checkpoint, read_checkpoint
from kernels.cpu.library import best
from tests.engine.layers.families import random_family, save_family

HOST = Machine(2, "affinity", 2**33, "MemAvailable", no_gpu="no driver")
KV_CACHE = next(one for one in VARIABLES if one.name == "kv_cache")
# Model → formats that some kernels have for it: not for latents, and none with scales for pages of several shapes.
MODELS = {
    "mimo7b": {"fp8", "int8", "int4"},
    "deepseek-v3": set[str](),
    "gemma4": {"fp8"},
}


@pytest.mark.parametrize("name", MODELS)
def test_plan_and_engine_choose_the_format_that_the_checkpoint_states(name: str, tmp_path: Path) -> None:
    save_family(name, random_family(name), tmp_path)
    assert chosen_by_both(read_checkpoint(tmp_path)) == MODELS[name]


@pytest.mark.parametrize("draft", MODELS)
def test_the_pages_of_a_draft_model_decide_too(draft: str, tmp_path: Path) -> None:
    for name in {"mimo7b", draft}:
        save_family(name, random_family(name), tmp_path / name)
    target = replace(read_checkpoint(tmp_path / "mimo7b"), draft=read_checkpoint(tmp_path / draft))
    assert chosen_by_both(target) == MODELS[draft]


def test_an_engine_reads_its_draft_model_before_it_chooses_pages(tmp_path: Path) -> None:
    for name in ("mimo7b", "deepseek-v3"):
        save_family(name, random_family(name), tmp_path / name)
    config = json.loads((tmp_path / "mimo7b" / "config.json").read_text())
    stated = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "INT8"}
    settings = {"quantization_config": stated}
    (tmp_path / "mimo7b" / "config.json").write_text(json.dumps({**config, **settings}))
    given = {"device": "cpu", "kernels": "torch", "kv_bytes": 1 << 20, "max_context": 32}
    drafting = {"speculation": "draft", "draft_model": str(tmp_path / "deepseek-v3")}
    configs = (_config(tmp_path / "mimo7b", given | more)[0] for more in ({}, drafting))
    chosen = [config.quantization.kv_cache for config in configs]
    assert chosen == ["int8", "float32"]


def chosen_by_both(made: Checkpoint) -> set[str]:
    """Return the formats that the plan chooses of those that a checkpoint states. The engine chooses the same."""
    chosen = set[str]()
    for stated in ("fp8", "int8", "int4", "nvfp4"):
        settings = {"quantization_config": {"kv_cache_quant_algo": stated.upper()}}
        checkpoint = replace(made, config={**made.config, **settings})
        facts = Facts(model_facts(checkpoint), HOST)
        for kernels in ("torch", "triton", best()):
            planned = KV_CACHE.auto(View(facts, kernels=kernels))[0]
            assert _kv_dtype(checkpoint, "cpu", "float32", kernels, "stored") == planned, (stated, kernels)
            chosen |= {planned} & {"fp8", "int8", "int4", "nvfp4"}
    return chosen
