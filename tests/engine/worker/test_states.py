"""Copies of recurrent states between slots, snapshots and states from before drafts, as a plan demands."""

import torch

from engine.core.plan import StepPlan
from engine.kv.states import StateLayout
from engine.worker.states import States, allocate_states


def states() -> States:
    """Slots with 0 … 3, snapshots with 10, 11, …, and kept states with 20 … 23."""
    made = allocate_states(StateLayout(()), 4, 2, torch.device("cpu"), drafts=True)
    rows = (torch.arange(count, dtype=torch.float32)[:, None] for count in (4, 3, 4))
    slots, snapshots, kept = rows
    return States(made.layout, slots, 10 + snapshots, 20 + kept)


def plan(**copies: tuple) -> StepPlan:
    return StepPlan(1, (), (), (), **copies)


def test_each_slot_is_kept_or_returned() -> None:
    made = states()
    made.restore(plan(kept=(0, 2), returned=(1, 3)))
    assert made.kept.flatten().tolist() == [0, 21, 2, 23]
    assert made.slots.flatten().tolist() == [0, 21, 2, 23]


def test_snapshots_are_restored_before_a_step_and_saved_after_it() -> None:
    made = states()
    made.restore(plan(restored=((2, 0), (1, 3)), saved=((1, 1),)))
    assert made.slots.flatten().tolist() == [12, 1, 2, 11] and made.snapshots.flatten().tolist() == [10, 11, 12]
    made.save(plan(saved=((1, 1), (0, 2))))
    assert made.snapshots.flatten().tolist() == [10, 1, 12]
    assert made.kept.flatten().tolist() == [20, 21, 22, 23]


def test_states_from_before_drafts_take_memory_only_with_drafts() -> None:
    made = (allocate_states(StateLayout(()), 4, 2, torch.device("cpu"), drafts=drafts) for drafts in (False, True))
    assert [len(one.kept) for one in made] == [0, 4]
