"""Requested concurrent capacity: resolved here by brute force, refused with the nearest values that fit."""

from pathlib import Path

import pytest

from appliance.config import exits
from appliance.planning.host import appliance_bytes
from appliance.planning.memory import Memory
from tests.appliance.planning.test_plan import (
    BLOCK,
    CONTEXT,
    DIM,
    HEADS,
    KV_HEADS,
    VOCAB,
    checkpoint,
    free,
    planned,
    reason,
    refused,
)

GIB, MIB = 2**30, 2**20


def roomy(tmp_path: Path, blocks: int, *sets: str) -> int:
    """Return the free bytes that leave exactly `blocks` blocks to an engine with the model's full context."""
    rest = planned(tmp_path, f"model.max_context={CONTEXT}", *sets).memory
    return rest.weights + rest.workspace + blocks * BLOCK + appliance_bytes(VOCAB)


def attention_bytes(context: int) -> int:
    """Memory of torch for the longest row: keys, values and two copies of the scores of 512 tokens."""
    return 4 * context * KV_HEADS * DIM * 4 + 2 * HEADS * min(512, context) * context * 4


SHARE = "hardware.memory_share=1"


@pytest.mark.parametrize("requests", [1, 2, 7, 32])
def test_the_context_is_the_longest_with_which_the_wanted_requests_fit(tmp_path: Path, requests: int) -> None:
    machine = free(roomy(tmp_path, 130, SHARE))
    found = planned(tmp_path, SHARE, f"hardware.capacity.requests={requests}", machine=machine)
    context, memory = found.engines[0].model.max_context, found.memory

    def fits(tokens: int) -> bool:
        shorter = (CONTEXT - tokens) * 256 * 4 + 256 * 4 * (63 - (tokens + 16) // 16)  # of the request table
        shorter += attention_bytes(CONTEXT) - attention_bytes(tokens)
        return (requests * -(-tokens // 16) + 1) * BLOCK <= 130 * BLOCK + shorter

    assert context == max(tokens for tokens in range(2, CONTEXT + 1) if fits(tokens))
    assert memory.whole_contexts >= requests and memory.total <= memory.budget
    if requests > 2:
        assert f"{requests} requests of it fit at the same time" in reason(found, "model.max_context")[1]


def test_with_a_length_of_its_own_the_context_stays_long(tmp_path: Path) -> None:
    machine = free(roomy(tmp_path, 130, SHARE))
    sets = (SHARE, "hardware.capacity={requests: 8, tokens: 256}")
    found = planned(tmp_path, *sets, machine=machine)
    assert found.engines[0].model.max_context == CONTEXT and found.memory.blocks >= 8 * 16 + 1
    fits = {one.tokens: one.requests for one in found.memory.concurrency}
    assert fits[CONTEXT] == (found.memory.blocks - 1) // 63


def test_capacity_that_does_not_fit_is_refused_with_the_nearest_values(tmp_path: Path) -> None:
    machine = free(roomy(tmp_path, 129, SHARE))
    sets = (SHARE, "hardware.capacity={requests: 9, tokens: 256}", "model.max_context=1000")
    error = refused(tmp_path, *sets, machine=machine)
    assert error.cause == exits.MEMORY and "hardware.capacity.requests: 9 requests of 256 tokens need" in str(error)
    assert "it holds 9 of 224 tokens or 8 of 256; lower hardware.capacity.requests or hardware.capacity.tokens" in str(
        error
    )
    for nearest in ("{requests: 9, tokens: 224}", "{requests: 8, tokens: 256}"):
        planned(tmp_path, SHARE, f"hardware.capacity={nearest}", "model.max_context=1000", machine=machine)
    for beyond in ("{requests: 9, tokens: 225}", "{requests: 8, tokens: 257}"):
        refused(tmp_path, SHARE, f"hardware.capacity={beyond}", "model.max_context=1000", machine=machine)


def test_kv_cache_memory_has_precedence(tmp_path: Path) -> None:
    given = f"hardware.kv_cache_memory={33 * BLOCK}"
    found = planned(tmp_path, given, "hardware.capacity.requests=4")
    assert (found.engines[0].model.max_context, found.memory.blocks, found.memory.whole_contexts) == (128, 33, 4)
    error = refused(tmp_path, given, "hardware.capacity={requests: 4, tokens: 129}")
    assert "it holds 4 of 128 tokens or 3 of 129" in str(error) and "or raise hardware.kv_cache_memory" in str(error)


def test_auto_on_a_cpu_exceeds_its_bound_for_the_requested_capacity(tmp_path: Path) -> None:
    from dataclasses import replace

    facts = replace(checkpoint(), model=replace(checkpoint().model, max_context=100 * CONTEXT))
    sets = ("hardware.capacity={requests: 64, tokens: 50000}",)
    found = planned(tmp_path, *sets, machine=free(40 * GIB), facts=facts)
    assert found.memory.cache == max((64 * 3125 + 1) * BLOCK, 4 * GIB)
    sets = ("hardware.capacity={requests: 64, tokens: 50000}", "engine.cache.block_tokens=32")
    assert planned(tmp_path, *sets, machine=free(40 * GIB), facts=facts).memory.cache >= 64 * 1563 * 2 * BLOCK


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            ["hardware.capacity.requests=257", "engine.scheduling.max_running=256"],
            "257: engine.scheduling.max_running lets 256 run at once; use at most 256",
        ),
        (
            ["hardware.capacity.requests=9", "engine.scheduling.max_running=4", "parallelism.data=2"],
            "9: engine.scheduling.max_running lets 4 run at once in each of 2 engines; use at most 8, or raise "
            "max_running to",
        ),
        (["hardware.capacity.tokens=1001"], "1001: the checkpoint supports 1000 tokens; use at most 1000, or auto"),
        (["hardware.capacity.tokens=9", "model.max_context=8"], "9: model.max_context allows 8 tokens; use at most 8"),
    ],
)
def test_contradicting_keys_are_reported_together(tmp_path: Path, sets: list[str], words: str) -> None:
    assert words in str(refused(tmp_path, *sets))


def test_auto_runs_as_many_requests_as_requested(tmp_path: Path) -> None:
    assert reason(planned(tmp_path), "engine.scheduling.max_running")[0] == 256
    found = planned(tmp_path, "hardware.capacity={requests: 514, tokens: 16}", "parallelism.data=2")
    assert reason(found, "engine.scheduling.max_running") == (257, "set by hardware.capacity.requests")


def test_requests_are_the_services_and_are_shared_among_engines(tmp_path: Path) -> None:
    sets = ("hardware.capacity={requests: 7, tokens: 320}", "parallelism.data=2")
    least = (4 * 20 + 1) * BLOCK
    assert planned(tmp_path, *sets, f"hardware.kv_cache_memory={least}").memory.blocks == 81
    refused(tmp_path, *sets, f"hardware.kv_cache_memory={least - 1}")


def test_a_gpus_host_must_hold_the_processes(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.appliance.planning.test_plan import GPU_KERNELS

    error = refused(tmp_path, machine=replace(GPU_KERNELS, memory_free=2 * GIB))
    assert error.cause == exits.MEMORY and "the host needs 2.2 GiB" in str(error)


def test_request_state_is_listed_by_kind_of_layer(tmp_path: Path) -> None:
    memory: Memory = planned(tmp_path, facts=checkpoint(window=32)).memory
    (state,) = memory.state
    assert (state.kind, state.layers, state.reach) == ("window 32", 3, 32)
    assert state.token_bytes == BLOCK // 16 and state.request_bytes == 35 * BLOCK
    (whole,) = planned(tmp_path).memory.state
    assert (whole.kind, whole.reach, whole.request_bytes) == ("full", None, 63 * BLOCK)
