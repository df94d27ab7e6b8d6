"""Plans the next step: a pure function of the events so far, without clock, I/O, torch or randomness; times are inputs.

One rule covers all rows: computed positions catch up with known tokens. Decode, chunked prefill, prefix hits and
resumed
sequences are the same case. A step first gives a row to every running sequence that lacks one token, then the remaining
token budget to partially computed prompts, then admits queued sequences in the order of their ranks. Ranks are assigned
by the policy (engine/core/policies.py, engine/core/fair.py).

Planning is optimistic: a token that a step in flight is sampling counts as known until its result says that it ended
the request. Tokens sampled for a request that has ended meanwhile are dropped. Grammars do not change this, because
only the mask waits for the token (engine/core/plan.py). Drafts need the last token: no step is planned while a step in
flight samples a token of a request that may have drafts (engine/core/drafting.py).

If blocks are missing, the running sequence with the worst rank is preempted; it is queued and recomputed later. The
sequence with the best rank is never preempted for another one, and it fits by itself (or was refused when submitted),
so it always makes progress.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.api.errors import NOTHING_LEFT, RequestError, StepError
from engine.api.events import AdapterMissing, Admitted, Blocked, Ended, Event, Expired, Outgrown, Preempted, Queued
from engine.api.hashes import root_hash
from engine.api.messages import Alignment, Delta, Failed, Finish, Logprob, Pooled, Stats, Submit
from engine.core.adapters import Adapters
from engine.core.config import SchedulerConfig
from engine.core.counters import Counters
from engine.core.deadlines import Deadlines
from engine.core.drafting import Drafting
from engine.core.fair import FairPolicy
from engine.core.media import block_marks, step_part
from engine.core.plan import NewRow, Row, StepPlan, StepResult
from engine.core.policies import FirstComeFirstServed, PriorityPolicy, SchedulingPolicy
from engine.core.sequence import Sequence, State
from engine.kv.cache import MISS, Blocks, Cache, Tables
from engine.kv.layout import blocks_of

HOLDERS = 3  # number of requests that are listed as holders of blocks
MOST_AGAIN = 8
"""Tokens of a recurrent model that are computed again in a step with further drafts. With more, a step without drafts
makes its state current."""

POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityPolicy,
    "fair": FairPolicy,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its sequences."""

    plan: StepPlan
    sequences: list[Sequence]  # one for each row
    constrained: list[int]  # indexes of rows that a grammar or a thinking budget may constrain
    at: float = 0.0  # time of planning


@dataclass(slots=True)
class AppliedStep:
    """Outputs of a step by request."""

    deltas: list[Delta] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


@dataclass(slots=True)
class _Draft:
    """A plan under construction."""

    step: int
    budget: int
    drafts: int  # draft tokens that it has room for
    lookahead: int  # tokens that the draft model may draft for the next step
    again: int = 0  # tokens that it has room to compute again after rejected drafts, beside new drafts
    embeddings: int = 0  # of media that the tower may compute
    rows: list[Row] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    preempted: bool = False


Notify = Callable[[str, float, Event], None]


class Scheduler:
    """Continuous batching over one KV pool. `notify` gets (request id, time, event) for every event except tokens."""

    def __init__(self, config: SchedulerConfig, notify: Notify | None = None) -> None:
        layout = config.layout
        self.config = config
        prefix = config.prefix_cache and config.sources is None
        self.cache = Cache(layout.groups, layout.block_tokens, config.blocks, prefix=prefix, snapshots=config.snapshots)
        self.counters = Counters()
        self.adapters = Adapters(config.adapters, config.adapter_slots)
        self.drafting = Drafting(config.speculation, shared=prefix)
        self.step = 0
        self._notify = notify or _ignore_event
        self._now = 0.0  # time of the last event that had one
        self._slots = config.slots
        self._free_slots = list(range(self._slots - 1, -1, -1))
        self._dropped: list[int] = []  # slots freed since the last plan
        self._policy = POLICIES[config.policy]()
        self._running, self._waiting = self._policy.running, self._policy.waiting
        self._aside: dict[str, Sequence] = {}  # queued requests that wait for a slot of their adapter
        self._deadlines = Deadlines()
        self._by_id: dict[str, Sequence] = {}
        self._in_flight: deque[Planned] = deque()
        self._arrivals = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._aside)

    @property
    def waiting_for_adapters(self) -> int:
        """Number of queued requests that wait for an adapter or a slot for it."""
        return len(self._aside)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def stats(self) -> Stats:
        counters, pool = self.counters, self.cache.pool
        return Stats(
            step=self.step,
            running=len(self._running),
            waiting=self.waiting,
            kv_blocks_used=pool.used,
            kv_blocks_total=pool.size - 1,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            cached_tokens=counters.cached_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            drafts=counters.drafts,
            draft_tokens=counters.draft_tokens,
            accepted_tokens=counters.accepted_tokens,
            accepted_at=tuple(counters.accepted_at),
            drafting_seconds=self.drafting.seconds,
            step_tokens=tuple(counters.steps),
            media_encoded=counters.media_encoded,
            media_cached=counters.media_cached,
            media_seconds=counters.media_seconds,
            adapters_loaded=len(self.adapters.names),
            adapters_active=self.adapters.active,
            adapter_evictions=self.adapters.state.evictions,
            adapter_waiting=self.waiting_for_adapters,
        )

    # Events

    def check(self, submit: Submit) -> None:
        """Raise RequestError for a request that can never be served, or whose id is in use."""
        if submit.id in self._by_id:
            raise RequestError(f"request id {submit.id!r} is in use; ids of open requests must differ", "id")
        if submit.adapter and submit.adapter not in self.adapters.names:
            known = ", ".join(self.adapters.names) or "none"
            raise RequestError(f"adapter {submit.adapter!a}: not loaded; loaded are {known}", "model")
        self.config.check(submit)

    def submit(self, submit: Submit, now: float) -> Delta | None:
        """Add a request. A resumed request that is already complete ends at once, with the returned Delta. Raises
        RequestError if it can never be served. `now`: its arrival time, which may precede the last event."""
        self.check(submit)
        self._now = max(self._now, now)
        self._arrivals += 1
        sequence = Sequence(submit, self._arrivals, now, self.config.longest(submit))
        sequence.speculative = self.config.speculates(submit)
        sequence.adapter = self.adapters.version_of(submit.adapter)
        finish, reason = sequence.finish() if submit.emitted else (None, None)
        if finish is not None:
            return Delta(submit.id, finish=finish, stop_reason=reason, timing=sequence.timing())
        self._set_rope_length(sequence, sequence.prompt_tokens)
        if sequence.total > sequence.rope_limit:
            self._set_rope_length(sequence, sequence.total)
        self._by_id[submit.id] = sequence
        self.adapters.add(sequence.adapter)
        self._deadlines.add(sequence, self._by_id)
        self._policy.arrive(sequence)
        ahead = self._waiting.before(sequence)
        self._waiting.add(sequence)
        self._notify(submit.id, now, Queued(sequence.prompt_tokens, len(submit.emitted), ahead))
        return None

    def propose(self, id: str, tokens: tuple[int, ...]) -> None:
        """Set the draft of the next tokens of a request. Its grammar or thinking budget forces these tokens, or a draft
        model drafted them and the grammar allows them."""
        sequence = self._by_id.get(id)
        if sequence is not None:
            sequence.forced, sequence.proposed = tokens, ()

    def proposed(self, id: str) -> tuple[int, ...]:
        """Return the draft of a model for the next tokens of a request."""
        return self._by_id[id].proposed if id in self._by_id else ()

    def end(self, id: str, finish: Finish) -> Delta | None:
        """End a request from outside (abort, or a finished grammar). Its blocks are free in the next plan. Returns None
        for an unknown id."""
        sequence = self._by_id.get(id)
        if sequence is None:
            return None
        self._end(sequence, finish)
        return Delta(id, finish=finish, timing=sequence.timing())

    def late(self, now: float) -> bool:
        """Return whether a deadline has passed."""
        return self._deadlines.due(now)

    def expire(self, now: float) -> list[Delta]:
        """End the requests whose deadlines have passed."""
        self._now = now
        deltas = []
        for sequence, wanted in self._deadlines.passed(now, self._by_id):
            self._notify(sequence.id, now, Expired(wanted, sequence.state is State.RUNNING))
            self._end(sequence, "deadline")
            deltas.append(Delta(sequence.id, finish="deadline", timing=sequence.timing()))
        return deltas

    def end_all(self) -> None:
        """Abort every request without deltas, because no client is connected."""
        for sequence in list(self._by_id.values()):
            self._end(sequence, "abort")

    def reset_prefix_cache(self) -> None:
        self.cache.forget_all()
        self.drafting.replies.clear()

    def load_adapter(self, name: str) -> int:
        """Register an adapter, or a new version of it. Requests that have not started use it. Return the number of the
        version."""
        version = self.adapters.load(name)
        for sequence in self._by_id.values():
            if sequence.submit.adapter == name and sequence.scheduled is None:
                self.adapters.replace(sequence.adapter, version)
                sequence.adapter = version
                self._set_rope_length(sequence, sequence.rope_length)
        return version

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Open requests with it are completed."""
        self.adapters.unload(name)

    def adapter_prepared(self, version: int) -> None:
        """Note that this version can be moved to a slot."""
        self.adapters.prepared(version)

    def adapter_failed(self, version: int) -> list[Delta]:
        """End the requests that wait for a version that could not be read."""
        self.adapters.failed(version)
        found = [each for each in self._by_id.values() if each.adapter == version and each.scheduled is None]
        for sequence in found:
            self._end(sequence, "error")
        return [Delta(sequence.id, finish="error", timing=sequence.timing()) for sequence in found]

    def plan(self, now: float) -> Planned | None:
        """Return the next step, or None if nothing can be computed until a result or a request arrives."""
        self._now = now
        if self._waits_for_drafts:
            return None
        media = self.config.media
        embeddings = 0 if media is None else media.step_tokens
        drafts = self._room_for_drafts()
        lookahead = drafts if self.config.speculation.has_model else 0
        again = (self.config.max_step_tokens - len(self._running)) // 2 if self.config.rolls_back else 0
        draft = _Draft(self.step + 1, self.config.max_step_tokens, drafts, lookahead, again, embeddings)
        if self.cache.snapshots is not None:
            for sequence in self._running:
                self.cache.publish_states(sequence.tables, sequence.ids)
        self._policy.begin()
        prompts = self._plan_tokens(draft)
        for sequence in prompts:
            if draft.budget and sequence.state is State.RUNNING:
                self._plan_prompt(draft, sequence)
        self._policy.charge(draft.sequences)
        self._queue_again()
        while draft.budget and len(self._waiting) and not draft.preempted and self._admit(draft, now):
            pass
        if not draft.rows:
            return None
        self.step = draft.step
        plan = StepPlan(
            draft.step,
            tuple(draft.new),
            tuple(self._dropped),
            tuple(draft.rows),
            restored=tuple(draft.restored),
            saved=tuple(draft.saved),
            adapters=tuple(draft.adapters),
            kept=tuple(draft.kept),
            returned=tuple(draft.returned),
        )
        self._dropped.clear()
        constrained = [i for i, s in enumerate(draft.sequences) if s.constrained and draft.rows[i].sample]
        planned = Planned(plan, draft.sequences, constrained, now)
        self._in_flight.append(planned)
        self.counters.steps.append(self.config.max_step_tokens - draft.budget)
        return planned

    def apply(self, result: StepResult, now: float) -> AppliedStep:
        """Apply the result of the oldest step in flight."""
        self._now = now
        planned = self._in_flight.popleft()
        assert planned.plan.step == result.step, f"result {result.step} came for step {planned.plan.step}"
        settled = AppliedStep()
        if result.media is not None:
            self.counters.media(result.media)
        for index, sequence in enumerate(planned.sequences):
            if sequence.state is State.ENDED:
                continue
            row = planned.plan.rows[index]
            if index in result.failed:
                self._fail(sequence, result.failed[index], settled)
                continue
            if sequence.prompt_logprobs is not None:
                _keep_prompt_logprobs(sequence, row, result.prompt_logprobs.get(index, ()))
            if sequence.routes is not None and not row.sample:
                sequence.add_routes(row.first, result.routes.get(index, ()))
            if row.sample:
                settled.deltas.append(self._append_tokens(sequence, row, result, index, now))
            elif sequence.total == sequence.limit and row.first + row.count == sequence.limit:
                sequence.first_token = sequence.last_token = now
                pooled = sequence.submit.pooling is not None
                self._end(sequence, "stop" if pooled else "length")
                if pooled:
                    settled.deltas.append(_pooled(sequence, result.pooled.get(index)))
                else:
                    settled.deltas.append(_last_of_scored(sequence, result.alignments.get(index)))
        self.drafting.measure(planned.plan, planned.at, now, running=bool(self._running))
        return settled

    # One step

    def _plan_tokens(self, draft: _Draft) -> list[Sequence]:
        """Add rows of all running sequences that lack one token. Return those that lack more."""
        prompts: list[Sequence] = []
        outgrown: list[Sequence] = []
        rows, sequences, nothing, step = draft.rows, draft.sequences, self.cache.no_blocks, draft.step
        for sequence in self._running.items:  # a preemption removes the last item: this one or a later one
            first, total = sequence.computed, sequence.total
            missing = min(total, sequence.last) - first
            if missing != 1 and not (sequence.stale and 1 < missing <= min(draft.again + 1, MOST_AGAIN)):
                if missing > 0:
                    prompts.append(sequence)
                continue
            if total > sequence.rope_limit:
                outgrown.append(sequence)
                continue
            blocks, drafts = nothing, tuple[int, ...]()
            known = first + missing
            sample = total == known and total < sequence.limit
            if sample and draft.drafts and total == len(sequence.ids) and self.drafting.may_draft(sequence):
                drafts = self._drafts(draft, sequence)
            end = known + len(drafts)
            if end > sequence.tables.touch:
                room = self._allocate(draft, sequence, end)
                if room is None:
                    continue
                blocks = room
            sequence.computed = known
            sequence.total = total + sample
            sequence.step = step
            row = Row(sequence.slot, first, end - first, sample, blocks, drafts)
            rows.append(self._look_ahead(draft, sequence, row) if sample and draft.lookahead else row)
            sequences.append(sequence)
            draft.budget -= end - first - 1
            draft.drafts -= len(drafts)
            draft.again -= missing - 1
            self._return_state(draft, sequence, drafts)
            if known >= sequence.tables.points.due:  # then it has no drafts
                self._save(draft, sequence)
        draft.budget -= len(rows)
        for sequence in outgrown:
            if sequence.state is State.RUNNING and not sequence.pending:
                self._preempt(sequence)
                self._notify(sequence.id, self._now, Outgrown(sequence.rope_limit))
        return prompts

    @property
    def _waits_for_drafts(self) -> bool:
        """Return whether a step in flight samples a token that a draft may follow, or verifies a draft, whose number of
        accepted tokens is unknown."""
        if not self.config.speculation.enabled or not self._in_flight:
            return False
        allowed = self.drafting.allows(len(self._running), self.step + 1)
        return any(
            sequence.pending
            and sequence.state is not State.ENDED
            and (bool(row.drafts) or (allowed and self.drafting.may_draft(sequence)))
            for planned in self._in_flight
            for sequence, row in zip(planned.sequences, planned.plan.rows, strict=True)
        )

    def _room_for_drafts(self) -> int:
        """Return the number of draft tokens in a step: rows of logits, and half of the tokens, that requests leave."""
        config = self.config
        if not config.speculation.enabled or not self.drafting.allows(len(self._running), self.step + 1):
            return 0
        rows = config.slots + config.speculation.rows - min(config.slots, len(self._running) + self.waiting)
        return min(rows, (config.max_step_tokens - len(self._running)) // 2)

    def _drafts(self, draft: _Draft, sequence: Sequence) -> tuple[int, ...]:
        """Return the drafts of the next tokens. They end where another sequence would have to give up blocks."""
        count = self._longest_draft(sequence, sequence.total, draft.drafts)
        return self.drafting.propose(sequence, count, len(self._running))

    def _longest_draft(self, sequence: Sequence, known: int, most: int) -> int:
        """Return the longest draft, of at most `most` tokens, after this many known tokens."""
        # The last token that the limit allows is only sampled.
        count = min(most, sequence.limit - 1 - known, sequence.rope_limit - known)
        count = min(count, self.cache.drafts_before_save(sequence.tables, known))
        if known + count > sequence.tables.touch:
            fresh = blocks_of(known + count, self.cache.block_tokens) - blocks_of(known, self.cache.block_tokens)
            if fresh and fresh * len(self.cache.groups) > self.cache.spare(len(self._running)):
                count = min(count, -known % self.cache.block_tokens)
        return count

    def _look_ahead(self, draft: _Draft, sequence: Sequence, row: Row) -> Row:
        """Return the row with the number of tokens that the draft model drafts after it, and with blocks for them. They
        follow the token that the row samples last if all of its drafts are accepted."""
        known, most = row.first + row.count + 1, draft.lookahead
        count = self._longest_draft(sequence, known, self.drafting.lookahead(sequence, most, len(self._running)))
        if count < 1:
            return row
        blocks = self.cache.grow(sequence.tables, sequence.ids, row.first, known + count)
        if blocks is None:
            return row
        draft.lookahead -= count
        joined = tuple(own + more for own, more in zip(row.blocks, blocks, strict=True))
        return msgspec.structs.replace(row, blocks=joined, lookahead=count)

    def _plan_prompt(self, draft: _Draft, sequence: Sequence) -> None:
        """Add the next chunk of a running sequence that lacks several tokens."""
        first = sequence.computed
        known = min(sequence.total, sequence.last)
        end = self.cache.cut(sequence.tables, first, min(known, first + draft.budget), known)
        embeddings = 0
        if self.config.media is not None:
            part = step_part(self.config.media, sequence.submit, (first, end), draft.embeddings, enters=False)
            end, embeddings = part.end, part.embeddings
            if end == first:
                return
        blocks = self._allocate(draft, sequence, end)
        if blocks is not None:
            draft.embeddings -= embeddings
            self._add_row(draft, sequence, end - first, blocks)

    def _admit(self, draft: _Draft, now: float) -> bool:
        """Admit the first queued sequence if there is a place in the batch, and blocks for all its tokens in addition
        to one for each running sequence, which would soon preempt it otherwise. A sequence whose adapter has no slot is
        set aside. Return whether the next one may be admitted."""
        sequence, spare = self._waiting.first, self.cache.spare(len(self._running))
        adapter_slot = self.adapters.find_slot(sequence.adapter, started=sequence.scheduled is not None)
        if adapter_slot is None:
            self._set_aside(sequence)
            return True
        source = sequence.submit.source
        at_once = sequence.total if self.config.whole else source + 1 if source else 1
        if sequence.pending or at_once > draft.budget:
            return False
        if not self._free_slots:
            self._block(sequence, Blocked("places", self._slots, 0))
            return False
        if spare < 1:
            self._block(sequence, Blocked("blocks", 1, 0, self._holders()))
            return False
        if sequence.total > sequence.rope_limit:
            self._set_rope_length(sequence, sequence.total)
        scored = sequence.sampling.prompt_logprobs is not None or sequence.routes is not None
        may_read = self.config.prefix_cache and not scored and self.config.may_skip(sequence.submit)
        hit = self.cache.lookup(sequence.tables, sequence.ids) if may_read else MISS
        wanted = self.cache.blocks_needed(sequence.tables, hit, sequence.total, self.config.max_step_tokens)
        if wanted > spare:
            self._block(sequence, Blocked("blocks", wanted, spare, self._holders()))
            return False
        end = min(sequence.total, hit.tokens + draft.budget)
        if self.config.media is not None:
            part = step_part(self.config.media, sequence.submit, (hit.tokens, end), draft.embeddings, enters=True)
            if part.end == hit.tokens:
                return False
            end = part.end
            draft.embeddings -= part.embeddings
        self._waiting.remove(sequence)
        sequence.blocked = ""
        sequence.become(State.RUNNING)
        sequence.slot = self._free_slots.pop()
        self._running.add(sequence)
        self.cache.start(sequence.tables, hit)
        sequence.computed = hit.tokens
        sequence.charged = max(sequence.charged, hit.tokens)
        filled = (self.adapters.start if sequence.scheduled is None else self.adapters.use)(
            sequence.adapter, adapter_slot
        )
        if filled:
            draft.adapters.append((adapter_slot, sequence.adapter))
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.cached_tokens = min(hit.tokens, sequence.prompt_tokens)
            self.counters.prompt(sequence.prompt_tokens, hit, looked=may_read)
        self._notify(sequence.id, now, Admitted(draft.step, len(sequence.ids), hit.tokens))
        snapshot = self.cache.restore(sequence.tables, hit, sequence.total)
        if snapshot is not None:
            draft.restored.append((snapshot, sequence.slot))
        end = self.cache.cut(sequence.tables, hit.tokens, end, sequence.total)
        added = self.cache.grow(sequence.tables, sequence.ids, hit.tokens, end)
        assert added is not None, "the free blocks were checked before"
        draft.new.append(
            NewRow(
                sequence.slot,
                tuple(sequence.ids),
                sequence.prompt_tokens,
                sequence.sampling,
                tuple(sequence.stops),
                sequence.rope_length,
                sequence.submit.pooling,
                sequence.submit.segments,
                source,
                adapter_slot,
                sequence.submit.media,
            )
        )
        self._add_row(draft, sequence, end - hit.tokens, tuple(map(tuple, sequence.tables.blocks)))
        self._policy.charge((sequence,))
        return True

    def _set_aside(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue until the adapters change, so that the next ones can be admitted."""
        name, slots = sequence.submit.adapter, self.config.adapter_slots or 0
        ready = self.adapters.state.versions[sequence.adapter].ready
        self._block(sequence, AdapterMissing(name, slots if ready else 0))
        self._waiting.remove(sequence)
        self._aside[sequence.id] = sequence

    def _queue_again(self) -> None:
        """Queue the sequences that were set aside, if slots or adapters have changed since."""
        state = self.adapters.state
        if state.changed:
            state.changed, state.reserved = False, None
            for sequence in self._aside.values():
                self._waiting.add(sequence)
            self._aside.clear()

    def _block(self, sequence: Sequence, why: Blocked | AdapterMissing) -> None:
        """Report why the first queued sequence cannot run, once per reason."""
        if sequence.blocked != why.lacks:
            sequence.blocked = why.lacks
            self._notify(sequence.id, self._now, why)

    def _holders(self) -> tuple[tuple[str, int], ...]:
        """Return the requests with the most blocks."""
        held = [(sum(map(len, sequence.tables.blocks)), sequence.id) for sequence in self._running]
        return tuple((id, blocks) for blocks, id in heapq.nlargest(HOLDERS, held))

    def _add_row(self, draft: _Draft, sequence: Sequence, count: int, blocks: Blocks) -> None:
        first = sequence.computed
        sample = first + count == sequence.total < sequence.limit
        sequence.computed = first + count
        self.cache.publish(sequence.tables, sequence.ids, sequence.computed)
        sequence.total += sample
        sequence.step = draft.step
        draft.budget -= count
        self._return_state(draft, sequence)
        row = Row(sequence.slot, first, count, sample, blocks)
        draft.rows.append(self._look_ahead(draft, sequence, row) if sample and draft.lookahead else row)
        draft.sequences.append(sequence)
        self._save(draft, sequence)

    def _save(self, draft: _Draft, sequence: Sequence) -> None:
        """Save the recurrent state after the step if a snapshot is due."""
        snapshot = self.cache.save(sequence.tables, sequence.computed)
        if snapshot is not None:
            draft.saved.append((sequence.slot, snapshot))

    def _return_state(self, draft: _Draft, sequence: Sequence, drafts: tuple[int, ...] = ()) -> None:
        """Let the row of a recurrent model begin with the state of its first position, and keep it before drafts."""
        if sequence.stale:
            draft.returned.append(sequence.slot)  # the kept copy still has the state of this position
            sequence.stale = False
        elif drafts and self.config.rolls_back:
            draft.kept.append(sequence.slot)

    # Blocks and slots

    def _allocate(self, draft: _Draft, sequence: Sequence, end: int) -> Blocks | None:
        """Return new blocks up to position `end`, preempting sequences of worse rank; return None if this sequence
        has to wait or was preempted itself."""
        while True:
            blocks = self.cache.grow(sequence.tables, sequence.ids, sequence.computed, end)
            if blocks is not None:
                return blocks
            victim = self._running.last
            if victim.step == draft.step:
                return None  # the victim already has its row in this step; retry in the next one
            draft.preempted = True
            self.counters.preemptions += 1
            victim.preemptions += 1
            self._preempt(victim)
            by = "" if victim is sequence else sequence.id
            self._notify(victim.id, self._now, Preempted(draft.step, victim.total, by))
            if victim is sequence:
                return None

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: free its blocks and queue it. A pending token still counts."""
        self._release(sequence)
        sequence.become(State.WAITING)
        sequence.computed = 0
        self._waiting.add(sequence)

    def _release(self, sequence: Sequence, *, forget: bool = False) -> None:
        if not forget:
            self.cache.publish(sequence.tables, sequence.ids, sequence.computed)
            self.cache.publish_states(sequence.tables, sequence.ids)
        self.cache.end(sequence.tables, forget=forget)
        self._running.remove(sequence)
        self._dropped.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.stale = -1, False

    def _end(self, sequence: Sequence, finish: Finish, *, forget: bool = False) -> None:
        if sequence.state is State.RUNNING:
            self._release(sequence, forget=forget)
        elif self._aside.pop(sequence.id, None) is None:
            self._waiting.remove(sequence)
        sequence.become(State.ENDED)
        self.adapters.end(sequence.adapter, started=sequence.scheduled is not None)
        del self._by_id[sequence.id]
        drafted = sequence.accepted_tokens + sequence.rejected_tokens
        reply = len(sequence.ids) - sequence.prompt_tokens
        if not forget:
            self.drafting.end(sequence)
        self._notify(sequence.id, self._now, Ended(finish, reply, drafted, sequence.accepted_tokens))

    # Requests

    def _set_rope_length(self, sequence: Sequence, length: int) -> None:
        """Set the length whose rotary scaling the known tokens use. Cached blocks depend on it."""
        sequence.rope_length = length
        sequence.rope_limit = self.config.rope_limit(length)
        submit = sequence.submit
        adapter = self.adapters.key(sequence.adapter)
        whole = () if self.config.media is None else self.config.media.root(submit)
        root = root_hash(submit.salt.encode(), *self.config.variants(length), *adapter, *whole)
        before, prompt = sequence.tables, sequence.prompt_tokens // self.cache.block_tokens
        marks = block_marks(submit, self.cache.block_tokens)
        sequence.tables = Tables(root, len(self.cache.groups), prompt, marks)
        sequence.tables.written, sequence.tables.settled = before.written, before.settled

    # Results

    def _append_tokens(self, sequence: Sequence, row: Row, result: StepResult, index: int, now: float) -> Delta:
        """Append the tokens of a row, up to the token that ends the request. Return their delta."""
        ids = sequence.ids
        tokens = result.tokens(index)
        if row.drafts:
            self._count_draft(sequence, row.drafts, len(tokens) - 1)
        sequence.forced, sequence.proposed = (), result.drafts.get(index, ())
        finish: Finish | None = None
        reason: int | None = None
        for number, token in enumerate(tokens):  # noqa: B007 - the number of the last token is used
            ids.append(token)
            if token in sequence.stops or len(ids) >= sequence.limit:
                finish, reason = sequence.finish()
                if finish is not None:
                    break
        tokens = tokens[: number + 1]
        self.counters.generated_tokens += len(tokens)
        if number:
            sequence.total += number
            if sequence.state is State.RUNNING:
                sequence.computed += number
        if self.config.rolls_back and number < len(row.drafts) and sequence.state is State.RUNNING:
            sequence.computed, sequence.stale = row.first, True
        sequence.last_token = now
        if sequence.routes is not None:  # rejected drafts have been computed too
            sequence.add_routes(row.first, result.routes.get(index, ())[: len(ids) - 1 - row.first])
        elif finish is None and sequence.first_token is not None and not result.logprobs:
            return Delta(sequence.id, tokens)
        timed = finish is not None or sequence.first_token is None
        if sequence.first_token is None:
            sequence.first_token = now
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if finish is not None:
            self._end(sequence, finish)
        return Delta(
            sequence.id,
            tokens,
            logprobs=result.logprobs.get(index, ())[: len(tokens)],
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            routes=sequence.take_routes(),
            finish=finish,
            stop_reason=reason,
            timing=sequence.timing() if timed else None,
        )

    def _count_draft(self, sequence: Sequence, drafts: tuple[int, ...], accepted: int) -> None:
        drafted, forced = len(drafts), sequence.forced[: len(drafts)] == drafts
        self.counters.draft(drafted, accepted)
        self.drafting.verified(sequence, drafted, accepted, forced=forced)
        sequence.accepted_tokens += accepted
        sequence.rejected_tokens += drafted - accepted

    def _fail(self, sequence: Sequence, why: str, settled: AppliedStep) -> None:
        self._end(sequence, "error", forget=True)
        code = RequestError.code if why == NOTHING_LEFT else StepError.code
        settled.failed.append(Failed(sequence.id, code, why))
        settled.deltas.append(Delta(sequence.id, finish="error", timing=sequence.timing()))


def _keep_prompt_logprobs(sequence: Sequence, row: Row, logprobs: tuple[Logprob, ...]) -> None:
    assert sequence.prompt_logprobs is not None, "checked by the caller"
    # Indexed by position: a step in flight may still return values that are recomputed after a preemption.
    sequence.prompt_logprobs[row.first + 1 : row.first + 1 + len(logprobs)] = logprobs


def _last_of_scored(sequence: Sequence, alignment: Alignment | None) -> Delta:
    """Return the only delta of a request without a reply."""
    prompt_logprobs = sequence.prompt_logprobs
    return Delta(
        sequence.id,
        prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        routes=sequence.take_routes(),
        alignment=alignment,
        finish="length",
        timing=sequence.timing(),
    )


def _pooled(sequence: Sequence, found: Pooled | None) -> Delta:
    """Return the only delta of a pooling request. `found` is None in a replay."""
    return Delta(sequence.id, finish="stop", timing=sequence.timing(), pooled=found)


def _ignore_event(id: str, now: float, event: Event) -> None:
    """Ignore the event."""
