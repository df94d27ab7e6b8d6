"""parallelism.tensor in a plan: shardable dimensions, devices, memory and CPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.hardware.machine import Gpu, Machine
from appliance.hardware.topology import Topology
from appliance.planning.workspace import PROCESS_BYTES
from engine.api.config import Place
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, ResidualBlock
from tests.appliance.planning.test_plan import (
    BLOCK,
    CPU,
    GIB,
    GPU_HOST,
    H100,
    HEADS,
    HIDDEN,
    LAYERS,
    MIB,
    PARAMETERS,
    VOCAB,
    checkpoint,
    planned,
    reason,
    refused,
)

HOST = replace(GPU_HOST, gpus=(H100,) * 4)
NORMS = (2 * LAYERS + 1) * HIDDEN
TWO_NODES = tuple(tuple((node * 8 + core,) for core in range(8)) for node in range(2))


def wide() -> Checkpoint:
    """Return weights that take more memory than the ranks' all-reduce buffers."""
    made = checkpoint()
    block = (made.model.blocks[0][0], ResidualBlock(body=MLP(hidden=HIDDEN, intermediate_size=8_000_000)))
    return replace(made, model=replace(made.model, blocks=(block,)))


def test_one_rank_is_the_default_and_says_nothing_more(tmp_path: Path) -> None:
    engine = planned(tmp_path).engines[0]
    assert (engine.parallelism.tensor, engine.parallelism.rank_cpus, engine.hardware.gpu) == (1, (), 0)


def test_a_rank_has_its_share_of_weights_and_cache_and_of_the_memory(tmp_path: Path) -> None:
    one, two = planned(tmp_path), planned(tmp_path, "parallelism.tensor=2")
    rows = -(-VOCAB // 2)  # of the vocabulary, which 2 does not divide
    cut = (PARAMETERS - NORMS - VOCAB * HIDDEN) // 2
    assert two.memory.weights == (cut + NORMS + rows * HIDDEN) * 4
    assert two.memory.block_bytes == BLOCK // 2
    assert two.memory.budget == one.memory.budget // 2
    assert two.memory.workspace > PROCESS_BYTES["cpu"]
    assert two.engines[0].memory.weights == two.memory.weights and two.engines[0].memory.kv_cache == two.memory.cache


def test_kv_heads_that_are_fewer_than_the_ranks_are_not_cut_further(tmp_path: Path) -> None:
    four = planned(tmp_path, "parallelism.tensor=4")
    assert four.memory.block_bytes == BLOCK // 2


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (3, f"ranks need whole heads, and the model has {HEADS} query heads, 2 KV heads"),
        (5, "ranks split the intermediate sizes of MLPs, 48"),  # of two reasons the first that alone excludes it
        (8, f"ranks need whole heads, and the model has {HEADS} query heads, 2 KV heads"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused_with_those_that_do(tmp_path: Path, size: int, why: str) -> None:
    suggestion_text = str(refused(tmp_path, f"parallelism.tensor={size}").problems[0])
    assert f"parallelism.tensor: {size}: {why}; use auto, 1, 2 or 4" in suggestion_text


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    suggestion_text = str(refused(tmp_path, "parallelism.tensor=2", machine=GPU_HOST).problems[0])
    assert "each rank of each engine has its own GPU, and 1 are usable here; use auto or 1" in suggestion_text
    suggestion_text = str(refused(tmp_path, "parallelism={tensor: 4, data: 2}", machine=HOST).problems[0])
    assert "each rank of each engine has its own GPU, and 4 are usable here; use auto, 1 or 2" in suggestion_text


def test_each_engine_has_gpus_of_its_own_and_the_least_free_counts(tmp_path: Path) -> None:
    small = Gpu("NVIDIA H100", 80 * GIB, 40 * GIB, (9, 0))
    host = replace(HOST, gpus=(H100, H100, small, H100))
    found = planned(tmp_path, "parallelism={tensor: 2, data: 2}", machine=host)
    assert [engine.hardware.gpu for engine in found.engines] == [0, 2]
    assert found.memory.free == small.free and found.memory.budget == int(40 * GIB * 0.85)


def test_auto_is_one_on_a_cpu_and_where_one_gpu_holds_the_model(tmp_path: Path) -> None:
    found = planned(tmp_path, "parallelism.tensor=auto")
    assert found.engines[0].parallelism.tensor == 1 and "share its memory" in reason(found, "parallelism.tensor")[1]
    found = planned(tmp_path, "parallelism.tensor=auto", machine=HOST)
    assert reason(found, "parallelism.tensor") == (1, "the model fits on one GPU")


def test_auto_is_the_fewest_gpus_that_hold_the_model_and_divide_it(tmp_path: Path) -> None:
    facts, sets = wide(), ("model.max_context=30", "engine.scheduling.max_step_tokens=64")
    one = planned(tmp_path, "parallelism.tensor=1", *sets, machine=HOST, facts=facts).memory
    # for weights, workspace and a short context one GPU has slightly too little memory, two have enough
    tight = int((one.weights + one.workspace + 3 * one.block_bytes - 8_000) / 0.85)
    machine = replace(HOST, gpus=(Gpu("small", MIB, tight, (9, 0)),) * 3)
    found = planned(tmp_path, "parallelism.tensor=auto", *sets, machine=machine, facts=facts)
    resolved, why = reason(found, "parallelism.tensor")
    assert (
        resolved == 2
        and why == "fewer ranks have too little memory for weights, workspace and the cache of one request"
    )
    assert found.engines[0].parallelism.tensor == 2


def test_every_rank_gets_a_node_and_cpus_of_its_own(tmp_path: Path) -> None:
    cpus = tuple(range(16))
    here = Machine(16, "affinity", 20 * GIB, "MemAvailable", kernels=("avx2",), topology=Topology(cpus, TWO_NODES))
    found = planned(tmp_path, "parallelism.tensor=2", "hardware.reserved_cores=0", machine=here)
    (engine,) = found.engines
    assert engine.hardware.kernels == "avx2" and engine.hardware.threads == 8
    assert engine.hardware.cpus == cpus[:8] and engine.parallelism.rank_cpus == (Place(cpus[8:], cpus[8:]),)
    assert reason(found, "hardware.cpus")[1] == "one thread per core, each rank on one NUMA node"
    two = planned(tmp_path, "parallelism={tensor: 2, data: 2}", "hardware.reserved_cores=0", machine=here)
    taken = [
        place
        for engine in two.engines
        for place in (engine.hardware.cpus, *(rank.cpus for rank in engine.parallelism.rank_cpus))
    ]
    assert taken == [cpus[:4], cpus[4:8], cpus[8:12], cpus[12:]]


def test_threads_are_shared_out_among_ranks(tmp_path: Path) -> None:
    found = planned(tmp_path, "parallelism.tensor=2", machine=CPU)
    assert found.engines[0].hardware.threads == 3
    assert reason(found, "hardware.threads")[1] == "6 cores by affinity for 2 ranks"
