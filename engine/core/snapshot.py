"""The state of a scheduler as plain data, so that a recording can begin in the middle of a run.

`snapshot` copies everything that events change and that cannot be derived from the rest; `restore` puts it into a new
scheduler with the same configuration. Queues, for example, are derived from the ranks of the sequences.
"""

from collections import OrderedDict
from typing import Literal

import msgspec

from engine.api.messages import Logprob, Submit
from engine.core.adapters import AdaptersState
from engine.core.config import SchedulerConfig
from engine.core.counters import Counters
from engine.core.draft_control import Acceptance, ControlState
from engine.core.fair import FairPolicy
from engine.core.media import block_marks, plan_without_tensors, without_tensors
from engine.core.plan import StepPlan
from engine.core.scheduler import Planned, Scheduler
from engine.core.sequence import Sequence, State
from engine.core.suffixes import RepliesState
from engine.kv.cache import Tables
from engine.kv.pool import Pool
from engine.kv.snapshots import SavePoints


class TablesState(msgspec.Struct, array_like=True):
    """Fields of `engine.kv.cache.Tables`."""

    root: bytes
    hashes: list[bytes]
    blocks: list[list[int]]
    released: list[int]
    published: int
    touch: int
    prompt: int
    written: int
    settled: int
    points: SavePoints


class SequenceState(msgspec.Struct, array_like=True):
    """Fields of `engine.core.sequence.Sequence` that do not follow from its `submit`."""

    submit: Submit
    arrival: int
    scheduling_key: tuple[float, int]
    state: State
    ids: list[int]
    total: int
    computed: int
    charged: int
    slot: int
    blocked: str
    step: int
    rope_length: int
    rope_limit: int
    tables: TablesState
    prompt_logprobs: list[Logprob | None] | None
    arrived: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    cached_tokens: int
    preemptions: int
    speculative: bool
    forced: tuple[int, ...]
    accepted_tokens: int
    rejected_tokens: int
    acceptance: Acceptance
    adapter: int = -1
    proposed: tuple[int, ...] = ()
    routes: list[bytes] | None = None
    routed: int = 0
    stale: bool = False


class PlannedState(msgspec.Struct, array_like=True):
    plan: StepPlan
    sequences: list[int]
    """Indexes into `SchedulerState.sequences`."""
    constrained: list[int]
    at: float


class PoolState(msgspec.Struct, array_like=True):
    """Fields of `engine.kv.pool.Pool`."""

    holders: list[int]
    uncached: list[int]
    cached: list[int]
    keys: dict[int, tuple[int, bytes]]
    """By block."""


class FairState(msgspec.Struct, array_like=True):
    """Fields of `engine.core.fair.FairPolicy` and its queues."""

    served: dict[str, float]
    left: str | None


class SchedulerState(msgspec.Struct, frozen=True):
    step: int
    now: float
    arrivals: int
    free_slots: list[int]
    dropped: list[int]
    sequences: list[SequenceState]
    """Open sequences in the scheduler's order, then ended sequences of steps in flight."""
    in_flight: list[PlannedState]
    deadlines: list[tuple[float, int, Literal["first token", "end"], str]]
    counters: Counters
    pool: PoolState
    control: ControlState
    """Measured step times of adaptive drafts."""
    replies: list[RepliesState]
    """Recent replies, the source of drafts."""
    fair: FairState | None = None
    adapters: AdaptersState | None = None
    aside: tuple[str, ...] = ()
    """Requests that wait for a slot of their adapter."""
    snapshots: PoolState | None = None
    """Pool of the snapshots of recurrent state."""


def snapshot(scheduler: Scheduler) -> SchedulerState:
    """Return the state. It shares lists with the scheduler, so encode it before the next event."""
    ended = (each for planned in scheduler._in_flight for each in planned.sequences if each.state is State.ENDED)
    sequences = [*scheduler._by_id.values(), *{id(each): each for each in ended}.values()]
    index = {id(sequence): at for at, sequence in enumerate(sequences)}
    policy = scheduler._policy
    return SchedulerState(
        step=scheduler.step,
        now=scheduler._now,
        arrivals=scheduler._arrivals,
        free_slots=scheduler._free_slots,
        dropped=scheduler._dropped,
        sequences=[_sequence_state(sequence) for sequence in sequences],
        in_flight=[
            PlannedState(
                plan_without_tensors(planned.plan),
                [index[id(each)] for each in planned.sequences],
                planned.constrained,
                planned.at,
            )
            for planned in scheduler._in_flight
        ],
        deadlines=scheduler._deadlines._entries,
        counters=scheduler.counters,
        pool=_pool_state(scheduler.cache.pool),
        control=scheduler.drafting.control.state,
        replies=scheduler.drafting.replies.state(),
        fair=FairState(policy.served, policy.waiting.left) if isinstance(policy, FairPolicy) else None,
        adapters=scheduler.adapters.state,
        aside=tuple(scheduler._aside),
        snapshots=None if scheduler.cache.snapshots is None else _pool_state(scheduler.cache.snapshots.pool),
    )


def restore(scheduler: Scheduler, state: SchedulerState) -> None:
    """Put a new scheduler into a recorded state. Raises ValueError if they do not match."""
    policy = scheduler._policy
    if isinstance(policy, FairPolicy) != (state.fair is not None):
        raise ValueError("the recorded state and its configuration have different scheduling policies")
    if (scheduler.cache.snapshots is None) != (state.snapshots is None):
        raise ValueError("the recorded state and its configuration differ in snapshots of recurrent state")
    _restore_pool(scheduler.cache.pool, state.pool)
    if scheduler.cache.snapshots is not None and state.snapshots is not None:
        _restore_pool(scheduler.cache.snapshots.pool, state.snapshots)
    if isinstance(policy, FairPolicy) and state.fair is not None:
        policy.served.update(state.fair.served)
        policy.waiting.left = state.fair.left
    sequences = [_sequence(each, scheduler.config) for each in state.sequences]
    for sequence in sequences:
        if sequence.state is State.RUNNING:
            policy.running.add(sequence)
        elif sequence.state is State.WAITING and sequence.id not in state.aside:
            policy.waiting.add(sequence)
    scheduler._by_id.update((each.id, each) for each in sequences if each.state is not State.ENDED)
    scheduler._in_flight.extend(
        Planned(each.plan, [sequences[at] for at in each.sequences], each.constrained, each.at)
        for each in state.in_flight
    )
    scheduler._aside.update((id, scheduler._by_id[id]) for id in state.aside)
    if state.adapters is not None:
        scheduler.adapters.state = state.adapters
    scheduler._deadlines._entries = state.deadlines
    scheduler.drafting.control.state = state.control
    scheduler.drafting.replies.restore(state.replies)
    scheduler.counters = state.counters
    scheduler.step, scheduler._now, scheduler._arrivals = state.step, state.now, state.arrivals
    scheduler._free_slots, scheduler._dropped = state.free_slots, state.dropped


SEQUENCE_FIELDS = tuple(name for name in SequenceState.__struct_fields__ if name not in ("submit", "tables"))


def _sequence_state(sequence: Sequence) -> SequenceState:
    tables = TablesState(*(getattr(sequence.tables, name) for name in TablesState.__struct_fields__))
    same = {name: getattr(sequence, name) for name in SEQUENCE_FIELDS}
    return SequenceState(submit=without_tensors(sequence.submit), tables=tables, **same)


def _sequence(state: SequenceState, config: SchedulerConfig) -> Sequence:
    sequence = Sequence(state.submit, state.arrival, state.arrived, config.longest(state.submit))
    for name in SEQUENCE_FIELDS:
        setattr(sequence, name, getattr(state, name))
    sequence.tables = Tables(state.tables.root, 0, marks=block_marks(state.submit, config.layout.block_tokens))
    for name in TablesState.__struct_fields__:
        setattr(sequence.tables, name, getattr(state.tables, name))
    return sequence


def _pool_state(pool: Pool) -> PoolState:
    keys = {block: key for key, block in pool._by_key.items()}
    return PoolState(pool.holders, pool._uncached, list(pool._cached), keys)


def _restore_pool(pool: Pool, state: PoolState) -> None:
    if len(state.holders) != pool.size or not state.keys.keys() <= set(range(pool.size)):
        raise ValueError(f"the recorded state does not have the {pool.size} blocks of its configuration")
    pool.holders, pool._uncached = state.holders, state.uncached
    pool._cached = OrderedDict.fromkeys(state.cached)
    for block, key in state.keys.items():
        pool._key[block] = key
        pool._by_key[key] = block
