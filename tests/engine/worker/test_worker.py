"""Tests of the worker alone on a tiny model: step plans and their results, and errors at startup."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.api.config import EngineConfig
from engine.api.errors import CheckpointError, ConfigError, OutOfMemory
from engine.api.messages import Sampling
from engine.arguments import engine_config
from engine.core.plan import NewRow, PendingMasks, Row, StepPlan
from engine.worker.build import build_worker
from engine.worker.warm import warm_steps
from engine.worker.worker import Worker
from kernels.jit import interpreted
from tests.engine.configs import with_arguments

VOCAB = 53
POISON = 50  # its embedding is NaN
GREEDY = Sampling(temperature=0.0, logprobs=0)


def silent(phase: str, fraction: float) -> None:
    """Ignore progress reports."""


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter if parameter.ndim == 1 else 0))
        made.model.embed_tokens.weight[POISON] = torch.nan
    return made


@pytest.fixture(scope="module")
def config(model: Any, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = tmp_path_factory.mktemp("worker") / "model"
    model.save_pretrained(path)
    return engine_config(
        model=str(path), kv_bytes=100_000, max_context=40, block_tokens=4, max_running=4, max_step_tokens=16
    )


@pytest.fixture(params=["torch", "triton"])
def worker(config: EngineConfig, request: pytest.FixtureRequest) -> Iterator[Worker]:
    """With torch's operations, and with the fused kernels of a GPU in Triton's interpreter."""
    if request.param == "triton" and not interpreted():
        pytest.skip("kernels are compiled here: tests/engine/worker/test_gpu.py has them")
    made = build_worker(with_arguments(config, kernels=request.param, graph_sizes=(1, 2)), silent)
    yield made
    made.close()


@pytest.fixture
def best(model: Any) -> Callable[[tuple[int, ...]], int]:
    """The token that transformers would go on with."""
    return lambda ids: int(model(torch.tensor([ids])).logits[0, -1].argmax())


def new(slot: int, ids: tuple[int, ...], sampling: Sampling = GREEDY) -> NewRow:
    return NewRow(slot, ids, len(ids), sampling, (), len(ids))


def test_two_steps_may_be_queued_before_the_first_token_is_known(worker, best):
    ids = (1, 2, 3)
    handles = [worker.start(StepPlan(1, (new(0, ids),), (), (Row(0, 0, 3, True, ((1, 2),)),)), {})]
    handles += [worker.start(StepPlan(i, (), (), (Row(0, 1 + i, 1, True, ((),)),)), {}) for i in (2, 3)]
    for number, handle in enumerate(handles, start=1):
        result = handle.result()
        assert result.step == number and result.sampled == (best(ids),)
        assert result.logprobs[0][0].token == result.sampled[0]
        ids += result.sampled


def test_rows_that_draw_nothing_give_minus_one(worker, best):
    rows = (Row(0, 0, 2, False, ((1,),)), Row(1, 0, 2, True, ((2,),)))
    result = worker.start(StepPlan(1, (new(0, (4, 5, 6)), new(1, (7, 8))), (), rows), {}).result()
    assert result.sampled == (-1, best((7, 8))) and set(result.logprobs) == {1}


def test_empty_step_runs(worker):
    assert worker.start(StepPlan(7, (), (0,), ()), {}).result().sampled == ()


@pytest.mark.parametrize("draws", [True, False])
def test_nonfinite_request_fails_without_effect_on_others(draws, worker, best):
    rows = (Row(0, 0, 2, True, ((1,),)), Row(1, 0, 3, draws, ((2,),)), Row(2, 0, 2, True, ((3,),)))
    plan = StepPlan(1, (new(0, (1, 2)), new(1, (3, POISON, 4)), new(2, (5, 6))), (), rows)
    result = worker.start(plan, {}).result()
    assert set(result.failed) == {1} and "not finite" in result.failed[1]
    assert (result.sampled[0], result.sampled[2]) == (best((1, 2)), best((5, 6)))
    heir = StepPlan(2, (new(1, (9, 8)),), (1,), (Row(1, 0, 2, True, ((2,),)),))
    assert worker.start(heir, {}).result().sampled == (best((9, 8)),)


def test_a_mask_holds_for_its_row_alone(worker, best):
    mask = np.zeros(2, np.uint32)
    mask[1] = 1 << (VOCAB - 1 - 32)
    rows = (Row(0, 0, 2, True, ((1,),)), Row(1, 0, 2, False, ((2,),)), Row(2, 0, 2, True, ((3,),)))
    plan = StepPlan(1, (new(0, (1, 2)), new(1, (3, 4)), new(2, (5, 6))), (), rows)
    second_sample = 1  # row 1 samples nothing
    assert worker.start(plan, {second_sample: mask}).result().sampled == (best((1, 2)), -1, VOCAB - 1)


def test_masks_that_come_after_the_start_hold_for_the_step_that_waits_for_them(worker, best):
    mask = np.zeros(2, np.uint32)
    mask[0] = 1 << 7
    late = PendingMasks()
    enters = StepPlan(
        1, (new(0, (1, 2)), new(1, (5, 6))), (), (Row(0, 0, 2, True, ((1,),)), Row(1, 0, 2, True, ((2,),)))
    )
    goes_on = StepPlan(2, (), (), (Row(0, 2, 1, True, ((),)), Row(1, 2, 1, True, ((),))))
    first, second = worker.start(enters, {}), worker.start(goes_on, late)
    drawn = first.result().sampled
    assert drawn == (best((1, 2)), best((5, 6))), "the step before does not wait"
    late.set_result({1: mask})
    assert second.result().sampled == (best((1, 2, drawn[0])), 7)


def test_tokens_of_a_step_are_where_the_next_one_reads_them(worker, best):
    """Remove one request, and run decode steps that match a captured size and steps that do not."""
    known = {0: (1, 2, 3), 1: (4, 5), 2: (6,)}
    first = tuple(Row(slot, 0, len(ids), True, ((2 * slot + 1,),)) for slot, ids in known.items())
    handle = worker.start(StepPlan(1, tuple(new(slot, ids) for slot, ids in known.items()), (), first), {})
    for step in range(2, 5):
        expected = [best(known[slot]) for slot in known]
        result = handle.result()
        assert list(result.sampled) == expected
        known = {slot: (*ids, token) for (slot, ids), token in zip(known.items(), expected, strict=True)}
        dropped = (1,) if step == 3 else ()
        known = {slot: ids for slot, ids in known.items() if slot not in dropped}
        rows = tuple(
            Row(slot, len(ids) - 1, 1, True, ((2 * slot + 2,) if len(ids) == 5 else (),)) for slot, ids in known.items()
        )
        handle = worker.start(StepPlan(step, (), dropped, rows), {})


def test_every_warming_step_runs_and_leaves_nothing(worker, config, best):
    for plan in warm_steps(worker.layout, worker.model, config, compiling=True):
        worker.start(plan, {}).result()
    row = Row(0, 0, 3, True, ((1,),))
    assert worker.start(StepPlan(1, (new(0, (5, 6, 7)),), (), (row,)), {}).result().sampled == (best((5, 6, 7)),)


def test_a_prompt_in_pieces_draws_after_its_last(worker, best):
    ids = (7, 8, 9, 10, 11)
    pieces = [(0, 2, False, ((1,),)), (2, 2, False, ((),)), (4, 1, True, ((2,),))]
    results = []
    for step, (first, count, sample, blocks) in enumerate(pieces, 1):
        entering = (new(0, ids),) if step == 1 else ()
        results.append(worker.start(StepPlan(step, entering, (), (Row(0, first, count, sample, blocks),)), {}).result())
    assert [result.sampled for result in results] == [(-1,), (-1,), (best(ids),)]


def test_reported_sizes_equal_the_allocations(worker, config, model):
    assert worker.blocks == config.memory.kv_cache // worker.layout.block_bytes
    assert worker.kv_bytes == worker.blocks * worker.layout.block_bytes <= config.memory.kv_cache
    # on a CPU the embedding is memory-mapped from the checkpoint file
    in_the_file = model.model.embed_tokens.weight.nbytes
    assert worker.weight_bytes == sum(parameter.nbytes for parameter in model.parameters()) - in_the_file
    assert set(worker.seconds) - {"capturing"} == {"reading", "loading", "allocating", "warming"}


def test_progress_names_phases_in_order_and_ends_loading_at_one(config):
    seen: list[tuple[str, float]] = []
    build_worker(config, lambda phase, fraction: seen.append((phase, fraction))).close()
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["reading", "loading", "allocating", "warming"]
    fractions = [fraction for phase, fraction in seen if phase == "loading"]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("kv_bytes", [1, 3_000])
def test_a_cache_too_small_for_one_request_states_the_size_it_takes(kv_bytes, config):
    with pytest.raises(OutOfMemory, match=r"hardware\.kv_cache_memory.*model\.max_context") as caught:
        build_worker(with_arguments(config, kv_bytes=kv_bytes), silent)
    needed = int(str(caught.value).split("tokens need ")[1].split(" bytes")[0].replace(",", ""))
    build_worker(with_arguments(config, kv_bytes=needed), silent).close()
    with pytest.raises(OutOfMemory):
        build_worker(with_arguments(config, kv_bytes=needed - 1), silent)


def test_huge_cache_is_out_of_memory(config):
    with pytest.raises(OutOfMemory, match="kv_cache_memory"):
        build_worker(with_arguments(config, kv_bytes=1 << 50), silent)


def test_missing_checkpoint_and_missing_device_have_different_errors(config, tmp_path):
    with pytest.raises(CheckpointError):
        build_worker(with_arguments(config, model=str(tmp_path / "none")), silent)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"hardware\.device"):
            build_worker(with_arguments(config, device="cuda"), silent)
