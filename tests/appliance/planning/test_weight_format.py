"""quantization.group_size and quantization.head: resolved values, memory, and refusal of values without effect."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.checkpoint import read_checkpoint
from tests.appliance.planning.test_plan import CPU, planned, refused

GROUP, HEAD, EMBEDDING = "quantization.group_size", "quantization.head", "quantization.embedding"
COMPILED = replace(CPU, kernels=("avx2",))


def engine(tmp_path: Path, *sets: str):
    return planned(tmp_path, *sets, machine=COMPILED).engines[0]


def test_values_reach_the_engine_and_appear_among_the_resolved_ones(tmp_path: Path) -> None:
    plan = planned(tmp_path, "quantization.weights=int4", f"{GROUP}=128", f"{HEAD}=int4", machine=COMPILED)
    assert (plan.engines[0].quantization.group_size, plan.engines[0].quantization.head) == (128, "int4")
    assert plan.engines[0].quantization.weight_format == "int4, groups of 128, int4 head"
    values = {one.key: one.resolved for one in plan.effective}
    assert (values[GROUP], values[HEAD]) == (128, "int4")


@pytest.mark.parametrize(("weights", "group"), [("int8", 64), ("int6", 64), ("int4", 32)])
def test_defaults_depend_on_the_number_of_bits(tmp_path: Path, weights: str, group: int) -> None:
    plan = planned(tmp_path, f"quantization.weights={weights}", machine=COMPILED)
    values = {one.key: one.resolved for one in plan.effective}
    assert (values[GROUP], values[HEAD]) == (group, "int8")
    assert plan.engines[0].quantization.weight_format == weights


def test_writing_out_the_defaults_changes_nothing(tmp_path: Path) -> None:
    plain = engine(tmp_path, "quantization.weights=int8")
    assert engine(tmp_path, "quantization.weights=int8", f"{GROUP}=64", f"{HEAD}=int8") == plain
    assert engine(tmp_path, f"{HEAD}=stored") == engine(tmp_path)
    mixed = engine(tmp_path, "quantization.weights=int8", f"{GROUP}=64", f"{HEAD}=int4")
    assert mixed.quantization.group_size == 64, "4 bits would have groups of 32"


def test_the_memory_plan_counts_groups_and_head(tmp_path: Path) -> None:
    """The engine's tests compare the planned bytes with the loaded ones (tests/engine/layers/test_rounded.py)."""

    def planned_bytes(*sets: str) -> int:
        return engine(tmp_path, "quantization.weights=int8", *sets).memory.weights

    assert len({planned_bytes(f"{GROUP}={size}") for size in (32, 64, 128)}) == 3
    assert planned_bytes(f"{GROUP}=64") == planned_bytes()
    assert planned_bytes() > planned_bytes(f"{HEAD}=int6") > planned_bytes(f"{HEAD}=int4")


def test_the_head_alone_can_be_quantized_and_is_cached(tmp_path: Path) -> None:
    plain, head = engine(tmp_path), engine(tmp_path, f"{HEAD}=int8")
    assert (head.quantization.weights, head.quantization.head) == ("stored", "int8")
    assert head.memory.weights < plain.memory.weights


def test_values_without_effect_are_refused_with_the_reason(tmp_path: Path) -> None:
    assert "no weights are quantized" in str(refused(tmp_path, f"{GROUP}=32", machine=COMPILED))
    by_torch = str(refused(tmp_path, f"{HEAD}=int4", "hardware.kernels=torch", machine=COMPILED))
    assert "only compiled kernels of a CPU and Triton kernels multiply by it" in by_torch
    six = str(refused(tmp_path, f"{HEAD}=int6", "hardware.kernels=torch", machine=COMPILED))
    assert "only compiled kernels of a CPU multiply by it, and these are torch kernels" in six
    blocks = "quantization.weights=int6", f"{HEAD}=int6", f"{GROUP}=32"
    assert "int6 has blocks of 64 inputs" in str(refused(tmp_path, *blocks, machine=COMPILED))
    assert engine(tmp_path, *blocks[:2], f"{GROUP}=64") == engine(tmp_path, *blocks[:2])


def test_the_embedding_has_a_format_of_its_own(tmp_path: Path) -> None:
    demo = read_checkpoint(Path(__file__).parents[3] / "manifests" / "demo")
    auto, six, stored = (
        planned(tmp_path, f"{EMBEDDING}={value}", machine=COMPILED, facts=demo) for value in ("auto", "int6", "stored")
    )
    assert six.engines[0].quantization.weight_format == "stored, int6 embedding"
    assert {one.key: one.resolved for one in auto.effective}[EMBEDDING] == "stored" and stored.engines == auto.engines
    vocab, hidden = demo.model.embed.vocab, demo.model.embed.hidden
    more = six.engines[0].memory.weights - auto.engines[0].memory.weights
    assert more == vocab * hidden // 64 * 50, "the embedding as stored is mapped from the file and takes no memory"
    assert "rows have 32 numbers" in str(refused(tmp_path, f"{EMBEDDING}=int6", machine=COMPILED))
