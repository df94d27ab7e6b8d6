"""Plans with drafts on the checking device: every stream is right, faults are seen, and adaptive drafts help."""

from dataclasses import replace

import msgspec
import pytest

from engine.api.config import SpeculationConfig
from engine.api.errors import ConfigError
from engine.api.messages import Sampling, Submit
from engine.core.config import SchedulerConfig
from engine.core.draft_control import FIRST_DRAFT, LoadLevel
from engine.core.drafting import Drafting
from engine.core.plan import Row, StepPlan, StepResult
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence, State
from engine.core.snapshot import SchedulerState, restore, snapshot
from engine.kv import snapshots
from tests.engine.core.scheduler_simulation import Load, make_layout, simulate


def config(method, **more):
    return SpeculationConfig(method=method, ngram_min=1, tokens=5, **more)


METHODS = {
    "ngram": config("ngram"),
    "suffix": config("suffix"),
    "auto": config("suffix", adaptive=True),
    "mtp": config("mtp"),
    "mtp auto": config("mtp", adaptive=True),
}
LOADS = [
    Load(seed, windows, blocks=blocks, max_step_tokens=budget, overlap=overlap, replies=(7, 30), requests=16)
    for seed, windows, blocks, budget, overlap in (
        (0, (None,), 28, 16, True),
        (1, (None, 9), 52, 16, True),
        (2, (None,), 30, 7, False),
        (3, (9,), 26, 40, True),
    )
] + [Load(7, (None,), max_step_tokens=7, abort=0.9, same_prompts=1, salts=("",), resumed=0.0, replies=(30,))]

RECURRENT = [replace(load, snapshots=snapshots) for load, snapshots in zip(LOADS, (6, 20, 0, 9), strict=False)]

PAUSING = replace(LOADS[0], requests=40, replies=(60,))  # adaptive drafts of some requests pause


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: str(load.seed))
def test_streams_with_drafts_are_right(method, load):
    outcome = simulate(replace(load, speculation=METHODS[method]))
    counters = outcome.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    assert sum(counters.accepted_at) == counters.accepted_tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("load", RECURRENT, ids=lambda load: str(load.seed))
def test_streams_of_recurrent_models_with_drafts_are_right(method, load, monkeypatch):
    """Snapshots are due every 12 tokens, and steps with drafts end before them."""
    monkeypatch.setattr(snapshots, "INTERVAL", 12)
    outcome = simulate(replace(load, speculation=METHODS[method]))
    counters = outcome.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens


def test_a_preempted_request_does_not_return_to_a_kept_state():
    layout = make_layout((None,))
    scheduler = Scheduler(
        SchedulerConfig(layout=layout, blocks=40, max_context=90, snapshots=3, speculation=METHODS["ngram"])
    )
    scheduler.submit(Submit("r", (1, 2, 3), Sampling(), 9), 0.0)
    planned = scheduler.plan(0.0)
    scheduler.apply(StepResult(1, (4,)), 1.0)
    (sequence,) = planned.sequences
    sequence.stale = True
    scheduler._preempt(sequence)
    assert scheduler.plan(2.0).plan.returned == () and not sequence.stale


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_streams_with_drafts_are_right_with_each_policy(policy):
    simulate(replace(LOADS[0], policy=policy, speculation=METHODS["suffix"]))


def steps(load):
    outcome = simulate(load)
    return outcome.now, outcome.scheduler.counters


def test_adaptive_drafts_stop_where_a_draft_token_costs_as_much_as_a_token():
    load = replace(LOADS[0], requests=60, replies=(60,), draft_cost=0.4)
    plain, _ = steps(load)
    always, counters = steps(replace(load, speculation=METHODS["suffix"]))
    adaptive, fewer = steps(replace(load, speculation=METHODS["auto"]))
    assert always > 1.2 * plain, "the load does not show the cost of drafts"
    assert adaptive < 1.1 * plain
    assert fewer.draft_tokens < counters.draft_tokens / 3


def test_adaptive_drafts_go_on_where_they_cost_nothing():
    plain, _ = steps(PAUSING)
    adaptive, counters = steps(replace(PAUSING, speculation=METHODS["auto"]))
    assert adaptive < plain and counters.accepted_tokens > 50


def test_decisions_depend_on_the_times_of_events_alone():
    load = replace(LOADS[1], requests=40, draft_cost=0.2, speculation=METHODS["auto"])
    first, second = simulate(load), simulate(load)
    assert first.now == second.now and first.scheduler.counters == second.scheduler.counters


def decode(scheduler, name, now, *, right, tokens=96, cost=0.25):
    """Decode a request whose drafts are all right, or all wrong. A draft token costs this share of a step. Return the
    time at the end, and the numbers of steps and of draft tokens."""
    scheduler.drafting.search = lambda sequence, count: (1 if right else 2,) * count
    scheduler.submit(Submit(name, (3, 4, 5), Sampling(), tokens, ignore_eos=True), now)
    steps, drafted, ended = 0, 0, False
    while not ended:
        plan = scheduler.plan(now).plan
        (row,) = plan.rows
        now += 1.0 + cost * len(row.drafts)
        further = {0: (1,) * len(row.drafts)} if right and row.drafts else {}
        ended = any(one.finish for one in scheduler.apply(StepResult(plan.step, (1,), further), now).deltas)
        steps, drafted = steps + 1, drafted + len(row.drafts)
    return now, steps, drafted


def adaptive(method="suffix"):
    settings = SpeculationConfig(method=method, tokens=8, adaptive=True)
    return Scheduler(SchedulerConfig(layout=make_layout((None,)), blocks=60, max_context=200, speculation=settings))


def test_a_request_after_wrong_drafts_begins_with_one_token():
    """A draft that is always wrong costs less than 5 % of the time of a reply, and little in later requests."""
    scheduler, now, costs = adaptive(), 0.0, []
    for number in range(6):
        after, steps, drafted = decode(scheduler, f"wrong {number}", now, right=False)
        costs.append((after - now) / steps - 1)
        now = after
    assert costs[0] < 0.05 and max(costs[2:]) < 0.02, costs
    assert drafted <= 6


def test_right_drafts_after_wrong_ones_are_drafted_in_full_again():
    scheduler, now = adaptive(), 0.0
    for number in range(6):
        now, _, _ = decode(scheduler, f"wrong {number}", now, right=False)
    now, first, _ = decode(scheduler, "right", now, right=True)
    for number in range(3):
        now, steps, _ = decode(scheduler, f"right {number}", now, right=True)
    assert first <= 19 and steps <= 15, "96 tokens: 11 steps with drafts of 8 tokens, and the first short ones"


def test_the_recent_acceptance_is_part_of_a_snapshot():
    scheduler = adaptive()
    now, _, _ = decode(scheduler, "wrong", 0.0, right=False)
    copy = adaptive()
    restore(copy, msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot(scheduler)), type=SchedulerState))
    assert copy.drafting.control.state.acceptance == scheduler.drafting.control.state.acceptance < 0.6
    assert decode(copy, "next", now, right=False) == decode(scheduler, "next", now, right=False)


def test_only_drafts_can_pause():
    with pytest.raises(ConfigError, match="speculation.method=off has no drafts to pause; set it to false"):
        config("off", adaptive=True)


def test_a_step_that_drafts_after_a_pause_is_not_measured():
    """The time of its model would count as time without drafts."""
    drafting = Drafting(config("mtp", adaptive=True), shared=False)
    plain, first = Row(0, 4, 1, True, ()), Row(0, 5, 1, True, (), lookahead=2)
    for step, row in enumerate((plain, first)):
        drafting.measure(StepPlan(step, (), (), (row,)), float(step), step + 0.5 + step, running=False)
    (level,) = drafting.control.state.levels.values()
    assert (level.plain_steps, level.plain, level.drafted_steps) == (1, 0.5, 0)


def test_computing_tokens_again_counts_as_a_cost_of_drafts():
    """A step of a recurrent model after a rejected draft, without and with a new draft."""
    drafting = Drafting(config("ngram", adaptive=True), shared=False)
    rows = Row(0, 4, 1, True, ()), Row(0, 5, 3, True, ()), Row(0, 8, 5, True, (), (1, 2))
    for step, (row, seconds) in enumerate(zip(rows, (1.0, 9.0, 1.6), strict=True)):
        plan = StepPlan(step, (), (), (row,), returned=(0,) if row.count > 1 else ())
        drafting.measure(plan, 20.0 * step, 20.0 * step + seconds, running=False)
    (level,) = drafting.control.state.levels.values()
    assert (level.plain_steps, level.plain, level.drafted_steps) == (1, 1.0, 1)
    assert level.token == pytest.approx(0.3)


def test_a_model_drafts_as_many_tokens_as_pay():
    drafting, sequence = Drafting(config("mtp", adaptive=True), shared=False), request([1, 2], "", -1)
    assert drafting.lookahead(sequence, 9, 1) == FIRST_DRAFT == 4, "unmeasured drafts are tried"
    level = drafting.control.state.levels[1] = LoadLevel(plain=1.0, token=0.5, drafted_steps=9)
    assert drafting.lookahead(sequence, 9, 1) == FIRST_DRAFT and sequence.acceptance.resume == 0
    sequence.acceptance.accepted = sequence.acceptance.tried * 0.8
    assert drafting.lookahead(sequence, 9, 1) == 3, "0.8 ** 4 < 0.5"
    level.token = 0.9
    assert drafting.lookahead(sequence, 9, 1) == 0 and sequence.acceptance.resume > len(sequence.ids)
    sequence.proposed = (3, 4)
    assert drafting.propose(sequence, 9, 1) == (3, 4), "a computed draft is verified"
    sequence.speculative = False
    assert drafting.lookahead(sequence, 9, 1) == 0


@pytest.mark.parametrize("method", ["draft", "mtp"])
def test_the_draft_of_a_model_is_verified(method):
    """No lookup takes its place, and it ends at the maximum of a draft."""
    own = SpeculationConfig(method=method, model="folder" if method == "draft" else "", tokens=2)
    drafting, sequence = Drafting(own, shared=True), request([1, 2, 1, 2, 1], "", -1)
    assert drafting.propose(sequence, 4, 1) == ()
    sequence.proposed = (5, 6, 7)
    assert drafting.propose(sequence, 4, 1) == (5, 6) and drafting.propose(sequence, 1, 1) == (5,)
    sequence.forced = (3,)
    assert drafting.propose(sequence, 4, 1) == (3,)


def request(prompt, salt, adapter, reply=()):
    sequence = Sequence(Submit("a", tuple(prompt), Sampling(), 99, salt=salt), 0, 0.0, 1000)
    sequence.ids += reply
    sequence.total = len(sequence.ids)
    sequence.adapter, sequence.speculative = adapter, True
    return sequence


@pytest.mark.parametrize("shared", [True, False])
def test_drafts_come_from_replies_of_the_same_salt_and_adapter_only(shared):
    drafting = Drafting(METHODS["suffix"], shared=shared)
    drafting.end(request([1], "x", 2, reply=[5, 6, 7, 8]))
    found = {
        (salt, adapter): drafting.propose(request([3, 5, 6], salt, adapter), 4, 1)
        for salt in ("", "x", "y")
        for adapter in (-1, 2)
    }
    assert found.pop(("x", 2)) == ((7, 8) if shared else ())
    assert set(found.values()) == {()}


def test_a_reset_of_the_prefix_cache_drops_the_replies():
    outcome = simulate(replace(LOADS[0], speculation=METHODS["suffix"]))
    replies = outcome.scheduler.drafting.replies
    assert replies.state() and replies.tokens
    outcome.scheduler.reset_prefix_cache()
    assert not replies.state() and not replies.tokens


def test_forced_drafts_do_not_count_as_acceptance_of_lookups():
    settings = SchedulerConfig(layout=make_layout((None,)), blocks=9, max_context=9, speculation=METHODS["auto"])
    scheduler, sequence = Scheduler(settings), request([1], "", -1)
    before, sequence.forced = sequence.acceptance.rate, (5, 6, 7)
    scheduler._count_draft(sequence, (5, 6), 0)
    assert sequence.acceptance.rate == before
    scheduler._count_draft(sequence, (5, 7), 0)
    assert sequence.acceptance.rate < before


def test_rejected_drafts_lower_the_acceptance_of_a_request():
    drafting, sequence = Drafting(METHODS["auto"], shared=True), request([1], "", -1)
    before = sequence.acceptance.rate
    drafting.verified(sequence, 4, 0, forced=True)
    assert sequence.acceptance.rate == before
    drafting.verified(sequence, 4, 0, forced=False)
    assert sequence.acceptance.rate < before


def test_a_constrained_request_that_pauses_has_forced_drafts_only():
    drafting = Drafting(METHODS["auto"], shared=True)
    sequence = request([1, 2, 1, 2, 1], "", -1)
    sequence.constrained = True
    assert drafting.propose(sequence, 2, 1) == (2, 1)
    sequence.acceptance.resume = 99
    assert drafting.may_draft(sequence) and drafting.propose(sequence, 2, 1) == ()
    sequence.forced = (5, 6, 7)
    assert drafting.propose(sequence, 2, 1) == (5, 6)


def test_a_failed_row_with_drafts_counts_none():
    settings = SchedulerConfig(layout=make_layout((None,)), blocks=9, max_context=60, speculation=METHODS["suffix"])
    scheduler = Scheduler(settings)
    scheduler.drafting.search = lambda sequence, count: (2, 1)[:count]
    scheduler.submit(Submit("a", (1, 2, 1, 2, 1), Sampling(), 9), 0.0)
    scheduler.apply(StepResult(scheduler.plan(0.0).plan.step, (2,)), 0.0)
    planned = scheduler.plan(0.0)
    assert planned.plan.rows[0].drafts == (2, 1)
    applied = scheduler.apply(StepResult(planned.plan.step, (-1,), failed={0: "not finite"}), 0.0)
    assert [(one.id, one.finish) for one in applied.deltas] == [("a", "error")]
    counters = scheduler.counters
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (0, 0, 0)
    assert applied.deltas[0].timing.rejected_tokens == 0


# Planted faults


def wrap(monkeypatch, owner, name, make):
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def rejected_drafts_count_as_computed(monkeypatch):
    def make(right):
        def append(self, sequence, row, result, index, now):
            delta = right(self, sequence, row, result, index, now)
            if row.drafts and sequence.slot >= 0:
                sequence.computed = max(sequence.computed, row.first + row.count)
            return delta

        return append

    wrap(monkeypatch, Scheduler, "_append_tokens", make)


def last_accepted_token_lost(monkeypatch):
    wrap(
        monkeypatch,
        StepResult,
        "tokens",
        lambda right: lambda self, row: right(self, row)[:-1] if len(right(self, row)) > 1 else right(self, row),
    )


def plans_ahead_of_a_draft_of_a_request_that_pauses(monkeypatch):
    def waits(self):
        return self.drafting.allows(len(self._running), self.step + 1) and any(
            sequence.pending and sequence.state is not State.ENDED and self.drafting.may_draft(sequence)
            for planned in self._in_flight
            for sequence in planned.sequences
        )

    monkeypatch.setattr(Scheduler, "_waits_for_drafts", property(waits))


def plans_ahead_of_drafts(monkeypatch):
    monkeypatch.setattr(Scheduler, "_waits_for_drafts", False)


def more_rows_of_logits_than_planned(monkeypatch):
    monkeypatch.setattr(Scheduler, "_room_for_drafts", lambda self: self.config.max_step_tokens)


def drafts_beyond_the_limit(monkeypatch):
    wrap(
        monkeypatch,
        Scheduler,
        "_drafts",
        lambda right: lambda self, draft, sequence: (*right(self, draft, sequence), 1, 1, 1, 1, 1, 1),
    )


def drafts_do_not_spend_the_budget(monkeypatch):
    def make(right):
        def plan(self, draft):
            prompts = right(self, draft)
            draft.budget += sum(len(row.drafts) for row in draft.rows)
            return prompts

        return plan

    wrap(monkeypatch, Scheduler, "_plan_tokens", make)


def blocks_of_drafts_not_allocated(monkeypatch):
    def make(right):
        def allocate(self, draft, sequence, end):
            return right(self, draft, sequence, min(end, sequence.total))

        return allocate

    wrap(monkeypatch, Scheduler, "_allocate", make)


def blocks_of_the_draft_model_not_allocated(monkeypatch):
    def make(right):
        def look_ahead(self, draft, sequence, row):
            ahead = right(self, draft, sequence, row).lookahead
            return msgspec.structs.replace(row, lookahead=ahead)

        return look_ahead

    wrap(monkeypatch, Scheduler, "_look_ahead", make)


FAULTS = [
    blocks_of_the_draft_model_not_allocated,
    plans_ahead_of_a_draft_of_a_request_that_pauses,
    plans_ahead_of_drafts,
    more_rows_of_logits_than_planned,
    rejected_drafts_count_as_computed,
    last_accepted_token_lost,
    drafts_beyond_the_limit,
    drafts_do_not_spend_the_budget,
    blocks_of_drafts_not_allocated,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_injected_fault_of_drafts_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        for load in (*LOADS, PAUSING, replace(PAUSING, draft_cost=0.3)):
            for method in ("suffix", "auto", "mtp", "mtp auto"):
                simulate(replace(load, speculation=METHODS[method]))


def drafts_that_are_not_rolled_back(monkeypatch):
    monkeypatch.setattr(SchedulerConfig, "rolls_back", False)


def states_not_returned(monkeypatch):
    def make(right):
        def return_state(self, draft, sequence, drafts=()):
            right(self, draft, sequence, drafts)
            draft.returned.clear()

        return return_state

    wrap(monkeypatch, Scheduler, "_return_state", make)


def states_kept_once(monkeypatch):
    def make(right):
        def return_state(self, draft, sequence, drafts=()):
            right(self, draft, sequence, drafts)
            if sequence.accepted_tokens:
                draft.kept.clear()

        return return_state

    wrap(monkeypatch, Scheduler, "_return_state", make)


RECURRENT_FAULTS = [
    drafts_that_are_not_rolled_back,
    states_not_returned,
    states_kept_once,
]


@pytest.mark.parametrize("plant", RECURRENT_FAULTS, ids=lambda plant: plant.__name__)
def test_injected_fault_of_recurrent_states_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        for load in RECURRENT:
            simulate(replace(load, speculation=METHODS["ngram"]))
