"""Adaptive drafts: they pause per request and per load level where measured times and acceptance say so."""

import msgspec
import pytest

from engine.core.draft_control import (
    DRAFTED_STEPS,
    FIRST_DRAFT,
    FIRST_PAUSE,
    LAST_PAUSE,
    MISSES,
    PLAIN_STEPS,
    REFRESH,
    WINDOW,
    Acceptance,
    DraftControl,
)


def measured(rows, plain, token, steps=DRAFTED_STEPS):
    """A control that has measured steps of this number of rows."""
    control, now = DraftControl(), 0.0
    for step in range(PLAIN_STEPS):
        now += plain
        control.applied(rows, 0, step, now - plain, now, running=True)
    for step in range(PLAIN_STEPS, PLAIN_STEPS + steps):
        now += plain + 4 * token
        control.applied(rows, 4, step, now - plain - 4 * token, now, running=True)
    return control


def test_a_level_has_no_drafts_before_its_plain_time_is_measured():
    control, now = DraftControl(), 0.0
    for step in range(PLAIN_STEPS):
        assert not control.allows(3, step)
        now += 1
        control.applied(3, 0, step, now - 1, now, running=True)
    assert control.allows(3, PLAIN_STEPS) and control.allows(2, PLAIN_STEPS)  # 2 and 3 rows are one level
    assert not control.allows(4, PLAIN_STEPS)
    assert not control.allows(3, PLAIN_STEPS + REFRESH), "the plain time is old"


@pytest.mark.parametrize(("rows", "plain", "token"), [(1, 0.02, 0.002), (32, 0.1, 0.001), (8, 0.05, 0.003)])
def test_break_even_is_the_cost_of_a_draft_token_relative_to_a_token(rows, plain, token):
    assert measured(rows, plain, token).break_even(rows) == pytest.approx(token * rows / plain)


def test_unmeasured_drafts_are_tried():
    assert measured(4, 0.1, 0.05, steps=DRAFTED_STEPS - 1).break_even(4) == 0.0


def test_a_level_where_no_draft_can_pay_pauses_for_longer_each_time():
    control, step = measured(8, 0.1, 0.02), PLAIN_STEPS + DRAFTED_STEPS
    pauses = []
    now = 100.0
    while len(pauses) < 8:
        resumed = step
        while not control.allows(8, resumed):
            control.state.levels[4].plain_at = resumed
            resumed += 1
        pauses.append(resumed - step + 1)
        step = resumed + 1
        now += 0.18
        control.applied(8, 4, resumed, now - 0.18, now, running=True)
    assert pauses[0] == FIRST_PAUSE and pauses[1:5] == [
        2 * FIRST_PAUSE,
        4 * FIRST_PAUSE,
        8 * FIRST_PAUSE,
        16 * FIRST_PAUSE,
    ]
    assert pauses[-1] == LAST_PAUSE


def test_time_without_requests_is_not_measured():
    control = DraftControl()
    control.applied(1, 0, 0, 0.0, 0.1, running=False)
    control.applied(1, 0, 1, 50.0, 50.1, running=True)
    assert control.state.levels[1].plain == pytest.approx(0.1)
    control.applied(1, 0, 2, 50.15, 50.2, running=True)  # the host's time between steps counts
    assert control.state.levels[1].plain == pytest.approx(0.1)


def test_steps_that_compute_prompts_are_not_measured():
    control = DraftControl()
    control.applied(2, None, 0, 0.0, 9.0, running=True)
    control.applied(2, 0, 1, 9.0, 9.1, running=True)
    assert control.state.levels[2].plain == pytest.approx(0.1) and control.state.levels[2].plain_steps == 1


def test_one_interruption_of_the_machine_does_not_decide():
    control = measured(1, 0.02, 0.001)
    control.applied(1, 4, 99, 0.0, 1000.0, running=True)
    assert 0 < control.break_even(1) < 0.2 and control.allows(1, 100)
    control.applied(1, 0, 100, 0.0, 2000.0, running=True)
    assert control.state.levels[1].plain < 0.04


def test_drafts_that_cost_nothing_at_first_may_cost_something_later():
    control = measured(8, 0.1, 0.0)
    assert control.break_even(8) == 0.0
    for step in range(100, 130):
        control.applied(8, 4, step, 0.0, 0.18, running=False)
    assert not control.allows(8, 130), "a draft token takes 0.02 s, more than a token without drafts"


def accepted(*drafts):
    found = Acceptance()
    for drafted, taken in drafts:
        found.verified(drafted, taken)
    return found


def test_the_length_is_that_whose_last_token_pays():
    found = accepted(*[(4, 2)] * 40)  # 2 of 3 tried tokens
    assert found.rate == pytest.approx(2 / 3, abs=0.02)
    assert found.length(0.0, 10) == 7, "a measured time of 0 is chance: 0.67⁷ = 0.06, 0.67⁸ = 0.04"
    assert found.length(0.25, 10) == 3  # 0.67³ = 0.30 pays, 0.67⁴ = 0.20 does not
    assert found.length(0.5, 10) == 1


def test_a_request_whose_drafts_do_not_pay_pauses_and_tries_again():
    found = accepted((4, 0), (4, 0), (4, 0))
    assert found.length(0.6, 100) == 0 and found.resume == 100 + FIRST_PAUSE
    assert found.length(0.6, 120) >= 1, "the next attempt"
    found = accepted((4, 0), (4, 0), (4, 0), (4, 0), (4, 0), (4, 0))
    for number in range(1, 9):
        found.verified(4, 0)
        while found.length(0.6, 1000) != 0:
            found.verified(4, 0)
        assert found.resume == 1000 + min(LAST_PAUSE, FIRST_PAUSE << (number - 1))


def test_accepted_drafts_shorten_the_next_pause():
    found = accepted(*[(4, 0)] * 6)
    found.length(0.6, 0)
    found.verified(4, 0)
    assert found.pause == 2 * FIRST_PAUSE
    found.verified(4, 4)
    assert found.pause == FIRST_PAUSE


def test_a_request_without_matches_pauses():
    found = Acceptance()
    for length in range(MISSES - 1):
        found.proposed(0, length)
    found.proposed(2, 50)
    for length in range(MISSES):
        assert found.resume == 0
        found.proposed(0, 100 + length)
    assert found.resume == 100 + MISSES - 1 + FIRST_PAUSE


def test_the_first_draft_of_a_request_is_short():
    acceptance = Acceptance()
    assert acceptance.length(0.2, 10) == acceptance.length(0.0, 10) == FIRST_DRAFT
    acceptance.verified(4, 4)
    assert acceptance.length(0.2, 10) > FIRST_DRAFT and acceptance.length(0.0, 10) > 2 * FIRST_DRAFT


def test_one_token_decides_after_a_pause():
    found = accepted((4, 0), (4, 0), (4, 0), (4, 0), (4, 0), (4, 0))
    assert found.length(0.33, 100) == 0, "a pause"
    assert found.length(0.33, 116) == found.length(0.0, 116) == 1
    rejected = msgspec.structs.replace(found)
    rejected.verified(1, 0)
    assert rejected.length(0.33, 117) == 0 and rejected.resume == 117 + 2 * FIRST_PAUSE
    found.verified(1, 1)
    assert found.length(0.33, 118) == FIRST_DRAFT
    found.verified(4, 4)
    assert found.length(0.33, 122) > FIRST_DRAFT


@pytest.mark.parametrize(("recent", "first"), [(0.9, FIRST_DRAFT), (0.5, 2), (0.3, 1), (0.2, 1), (0.0, 1)])
def test_a_request_begins_with_the_acceptance_of_recent_ones(recent, first):
    found = Acceptance()
    found.begin(recent, 0.22)
    assert found.begun and found.length(0.22, 10) == first


def test_a_request_begins_with_one_token_where_the_break_even_is_not_measured():
    found = Acceptance()
    found.begin(0.03, DraftControl().break_even(1))
    assert (found.length(0.0, 10), found.resume) == (1, 0)


def test_the_recent_acceptance_counts_each_draft_equally():
    control = DraftControl()
    before = control.state.acceptance
    control.verified(4, 4)
    assert control.state.acceptance == pytest.approx(before + (1 - before) / WINDOW)
    for _ in range(60):
        control.verified(1, 1)
        control.verified(9, 0)
    assert control.state.acceptance == pytest.approx(0.5, abs=0.05), "half of the drafts are wrong"
    control.verified(0, 0)
    assert 0.4 < control.state.acceptance < 0.5


@pytest.mark.parametrize("break_even", (0.0, 0.1, 0.17, 0.33, 0.7))
def test_drafts_that_are_always_wrong_cost_little(break_even):
    found, drafted = Acceptance(), 0
    for length in range(96):
        if length >= found.resume and (count := found.length(break_even, length)):
            drafted += count
            found.verified(count, 0)
    assert drafted * break_even < 0.05 * 96 and drafted < 45
