"""The checking device is worth something only if it sees faults: each of these, planted, has to be caught."""

import pytest
from scheduler_simulation import Load, simulate

from engine.core import scheduler as scheduler_module
from engine.core.scheduler import Scheduler
from engine.kv.cache import Cache, Hit
from engine.kv.layout import Group
from engine.kv.pool import Pool

LOADS = [
    Load(seed, windows, blocks=blocks * len(windows), max_step_tokens=budget, overlap=overlap, replies=(7, 30))
    for seed, windows, blocks, budget, overlap in (
        (0, (None,), 28, 16, True),
        (1, (None, 9), 26, 16, True),
        (2, (None,), 30, 7, False),
        (3, (9,), 26, 40, True),
        (4, (None, 5), 40, 16, True),
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
