"""Slots of LoRA adapters in the scheduler: which version is where, who waits, and that nobody waits forever."""

import random
from dataclasses import replace

import msgspec
import pytest

from engine.api.events import AdapterMissing
from engine.api.messages import Sampling, Submit
from engine.core.adapters import Adapters
from engine.core.config import SchedulerConfig
from engine.core.plan import StepPlan, StepResult
from engine.core.scheduler import Scheduler
from engine.core.sequence import State
from engine.core.snapshot import SchedulerState, restore, snapshot
from tests.engine.core.scheduler_simulation import make_layout

CONFIG = SchedulerConfig(
    layout=make_layout((None,)),
    blocks=60,
    max_context=64,
    max_running=6,
    max_step_tokens=16,
    adapters=("a", "b"),
    adapter_slots=2,
)


def submit(id: str, adapter: str = "", tokens: int = 3, reply: int = 4, owner: str = "", priority: int = 0) -> Submit:
    prompt = tuple(range(1, tokens + 1))
    return Submit(id, prompt, Sampling(), reply, adapter=adapter, owner=owner, priority=priority)


class Device:
    """Checks each plan: rows find the version of their request in its slot, and no slot in use is filled."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.rows: dict[int, int] = {}  # adapter slot of each request slot
        self.fills = 0

    def take(self, plan: StepPlan, scheduler: Scheduler) -> None:
        for slot in plan.dropped:
            self.rows.pop(slot, None)
        for slot, version in plan.adapters:
            assert slot not in self.rows.values(), "a slot with requests must not be filled"
            self.slots[slot] = version
            self.fills += 1
        for new in plan.new:
            if new.adapter >= 0:
                self.rows[new.slot] = new.adapter
        for sequence in scheduler._running:
            slot = next((new.adapter for new in plan.new if new.slot == sequence.slot), None)
            if slot is not None and sequence.adapter >= 0:
                assert self.slots[slot] == sequence.adapter
            assert slot is None or (slot < 0) == (sequence.adapter < 0)


def step(scheduler: Scheduler, device: Device | None = None, *, read: bool = True) -> StepPlan | None:
    planned = scheduler.plan(0.0)
    for version in tuple(scheduler.adapters.wanted) if read else ():
        scheduler.adapter_prepared(version)
    if planned is None:
        return None
    if device is not None:
        device.take(planned.plan, scheduler)
    tokens = tuple(7 if row.sample else -1 for row in planned.plan.rows)
    scheduler.apply(StepResult(planned.plan.step, tokens), 0.0)
    return planned.plan


def finish(scheduler: Scheduler, device: Device | None = None, most: int = 500) -> int:
    steps = 0
    while scheduler.running or scheduler.waiting:
        step(scheduler, device)
        steps += 1
        assert steps < most, "some request waits forever"
    return steps


def running(scheduler: Scheduler) -> set[str]:
    return {sequence.id for sequence in scheduler._running}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("blocks", [60, 20])
def test_random_traffic_with_more_adapters_than_slots_ends_and_is_right(policy: str, blocks: int) -> None:
    """Adapters are loaded again and unloaded meanwhile. A scheduler that is restored from its snapshot, which happens
    often, plans the same step."""
    drawn = random.Random(f"{policy}{blocks}")
    config = replace(CONFIG, policy=policy, blocks=blocks)
    scheduler, device = Scheduler(config), Device()
    for name in "cde":
        scheduler.load_adapter(name)
    for number in range(120):
        names = ["", *scheduler.adapters.names]
        if drawn.random() < 0.7:
            adapter = drawn.choice(names)
            owner, priority = drawn.choice("xyz"), drawn.randint(0, 2)
            scheduler.submit(
                submit(str(number), adapter, drawn.randint(1, 20), drawn.randint(1, 12), owner, priority), 0.0
            )
        if drawn.random() < 0.1:
            scheduler.load_adapter(drawn.choice("abcdef"))
        if drawn.random() < 0.05 and scheduler.adapters.names:
            scheduler.unload_adapter(drawn.choice(scheduler.adapters.names))
        if drawn.random() < 0.1 and scheduler._by_id:
            scheduler.end(drawn.choice(sorted(scheduler._by_id)), "abort")
        if drawn.random() < 0.3:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot(scheduler)), type=SchedulerState)
            other = Scheduler(config)
            restore(other, state)
            assert list(other._aside) == list(scheduler._aside)
            one, same = scheduler.plan(0.0), other.plan(0.0)
            assert (None if one is None else one.plan) == (None if same is None else same.plan)
            scheduler = other
            if same is not None:
                device.take(same.plan, scheduler)
                tokens = tuple(7 if row.sample else -1 for row in same.plan.rows)
                scheduler.apply(StepResult(same.plan.step, tokens), 0.0)
        step(scheduler, device, read=drawn.random() < 0.6)
    finish(scheduler, device)
    assert device.fills > 10
    state = scheduler.adapters.state
    assert all(not own.started and not own.waiting and not own.ready for own in state.versions.values())
    assert set(state.versions) == set(state.newest.values()), "versions that nobody uses are forgotten"
    assert not scheduler._aside


def test_the_least_recently_used_adapter_leaves() -> None:
    scheduler, device = Scheduler(CONFIG), Device()
    for name in ("c", "a", "b", "a", "c", "b"):
        if name == "c":
            scheduler.load_adapter("c") if "c" not in scheduler.adapters.names else None
        scheduler.submit(submit(f"{device.fills}{name}", name), 0.0)
        finish(scheduler, device)
    held = {scheduler.adapters.state.versions[version].name for version in device.slots.values()}
    assert held == {"b", "c"}
    assert device.fills == 5  # c, a, b for c, c for b, b for a
    assert scheduler.adapters.state.evictions == 3


def test_a_request_waits_for_a_slot_and_others_pass_it() -> None:
    told: list[object] = []
    scheduler = Scheduler(CONFIG, lambda id, now, event: told.append((id, event)))
    scheduler.load_adapter("c")
    for id in ("a", "b", "c", ""):
        scheduler.submit(submit(f"r{id}", id, reply=9), 0.0)
    step(scheduler)
    step(scheduler)
    step(scheduler)
    assert running(scheduler) == {"ra", "rb", "r"}
    assert scheduler.waiting_for_adapters == scheduler.stats().adapter_waiting == 1
    missing = [event for id, event in told if id == "rc" and isinstance(event, AdapterMissing)]
    assert [event.slots for event in missing] == [0, 2]
    assert "is read" in str(missing[0]) and "all 2 slots are used (adapter_loading.max_active)" in str(missing[1])
    finish(scheduler)


def test_constant_traffic_of_the_adapters_in_slots_does_not_keep_others_waiting() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.load_adapter("c")
    for name in "ab":
        scheduler.submit(submit(f"{name}-first", name, reply=5), 0.0)
    step(scheduler)
    step(scheduler)
    scheduler.submit(submit("c", "c"), 0.0)
    for number in range(40):
        scheduler.submit(submit(f"a{number}", "a", reply=5), 0.0)
        scheduler.submit(submit(f"b{number}", "b", reply=5), 0.0)
        step(scheduler)
        if "c" in running(scheduler):
            break
    assert number < 12
    finish(scheduler)


def test_requests_that_have_started_keep_their_version_and_others_get_the_new_one() -> None:
    scheduler, device = Scheduler(replace(CONFIG, max_running=1)), Device()
    for id in ("one", "two"):
        scheduler.submit(submit(id, "a", reply=6), 0.0)
    step(scheduler, device)
    step(scheduler, device)
    version = scheduler.load_adapter("a")
    found = {sequence.id: sequence.adapter for sequence in scheduler._by_id.values()}
    assert found == {"one": 0, "two": version}
    roots = {sequence.id: sequence.tables.root for sequence in scheduler._by_id.values()}
    assert roots["one"] != roots["two"]
    finish(scheduler, device)
    assert scheduler.adapters.forgotten == [0]


def test_a_preempted_request_keeps_its_slot() -> None:
    scheduler, device = Scheduler(replace(CONFIG, blocks=14, adapter_slots=1)), Device()
    scheduler.submit(submit("one", "a", 12, 30), 0.0)
    scheduler.submit(submit("two", "a", 12, 30), 0.0)
    scheduler.submit(submit("base", "", 12, 30), 0.0)
    scheduler.submit(submit("other", "b", 3, 3), 0.0)
    finish(scheduler, device)
    assert scheduler.counters.preemptions
    assert device.fills == 2


def test_requests_for_an_adapter_that_cannot_be_read_end_and_others_continue() -> None:
    scheduler = Scheduler(CONFIG)
    for id, name in (("one", "a"), ("two", "a"), ("three", "b")):
        scheduler.submit(submit(id, name), 0.0)
    step(scheduler, read=False)
    assert list(scheduler.adapters.wanted) == [0, 1]
    assert [(delta.id, delta.finish) for delta in scheduler.adapter_failed(0)] == [("one", "error"), ("two", "error")]
    assert finish(scheduler) < 10
    scheduler.submit(submit("again", "a"), 0.0)
    step(scheduler, read=False)
    assert list(scheduler.adapters.wanted) == [0], "a later request tries again"


def test_a_version_that_was_read_for_nobody_is_released() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.submit(submit("one", "a"), 0.0)
    step(scheduler, read=False)
    scheduler.end("one", "abort")
    scheduler.adapter_prepared(0)
    assert scheduler.adapters.released == [0]
    scheduler.submit(submit("two", "a"), 0.0)
    step(scheduler)
    scheduler.end("two", "abort")
    assert scheduler.adapters.released == [0, 0]


def test_without_slots_every_adapter_has_its_own_from_the_start() -> None:
    scheduler = Scheduler(replace(CONFIG, adapter_slots=None))
    for name in ("b", "a", ""):
        scheduler.submit(submit(f"r{name}", name), 0.0)
    plan = step(scheduler)
    assert plan is not None
    assert [new.adapter for new in plan.new] == [1, 0, -1]
    assert plan.adapters == ()
    assert all(sequence.state is State.RUNNING for sequence in scheduler._by_id.values())


def test_a_reserved_slot_is_free_for_its_adapter_alone() -> None:
    adapters = Adapters(("a", "b", "c"), 1)
    for version, own in adapters.state.versions.items():
        adapters.add(version)
        own.ready = True
    slot = adapters.find_slot(0, started=False)
    assert slot == 0 and adapters.start(0, slot)
    assert adapters.find_slot(1, started=False) is None
    adapters.end(0, started=True)
    assert adapters.find_slot(2, started=False) is None and adapters.find_slot(1, started=False) == 0
