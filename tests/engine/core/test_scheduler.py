"""Random workloads over the checking device, and the scheduler's rules one by one. Failures name their seed."""

import random
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from scheduler_simulation import WINDOWS, Load, expected, make_layout, next_token, run, simulate

from engine.api.errors import NOTHING_LEFT, RequestError
from engine.api.events import Admitted, Blocked, Ended, Preempted, Queued
from engine.api.messages import Grammar, Logprob, Sampling, Submit
from engine.core.config import EncoderLimits, SchedulerConfig
from engine.core.plan import StepResult
from engine.core.scheduler import Scheduler
from engine.kv.cache import Tables
from engine.models.parts import DynamicScaling, LongScaling, Rope


def scheduler(**changes):
    settings = {"layout": make_layout((None,)), "blocks": 41, "max_context": 100, "max_step_tokens": 16, **changes}
    return Scheduler(SchedulerConfig(**settings))


def telling(**changes):
    """Return a scheduler and the list of its events: (id, time, event)."""
    told = []
    made = scheduler(**changes)
    return Scheduler(made.config, lambda *happened: told.append(happened)), told


def submit(id, prompt, max_tokens=4, **changes):
    return Submit(id, tuple(prompt), changes.pop("sampling", Sampling()), max_tokens, **changes)


def step(scheduler, token=1, now=0.0, **result):
    """Plans one step and settles it at once."""
    planned = scheduler.plan(now)
    sampled = tuple(token if row.sample else -1 for row in planned.plan.rows)
    return planned, scheduler.apply(StepResult(planned.plan.step, sampled, **result), now)


def finish(scheduler, token=1):
    """Runs to the end: ids by request."""
    streams = {}
    while scheduler.running or scheduler.waiting:
        _, settled = step(scheduler, token)
        for delta in settled.deltas:
            streams[delta.id] = streams.get(delta.id, ()) + delta.ids
    return streams


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_outputs_and_cache_reads_are_correct_under_load(windows, policy):
    preemptions = cached = 0
    for seed in range(3):
        rng = random.Random(seed)
        load = Load(
            seed,
            windows,
            blocks=rng.choice((14, 25, 40)) * len(windows) + 10,
            policy=policy,
            overlap=seed != 1,
            max_step_tokens=rng.choice((7, 16, 40)),
            max_running=rng.choice((1, 4, 7)),
        )
        counters = simulate(load).scheduler.counters
        preemptions += counters.preemptions
        cached += counters.cached_tokens
    assert cached, "no prefix was ever found: the workload shows nothing"


def test_overlap_does_not_change_tokens():
    outcomes = [
        run(Load(11, (None, 9), blocks=44, abort=0.0, overlap=overlap, max_running=8, replies=(30,)))
        for overlap in (False, True)
    ]
    assert outcomes[0].streams == outcomes[1].streams
    assert outcomes[0].ends == outcomes[1].ends
    assert all(outcome.scheduler.counters.preemptions for outcome in outcomes)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_encoder_input_is_read_in_the_first_step_after_each_preemption(policy, overlap):
    preemptions = refused = 0
    for seed, budget in product(range(4), (16, 40)):
        sources = EncoderLimits(longest=10, reply=24)
        outcome = simulate(
            Load(seed, (None,), blocks=15, policy=policy, overlap=overlap, sources=sources, max_step_tokens=budget,
                 max_running=6, max_context=30, replies=(7, 40), requests=20)
        )  # fmt: skip
        preemptions += outcome.scheduler.counters.preemptions
        refused += outcome.refused
        assert not outcome.scheduler.counters.cached_tokens, "what was made of a source was found for another"
    assert preemptions and refused


def source_request(source, prompt=(1, 2, 3, 4), tokens=5, **more):
    return Submit("a", tuple(prompt), Sampling(**more), tokens, source=source)


@pytest.mark.parametrize(
    ("submit", "param", "says"),
    [
        (source_request(0), "prompt", "has 0 tokens; it must have 1 to 3"),
        (source_request(4, (1, 2, 3, 4, 5)), "prompt", "has 4 tokens; it must have 1 to 3"),
        (
            source_request(3, (1, 2, 3)),
            "decoder_prompt",
            "decoder prompt has 0 tokens; it must have 1 to 3",
        ),
        (source_request(1, (1, 2, 3, 4, 5)), "decoder_prompt", "decoder prompt has 4 tokens"),
        (source_request(2, prompt_logprobs=1), "prompt_logprobs", "not available for encoder-decoder"),
    ],
)
def test_invalid_encoder_and_decoder_prompts_are_rejected(submit, param, says):
    config = SchedulerConfig(
        layout=make_layout((None,)), blocks=20, max_context=12, sources=EncoderLimits(longest=3, reply=4),
        max_step_tokens=8, max_running=4,
    )  # fmt: skip
    with pytest.raises(RequestError, match=says) as refused:
        Scheduler(config).submit(submit, 0.0)
    assert refused.value.param == param


def test_encoder_input_must_fit_next_to_all_running_requests():
    config = SchedulerConfig(
        layout=make_layout((None,)), blocks=20, max_context=12, sources=EncoderLimits(longest=9, reply=4),
        max_step_tokens=8, max_running=4,
    )  # fmt: skip
    with pytest.raises(RequestError, match="has 5 tokens; it must have 1 to 4"):
        Scheduler(config).submit(source_request(5, (1, 2, 3, 4, 5, 6)), 0.0)
    Scheduler(config).submit(source_request(4, (1, 2, 3, 4, 5)), 0.0)


def test_model_without_encoder_rejects_encoder_input():
    config = SchedulerConfig(layout=make_layout((None,)), blocks=20, max_context=12)
    with pytest.raises(RequestError, match="no encoder") as refused:
        Scheduler(config).submit(source_request(2), 0.0)
    assert refused.value.param == "source"


def test_small_cache_gives_the_same_outputs_as_a_large_one():
    load = Load(5, (None,), requests=32, max_running=32, max_step_tokens=64, abort=0.0, same_prompts=32, replies=(30,))
    small = simulate(replace(load, blocks=26))
    large = simulate(replace(load, blocks=2000))
    assert small.scheduler.counters.preemptions > 0
    assert large.scheduler.counters.preemptions == 0
    assert small.streams == large.streams


def test_preempted_request_keeps_its_tokens():
    s = scheduler(blocks=11, max_step_tokens=40)  # ten blocks of four
    s.submit(submit("a", [1] * 15, 20), 0.0)
    s.submit(submit("b", [2] * 15, 20), 0.0)
    resumed = []
    seen = {}
    while s.running or s.waiting:
        planned, _ = step(s)
        for new in planned.plan.new:
            resumed += [new] * (new.ids[0] in seen)
            seen[new.ids[0]] = True
    assert s.counters.preemptions == len(resumed) == 1
    assert resumed[0].ids == (2,) * 15 + (1,) * (len(resumed[0].ids) - 15)
    assert len(resumed[0].ids) > 15
    assert resumed[0].prompt_tokens == 15


def test_last_or_lowest_priority_request_is_preempted():
    for policy, victim in (("fcfs", "b"), ("priority", "a")):
        s = scheduler(blocks=11, max_step_tokens=40, policy=policy)
        s.submit(submit("a", [1] * 15, 20, priority=9), 0.0)
        s.submit(submit("b", [2] * 15, 20, priority=1), 0.0)
        deltas = {}
        while s.running or s.waiting:
            for delta in step(s)[1].deltas:
                deltas[delta.id] = delta
        assert {id for id, delta in deltas.items() if delta.timing.preemptions} == {victim}


@pytest.mark.parametrize("policy, first", [("fcfs", ["a", "b", "c"]), ("priority", ["b", "c", "a"])])
def test_waiting_requests_are_admitted_in_the_order_of_the_policy(policy, first):
    s = scheduler(policy=policy, max_running=1)
    for id, priority in (("a", 5), ("b", -1), ("c", -1)):
        s.submit(submit(id, [1], 1, priority=priority), 0.0)
    ended = []
    while s.running or s.waiting:
        ended += [delta.id for delta in step(s)[1].deltas]
    assert ended == first


def test_decode_rows_come_before_prompt_chunks():
    s = scheduler(max_step_tokens=7)
    s.submit(submit("a", [1, 2, 3], 9), 0.0)
    step(s)
    s.submit(submit("b", range(11)), 0.0)
    counts = []
    for _ in range(3):
        planned, _ = step(s)
        counts.append([(row.slot, row.count, row.sample) for row in planned.plan.rows])
    assert counts == [
        [(0, 1, True), (1, 6, False)],
        [(0, 1, True), (1, 5, True)],
        [(0, 1, True), (1, 1, True)],
    ]


def test_running_requests_are_limited_by_step_tokens():
    s = scheduler(max_step_tokens=3, max_running=9)
    for id in range(5):
        s.submit(submit(str(id), [id], 5), 0.0)
    for _ in range(4):
        step(s)
    assert (s.running, s.waiting) == (3, 2)


def test_blocks_of_an_aborted_request_are_free_in_the_next_plan():
    s = scheduler(blocks=6, max_step_tokens=40)
    s.submit(submit("a", [1] * 17, 2), 0.0)
    s.submit(submit("b", [2] * 17, 2), 0.0)
    first = s.plan(0.0)
    assert [row.slot for row in first.plan.rows] == [0]
    assert s.end("a", "abort").finish == "abort"
    second = s.plan(0.0)
    assert second.plan.dropped == (0,)
    assert [new.ids[0] for new in second.plan.new] == [2]
    assert s.end("a", "abort") is None, "an unknown id is no error"
    assert s.apply(StepResult(1, (3,)), 0.0).deltas == [], "what was sampled for an aborted request is dropped"


def test_a_stop_in_a_step_drops_the_row_that_was_planned_ahead():
    s = scheduler()
    s.submit(submit("a", [1, 2], 9, eos_token_ids=(4,), stop_token_ids=(3,)), 0.0)
    for _ in range(2):
        s.plan(0.0)
    (delta,) = s.apply(StepResult(1, (3,)), 1.0).deltas
    assert (delta.ids, delta.finish, delta.stop_reason) == ((3,), "stop", 3)
    assert s.plan(1.0) is None
    assert s.apply(StepResult(2, (1,)), 1.0).deltas == []
    assert s.cache.pool.used == 0


@pytest.mark.parametrize("planned_ahead", [1, 2])
def test_no_more_tokens_are_planned_than_max_tokens_or_the_context_allow(planned_ahead):
    for max_tokens, max_context, length in ((3, 100, 3), (50, 9, 4)):
        s = scheduler(max_context=max_context)
        s.submit(submit("a", [1] * 5, max_tokens), 0.0)
        in_flight, ids = [], ()
        while s.running or s.waiting:
            planned = s.plan(0.0)
            if planned is not None:
                in_flight.append(planned)
            if planned is None or len(in_flight) == planned_ahead:
                (delta,) = s.apply(StepResult(in_flight.pop(0).plan.step, (1,)), 0.0).deltas
                ids += delta.ids
        assert len(ids) == length and delta.finish == "length" and not in_flight


def test_end_tokens_count_only_after_min_tokens_and_not_at_all_when_ignored():
    for changes, length, finish_word in (
        ({}, 1, "stop"),
        ({"sampling": Sampling(min_tokens=2)}, 3, "stop"),
        ({"ignore_eos": True}, 5, "length"),
    ):
        s = scheduler()
        s.submit(submit("a", [2], 5, eos_token_ids=(1,), **changes), 0.0)
        ids = []
        while s.running or s.waiting:
            (delta,) = step(s)[1].deltas
            ids += delta.ids
        assert (len(ids), delta.finish, delta.stop_reason) == (length, finish_word, None)


@pytest.mark.parametrize("emitted, finish_word", [((7, 7, 7, 7), "length"), ((7, 4), "stop")])
def test_a_resumed_request_that_had_all_its_tokens_ends_at_once(emitted, finish_word):
    s = scheduler()
    delta = s.submit(submit("a", [1], 4, emitted=emitted, eos_token_ids=(4,)), 0.0)
    assert (delta.ids, delta.finish) == ((), finish_word)
    assert s.plan(0.0) is None


def test_a_request_that_can_never_be_served_is_refused_with_what_to_change():
    s = scheduler(blocks=11, vocab_size=50)
    s.submit(submit("a", [1]), 0.0)
    for wrong, param, words in (
        (submit("b", []), "prompt", "no tokens"),
        (submit("b", [1] * 100), "prompt", "max_context=100"),
        (submit("b", [1] * 37, 4), "max_tokens", "11 KV blocks"),
        (submit("a", [1]), "id", "in use"),
        (submit("b", [1, 50]), "prompt", "0 to 49"),
        (submit("b", [1, -1]), "prompt", "-1"),
        (submit("b", [1], sampling=Sampling(logit_bias={99: 1.0})), "logit_bias", "99"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            s.submit(wrong, 0.0)
        assert caught.value.param == param
    s.submit(submit("b", [1] * 36, 4), 0.0)
    assert finish(s)["b"] == (1,) * 4


def test_a_prompt_without_a_reply_is_scored_and_ends():
    for length in (1, 3, 4, 5, 17):
        s = scheduler(max_step_tokens=5)
        s.submit(submit("a", [1] * length, 0, sampling=Sampling(prompt_logprobs=0)), 0.0)
        while s.running or s.waiting:
            planned = s.plan(0.0)
            (row,) = planned.plan.rows
            assert not row.sample
            told = range(row.first + 1, min(row.first + row.count, length - 1) + 1)
            entries = {0: tuple(Logprob(position, -1.0, 1) for position in told)}
            settled = s.apply(StepResult(planned.plan.step, (-1,), prompt_logprobs=entries), 0.0)
        (delta,) = settled.deltas
        assert (delta.ids, delta.finish) == ((), "length")
        assert [None if p is None else p.token for p in delta.prompt_logprobs] == [None, *range(1, length)]


def test_prompt_logprobs_skip_the_cache_and_come_once():
    s = scheduler()
    s.submit(submit("warm", [1] * 9), 0.0)
    finish(s)
    s.submit(submit("a", [1] * 9, 2, sampling=Sampling(prompt_logprobs=1)), 0.0)
    planned = s.plan(0.0)
    assert planned.plan.rows[0].first == 0
    entries = {0: tuple(Logprob(p, -1.0, 1) for p in range(1, 9))}
    (first,) = s.apply(StepResult(planned.plan.step, (1,), prompt_logprobs=entries), 0.0).deltas
    assert len(first.prompt_logprobs) == 9
    (last,) = step(s)[1].deltas
    assert last.prompt_logprobs is None


@pytest.mark.parametrize("length, hit", [(1, 0), (3, 0), (4, 3), (5, 4), (8, 7), (9, 8), (11, 8)])
def test_a_fully_cached_prompt_computes_its_last_token_alone(length, hit):
    s = scheduler()
    s.submit(submit("a", range(length), 1), 0.0)
    finish(s)
    before = msgspec.structs.asdict(s.stats())
    s.submit(submit("b", range(length), 1), 0.0)
    planned, settled = step(s)
    after = msgspec.structs.asdict(s.stats())
    assert planned.plan.rows[0].first == hit == settled.deltas[0].timing.cached_tokens
    assert after["cached_tokens"] - before["cached_tokens"] == hit
    whole = length % 4 == 0
    assert after["recomputed_tokens"] - before["recomputed_tokens"] == (1 if whole else 0)
    assert after["prefix_queries"] - before["prefix_queries"] == length
    assert after["prompt_tokens"] == 2 * length


def test_a_fully_cached_prompt_whose_last_block_is_in_use_computes_that_block():
    s = scheduler()
    s.submit(submit("a", range(8), 9), 0.0)
    step(s)
    s.submit(submit("b", range(8), 1), 0.0)
    planned, _ = step(s)
    assert [row.first for row in planned.plan.rows] == [8, 4]
    assert s.stats().recomputed_tokens == 4


def timings(scheduler):
    """Return the timing from the last delta of each request."""
    found = {}
    while scheduler.running or scheduler.waiting:
        for delta in step(scheduler)[1].deltas:
            found[delta.id] = delta.timing or found.get(delta.id)
    return found


def test_tokens_that_are_written_to_the_cache_are_those_that_it_had_not():
    """Against a set of all beginnings that were ever computed, in whole blocks."""
    rng = random.Random(7)
    s, there = scheduler(blocks=2001), set()
    for number in range(60):
        prompt = tuple(rng.choice((3, 5)) for _ in range(rng.randint(1, 21)))
        reply = rng.randint(0, 9)
        s.submit(submit("a", prompt, reply, eos_token_ids=()), 0.0)
        timing = timings(s)["a"]
        beginnings = {prompt[:end] for end in range(4, len(prompt) + 1, 4)}
        assert timing.written_tokens == 4 * len(beginnings - there), number
        assert timing.cached_tokens + timing.written_tokens <= len(prompt)
        whole = (*prompt, *[1] * reply)[: len(prompt) + max(0, reply - 1)]
        there |= {whole[:end] for end in range(4, len(whole) + 1, 4)}
    assert len(there) > 60


def test_each_token_is_written_by_one_request_however_often_it_is_preempted():
    s = scheduler(blocks=11, max_step_tokens=40)  # ten blocks of four
    s.submit(submit("a", [1] * 15, 20), 0.0)
    s.submit(submit("b", [2] * 15, 20), 0.0)
    found = timings(s)
    assert s.counters.preemptions == 1
    assert [found[id].written_tokens for id in "ab"] == [12, 12]


def test_a_prompt_that_is_preempted_half_way_and_forgotten_is_written_once():
    cache = scheduler().cache
    ids, tables = list(range(20)), Tables(b"", 1, 5)
    for end in (8, 20):  # tokens that it gets to
        cache.start(tables, cache.lookup(tables, ids))
        cache.grow(tables, ids, 0, end)
        cache.publish(tables, ids, end)
        cache.end(tables)
        cache.pool.forget_all()
    assert tables.written == 20


def test_a_prompt_that_is_read_again_for_its_logprobs_is_not_written_again():
    s = scheduler()
    s.submit(submit("warm", [1] * 9), 0.0)
    finish(s)
    s.submit(submit("a", [1] * 9, 0, sampling=Sampling(prompt_logprobs=0)), 0.0)
    planned = s.plan(0.0)
    entries = {0: tuple(Logprob(position, -1.0, 1) for position in range(1, 9))}
    (delta,) = s.apply(StepResult(planned.plan.step, (-1,), prompt_logprobs=entries), 0.0).deltas
    assert (delta.timing.cached_tokens, delta.timing.written_tokens) == (0, 0)


def test_tokens_of_a_reply_that_goes_on_do_not_count_as_its_prompt():
    s = scheduler()
    s.submit(submit("a", range(6), 12, emitted=tuple(range(9))), 0.0)
    assert timings(s)["a"].written_tokens == 4


def test_concurrent_requests_write_shared_blocks_once():
    s = scheduler(max_step_tokens=64)
    for id in "abc":
        s.submit(submit(id, range(10), 2), 0.0)
    assert sum(timing.written_tokens for timing in timings(s).values()) == 8


@pytest.mark.parametrize("changes", [{"prefix_cache": False}, {"layout": make_layout(())}])
def test_no_tokens_are_counted_without_a_prefix_cache(changes):
    s = scheduler(**changes)
    s.submit(submit("a", range(10), 2), 0.0)
    assert timings(s)["a"].written_tokens == 0


def test_a_sequence_that_is_computed_anew_has_written_its_prompt_once():
    rope = Rope(dim=2, theta=1e4, scaling=LongScaling(short=(1.0,), long=(2.0,), original=8))
    s = scheduler(ropes=(rope,))
    s.submit(submit("a", range(6), 6), 0.0)
    assert timings(s)["a"].written_tokens == 4


def test_the_same_salt_hits_and_another_or_none_does_not():
    s = scheduler()
    s.submit(submit("a", range(9), 1, salt="x"), 0.0)
    finish(s)
    for id, salt, hit in (("b", "x", 8), ("c", "y", 0), ("d", "", 0)):
        s.submit(submit(id, range(9), 1, salt=salt), 0.0)
        assert step(s)[1].deltas[0].timing.cached_tokens == hit


def test_failed_row_ends_only_its_request_and_leaves_the_cache():
    s = scheduler()
    s.submit(submit("a", range(9)), 0.0)
    s.submit(submit("b", range(20, 25)), 0.0)
    _, settled = step(s, failed={0: "logits are not finite"})
    (failed,) = settled.failed
    assert (failed.id, failed.code, failed.message) == ("a", "step", "logits are not finite")
    assert {delta.id: delta.finish for delta in settled.deltas} == {"a": "error", "b": None}
    s.submit(submit("c", range(9)), 0.0)
    planned, _ = step(s)
    assert planned.plan.rows[-1].first == 0
    assert finish(s).keys() == {"b", "c"}


def test_contradictory_sampling_options_fail_the_request():
    s = scheduler()
    s.submit(submit("a", range(9)), 0.0)
    _, settled = step(s, failed={0: NOTHING_LEFT})
    assert [(failed.code, failed.message) for failed in settled.failed] == [("request", NOTHING_LEFT)]


def test_a_constrained_row_is_planned_like_any_other_and_named():
    s = scheduler()
    s.submit(submit("a", [1], 3, grammar=Grammar("regex", "x*")), 0.0)
    s.submit(submit("b", [1], 3), 0.0)
    first, second = s.plan(0.0), s.plan(0.0)
    for planned in (first, second):
        assert [q.id for q in planned.sequences] == ["a", "b"] and planned.constrained == [0]
    assert first.sequences[0].pending == 2
    s.apply(StepResult(1, (1, 1)), 0.0)
    assert second.sequences[0].pending == 1, "the token that its mask follows from is known"


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_sequence_that_grows_past_the_original_length_is_computed_anew(ahead):
    rope = Rope(dim=2, theta=1e4, scaling=LongScaling(short=(1.0,), long=(2.0,), original=8))
    s = scheduler(ropes=(rope,))
    s.submit(submit("a", range(6), 6), 0.0)
    in_flight, fresh = [], []
    while s.running or s.waiting:
        planned = s.plan(0.0)
        if planned is not None:
            in_flight.append(planned)
            fresh += [
                (len(new.ids), new.rope_length, row.first) for new in planned.plan.new for row in planned.plan.rows
            ]
        if planned is None or len(in_flight) == ahead:
            s.apply(StepResult(in_flight.pop(0).plan.step, (1,)), 0.0)
    assert fresh == [(6, 6, 0), (9, 9, 0)], "blocks of the other rotation are of no use"
    assert s.stats().preemptions == 0


def test_rotations_that_depend_on_the_prompt_share_no_blocks():
    rope = Rope(dim=2, theta=1e4, scaling=DynamicScaling(factor=2.0, original=8))
    s = scheduler(ropes=(rope,))
    for id, length, hit in (("a", 8, 0), ("b", 7, 4), ("c", 13, 0), ("d", 14, 0), ("e", 13, 12)):
        s.submit(submit(id, range(length), 1), 0.0)
        assert step(s)[1].deltas[0].timing.cached_tokens == hit, id


def test_timings_are_ordered_and_match_the_events():
    s = scheduler(max_step_tokens=2)
    s.submit(submit("a", [1, 2, 3], 2), 1.0)
    deltas = [delta for now in (2.0, 3.0, 4.0) for delta in step(s, now=now)[1].deltas]
    timing = deltas[-1].timing
    assert (timing.arrived, timing.scheduled, timing.first_token, timing.last_token) == (1.0, 2.0, 3.0, 4.0)
    assert deltas[0].timing is not None, "the first delta has the time to it"


def test_cache_reset_does_not_affect_running_requests():
    s = scheduler()
    s.submit(submit("a", range(9), 6), 0.0)
    step(s)
    s.reset_prefix_cache()
    s.submit(submit("b", range(9), 2), 0.0)
    planned, _ = step(s)
    assert planned.plan.rows[-1].first == 0
    assert {id: len(ids) for id, ids in finish(s).items()} == {"a": 4, "b": 1}
    assert s.cache.pool.free == 40


def test_simulation_predicts_the_first_token():
    request = submit("a", [1, 2, 3], 1)
    assert expected(request, 100) == ([next_token([1, 2, 3])], "length", None)


# -- events ------------------------------------------------------------------------------------------------------------


def test_admission_event_reports_cached_tokens():
    told_to, told = telling()
    told_to.submit(submit("a", range(9)), 1.0)
    step(told_to, now=2.0)
    finish(told_to)
    told_to.submit(submit("b", range(9)), 3.0)
    step(told_to, now=4.0)
    assert told[:2] == [("a", 1.0, Queued(9, 0, 0)), ("a", 2.0, Admitted(1, 9, 0))]
    assert told[2][0] == "a" and told[2][2] == Ended("length", 4)
    assert told[3:] == [("b", 3.0, Queued(9, 0, 0)), ("b", 4.0, Admitted(5, 9, 8))]


def test_blocked_event_reports_missing_blocks_and_holders_once():
    told_to, told = telling(blocks=9, prefix_cache=False)  # of 4 tokens, one of them the null block
    for number, (id, length) in enumerate((("big", 15), ("small", 3), ("next", 11), ("last", 3))):
        told_to.submit(submit(id, range(length), 9), float(number))
    for number in range(3):
        step(told_to, now=10.0 + number)
    blocked = [happened for happened in told if isinstance(happened[2], Blocked)]
    assert blocked == [("next", 11.0, Blocked("blocks", 3, 1, (("big", 4), ("small", 1))))]
    assert [happened[2].ahead for happened in told if isinstance(happened[2], Queued)] == [0, 1, 2, 3]
    assert str(blocked[0][2]) == (
        "first in the queue: KV cache full, 3 blocks needed and 1 free; the largest users are big (4), small (1)"
    )


def test_blocked_event_names_the_limiting_key():
    told_to, told = telling(max_running=2)
    for id in "abc":
        told_to.submit(submit(id, (1, 2)), 0.0)
    step(told_to, now=1.0)
    step(told_to, now=2.0)
    assert [happened for happened in told if isinstance(happened[2], Blocked)] == [("c", 1.0, Blocked("places", 2, 0))]
    assert "all 2 places of the batch are taken (engine.scheduling.max_running)" in str(told[-1][2])
    finish(told_to)
    assert [happened[2].step for happened in told if isinstance(happened[2], Admitted)] == [1, 1, 5]


def test_preemption_event_names_the_cause():
    told_to, told = telling(blocks=9, prefix_cache=False)
    told_to.submit(submit("first", range(13), 16), 0.0)
    told_to.submit(submit("second", range(6), 16), 0.0)
    assert {id: len(ids) for id, ids in finish(told_to).items()} == {"first": 16, "second": 16}
    preempted = next(happened for happened in told if isinstance(happened[2], Preempted))
    assert preempted[0] == "second" and preempted[2].by == "first"
    after = told[told.index(preempted) + 1]
    assert after[0] == "second" and after[2].lacks == "blocks" and after[2].holders[0][0] == "first"
