"""Plans compared with engines built from them: the same bytes, part by part, never more than available."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan, plan
from engine.__main__ import differences
from engine.api.config import EngineConfig
from engine.api.messages import RankMemory, Ready
from engine.arguments import engine_config
from engine.lowering.footprint import PARTS
from engine.lowering.lower import lower
from engine.lowering.measures import buffer_widths
from engine.lowering.rewrites import compiled_ops
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.worker.build import build_worker
from engine.worker.ranks import Ranks
from kernels.cpu.library import best, usable
from tests.engine.configs import with_arguments
from tests.engine.forked_ranks import forked_ranks as forked_ranks  # a fixture
from tests.engine.layers.conftest import CASES, random_model
from tests.engine.quantized_writers import KINDS, write
from tests.tiers import thinned

GIB = 2**30
HOST = Machine(2, "affinity", 8 * GIB, "MemAvailable", no_gpu="no driver", kernels=usable())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a case, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("reality") / name
            random_model(name).save_pretrained(made[name])
        return made[name]

    return get


def planned(tmp_path: Path, checkpoint: Checkpoint, *sets: str, machine: Machine = HOST) -> Plan:
    path = tmp_path / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {checkpoint.path}}}}}\n")
    options = tuple(Option("--set", *one.split("=", 1)) for one in sets)
    return plan(load(Given(path, options, {})), checkpoint, machine)


def built(config: EngineConfig) -> tuple[dict[str, int], int]:
    """Return the bytes that the engine of this configuration holds, and how many of them are mapped from its file."""
    worker = build_worker(config, lambda phase, fraction: None)
    worker.close()
    return worker.memory_usage, worker.mapped


SMALL = ("engine.scheduling.max_running=5", "engine.scheduling.max_step_tokens=33", "hardware.threads=1")


def compare(tmp_path: Path, path: Path, *sets: str) -> None:
    made = planned(tmp_path, read_checkpoint(path), *SMALL, *sets)
    held, mapped = built(made.engines[0])
    assert made.engines[0].memory.ranks == (held,)
    assert made.memory.mapped == mapped
    assert sum(held[part] for part in PARTS if part in held) == made.memory.weights
    assert held["kv"] <= made.memory.cache < held["kv"] + made.memory.block_bytes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_an_engine_of_every_architecture_holds_what_was_planned(tmp_path: Path, folder: Callable, name: str) -> None:
    compare(tmp_path, folder(name), "model.max_context=16")
    compare(tmp_path, folder(name), "model.max_context=13", "hardware.kernels=torch", "engine.cache.block_tokens=3")


@pytest.mark.parametrize("kind", ["gptq-64-ordered", "awq-64", "packed-32-zeros", "packed-8-bits", "w8a8"])
def test_an_engine_of_every_format_too(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, KINDS[kind]).path
    compare(tmp_path, path, "model.max_context=64")
    compare(tmp_path, path, "model.max_context=17", "hardware.kernels=torch")


@pytest.mark.parametrize("sets", [(), ("quantization.weights=int8",), ("hardware.kernels=torch",)])
@pytest.mark.parametrize("name", thinned(["llama", "qwen2-moe", "olmo2"], kept=["qwen2-moe", "olmo2"]))
@pytest.mark.sampled(4)
def test_each_rank_of_an_engine_holds_what_was_planned_for_it(
    tmp_path: Path, folder: Callable, name: str, sets: tuple[str, ...]
) -> None:
    made = planned(tmp_path, read_checkpoint(folder(name)), *SMALL, *sets, "parallelism.tensor=2")
    config = with_arguments(made.engines[0], cpus=(), process_cpus=(), rank_cpus=())
    worker = build_worker(config, lambda phase, fraction: None, ranks=Ranks(config))
    worker.close()
    assert tuple(one.held for one in worker.memory) == config.memory.ranks and len(config.memory.ranks) == 2
    assert tuple(one.mapped for one in worker.memory) == tuple(one.mapped for one in made.memory.ranks)
    if config.hardware.kernels == "torch":  # the vocabulary, which 2 does not divide; packed shares are padded equally
        assert config.memory.ranks[0]["head"] < config.memory.ranks[1]["head"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-moe"])
def test_rounded_weights_and_pages_of_8_bits_too(tmp_path: Path, folder: Callable, name: str) -> None:
    for bits in ("int8", "int4"):
        compare(tmp_path, folder(name), f"quantization.weights={bits}", "quantization.kv_cache=int8")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen2-moe"])
@pytest.mark.sampled(16)
def test_at_the_last_byte_that_fits_an_engine_fits_and_below_it_none_is_started(
    tmp_path: Path, folder: Callable, name: str, seed: int
) -> None:
    """Only the plan sees the number for free memory; allocations are counted."""
    draw = random.Random(f"{name}{seed}")
    checkpoint = read_checkpoint(folder(name))
    sets = [
        f"model.max_context={draw.choice(['auto', 7, 16])}",
        f"engine.cache.block_tokens={draw.choice([1, 3, 16])}",
        f"engine.scheduling.max_running={draw.choice([3, 8])}",
        f"engine.scheduling.max_step_tokens={draw.choice([1, 9, 64])}",
        f"hardware.capacity.requests={draw.choice([1, 3])}",
        f"hardware.memory_share={draw.choice([0.5, 0.85, 1])}",
        f"hardware.kernels={draw.choice(['torch', best()])}",
        "hardware.threads=1",
    ]

    def accepted(free: int) -> Plan | None:
        try:
            return planned(tmp_path, checkpoint, *sets, machine=replace(HOST, memory_free=free))
        except Refused:
            return None

    low, high = 0, 4 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if accepted(middle) else (middle, high)
    least = accepted(high)
    assert least is not None and accepted(low) is None, sets
    for free in (high, high + draw.randrange(1, 100_000), 2 * high):
        made = accepted(free)
        assert made is not None, (sets, free)
        memory = made.memory
        held, _ = built(made.engines[0])  # refuses a pool that does not hold a request of max_context
        process = memory.workspace - memory.tables - memory.buffers - memory.self_test - memory.graphs
        assert sum(held.values()) + process <= memory.total <= memory.budget, sets
        assert memory.total + memory.host.total <= free, sets
        length = made.engines[0].model.max_context
        assert memory.whole_contexts >= made.manifest.hardware.capacity.requests, (sets, length)


def test_deviations_above_two_percent_are_reported() -> None:
    config = engine_config(model="m", kv_bytes=1, max_context=1)

    def told(*held: dict[str, int], **sets: object) -> list[str]:
        memory = tuple(RankMemory(one, planned={"mlp": 1000, "kv": 1000}) for one in held)
        return differences(with_arguments(config, **sets), Ready(1, 1, 1, 1, 1, 1, {}, 1, memory))

    assert told({"mlp": 1020, "kv": 980, "head": 5}) == told({"mlp": 500, "kv": 1000}) == []
    assert told({"mlp": 1021, "kv": 979}) == [
        "memory of mlp: 1,021 B used, 1,000 B planned (+2.1 %); please report it",
        "memory of kv: 979 B used, 1,000 B planned (-2.1 %); please report it",
    ]
    assert len(told({"mlp": 1021, "kv": 979}, kv_measured=True)) == 1
    assert told({"mlp": 1000, "kv": 1000}, {"mlp": 1021, "kv": 1000}, tensor=2) == [
        "memory of mlp of rank 1: 1,021 B used, 1,000 B planned (+2.1 %); please report it"
    ]


@pytest.mark.parametrize("name", CASES)
def test_buffers_of_a_step_are_as_wide_as_planned(folder: Callable, name: str) -> None:
    from tests.engine.layers.test_footprint import loaded

    checkpoint = read_checkpoint(folder(name))
    model = loaded(checkpoint, "base")
    assert model.compiled is not None
    assert model.compiled.buffers.widths == buffer_widths(compiled_ops(lower(checkpoint.model)))
