"""The checking device is worth something only if it sees faults: each of these, planted, has to be caught."""

import pytest
from scheduler_simulation import Load, simulate

from engine.core import scheduler as scheduler_module
from engine.core.scheduler import Scheduler
from engine.kv import snapshots as snapshots_module
from engine.kv.cache import Cache, Hit, Tables
from engine.kv.layout import Group
from engine.kv.pool import Pool
from engine.kv.snapshots import Snapshots

LOADS = [
    Load(seed, windows, blocks=blocks * len(windows), max_step_tokens=budget, overlap=overlap, replies=(7, 30))
    for seed, windows, blocks, budget, overlap in (
        (0, (None,), 28, 16, True),
        (1, (None, 9), 26, 16, True),
        (2, (None,), 30, 7, False),
        (3, (9,), 26, 40, True),
        (4, (None, 5), 40, 16, True),
        (8, ((None, 6), (None, 8)), 30, 16, True),
    )
]
LOADS += [
    Load(seed, (None,), max_step_tokens=7, abort=0.9, same_prompts=1, salts=("",), resumed=0.0, replies=(30,))
    for seed in (5, 6, 7)
]


def wrap(monkeypatch, owner, name, make):
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def window_one_short(monkeypatch):
    def make(right):
        return lambda self, n: min(n, right(self, n) + (self.window is not None))

    wrap(monkeypatch, Group, "needed_from", make)


def released_a_block_early(monkeypatch):
    wrap(
        monkeypatch, Cache, "_release", lambda right: lambda self, tables, n: right(self, tables, n + self.block_tokens)
    )


def published_the_wrong_block(monkeypatch):
    def make(right):
        return lambda self, block, key: right(self, block % (self.size - 1) + 1, key)

    wrap(monkeypatch, Pool, "publish", make)


def published_before_it_was_full(monkeypatch):
    def make(right):
        return lambda self, tables, ids, computed: right(
            self, tables, ids, min(computed + self.block_tokens, len(tables.blocks[0]) * self.block_tokens)
        )

    wrap(monkeypatch, Cache, "publish", make)


def without_salt(monkeypatch):
    wrap(monkeypatch, scheduler_module, "root_hash", lambda right: lambda salt, *rest: right(b"", *rest))


def hit_not_cut(monkeypatch):
    wrap(
        monkeypatch,
        Cache,
        "lookup",
        lambda right: lambda self, tables, ids: Hit((hit := right(self, tables, ids)).cached, hit.cached),
    )


def freed_twice(monkeypatch):
    def make(right):
        def release(self, block):
            right(self, block)
            if self.holders[block] == 0 and self._uncached:
                self._uncached.append(block)

        return release

    wrap(monkeypatch, Pool, "release", make)


def held_without_counting(monkeypatch):
    def make(right):
        def acquire(self, block):
            right(self, block)
            if self.holders[block] > 1:
                self.holders[block] -= 1

        return acquire

    wrap(monkeypatch, Pool, "acquire", make)


def never_freed(monkeypatch):
    wrap(monkeypatch, Cache, "end", lambda right: lambda self, tables, forget=False: tables.clear())


def slot_not_dropped(monkeypatch):
    def make(right):
        def vacate(self, sequence, *, forget=False):
            right(self, sequence, forget=forget)
            self._dropped.pop()

        return vacate

    wrap(monkeypatch, Scheduler, "_release", make)


def budget_not_spent(monkeypatch):
    def make(right):
        def add_row(self, draft, sequence, count, blocks):
            right(self, draft, sequence, count, blocks)
            draft.budget += count

        return add_row

    wrap(monkeypatch, Scheduler, "_add_row", make)


def token_on_its_way_forgotten(monkeypatch):
    def make(right):
        def leave(self, sequence):
            right(self, sequence)
            sequence.total = len(sequence.ids)

        return leave

    wrap(monkeypatch, Scheduler, "_preempt", make)


def stale_result_applied(monkeypatch):
    class Never:
        ENDED = object()

    def make(right):
        def apply(self, result, now):
            state = scheduler_module.State
            scheduler_module.State = Never
            try:
                return right(self, result, now)
            finally:
                scheduler_module.State = state

        return apply

    wrap(monkeypatch, Scheduler, "apply", make)


def kept_computed_after_preemption(monkeypatch):
    def make(right):
        def leave(self, sequence):
            computed = sequence.computed
            right(self, sequence)
            sequence.ids = sequence.ids[: max(sequence.prompt_tokens, computed - 1)]

        return leave

    wrap(monkeypatch, Scheduler, "_preempt", make)


def saved_one_token_late(monkeypatch):
    """The state has gone on when it is copied."""
    wrap(
        monkeypatch,
        Snapshots,
        "save",
        lambda right: lambda self, points, hashes, end: right(self, points, hashes, end - 1),
    )


def saved_under_the_block_before(monkeypatch):
    def make(right):
        def save(self, points, hashes, end):
            found = right(self, points, hashes, end)
            if found is not None and end > self.block_tokens:
                points.saved[-1] = end - self.block_tokens, found
            return found

        return save

    wrap(monkeypatch, Snapshots, "save", make)


def found_in_the_plan_that_saves_it(monkeypatch):
    def make(right):
        def save(self, draft, sequence):
            right(self, draft, sequence)
            self.cache.publish_states(sequence.tables, sequence.ids)

        return save

    wrap(monkeypatch, Scheduler, "_save", make)


def not_restored(monkeypatch):
    wrap(monkeypatch, Cache, "restore", lambda right: lambda self, *args: right(self, *args) and None)


def restored_to_another_slot(monkeypatch):
    def make(right):
        def restored(step, new, dropped, rows, *, restored, **others):
            slots = [slot for _, slot in restored]
            turned = [(snapshot, slot) for (snapshot, _), slot in zip(restored, slots[1:] + slots[:1], strict=True)]
            return right(step, new, dropped, rows, restored=tuple(turned), **others)

        return restored

    wrap(monkeypatch, scheduler_module, "StepPlan", make)


def hit_at_the_branch_without_a_snapshot(monkeypatch):
    def make(right):
        def lookup(self, snapshots, hashes, limit):
            hit = right(self, snapshots, hashes, limit)
            return Hit(hit.branch, hit.branch, hit.branch) if hit.tokens else hit

        return lookup

    def start(right):
        def start(self, points, hashes, tokens, branch, total):
            longest = self.longest(hashes, tokens // self.block_tokens) * self.block_tokens
            return right(self, points, hashes, longest, branch, total)

        return start

    wrap(monkeypatch, Cache, "_lookup_state", make)
    wrap(monkeypatch, Snapshots, "start", start)


def hit_of_the_whole_prompt(monkeypatch):
    def make(right):
        return lambda self, tables, ids: right(self, tables, [*ids, 0])

    wrap(monkeypatch, Cache, "lookup", make)


def snapshot_freed_twice(monkeypatch):
    def make(right):
        def publish(self, points, hashes):
            known = [snapshot for tokens, snapshot in points.saved if tokens // self.block_tokens <= len(hashes)]
            right(self, points, hashes)
            for snapshot in known:
                self.pool._uncached.append(snapshot)

        return publish

    wrap(monkeypatch, Snapshots, "publish", make)


def unpublished_snapshot_leaks(monkeypatch):
    def make(right):
        def end(self, points, hashes, *, forget):
            points.saved = []
            right(self, points, hashes, forget=forget)

        return end

    wrap(monkeypatch, Cache, "publish_states", lambda right: lambda self, tables, ids: None)
    wrap(monkeypatch, Snapshots, "end", make)


def kept_computed_position_when_preempted(monkeypatch):
    def make(right):
        def leave(self, sequence):
            computed = sequence.computed // 4 * 4
            right(self, sequence)
            sequence.tables.left = computed

        return leave

    def lookup(right):
        def look(self, tables, ids):
            hit = right(self, tables, ids)
            left = getattr(tables, "left", 0)
            return Hit(left, left, left) if left and hit.branch >= left > hit.tokens else hit

        return look

    monkeypatch.setattr(Tables, "__slots__", (), raising=False)
    monkeypatch.setattr(scheduler_module, "Tables", type("Tables", (Tables,), {}))
    wrap(monkeypatch, Scheduler, "_preempt", make)
    wrap(monkeypatch, Cache, "lookup", lookup)
    monkeypatch.setattr(Cache, "restore", lambda self, tables, hit, total: None)


STATE_FAULTS = [
    saved_one_token_late,
    saved_under_the_block_before,
    found_in_the_plan_that_saves_it,
    not_restored,
    restored_to_another_slot,
    hit_at_the_branch_without_a_snapshot,
    hit_of_the_whole_prompt,
    snapshot_freed_twice,
    unpublished_snapshot_leaks,
    kept_computed_position_when_preempted,
]
STATE_LOADS = [
    Load(seed, windows, blocks=blocks, max_step_tokens=budget, overlap=overlap, replies=(7, 30), snapshots=snapshots)
    for seed, windows, blocks, budget, overlap, snapshots in (
        (0, (None,), 28, 16, True, 12),
        (1, (None, 9), 52, 16, True, 20),
        (2, (None,), 30, 7, False, 3),
        (3, (), 2, 40, True, 30),
        (4, (9,), 26, 40, True, 30),
    )
] + [Load(seed, (None,), max_step_tokens=64, same_prompts=1, salts=("",), resumed=0.0, snapshots=30) for seed in (5, 6)]


@pytest.fixture
def short_interval(monkeypatch):
    monkeypatch.setattr(snapshots_module, "INTERVAL", 12)


FAULTS = [
    window_one_short,
    released_a_block_early,
    published_the_wrong_block,
    published_before_it_was_full,
    without_salt,
    hit_not_cut,
    freed_twice,
    held_without_counting,
    never_freed,
    slot_not_dropped,
    budget_not_spent,
    token_on_its_way_forgotten,
    stale_result_applied,
    kept_computed_after_preemption,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_injected_fault_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        for load in LOADS:
            simulate(load)


def test_workloads_pass_without_injected_fault():
    for load in LOADS:
        simulate(load)


@pytest.mark.usefixtures("short_interval")
@pytest.mark.parametrize("plant", STATE_FAULTS, ids=lambda plant: plant.__name__)
def test_injected_fault_of_recurrent_state_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        for load in STATE_LOADS:
            simulate(load)


@pytest.mark.usefixtures("short_interval")
def test_workloads_with_recurrent_state_pass_without_injected_fault():
    for load in STATE_LOADS:
        simulate(load)
