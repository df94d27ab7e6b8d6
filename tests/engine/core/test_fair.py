"""Fair shares by owner: bounds between owners, work conservation, and the order of Sheng et al. by brute force."""

import random
from collections import Counter, deque
from dataclasses import replace

import msgspec
import pytest
from scheduler_simulation import WINDOWS, Load, make_layout, simulate

from engine.api.messages import Sampling, Submit
from engine.core import scheduler as scheduler_module
from engine.core.config import SchedulerConfig
from engine.core.fair import FairPolicy, OwnerQueues
from engine.core.plan import StepResult
from engine.core.recorder import Recorder
from engine.core.records import read_records
from engine.core.replay import replay
from engine.core.scheduler import Scheduler

STEP_TOKENS, RUNNING = 32, 4
CONFIG = SchedulerConfig(
    layout=make_layout((None,)),
    blocks=400,
    max_context=400,
    max_step_tokens=STEP_TOKENS,
    max_running=RUNNING,
    policy="fair",
    prefix_cache=False,
)
PROMPTS, REPLIES = (3, 40), (1, 30)
# Maximum difference between two backlogged owners, from theorem 4.4 with all weights 1: twice the larger of the longest
# prompt (here the whole request, because requests are charged as they are computed) and the tokens of a batch.
LONGEST = PROMPTS[1] + REPLIES[1]
BOUND = 2 * RUNNING * LONGEST


class Bench:
    """Steps of one second. Counts, from plans alone, the tokens computed for the first time for each owner."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.now = 0.0
        self.owner, self.known, self.served = {}, Counter(), Counter()
        self.first, self.ended, self.arrived = {}, {}, {}
        self.tokens = self.rows = self.spent = self.waited = 0
        self._number = 0

    def submit(self, owner, prompt, reply, share=1.0):
        self._number += 1
        id = f"{owner}{self._number}"
        self.owner[id], self.arrived[id] = owner, self.now
        ask = Submit(id, tuple(range(prompt)), Sampling(), reply, owner=owner, share=share, salt=id)
        self.scheduler.submit(ask, self.now)
        return id

    def step(self):
        planned = self.scheduler.plan(self.now)
        if planned is None:
            return False
        rows = planned.plan.rows
        self.rows, self.spent, self.waited = len(rows), sum(row.count for row in rows), self.scheduler.waiting
        for sequence, row in zip(planned.sequences, planned.plan.rows, strict=True):
            new = max(0, row.first + row.count - self.known[sequence.id])
            self.known[sequence.id] += new
            self.served[self.owner[sequence.id]] += new
            self.tokens += new
        self.now += 1.0
        sampled = tuple(1 if row.sample else -1 for row in planned.plan.rows)
        for delta in self.scheduler.apply(StepResult(planned.plan.step, sampled), self.now).deltas:
            self.first.setdefault(delta.id, self.now)
            if delta.finish is not None:
                self.ended[delta.id] = self.now
        return True

    def finish(self):
        while self.step():
            assert self.now < 50_000, "no end"
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.ended.keys() == self.owner.keys()


def lengths(rng):
    return rng.randint(*PROMPTS), rng.randint(*REPLIES)


def flood(policy, seed, config=CONFIG):
    """One owner asks for forty requests at once, the other for two at a time, again and again: both always wait."""
    rng = random.Random(seed)
    bench = Bench(Scheduler(replace(config, policy=policy)))
    for _ in range(40):
        bench.submit("many", *lengths(rng))
    open_few, apart = [], 0
    while sum(bench.owner[id] == "many" and id not in bench.ended for id in bench.owner) > RUNNING:
        open_few = [id for id in open_few if id not in bench.ended]
        while len([id for id in open_few if id not in bench.first]) < 2:
            open_few.append(bench.submit("few", *lengths(rng)))
        bench.step()
        apart = max(apart, abs(bench.served["many"] - bench.served["few"]))
    bench.finish()
    return bench, apart


@pytest.mark.parametrize("seed", range(5))
def test_backlogged_owners_get_equal_service(seed):
    _, apart = flood("fair", seed)
    assert apart <= BOUND
    _, first_come = flood("fcfs", seed)
    assert first_come > 2 * BOUND, "the workload shows nothing"


@pytest.mark.parametrize("seed", range(5))
def test_a_flood_does_not_delay_the_first_tokens_of_others(seed):
    def worst(policy):
        rng = random.Random(seed)
        bench = Bench(Scheduler(replace(CONFIG, policy=policy)))
        for _ in range(60):
            bench.submit("many", *lengths(rng))
        waits = []
        for _ in range(8):
            id = bench.submit("few", *lengths(rng))
            while id not in bench.ended:
                bench.step()
            waits.append(bench.first[id] - bench.arrived[id])
        bench.finish()
        return max(waits)

    # A slot is free when the next running request ends; the prompt is then computed in a batch with others.
    assert worst("fair") <= REPLIES[1] + RUNNING * (1 + PROMPTS[1] // (STEP_TOKENS - RUNNING)) < worst("fcfs") / 3


@pytest.mark.parametrize("seed", range(5))
def test_single_owner_uses_the_whole_engine(seed):
    """All work is done in the same number of steps as first come, first served, and as long as it lasts the batch is as
    full."""
    times = []
    for policy in ("fair", "fcfs"):
        rng = random.Random(seed)
        bench = Bench(Scheduler(replace(CONFIG, policy=policy)))
        for _ in range(50):
            bench.submit("one", *lengths(rng))
        bench.finish()
        times.append((bench.now, bench.tokens, bench.ended))
    assert times[0] == times[1]

    mixed = {}
    for policy in ("fair", "fcfs"):
        rng = random.Random(seed)
        bench = Bench(Scheduler(replace(CONFIG, policy=policy)))
        for number in range(100):
            bench.submit("a" if number < 80 else "b", *lengths(rng))
        while bench.step():
            assert bench.rows == RUNNING or not bench.waited or bench.spent == STEP_TOKENS
        mixed[policy] = bench.tokens / bench.now
    assert mixed["fair"] == pytest.approx(mixed["fcfs"], rel=0.05)


def test_idle_owner_gains_no_credit():
    """It comes back to a flood, and gets half from then on, not all of it until it has caught up."""
    rng = random.Random(3)
    bench = Bench(Scheduler(CONFIG))
    bench.submit("back", 10, 3)
    for _ in range(80):
        bench.submit("many", *lengths(rng))
    while bench.served["many"] < 1500:
        bench.step()
    for _ in range(60):
        bench.submit("back", *lengths(rng))
    before = dict(bench.served)
    for _ in range(120):
        bench.step()
        gained = {owner: bench.served[owner] - before[owner] for owner in before}
        assert abs(gained["back"] - gained["many"]) <= BOUND
    assert min(gained.values()) > BOUND, "the workload shows nothing"


def test_many_owners_get_equal_shares():
    rng = random.Random(8)
    bench = Bench(Scheduler(CONFIG))
    asked = {f"o{number}": 8 * (1 + number) for number in range(5)}
    for owner, count in asked.items():
        for _ in range(count):
            bench.submit(owner, *lengths(rng))
    waits = {owner: lambda owner=owner: owner in bench.scheduler._waiting for owner in asked}
    while all(check() for check in waits.values()):
        bench.step()
        counts = [bench.served[owner] for owner in asked]
        assert max(counts) - min(counts) <= BOUND


def test_weighted_shares_are_respected():
    """Counts divided by shares differ by no more than counts do with equal shares."""
    rng = random.Random(9)
    bench = Bench(Scheduler(CONFIG))
    shares = {"quarter": 0.25, "one": 1.0, "three": 3.0}
    for owner, share in shares.items():
        for _ in range(round(60 * share)):
            bench.submit(owner, *lengths(rng), share=share)
    while all(owner in bench.scheduler._waiting for owner in shares):
        bench.step()
        counts = [bench.served[owner] / share for owner, share in shares.items()]
        assert max(counts) - min(counts) <= BOUND / min(shares.values())
    assert 2 < bench.served["three"] / bench.served["one"] < 4
    assert 2.5 < bench.served["one"] / bench.served["quarter"] < 6


class Oracle:
    """Reference for algorithm 2: a linear search through all waiting requests for the next one to admit."""

    def __init__(self):
        self.counters, self.queue, self.last = Counter(), [], None

    def arrive(self, owner, number):
        if owner not in [each for each, _ in self.queue]:
            if self.queue:
                self.counters[owner] = max(self.counters[owner], min(self.counters[each] for each, _ in self.queue))
            elif self.last is not None:
                self.counters[owner] = max(self.counters[owner], self.counters[self.last])
        self.queue.append((owner, number))

    def next(self):
        return min(self.queue, key=lambda each: (self.counters[each[0]], each[1]))

    def leave(self, owner, number):
        self.queue.remove((owner, number))
        self.last = owner


@pytest.mark.parametrize("seed", range(20))
def test_order_equals_the_paper(seed):
    rng, oracle, fair = random.Random(seed), Oracle(), FairPolicy()
    sequences = {}
    for number in range(300):
        if rng.random() < 0.55 or not oracle.queue:
            owner = rng.choice("aabc" if number < 150 else "bcd")
            ask = Submit(str(number), tuple(range(rng.randint(1, 30))), Sampling(), 5, owner=owner)
            sequence = sequences[number] = scheduler_module.Sequence(ask, number, 0.0, 100)
            oracle.arrive(owner, number)
            fair.arrive(sequence)
            fair.waiting.add(sequence)
        else:
            owner, number = oracle.next()
            assert fair.waiting.first is sequences[number]
            if rng.random() < 0.1:  # a client disconnects, at any position in the queue
                owner, number = rng.choice(oracle.queue)
            oracle.leave(owner, number)
            fair.waiting.remove(sequences[number])
            charged = rng.randint(0, 40)
            oracle.counters[owner] += charged
            sequences[number].computed += charged
            fair.charge([sequences[number]])
        assert fair.served == {owner: oracle.counters[owner] for owner in fair.served}
        assert len(fair.waiting) == len(oracle.queue)


def test_requests_ahead_include_owners_with_less_service():
    told = []
    bench = Bench(Scheduler(CONFIG, lambda id, now, event: told.append((id, event))))
    for _ in range(9):
        bench.submit("many", 20, 5)
    bench.step()
    for _ in range(3):
        bench.submit("few", 20, 5)
    ahead = [event.ahead for _, event in told if type(event).__name__ == "Queued"]
    assert ahead == [*range(9), 1, 2, 3]


def test_what_is_cached_or_computed_again_is_free():
    fair = FairPolicy()
    sequence = scheduler_module.Sequence(Submit("a", tuple(range(50)), Sampling(), 5, owner="x"), 1, 0.0, 100)
    fair.arrive(sequence)
    sequence.charged = 16  # found in the cache
    for computed in (32, 50, 51, 0, 32, 52):  # preempted behind 51
        sequence.computed = computed
        fair.charge([sequence])
    assert fair.served == {"x": 52 - 16}


class FairLoadScheduler(Scheduler):
    """Gives every request an owner: the simulation's requests have none."""

    def submit(self, submit, now):
        owner = ("a", "a", "a", "b", "c")[int(submit.id[1:]) % 5]
        return super().submit(msgspec.structs.replace(submit, owner=owner), now)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("seed", range(4))
def test_fair_scheduling_does_not_change_outputs(windows, seed):
    """With a cache that is far too small every request ends, and the first in order is never preempted."""
    rng = random.Random(seed)
    load = Load(
        seed, windows, blocks=rng.choice((14, 25)) * len(windows) + 10, policy="fair", overlap=seed != 1,
        max_step_tokens=rng.choice((7, 16, 40)), max_running=rng.choice((4, 7)), scheduler=FairLoadScheduler,
        replies=(7, 30),
    )  # fmt: skip
    outcome = simulate(load)
    assert len(outcome.ends) == len(outcome.submits)
    assert set(outcome.scheduler._policy.served) == {"a", "b", "c"}


def test_owner_with_most_service_is_preempted_first():
    preempted = []
    config = replace(CONFIG, blocks=24, max_running=6)
    scheduler = Scheduler(config, lambda id, now, event: preempted.append((id, event)))
    bench = Bench(scheduler)
    for _ in range(4):
        bench.submit("much", 10, 40)
    for _ in range(8):
        bench.step()
    bench.submit("little", 10, 40)
    bench.finish()
    victims = [id for id, event in preempted if type(event).__name__ == "Preempted"]
    assert victims and all(id.startswith("much") for id in victims)


def test_a_recording_under_fair_shares_replays(tmp_path):
    """From its start, and from a state in the middle of it."""
    rng = random.Random(5)
    bench = Bench(Recorder(replace(CONFIG, blocks=60, max_running=6), str(tmp_path / "r"), 60_000))
    coming = deque((rng.choice("aaab"), *lengths(rng)) for _ in range(120))
    while coming:
        bench.submit(*coming.popleft())
        bench.step()
    bench.finish()
    bench.scheduler.on_idle()
    assert (tmp_path / "r.1").exists()
    outcome = replay(read_records(tmp_path / "r"))
    assert outcome.difference is None and outcome.dropped > 0 and outcome.steps > 50


def without_lift(monkeypatch):
    monkeypatch.setattr(OwnerQueues, "least", lambda self: 0)


def prompts_for_nothing(monkeypatch):
    def charge(self, sequences):
        for sequence in sequences:
            self.served[sequence.owner] += 1

    monkeypatch.setattr(FairPolicy, "charge", charge)


def in_order_of_arrival(monkeypatch):
    monkeypatch.setattr(OwnerQueues, "_place", lambda self, sequence: (0, sequence.arrival))


def most_served_first(monkeypatch):
    monkeypatch.setattr(OwnerQueues, "_place", lambda self, sequence: (-self._served[sequence.owner], sequence.arrival))


def charged_again(monkeypatch):
    def charge(self, sequences):
        for sequence in sequences:
            self.served[sequence.owner] += sequence.computed

    monkeypatch.setattr(FairPolicy, "charge", charge)


def ranks_stand_still(monkeypatch):
    monkeypatch.setattr(FairPolicy, "begin", lambda self: None)


FAULTS = {
    without_lift: [test_idle_owner_gains_no_credit],
    prompts_for_nothing: [lambda: [test_backlogged_owners_get_equal_service(seed) for seed in range(5)],
                          test_what_is_cached_or_computed_again_is_free],
    in_order_of_arrival: [lambda: test_backlogged_owners_get_equal_service(0)],
    most_served_first: [lambda: test_a_flood_does_not_delay_the_first_tokens_of_others(0)],
    charged_again: [test_what_is_cached_or_computed_again_is_free],
    ranks_stand_still: [test_owner_with_most_service_is_preempted_first],
}  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_injected_fault_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for check in FAULTS[plant]:
            check()
