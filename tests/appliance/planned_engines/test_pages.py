"""The default type of the KV cache: a plan and an engine in Python choose the same one."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.constraints.facts import model_facts
from appliance.constraints.rule import Facts, View
from appliance.constraints.variables import VARIABLES
from appliance.hardware.machine import Machine
from engine.llm import _kv_dtype
from engine.models.checkpoint import read_checkpoint
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
    made, chosen = read_checkpoint(tmp_path), set()
    for stated in ("fp8", "int8", "int4", "nvfp4"):
        settings = {"quantization_config": {"kv_cache_quant_algo": stated.upper()}}
        checkpoint = replace(made, config={**made.config, **settings})
        facts = Facts(model_facts(checkpoint), HOST)
        for kernels in ("torch", "triton", best()):
            planned = KV_CACHE.auto(View(facts, kernels=kernels))[0]
            assert _kv_dtype(checkpoint, "cpu", "float32", kernels, "stored") == planned, (stated, kernels)
            chosen |= {planned} & {"fp8", "int8", "int4", "nvfp4"}
    assert chosen == MODELS[name]
