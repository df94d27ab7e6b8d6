"""Recorded traffic under other settings: against a device whose step times are known exactly."""

import json
import random
from collections import deque

import pytest
from scheduler_simulation import make_layout

from engine.api.errors import ConfigError
from engine.api.messages import Grammar, Sampling, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepResult
from engine.core.recorder import Recorder
from engine.core.records import read_records
from engine.core.replay import replay
from engine.core.whatif.__main__ import figures, main, percentile, predicted, table
from engine.core.whatif.quality import paused_steps, warnings
from engine.core.whatif.settings import Settings, changed
from engine.core.whatif.simulate import Reply, simulate
from engine.core.whatif.times import fit
from engine.core.whatif.traffic import Size, Step, read_traffic, size_of

CONFIG = {"layout": make_layout((None,)), "blocks": 200, "max_context": 400, "max_step_tokens": 32, "max_running": 8}


def truth(size):
    """Seconds of a step of the device."""
    return 0.002 + 0.0001 * min(size.tokens, 16) + 0.0004 * max(0, size.tokens - 16) + 0.00001 * size.attended / 10


def traffic_of(seed=1, count=120, rate=15.0):
    rng, at, asks = random.Random(seed), 1000.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        # salted to prevent cache hits: these depend on block boundaries, which another test covers
        prompt = tuple(rng.randrange(2, 50) for _ in range(rng.randrange(2, 120)))
        asks.append((at, Submit(str(number), prompt, Sampling(), rng.randrange(1, 60), salt=str(number))))
    return asks


def measured(path, asks, *, depth=2, aborts=(), pauses=(), **changes):
    """Runs the requests on the device, recording; their replies as clients would have measured them."""
    scheduler = Recorder(SchedulerConfig(**{**CONFIG, **changes}), str(path), 2**30)
    coming, in_flight, replies, now, free_at = deque(asks), deque(), {}, 999.0, 0.0
    while True:
        while coming and coming[0][0] <= now:
            at, submit = coming.popleft()
            scheduler.submit(submit, at)
            replies[submit.id] = Reply(at)
        planned = scheduler.plan(now)
        if planned is not None:
            free_at = max(now, free_at) + truth(size_of(planned.plan.rows)) + dict(pauses).get(planned.plan.step, 0.0)
            in_flight.append((planned, free_at))
        if in_flight and (planned is None or len(in_flight) == depth):
            done, ended = in_flight.popleft()
            now = max(now, ended)
            sampled = tuple(1 if row.sample else -1 for row in done.plan.rows)
            for delta in scheduler.apply(StepResult(done.plan.step, sampled), now).deltas:
                replies[delta.id].times += [now] * len(delta.ids)
                if delta.finish is None and delta.id in aborts and len(replies[delta.id].times) >= 3:
                    scheduler.end(delta.id, "abort")
        elif planned is None:
            if not coming:
                break
            now = max(now, coming[0][0])
    scheduler.flush()
    return list(replies.values())


def mean_times(traffic):
    times = fit(traffic.steps)
    return lambda size, at: times.mean(size)


def near(found, expected, share):
    return abs(found - expected) <= share * expected + 1e-9


def test_measurements_are_read_from_the_recording(tmp_path):
    asks = traffic_of()
    replies = measured(tmp_path / "r", asks, aborts=("3", "17"))
    traffic = read_traffic(read_records(tmp_path / "r"))
    assert [asked.submit for asked in traffic.requests] == [submit for _, submit in asks]
    assert [(asked.at, asked.times) for asked in traffic.requests] == [(reply.at, reply.times) for reply in replies]
    assert {asked.submit.id for asked in traffic.requests if asked.finish} == {"3", "17"}
    assert traffic.num_ignored == 0
    steps = replay(read_records(tmp_path / "r")).steps
    assert len(traffic.steps) == steps
    assert all(near(step.ended - step.started, truth(step.size), 1e-6) for step in traffic.steps)


@pytest.mark.parametrize("changes", [
    {}, {"max_running": 2}, {"max_running": 3, "max_step_tokens": 64}, {"blocks": 60},
    {"max_step_tokens": 9},
], ids=str)  # fmt: skip
@pytest.mark.sampled(2)
def test_predictions_for_other_settings_match_a_simulated_device(tmp_path, changes):
    asks = traffic_of()
    measured(tmp_path / "r", asks)
    expected = figures(measured(tmp_path / "other", asks, **changes))
    traffic = read_traffic(read_records(tmp_path / "r"))
    times = fit(traffic.steps)
    assert times.error < 0.02
    found = figures(simulate(traffic.requests, SchedulerConfig(**{**CONFIG, **changes}), times.seconds).replies)
    assert (found.requests, found.tokens) == (expected.requests, expected.tokens)
    for name in ("span", "throughput", "ttft_p50", "ttft_p95", "itl_p50", "itl_p95"):
        assert near(getattr(found, name), getattr(expected, name), 0.05), name


@pytest.mark.parametrize("depth", [1, 2])
def test_the_number_of_steps_in_flight_is_read_from_the_recording(tmp_path, depth):
    measured(tmp_path / "r", traffic_of(), depth=depth)
    assert read_traffic(read_records(tmp_path / "r")).depth == depth


def test_a_pause_of_the_machine_is_reported_and_left_out_of_the_model(tmp_path, capsys):
    asks = traffic_of(rate=8.0)
    measured(tmp_path / "r", asks, pauses={40: 3.0, 90: 2.5})
    expected = figures(measured(tmp_path / "other", asks))
    traffic = read_traffic(read_records(tmp_path / "r"))
    (warning,) = warnings(traffic)
    assert "the engine was paused during 2 of" in warning and "for 5.5 s" in warning
    found, error = predicted(traffic, Settings(traffic.config, traffic.depth), 1.0)
    assert error < 0.02
    for name in ("throughput", "ttft_p50", "ttft_p95", "itl_p95"):
        assert near(getattr(found, name), getattr(expected, name), 0.05), name
    assert main([str(tmp_path / "r")]) == 0
    assert f"warning: {warning}\n" in capsys.readouterr().out


def test_a_pause_between_two_steps_is_reported():
    size = Size(1, 1, 10)
    steps = [Step(size, float(at), at + 0.01, 0, 2.0 if at == 7 else 0.0) for at in range(20)]
    assert paused_steps(steps) == [steps[7]]
    assert paused_steps([Step(size, 1.0, 1.0)]) == [], "a step that took no time says nothing"


def test_a_saturated_recording_is_reported(tmp_path, capsys):
    measured(tmp_path / "r", traffic_of(rate=8.0))
    assert main([str(tmp_path / "r"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    measured(tmp_path / "full", traffic_of(rate=100.0))
    assert main([str(tmp_path / "full"), "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "the recording is saturated: requests were queued during" in warning


def test_traffic_that_comes_faster_is_predicted(tmp_path):
    asks = traffic_of(rate=8.0)
    measured(tmp_path / "r", asks)
    faster = [(1000.0 + (at - 1000.0) / 3, submit) for at, submit in asks]
    expected = figures(measured(tmp_path / "other", faster))
    traffic = read_traffic(read_records(tmp_path / "r"))
    found = figures(
        simulate(traffic.requests, traffic.config, fit(traffic.steps, traffic.requests[0].at).seconds, rate=3.0).replies
    )
    assert near(found.throughput, expected.throughput, 0.05) and near(found.ttft_p95, expected.ttft_p95, 0.1)


def test_aborted_requests_and_grammars_end_where_they_did(tmp_path):
    asks = [(at, submit) for at, submit in traffic_of(count=30)]
    at, submit = asks[5]
    asks[5] = (at, Submit("5", submit.prompt, Sampling(), 50, grammar=Grammar("regex", "a*"), salt="5"))
    replies = measured(tmp_path / "r", asks, aborts=("5", "9"))
    traffic = read_traffic(read_records(tmp_path / "r"))
    found = simulate(traffic.requests, traffic.config, mean_times(traffic))
    assert [len(reply.times) for reply in found.replies] == [len(reply.times) for reply in replies]


def test_client_that_disconnects_in_the_queue_is_reproduced(tmp_path):
    scheduler = Recorder(SchedulerConfig(**{**CONFIG, "max_running": 1}), str(tmp_path / "r"), 2**30)
    for number in range(2):
        scheduler.submit(Submit(str(number), (1, 2, 3), Sampling(), 9), 1.0)
    for number in range(9):
        planned = scheduler.plan(1.0 + number)
        scheduler.apply(StepResult(planned.plan.step, (1,) * len(planned.plan.rows)), 2.0 + number)
        if number == 3:
            scheduler.end("1", "abort")
    scheduler.flush()
    traffic = read_traffic(read_records(tmp_path / "r"))
    found = simulate(traffic.requests, traffic.config, mean_times(traffic), depth=1)
    assert [len(reply.times) for reply in found.replies] == [9, 0]


def test_timing_noise_keeps_its_mean_and_its_time():
    rng = random.Random(5)
    steps, at = [], 0.0
    for _ in range(3000):
        tokens = rng.choice((1, 4, 8, 30, 200))
        size = Size(tokens, min(tokens, 8), tokens * 50)
        seconds = truth(size) * rng.choice((0.7, 0.9, 1.0, 1.0, 1.4, 3.0))
        steps.append(Step(size, at, at + seconds))
        at += seconds
    times = fit(steps)
    total = sum(times.mean(step.size) for step in steps)
    assert near(total, at, 0.01)
    drawn = [times.seconds(step.size, step.started) for step in steps]
    assert drawn == pytest.approx([step.ended - step.started for step in steps], rel=1e-6)
    long = times.seconds(Size(10_000, 8, 500_000), 0.0)
    assert near(long, times.mean(Size(10_000, 8, 500_000)), 0.2), "a long step averages over short ones"
    assert all(coefficient >= 0 for coefficient in times.coefficients)


def test_slow_phases_are_reproduced():
    size, steps, at = Size(8, 8, 400), [], 50.0
    for number in range(600):
        seconds = 0.01 * (3.0 if 200 <= number < 300 else 1.0)
        steps.append(Step(size, at, at + seconds))
        at += seconds
    drawn = fit(steps, 50.0).seconds
    for begin, expected in ((0.5, 0.01), (3.5, 0.03), (7.5, 0.01)):
        assert near(drawn(size, begin), expected, 1e-6)
    assert near(drawn(size, steps[-1].started - 50.0 + 3.5), 0.03, 1e-6), "it repeats after its end"


def test_each_size_of_step_keeps_its_recorded_time():
    """The sum of terms fits large steps badly here; figures of the model come from drawn times"""
    rng, steps, at = random.Random(3), [], 0.0
    for _ in range(400):
        tokens = rng.choice((4, 64, 64, 300))
        seconds = {4: 0.01, 64: 0.09, 300: 0.1}[tokens] * rng.uniform(0.8, 1.2)
        steps.append(Step(Size(tokens, 4, tokens * 50), at, at + seconds))
        at += seconds
    drawn = fit(steps).seconds
    for tokens in (4, 64, 300):
        sizes = [step for step in steps if step.size.tokens == tokens]
        recorded = sum(step.ended - step.started for step in sizes)
        assert near(sum(drawn(step.size, step.started) for step in sizes), recorded, 0.02), tokens


@pytest.mark.parametrize(("assignment", "words"), [
    ("engine.cache.block_tokens=0", "not a whole number of at least 1"),
    ("engine.cache.prefix=yes", "must be true or false"),
    ("engine.scheduling.policy=lifo", "not one of fcfs, priority and fair"),
    ("hardware.kv_cache_memory=many", "not a size"),
    ("hardware.kv_cache_memory=1B", "would have no block"), ("model.path=x", "must be KEY=VALUE"),
    ("model.max_context", "KEY=VALUE"),
])  # fmt: skip
def test_invalid_settings_are_reported(assignment, words):
    with pytest.raises(ConfigError, match=words):
        changed(Settings(SchedulerConfig(**CONFIG)), [assignment])


def test_settings_are_those_of_the_manifest():
    given = ["engine.cache.block_tokens=8", "engine.cache.prefix=false", "engine.scheduling.max-running=3",
             "engine.scheduling.overlap=false", "model.max_context=90"]  # fmt: skip
    found = changed(Settings(SchedulerConfig(**CONFIG)), given)
    config = found.config
    assert (config.layout.block_tokens, config.blocks, config.prefix_cache, config.max_running) == (8, 100, False, 3)
    assert (config.max_context, found.depth) == (90, 1)
    pool = f"hardware.kv_cache_memory={config.layout.block_bytes * 7}"
    assert changed(found, [pool]).config.blocks == 7


def test_the_command_prints_a_table_and_json(tmp_path, capsys):
    measured(tmp_path / "r", traffic_of(count=20))
    assert main([str(tmp_path / "r"), "--set", "engine.scheduling.max_running=1"]) == 0
    out = capsys.readouterr().out
    assert "measured" in out and "tokens/s" in out and "step times are fitted to" in out
    assert main([str(tmp_path / "r"), "--json", "--rate", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["measured"]["tokens"] == report["model"]["tokens"] == report["changed"]["tokens"] > 0
    assert main([str(tmp_path / "nothing")]) == 1
    assert main([str(tmp_path / "r"), "--rate", "0"]) == 1
    assert "--rate 0" in capsys.readouterr().err


def test_empty_recording_is_reported(tmp_path, capsys):
    Recorder(SchedulerConfig(**CONFIG), str(tmp_path / "r"), 2**30).flush()
    assert main([str(tmp_path / "r")]) == 1
    assert "no complete request" in capsys.readouterr().err


def test_changes_are_formatted_as_shares_or_factors():
    one = figures([Reply(0.0, [1.0, 2.0])])
    many = figures([Reply(0.0, [100.0, 102.0])])
    lines = table(one, one, many).splitlines()
    assert next(line for line in lines if "TTFT p50" in line).endswith("× 100")
    assert next(line for line in lines if "between tokens p50" in line).endswith("+100.0 %")
    assert percentile([], 50) is None and percentile([3.0, 1.0], 50) == 3.0
