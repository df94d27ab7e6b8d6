"""Requests that are late: ended while they wait or run, with all that they hold, and again in a replay."""

import random

import pytest
from scheduler_simulation import Device, check_holders, make_layout

from engine.api.errors import RequestError
from engine.api.events import Ended, Expired
from engine.api.messages import Sampling, Submit
from engine.core import deadlines as deadlines_module
from engine.core.config import SchedulerConfig
from engine.core.deadlines import SPARE, Deadlines
from engine.core.plan import StepResult
from engine.core.recorder import Recorder
from engine.core.records import DeadlinesPassed, read_records
from engine.core.replay import replay
from engine.core.scheduler import Scheduler
from engine.core.whatif.simulate import simulate
from engine.core.whatif.traffic import read_traffic

CONFIG = SchedulerConfig(layout=make_layout((None,)), blocks=41, max_context=100, max_step_tokens=16, max_running=2)


def ask(id, prompt=5, reply=20, **deadlines):
    return Submit(id, tuple(range(prompt)), Sampling(), reply, salt=id, **deadlines)


def step(scheduler, now):
    """One step as the engine's loop makes it: the deltas that were sent."""
    deltas = scheduler.expire(now) if scheduler.late(now) else []
    planned = scheduler.plan(now)
    if planned is not None:
        sampled = tuple(1 if row.sample else -1 for row in planned.plan.rows)
        deltas += scheduler.apply(StepResult(planned.plan.step, sampled), now).deltas
    return deltas


def telling(config=CONFIG):
    told = []
    return Scheduler(config, lambda id, now, event: told.append((id, event))), told


def test_running_request_ends_at_its_deadline():
    scheduler, told = telling()
    scheduler.submit(ask("a", deadline=5.0), 0.0)
    found = [delta for now in (1.0, 2.0, 4.9) for delta in step(scheduler, now)]
    assert [delta.finish for delta in found] == [None] * 3
    (late,) = step(scheduler, 5.0)
    assert (late.id, late.ids, late.finish, late.timing.last_token) == ("a", (), "deadline", 4.9)
    assert scheduler.running == scheduler.cache.pool.used == 0
    assert told[-2:] == [("a", Expired("end", running=True)), ("a", Ended("deadline", 3))]
    assert str(told[-2][1]) == "deadline_ms passed while the request was running"


def test_queued_request_ends_at_its_deadline():
    scheduler, told = telling()
    for id in "abc":
        scheduler.submit(ask(id, ttft_deadline=3.0 if id == "c" else None), 0.0)
    assert [delta.id for delta in step(scheduler, 1.0)] == ["a", "b"]
    assert [(delta.id, delta.finish) for delta in step(scheduler, 3.0)] == [("c", "deadline"), ("a", None), ("b", None)]
    assert ("c", Expired("first token", running=False)) in told
    assert (scheduler.running, scheduler.waiting) == (2, 0)


def test_first_token_in_time_meets_the_deadline():
    scheduler, _ = telling()
    scheduler.submit(ask("a", reply=4, ttft_deadline=2.0), 0.0)
    ends = [delta.finish for now in range(1, 9) for delta in step(scheduler, float(now))]
    assert ends == [None, None, None, "length"]


def test_resumed_request_has_no_first_token_deadline():
    scheduler, _ = telling()
    scheduler.submit(ask("a", reply=4, ttft_deadline=2.0, emitted=(1, 1)), 5.0)
    assert [delta.finish for now in (6.0, 7.0) for delta in step(scheduler, now)] == [None, "length"]


def test_request_past_its_deadline_never_runs():
    scheduler, _ = telling()
    scheduler.submit(ask("a", deadline=2.0), 5.0)
    assert [delta.finish for delta in step(scheduler, 5.0)] == ["deadline"]
    assert scheduler.step == 0


def test_token_of_an_expired_request_is_dropped():
    scheduler, _ = telling()
    scheduler.submit(ask("a", deadline=2.0), 0.0)
    planned = scheduler.plan(1.0)
    assert [delta.finish for delta in scheduler.expire(2.0)] == ["deadline"]
    assert scheduler.apply(StepResult(planned.plan.step, (1,)), 2.5).deltas == []


def test_reused_id_has_its_own_deadline():
    scheduler, _ = telling()
    scheduler.submit(ask("a", deadline=5.0), 0.0)
    scheduler.end("a", "abort")
    scheduler.submit(ask("a", deadline=9.0), 1.0)
    assert scheduler.late(5.0) and scheduler.expire(5.0) == [] and not scheduler.late(8.9)
    assert [delta.finish for delta in scheduler.expire(9.0)] == ["deadline"]


def test_deadlines_of_requests_that_ended_are_not_kept():
    scheduler, _ = telling()
    for number in range(10 * SPARE):
        scheduler.submit(ask(str(number), deadline=1e6, ttft_deadline=1e6), 0.0)
        scheduler.end(str(number), "stop")
    assert len(scheduler._deadlines._entries) <= SPARE + 4


class Clocked:
    """A random run on the checking device, with every request's end computed by brute force.

    A request ends at the first step that starts at or after its deadline, unless it ended (or had its first token)
    before."""

    def __init__(self, seed, scheduler, policy="fcfs"):
        self.rng = random.Random(seed)
        self.scheduler = scheduler
        self.device = Device(CONFIG.layout, CONFIG.blocks, CONFIG.max_running, CONFIG.max_step_tokens)
        self.open, self.started, self.ends, self.expected = {}, set(), {}, {}

    def run(self, requests=60):
        number, now, in_flight = 0, 0.0, []
        while number < requests or self.open or in_flight:
            now += self.rng.choice((0.1, 0.5, 1.5))
            assert now < 10_000, "no end"
            while number < requests and self.rng.random() < 0.5:
                self._submit(str(number), now)
                number += 1
            self._expire(now)
            planned = self.scheduler.plan(now)
            check_holders(self.scheduler)
            if planned is not None:
                in_flight.append(self.device.run(planned.plan, [s.submit.salt for s in planned.sequences]))
            if in_flight and (planned is None or len(in_flight) == 2):
                self._settle(in_flight.pop(0), now)
        assert self.scheduler.cache.pool.used == self.scheduler.running == self.scheduler.waiting == 0
        assert self.ends == self.expected

    def _submit(self, id, now):
        deadlines = {name: now + self.rng.choice((0.5, 5, 50)) for name in ("deadline", "ttft_deadline")}
        wanted = {name: at for name, at in deadlines.items() if self.rng.random() < 0.4}
        submit = Submit(id, tuple(self.rng.randrange(5) for _ in range(self.rng.randint(1, 30))), Sampling(), 15,
                        salt=id, **wanted)  # fmt: skip
        try:
            self.scheduler.submit(submit, now)
        except RequestError:
            return
        self.open[id] = submit

    def _expire(self, now):
        for id, submit in list(self.open.items()):
            waits = id not in self.started and submit.ttft_deadline is not None
            if (submit.deadline is not None and submit.deadline <= now) or (waits and submit.ttft_deadline <= now):
                self.expected[id] = "deadline"
                del self.open[id]
        if self.scheduler.late(now):
            for delta in self.scheduler.expire(now):
                assert delta.id not in self.open, f"{delta.id}: ended too soon"
                self.ends[delta.id] = delta.finish

    def _settle(self, result, now):
        for delta in self.scheduler.apply(result, now).deltas:
            assert delta.id in self.open, f"{delta.id}: a token after its end"
            self.started.add(delta.id)
            if delta.finish is not None:
                self.ends[delta.id] = self.expected[delta.id] = delta.finish
                del self.open[delta.id]


@pytest.mark.parametrize("seed", range(12))
def test_deadlines_equal_brute_force(seed):
    clocked = Clocked(seed, Scheduler(CONFIG))
    clocked.run()
    kinds = set(clocked.ends.values())
    assert kinds == {"deadline", "length"} and len(clocked.ends) == 60


def test_expired_requests_expire_again_in_a_replay(tmp_path):
    recorder = Recorder(CONFIG, str(tmp_path / "r"), 104_000)
    Clocked(3, recorder).run(requests=150)
    recorder.on_idle()
    records = list(read_records(tmp_path / "r"))
    assert any(isinstance(record, DeadlinesPassed) for record in records) and (tmp_path / "r.1").exists()
    told = []
    outcome = replay(iter(records), lambda id, what: told.append(what))
    assert outcome.difference is None and outcome.steps > 50 and outcome.dropped
    assert any("deadline_ms passed while the request" in what for what in told)
    without = [record for record in records if not isinstance(record, DeadlinesPassed)]
    assert replay(iter(without)).difference is not None, "the deadlines made no difference"


def test_recorded_traffic_ends_at_its_deadlines(tmp_path):
    recorder = Recorder(CONFIG, str(tmp_path / "r"), 2**30)
    recorder.submit(ask("a", deadline=4.0), 0.0)
    recorder.submit(ask("b", reply=3), 0.0)
    now = 0.0
    while recorder.running or recorder.waiting:
        now += 1.0
        step(recorder, now)
    recorder.flush()
    traffic = read_traffic(read_records(tmp_path / "r"))
    a, b = traffic.requests
    assert (a.finish, a.ended, len(a.tokens), a.submit.deadline) == ("deadline", 4.0, 3, None)
    assert (b.finish, len(b.tokens)) == (None, 3)
    replies = simulate(traffic.requests, traffic.config, lambda size, at: 100.0, depth=1).replies
    assert [len(reply.times) for reply in replies] == [3, 3]


def never_late(monkeypatch):
    monkeypatch.setattr(Deadlines, "passed", lambda self, now, open: iter(()))
    monkeypatch.setattr(Deadlines, "due", lambda self, now: False)


def a_first_token_is_forgotten(monkeypatch):
    class Unstarted:
        def __init__(self, right):
            self.right = right
            self.first_token = None

        def __getattr__(self, name):
            return getattr(self.right, name)

    right = deadlines_module._open_sequence
    monkeypatch.setattr(
        deadlines_module,
        "_open_sequence",
        lambda entry, open: None if right(entry, open) is None else Unstarted(right(entry, open)),
    )
    monkeypatch.setattr(Scheduler, "_end", lambda self, s, finish, right=Scheduler._end: right(self, s.right, finish)
                        if isinstance(s, Unstarted) else right(self, s, finish))  # fmt: skip


def blocks_are_kept(monkeypatch):
    right = Scheduler.expire

    def expire(self, now):
        end = self.cache.end
        self.cache.end = lambda tables, forget=False: None
        try:
            return right(self, now)
        finally:
            self.cache.end = end

    monkeypatch.setattr(Scheduler, "expire", expire)


@pytest.mark.parametrize("plant", [never_late, a_first_token_is_forgotten, blocks_are_kept], ids=lambda f: f.__name__)
def test_injected_fault_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(3):
            Clocked(seed, Scheduler(CONFIG)).run()
