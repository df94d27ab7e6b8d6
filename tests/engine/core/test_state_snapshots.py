"""Snapshots of recurrent state: random workloads over the checking device, and the rules one by one."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from scheduler_simulation import WINDOWS, Load, make_layout, run, simulate

from engine.api.messages import Sampling, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepResult
from engine.core.recorder import Recorder
from engine.core.records import read_records
from engine.core.replay import replay
from engine.core.scheduler import Scheduler
from engine.kv import snapshots

CONFIG = SchedulerConfig(
    layout=make_layout((None,)), blocks=60, max_context=200, max_running=4, max_step_tokens=32, snapshots=8
)
RECURRENT = replace(CONFIG, layout=make_layout(()), blocks=1)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    monkeypatch.setattr(snapshots, "INTERVAL", 12)


def submit(id, prompt, max_tokens=1, **changes):
    return Submit(id, tuple(prompt), Sampling(), max_tokens, **changes)


def step(scheduler, token=1, failed=None):
    planned = scheduler.plan(0.0)
    sampled = tuple(token if row.sample else -1 for row in planned.plan.rows)
    scheduler.apply(StepResult(planned.plan.step, sampled, failed=failed or {}), 0.0)
    return planned.plan


def finish(scheduler):
    plans = []
    while scheduler.running or scheduler.waiting:
        plans.append(step(scheduler))
    return plans


def spans(plans):
    return [(row.first, row.first + row.count) for plan in plans for row in plan.rows]


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(5) for _ in range(length)]


@pytest.mark.parametrize("windows", [*WINDOWS.values(), ()], ids=[*WINDOWS, "no attention"])
def test_states_and_tokens_are_correct_under_load(windows):
    preemptions = cached = 0
    for seed in range(4):
        rng = random.Random(seed)
        load = Load(
            seed,
            windows,
            blocks=rng.choice((14, 25, 40)) * max(1, len(windows)) + 10,
            overlap=seed != 1,
            max_step_tokens=rng.choice((7, 16, 40)),
            max_running=rng.choice((4, 7)),
            policy=rng.choice(("fcfs", "priority", "fair")),
            snapshots=(0, 1, 3, 20)[seed],
        )
        counters = simulate(load).scheduler.counters
        preemptions += counters.preemptions
        cached += counters.cached_tokens
    assert cached, "no prefix was found"
    assert preemptions or windows != (None,)


def test_overlap_does_not_change_tokens():
    outcomes = [
        run(Load(11, (None,), blocks=24, abort=0.0, overlap=overlap, max_running=8, replies=(30,), snapshots=9))
        for overlap in (False, True)
    ]
    assert outcomes[0].streams == outcomes[1].streams
    assert all(outcome.scheduler.counters.preemptions for outcome in outcomes)


@pytest.mark.parametrize("config", [CONFIG, RECURRENT], ids=["hybrid", "recurrent"])
@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28), (33, 32)])
def test_same_prompt_hits_its_last_block_boundary(config, length, hit):
    scheduler = Scheduler(config)
    for id in "ab":
        scheduler.submit(submit(id, prompt_of(length)), 0.0)
        plans = finish(scheduler)
    assert spans(plans)[0][0] == hit
    assert spans(plans)[-1][1] == length
    assert [len(plan.restored) for plan in plans] == [int(hit > 0)] + [0] * (len(plans) - 1)
    assert scheduler.counters.cached_tokens == hit


def test_chunks_end_at_block_boundaries():
    scheduler = Scheduler(replace(CONFIG, max_step_tokens=11))
    scheduler.submit(submit("a", prompt_of(30)), 0.0)
    assert spans(finish(scheduler)) == [(0, 8), (8, 16), (16, 24), (24, 28), (28, 30)]


def test_state_is_saved_where_a_prompt_leaves_another():
    """Two prompts with a common beginning leave only keys and values of it; the third one also finds its state."""
    scheduler, common = Scheduler(CONFIG), prompt_of(9)
    for id, end in (("a", 0), ("b", 1), ("c", 2)):
        scheduler.submit(submit(id, [*common[:9], *(end,) * 9]), 0.0)
        plans = finish(scheduler)
        first = {"a": [(0, 16), (16, 18)], "b": [(0, 8), (8, 16), (16, 18)], "c": [(8, 16), (16, 18)]}[id]
        assert spans(plans) == first


def test_states_of_long_replies_are_saved():
    """A reply is continued: the next prompt has all of it."""
    scheduler = Scheduler(RECURRENT)
    scheduler.submit(submit("a", [0] * 5, max_tokens=40), 0.0)
    finish(scheduler)
    scheduler.submit(submit("b", [0] * 5 + [1] * 40), 0.0)
    assert spans(finish(scheduler))[0][0] == 40, "saved at 4, and every 12 tokens after it"


def test_a_state_is_not_found_in_the_plan_that_saves_it():
    """The copy to a snapshot follows the step, the copy from it would precede it."""
    scheduler = Scheduler(replace(CONFIG, max_step_tokens=64))
    for id in "ab":
        scheduler.submit(submit(id, prompt_of(18)), 0.0)
    first, second = step(scheduler), step(scheduler)
    assert [row.first for row in first.rows] == [0, 0] and not first.restored
    assert len(first.saved) == 2, "each saves its own state"
    scheduler.submit(submit("c", prompt_of(18)), 0.0)
    assert [row.first for row in step(scheduler).rows] == [16]
    assert not second.restored


def test_least_recently_used_snapshot_is_replaced():
    scheduler = Scheduler(replace(RECURRENT, snapshots=2))
    starts = []
    for number in (0, 1, 0, 2, 0, 1):
        scheduler.submit(submit(f"r{len(starts)}", [number] * 10), 0.0)
        starts.append(spans(finish(scheduler))[0][0])
    assert starts == [0, 0, 8, 0, 8, 0]


def test_preempted_request_resumes_from_its_longest_snapshot():
    scheduler = Scheduler(replace(CONFIG, blocks=17, max_step_tokens=64))
    for id in "ab":
        scheduler.submit(submit(id, prompt_of(18, seed=ord(id)), max_tokens=30), 0.0)
    plans = finish(scheduler)
    assert scheduler.counters.preemptions
    resumed = [row for plan in plans[1:] for row in plan.rows if row.slot in {new.slot for new in plan.new}]
    assert resumed and all(row.first >= 16 for row in resumed)
    again = [plan for plan in plans[1:] if plan.restored]
    assert len(again) == len(resumed)


def test_states_of_failed_requests_are_not_reused():
    scheduler = Scheduler(RECURRENT)
    scheduler.submit(submit("a", prompt_of(18), max_tokens=9), 0.0)
    step(scheduler)
    step(scheduler, failed={0: "the logits are not finite"})
    scheduler.submit(submit("b", prompt_of(18)), 0.0)
    assert spans(finish(scheduler))[0][0] == 0


def test_reset_and_disabled_prefix_caches_have_no_hits():
    for config, reset in ((CONFIG, True), (replace(CONFIG, prefix_cache=False), False), (CONFIG, False)):
        scheduler = Scheduler(config)
        scheduler.submit(submit("a", prompt_of(18)), 0.0)
        plans = finish(scheduler)
        if reset:
            scheduler.reset_prefix_cache()
        scheduler.submit(submit("b", prompt_of(18)), 0.0)
        hit = config.prefix_cache and not reset
        assert spans(finish(scheduler))[0][0] == (16 if hit else 0)
        assert any(plan.saved for plan in plans) == config.prefix_cache


def test_cached_keys_and_values_without_a_state_are_no_hit():
    scheduler = Scheduler(replace(CONFIG, snapshots=0))
    for id in "ab":
        scheduler.submit(submit(id, prompt_of(18)), 0.0)
        assert spans(finish(scheduler)) == [(0, 18)]


def test_recordings_of_recurrent_models_are_replayed(tmp_path: Path):
    file = tmp_path / "run.bin"

    class Recorded(Recorder):
        def __init__(self, config):
            super().__init__(config, str(file), 60_000)

        def apply(self, result, now):
            return super().apply(result, 2 * now)  # it flushes once per second

    outcome = run(Load(5, (None,), blocks=24, requests=60, snapshots=5, scheduler=Recorded))
    outcome.scheduler.on_idle()
    assert outcome.scheduler.counters.preemptions and file.with_name("run.bin.1").exists()
    result = replay(read_records(file))
    assert result.difference is None and result.steps > 50 and result.dropped
