"""A device without a model that checks every read, and a driver that runs random workloads through a scheduler over it.

The device stores at each (group, block, offset) a hash of all tokens up to that position. In a step it first makes all
writes, then every read that attention would make: position n of a group reads n itself and what its window reaches. A
read of anything but the hash of that row's own prefix is a fault. The token after a prefix is a pure function of the
prefix, so each stream has one right answer, whatever happened to it on its way.

For recurrent models, each slot contains the hash of a prefix in place of its state. A row must find the hash of its own
prefix.

It shares no code with the scheduler or the cache: tables are built from the plan alone.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from engine.api.config import SpeculationConfig
from engine.api.errors import RequestError
from engine.api.messages import Sampling, Submit
from engine.core.config import EncoderLimits, SchedulerConfig
from engine.core.plan import StepResult
from engine.core.scheduler import Scheduler
from engine.core.sequence import State
from engine.kv.layout import Group, Layout

VOCAB = 7
END, STOP = 5, 6  # rare enough that many streams reach their length

WINDOWS = {  # windows of the groups of a layout; (None, chunk) for chunks, None for full attention
    "full": (None,),
    "two full groups": (None, None),
    "window": (9,),
    "full and window": (None, 9),
    "narrow and wide windows": (1, 4, 13, None),
    "chunks": ((None, 6), (None, 8), None),
}


def make_layout(windows, block_tokens=4):
    limits = [window if isinstance(window, tuple) else (window,) for window in windows]
    groups = tuple(Group(f"g{i}", (i,), *limit) for i, limit in enumerate(limits))
    return Layout(groups, block_tokens, 1, 1, 1, 4)


def prefix_values(ids, salt):
    """The hash after each prefix of 1, 2, … tokens."""
    values, value = [], hash(("start", salt))
    for token in ids:
        value = hash((value, token))
        values.append(value)
    return values


def next_token(ids):
    value = 17
    for token in ids:
        value = (value * 31 + token + 1) % 1000003
    value = value * 7919 % 1000003
    return value % 5 if value % 29 else END + value % 2


def expected(submit, max_context, sources=None):
    """The undisturbed stream of a request: its tokens, why it ends and the stop token. By itself, with a fresh mind."""
    ids = list(submit.prompt) + list(submit.emitted)
    out = list(submit.emitted)
    if sources is not None:
        max_context = min(max_context, submit.source + sources.reply)
    while True:
        if out:
            if out[-1] in submit.stop_token_ids and len(out) > submit.sampling.min_tokens:
                return out, "stop", out[-1]
            if out[-1] in submit.eos_token_ids and not submit.ignore_eos and len(out) > submit.sampling.min_tokens:
                return out, "stop", None
        if len(out) >= submit.max_tokens or len(ids) >= max_context:
            return out, "length", None
        ids.append(next_token(ids))
        out.append(ids[-1])


@dataclass
class Known:
    ids: list
    salt: object
    tables: list  # of each group
    written: int = 0


class Device:
    """Simulated device. `salts`: slot -> salt of its request. Plans carry no salts, so the driver passes them in."""

    def __init__(self, layout, blocks, slots, max_step_tokens, snapshots=None, draft_rows=0):
        self.draft_rows = draft_rows
        self.layout, self.blocks, self.slots, self.max_step_tokens = layout, blocks, slots, max_step_tokens
        self.memory = {}
        self.table = {}
        self.snapshots = snapshots
        self.states, self.saved, self.kept = {}, {}, {}

    def run(self, plan, salts):
        """`salts[i]` is what else the contents of row i depend on."""
        assert sum(row.count for row in plan.rows) <= self.max_step_tokens, "a step over its budget"
        assert sum(row.samples for row in plan.rows) <= self.slots + self.draft_rows, "more logits than planned"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of one slot"
        for slot in plan.dropped:
            del self.table[slot]
        for new in plan.new:
            assert new.slot not in self.table and 0 <= new.slot < self.slots, "a slot in use"
            (first,) = (row for row in plan.rows if row.slot == new.slot)
            assert not new.source or (first.first == 0 and first.count > new.source), "a source is not read whole"
            self.table[new.slot] = Known(list(new.ids), None, [[] for _ in self.layout.groups])
        values, writers = {}, {}
        for row, salt in zip(plan.rows, salts, strict=True):
            self._write(row, salt, values, writers)
        for row in plan.rows:
            self._read(row, values[row.slot])
        if self.snapshots is not None:
            self._run_states(plan, values)
        copies = plan.restored or plan.saved or plan.kept or plan.returned
        assert self.snapshots is not None or not copies, "copies of states of a model without state"
        sampled = [self._sample(row) for row in plan.rows]
        further = {at: tokens[1:] for at, tokens in enumerate(sampled) if len(tokens) > 1}
        drafts = {at: self._draft(row) for at, row in enumerate(plan.rows) if row.lookahead}
        return StepResult(plan.step, tuple(tokens[0] for tokens in sampled), further, drafts=drafts)

    def _run_states(self, plan, values):
        """The state that a dropped request left is not cleared: only position 0 begins with zeros."""
        for snapshot, slot in plan.restored:
            assert slot in {new.slot for new in plan.new}, "a state is restored under a running request"
            self.states[slot] = self.saved[snapshot]
        assert not set(plan.kept) & set(plan.returned), "a state is kept and returned"
        assert len(set(plan.kept)) == len(plan.kept), "a state is kept twice"
        assert not {new.slot for new in plan.new} & {*plan.kept, *plan.returned}, "a request begins with a kept state"
        for slot in plan.kept:
            self.kept[slot] = self.states[slot]
        for slot in plan.returned:
            self.states[slot] = self.kept[slot]
        for row in plan.rows:
            mine = values[row.slot]
            found = self.states.get(row.slot) if row.first else None
            assert not row.first or found == mine[row.first - 1], f"slot {row.slot}: not its state at {row.first}"
            self.states[row.slot] = mine[row.first + row.count - 1]
        targets = [snapshot for _, snapshot in plan.saved]
        assert len(set(targets)) == len(targets), "two states are saved to one snapshot"
        for slot, snapshot in plan.saved:
            assert 1 <= snapshot <= self.snapshots, f"a copy to snapshot {snapshot}"
            assert slot in {row.slot for row in plan.rows}, "a state is saved that the step did not compute"
            assert not any(row.drafts for row in plan.rows if row.slot == slot), "a state with drafts is saved"
            self.saved[snapshot] = self.states[slot]

    def _write(self, row, salt, values, writers):
        known, size = self.table[row.slot], self.layout.block_tokens
        for table, blocks in zip(known.tables, row.blocks, strict=True):
            table.extend(blocks)
        assert len(row.drafts) < row.count, "a row of drafts alone"
        assert row.count >= 1 and row.first + row.count - len(row.drafts) <= len(known.ids), "positions without tokens"
        assert not row.drafts or row.sample, "drafts that nothing verifies"
        values[row.slot] = prefix_values([*known.ids, *row.drafts], salt)
        for group, table in enumerate(known.tables):
            for position in range(row.first, row.first + row.count):
                block = table[position // size]
                assert 0 < block < self.blocks, f"a write to block {block}"
                place = group, block, position % size
                value = values[row.slot][position]
                assert writers.setdefault((block, position % size), (group, value)) == (group, value), "two writers"
                self.memory[place] = value
                for other in range(len(self.layout.groups)):  # a block is one group's: the bytes are the same
                    if other != group:
                        self.memory.pop((other, block, position % size), None)

    def _read(self, row, values):
        known, size = self.table[row.slot], self.layout.block_tokens
        for index, group in enumerate(self.layout.groups):
            table = known.tables[index]
            for position in range(row.first, row.first + row.count):
                first = 0 if group.window is None else max(0, position - (group.window - 1))
                if group.chunk is not None:
                    first = position - position % group.chunk
                for read in range(first, position + 1):
                    found = self.memory.get((index, table[read // size], read % size))
                    assert found == values[read], f"slot {row.slot}: position {position} reads {read}, not its own"

    def _sample(self, row):
        """The tokens of a row: up to the first that differs from its draft."""
        if not row.sample:
            return (-1,)
        known, sampled = self.table[row.slot], []
        wanted = row.first + row.count - len(row.drafts)
        assert len(known.ids) == wanted, "a token is drawn before all known ones are computed"
        for draft in (*row.drafts, None):
            known.ids.append(next_token(known.ids))
            sampled.append(known.ids[-1])
            if sampled[-1] != draft:
                break
        return tuple(sampled)

    def _draft(self, row):
        """The tokens of a draft model, every third of them wrong. It computes the position before each of them."""
        assert row.lookahead <= self.draft_rows, "a draft that is longer than its maximum"
        known, drafts = self.table[row.slot], ()
        for _ in range(row.lookahead):
            ids = [*known.ids, *drafts]
            for table in known.tables:
                block = table[(len(ids) - 1) // self.layout.block_tokens]
                assert 0 < block < self.blocks, f"a draft model writes to block {block}"
            drafts += ((next_token(ids) + (len(ids) % 3 == 0)) % VOCAB,)
        return drafts


@dataclass
class Load:
    """A random workload. `requests` come over the first steps; odds are per step."""

    seed: int
    windows: tuple
    blocks: int = 40
    requests: int = 24
    max_running: int = 6
    max_step_tokens: int = 16
    max_context: int = 90
    policy: str = "fcfs"
    prefix_cache: bool = True
    overlap: bool = True
    abort: float = 0.05
    salts: tuple = ("", "a")
    resumed: float = 0.2
    same_prompts: int = 3
    replies: tuple = (1, 2, 7, 30)
    sources: EncoderLimits | None = None
    snapshots: int | None = None
    scheduler: type = Scheduler
    speculation: SpeculationConfig = SpeculationConfig()
    draft_cost: float = 0.0  # time of a draft token, relative to a step without drafts


@dataclass
class Outcome:
    streams: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    submits: dict = field(default_factory=dict)
    aborted: set = field(default_factory=set)
    refused: int = 0
    steps: int = 0
    now: float = 0.0
    scheduler: object = None


def make_submits(load, rng):
    bank = [[rng.randrange(5) for _ in range(rng.randrange(9, 60))] for _ in range(load.same_prompts)]
    submits = []
    for number in range(load.requests):
        prompt = rng.choice(bank)
        prompt = prompt[: rng.randrange(1, len(prompt) + 1)] + [
            rng.randrange(5) for _ in range(rng.choice((0, 0, 1, 5)))
        ]
        submit = Submit(
            f"r{number}",
            tuple(prompt),
            Sampling(min_tokens=rng.choice((0, 0, 3, 20))),
            rng.choice(load.replies),
            eos_token_ids=(END,),
            stop_token_ids=rng.choice(((), (STOP,))),
            ignore_eos=rng.random() < 0.2,
            priority=rng.randrange(3),
            salt=rng.choice(load.salts),
        )
        if load.sources is not None:
            begins = rng.randrange(1, 4)
            source = rng.randrange(1, max(2, min(len(prompt) + 1, load.sources.longest + 3)))
            prompt = (*prompt[:source], *(rng.randrange(5) for _ in range(begins)))
            submit = msgspec.structs.replace(submit, prompt=prompt, source=source)
        if rng.random() < load.resumed:
            done, _, _ = expected(submit, load.max_context, load.sources)
            submit = msgspec.structs.replace(submit, emitted=tuple(done[: rng.randrange(0, len(done) + 1)]))
        submits.append(submit)
    return submits


def run(load):
    """Runs a workload to its end, checking the device's reads, the blocks' holders and the scheduler's progress."""
    rng = random.Random(load.seed)
    layout = make_layout(load.windows)
    config = SchedulerConfig(
        layout=layout,
        blocks=load.blocks,
        max_context=load.max_context,
        max_running=load.max_running,
        max_step_tokens=load.max_step_tokens,
        policy=load.policy,
        prefix_cache=load.prefix_cache,
        sources=load.sources,
        snapshots=load.snapshots,
        speculation=load.speculation,
    )
    scheduler = load.scheduler(config)
    device = Device(layout, load.blocks, load.max_running, load.max_step_tokens, load.snapshots, load.speculation.rows)
    outcome = Outcome(scheduler=scheduler)
    todo = deque(make_submits(load, rng))
    in_flight, drafted = deque(), deque()
    idle = 0
    while todo or scheduler.running or scheduler.waiting or in_flight:
        outcome.steps += 1
        assert outcome.steps < 5000, f"seed {load.seed}: no end"
        while todo and rng.random() < 0.5:
            _submit(scheduler, todo.popleft(), outcome)
        _abort_some(scheduler, load, rng, outcome)
        planned = scheduler.plan(outcome.now)
        check_holders(scheduler)
        if planned is not None:
            # the device runs a step as soon as it is planned; its result is delivered later
            in_flight.append(device.run(planned.plan, [s.submit.salt for s in planned.sequences]))
            drafted.append(sum(len(row.drafts) for row in planned.plan.rows))
        if in_flight and (planned is None or len(in_flight) == (2 if load.overlap else 1)):
            outcome.now += 1.0 + load.draft_cost * drafted.popleft()
            _settle(scheduler, in_flight.popleft(), outcome)
        idle = 0 if in_flight or planned or todo else idle + 1
        assert idle < 2 or not (scheduler.running or scheduler.waiting), (
            f"seed {load.seed}: nothing runs, requests wait"
        )
    assert scheduler.cache.pool.used == 0, f"seed {load.seed}: blocks leak"
    assert scheduler.cache.snapshots is None or scheduler.cache.snapshots.pool.used == 0, "snapshots leak"
    assert scheduler.plan(0.0) is None
    return outcome


def _submit(scheduler, submit, outcome):
    outcome.submits[submit.id] = submit
    outcome.streams[submit.id] = list(submit.emitted)
    try:
        delta = scheduler.submit(submit, outcome.now)
    except RequestError:
        outcome.refused += 1
        del outcome.submits[submit.id]
        return
    if delta is not None:
        outcome.ends[submit.id] = delta.finish, delta.stop_reason


def _abort_some(scheduler, load, rng, outcome):
    if outcome.submits and rng.random() < load.abort:
        id = rng.choice(sorted(outcome.submits))
        delta = scheduler.end(id, "abort")
        assert (delta is None) == (id in outcome.ends), f"{id}: an abort of what had ended"
        if delta is not None:
            outcome.ends[id] = "abort", None
            outcome.aborted.add(id)


def _settle(scheduler, result, outcome):
    settled = scheduler.apply(result, outcome.now)
    for delta in settled.deltas:
        assert delta.id not in outcome.ends, f"{delta.id}: a token after its end"
        outcome.streams[delta.id] += delta.ids
        if delta.finish is not None:
            outcome.ends[delta.id] = delta.finish, delta.stop_reason


def check_holders(scheduler):
    """Check that reference counts equal the entries in block tables, and that unreferenced blocks are free."""
    held, unpublished = Counter(), Counter()
    for sequence in scheduler._by_id.values():
        tables = [block for blocks in sequence.tables.blocks for block in blocks if block]
        saved = [snapshot for _, snapshot in sequence.tables.points.saved]
        assert sequence.state is State.RUNNING or not (tables or saved), f"{sequence.id} waits and holds blocks"
        held.update(tables)
        unpublished.update(saved)
    _check_pool(scheduler.cache.pool, held)
    if scheduler.cache.snapshots is not None:
        _check_pool(scheduler.cache.snapshots.pool, unpublished)


def _check_pool(pool, held):
    for block in range(1, pool.size):
        assert pool.holders[block] == held[block], f"block {block}: {pool.holders[block]} holders, {held[block]} tables"
    free = list(pool._uncached) + list(pool._cached)
    assert len(free) == len(set(free)) == pool.free == pool.size - 1 - len(held), "the free list is wrong"


def check_streams(load, outcome):
    for id, submit in outcome.submits.items():
        tokens, finish, reason = expected(submit, load.max_context, load.sources)
        got = outcome.streams[id]
        if id in outcome.aborted:
            assert got == tokens[: len(got)], f"seed {load.seed}: {id} was aborted and had other tokens"
        else:
            assert got == tokens, f"seed {load.seed}: {id} gave {got}, not {tokens}"
            assert outcome.ends[id] == (finish, reason), f"seed {load.seed}: {id} ended with {outcome.ends[id]}"


def simulate(load):
    outcome = run(load)
    check_streams(load, outcome)
    return outcome
