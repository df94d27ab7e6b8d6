"""Derivations: every step's formula, evaluated again, gives its value; every breakdown adds up to the number shown."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.planning.derivation import Account, product
from appliance.planning.plan import Plan
from appliance.planning.why import explain
from tests.appliance.planning import test_plan
from tests.appliance.planning.test_plan import COMPILED, CPU, GPU_KERNELS, planned, quantized, sparse


def computed(formula: str) -> float:
    """Evaluate a formula of a derivation with Python's own arithmetic; ⌊ ⌋ are floor."""
    text = formula.replace("⌊", "floor(").replace("⌋", ")").replace("×", "*").replace("−", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    assert re.fullmatch(r"[\d\s.e+*/(),a-z-]*", text), formula
    return float(eval(text, {"floor": math.floor, "min": min, "max": max, "__builtins__": {}}))


PLANS = {
    "cpu": ({"machine": CPU}, ()),
    "compiled": ({"machine": COMPILED}, ("hardware.capacity.requests=5",)),
    "rounded": ({"machine": COMPILED}, ("quantization.weights=int4", "parallelism.data=2")),
    "int8": ({"machine": COMPILED}, ("quantization.kv_cache=int8", "hardware.kv_cache_memory=100MiB")),
    "gpu": ({"machine": GPU_KERNELS}, ("engine.scheduling.max_running=6",)),
    "experts": ({"machine": COMPILED, "facts": sparse()}, ()),
    "quantized": ({"machine": COMPILED, "facts": quantized()}, ()),
    "drafts": ({"machine": COMPILED}, ("speculation.method=auto",)),
    "windows": ({"machine": COMPILED, "facts": test_plan.checkpoint(window=40)}, ("model.max_context=900",)),
}


def made(tmp_path: Path, name: str) -> Plan:
    values, sets = PLANS[name]
    return planned(tmp_path, *sets, **values)  # type: ignore[arg-type]


def accounts(plan: Plan) -> dict[str, Account]:
    return {one.key: one for one in (*plan.memory.accounts, *plan.estimate.accounts)}


@pytest.mark.parametrize("name", PLANS)
def test_every_formula_evaluates_to_its_value(tmp_path: Path, name: str) -> None:
    for account in accounts(made(tmp_path, name)).values():
        for step in account.steps:
            assert computed(step.formula) == pytest.approx(step.value, rel=1e-9), (account.key, step)
            if step.unit == "B" and float(step.value).is_integer():
                assert computed(step.formula) == step.value, (account.key, step)


@pytest.mark.parametrize("name", PLANS)
def test_every_account_adds_up_to_the_number_that_the_plan_shows(tmp_path: Path, name: str) -> None:
    plan = made(tmp_path, name)
    memory, found = plan.memory, accounts(plan)
    shown = {
        "budget": memory.budget,
        "weights": memory.weights,
        "workspace": memory.workspace,
        "kv": memory.cache,
        "block": memory.block_bytes,
        "loading": memory.loading,
        "concurrency": memory.whole_contexts,
        "context": plan.engines[0].model.max_context,
        "host": memory.host.total,
        "state": sum(one.token_bytes for one in memory.state),
        "load": plan.estimate.load_s,
        **memory.parts,
    }
    for key, value in shown.items():
        assert found[key].total == value, key
    assert sum(memory.parts.values()) == memory.weights
    made_ceilings = plan.estimate.roofline
    if made_ceilings is not None:
        for one in made_ceilings.decode:
            assert found[f"decode:{one.rows}"].total == one.tokens_s
        assert found["prefill"].total == made_ceilings.prefill.tokens_s


def test_the_words_have_the_numbers_put_in(tmp_path: Path) -> None:
    text, found = explain(made(tmp_path, "cpu"), "mlp")
    assert found and text.startswith("mlp: ")
    assert "layers.*.mlp.gate_proj+up_proj: float32 = 3 × 96 × 32 × 4 = 36,864 B" in text
    assert text.endswith("total = 55,296 B")


@pytest.mark.parametrize("word", ["kv_cache", "cache", "hardware.kv_cache_memory", "kv-cache-memory", "kv"])
def test_numbers_have_common_names(tmp_path: Path, word: str) -> None:
    text, found = explain(made(tmp_path, "cpu"), word)
    assert found and "the pool with its null block" in text


def test_a_key_is_explained_with_its_value_reason_and_meaning(tmp_path: Path) -> None:
    text, found = explain(made(tmp_path, "cpu"), "engine.scheduling.max_step_tokens")
    assert found and text.startswith("engine.scheduling.max_step_tokens = auto → 512: for cpu\n  from default. Maximum")


def test_an_unknown_number_lists_available_ones(tmp_path: Path) -> None:
    text, found = explain(made(tmp_path, "cpu"), "wieghts")
    assert not found and "did you mean weights?" in text and "concurrency" in text


def test_a_product_lists_equal_factors_first() -> None:
    assert product("x", 3, 4, times=28).formula == "28 × 3 × 4" and product("x", 1234, 2).formula == "1,234 × 2"
    assert replace(product("x", 2), added=False).value == 2
