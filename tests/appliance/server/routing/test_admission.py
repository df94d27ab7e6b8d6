"""Admission: when a request may wait, if its deadlines can be met, and the Retry-After of a refusal."""

import random

import pytest

from appliance.server.routing.admission import (
    LONGEST_S,
    UNKNOWN_S,
    WINDOW_S,
    Admission,
    DrainRate,
    LatencyEstimate,
    QueueAhead,
    loading_retry_after_s,
    retry_after_s,
)
from engine.api.messages import Sampling, Submit, Timing


@pytest.mark.parametrize(("limit", "waiting", "full"), [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)])
def test_small_limits_admit_one_request_while_the_queue_is_empty(limit, waiting, full):
    assert Admission(limit).is_full(waiting) == full


@pytest.mark.parametrize(("waiting", "full", "excess"), [(0, False, 0), (6, False, 0), (7, True, 1), (9, True, 3)])
def test_the_queue_is_full_at_its_limit(waiting, full, excess):
    assert (Admission(7).is_full(waiting), Admission(7).excess(waiting)) == (full, excess)


def test_without_a_limit_nothing_is_full():
    """ER-14 null"""
    assert not Admission(None).is_full(10**9) and not Admission(None).excess(10**9)


@pytest.mark.parametrize(
    ("seconds", "told"), [(None, UNKNOWN_S), (0.0, 1), (1.0, 1), (1.01, 2), (59.5, 60), (1e9, LONGEST_S)]
)
def test_retry_after_is_whole_seconds_within_bounds(seconds, told):
    assert retry_after_s(seconds) == told


def drained(queue, starts, tokens=10):
    """Return a drain in which `queue` requests wait from 100 s on, and one starts each second after that."""
    drain = DrainRate()
    for _ in range(queue):
        drain.enter(100.0)
    for number in range(starts):
        drain.start(101.0 + number, tokens)
    return drain


def test_without_a_measured_start_nothing_is_known():
    assert DrainRate().requests_s(7, 100.0) is None and DrainRate().tokens_s(7, 100.0) is None


def test_time_to_drain_follows_the_measured_rate():
    """H-8 ER-14 a request, and 100 tokens, leave the queue each second"""
    drain = drained(100, 10, 100)
    assert drain.requests_s(1, 110.0) == 1.0 and drain.requests_s(5, 110.0) == 5.0
    assert drain.tokens_s(100, 110.0) == 1.0 and drain.tokens_s(549, 110.0) == 5.49


def test_a_burst_is_no_rate_of_thousands():
    """H-8 starts of the last moment count as starts within one second"""
    drain = DrainRate()
    for _ in range(4):
        drain.enter(100.0)
    for _ in range(4):
        drain.start(100.0, 1)
    assert drain.requests_s(40, 100.0) == 10.0


def test_time_in_which_nothing_waits_counts_for_nothing():
    """Ten requests, an hour apart, each with its first token after half a second: the rate is two a second, not ten
    an hour."""
    drain = DrainRate()
    for hour in range(10):
        drain.enter(3600.0 * hour)
        drain.start(3600.0 * hour + 0.5, 7)
    assert drain.requests_s(20, 40_000.0) == 10.0 and drain.tokens_s(140, 40_000.0) == 10.0


def test_a_queue_that_does_not_move_gets_longer():
    drain = drained(20, 5)
    times = [drain.requests_s(10, 105.0 + later) for later in (0, 10, 24, 40)]
    assert times[:3] == [10.0, 30.0, 58.0]
    assert times[3] == WINDOW_S, "nothing started in the window: the next one may take as long again"
    drain.start(145.5, 10)
    assert drain.requests_s(1, 145.5) == WINDOW_S


def test_cancelled_requests_do_not_count_as_starts():
    drain = drained(20, 0)
    for _ in range(20):
        drain.leave(110.0)
    assert drain.requests_s(1, 5000.0) == 10.0
    drain.enter(5000.0)
    drain.start(5000.5, 3)
    assert drain.requests_s(1, 5000.5) == 10.5


@pytest.mark.parametrize("seed", range(10))
def test_the_rate_matches_brute_force(seed):
    """Random events, compared with a brute-force list of all moments, searched second by second."""
    rng, drain, now, inside = random.Random(seed), DrainRate(), 50.0, 0
    spans, starts, busy = [], [], 0.0
    for _ in range(400):
        pause = rng.choice((0.0, 0.25, 1.0, 8.0))
        if inside:
            busy += pause
        now += pause
        spans.append(busy)
        move = rng.choice(("enter", "start", "leave"))
        if move == "enter" or not inside:
            drain.enter(now)
            inside += 1
        elif move == "start":
            drain.start(now, tokens := rng.randrange(50))
            starts.append((busy, tokens))
            inside -= 1
        else:
            drain.leave(now)
            inside -= 1
        recent = [tokens for at, tokens in starts if at >= busy - WINDOW_S]
        span = max(1.0, min(WINDOW_S, busy))
        if recent:
            assert drain.requests_s(12, now) == pytest.approx(span * 12 / len(recent))
            assert drain.tokens_s(12, now) == pytest.approx(span * 12 / max(1, sum(recent)))


# Deadlines


def ask(prompt=100, min_tokens=0, **deadlines):
    return Submit("a", (1,) * prompt, Sampling(min_tokens=min_tokens), 50, **deadlines)


def paced():
    """At 110 s: one request of 100 tokens starts each second; prompts alone take 0.2 s, a token 0.05 s."""
    latency = LatencyEstimate(drained(100, 10, 100))
    latency.record(100, Timing(1.0, 2.0, 2.2, 2.2 + 9 * 0.05), 10)
    return latency


def test_a_request_that_the_queue_makes_late_is_refused_with_the_delay():
    late = paced().missed_deadline([ask(ttft_deadline=115.0)], QueueAhead(8, 800), 110.0)
    assert (late.field, late.given_s, late.expected_s) == ("ttft_deadline_ms", 5.0, pytest.approx(8.2))
    assert late.excess_s == pytest.approx(3.2)
    assert str(late) == (
        "This request cannot meet its ttft_deadline_ms: about 8,200 ms are expected and 5,000 ms are left; 8 requests "
        "with 800 prompt tokens are queued before it. Retry later or increase the deadline."
    )


@pytest.mark.parametrize(("left_s", "late"), [(8.1, True), (8.3, False)])
def test_requests_with_feasible_deadlines_are_admitted(left_s, late):
    found = paced().missed_deadline([ask(ttft_deadline=110.0 + left_s)], QueueAhead(8, 800), 110.0)
    assert (found is not None) == late
    assert (paced().missed_deadline([ask(deadline=110.0 + left_s)], QueueAhead(8, 800), 110.0) is not None) == late


@pytest.mark.parametrize(("left_s", "late"), [(10.1, True), (10.3, False)])
def test_the_least_reply_counts_for_the_end_and_not_for_the_first_token(left_s, late):
    asked = ask(min_tokens=41, ttft_deadline=118.5, deadline=110.0 + left_s)
    found = paced().missed_deadline([asked], QueueAhead(8, 800), 110.0)
    assert found is None if not late else (found.field, found.expected_s) == ("deadline_ms", pytest.approx(10.2))


def test_the_wait_uses_the_faster_of_request_and_token_rates():
    """After short prompts, one long prompt is not refused, and neither are many short ones after long ones."""
    asked = ask(ttft_deadline=115.0)
    assert paced().missed_deadline([asked], QueueAhead(2, 90_000), 110.0) is None
    assert paced().missed_deadline([asked], QueueAhead(2000, 90), 110.0) is None
    assert paced().missed_deadline([asked], QueueAhead(2000, 90_000), 110.0) is not None


def test_while_nothing_waits_and_before_anything_is_known_nothing_is_late():
    asked = ask(ttft_deadline=110.01, min_tokens=50)
    assert paced().missed_deadline([asked], QueueAhead(0, 0), 110.0) is None
    assert LatencyEstimate(DrainRate()).missed_deadline([asked], QueueAhead(9, 900), 110.0) is None


def test_progress_since_the_last_start_reduces_the_queue():
    latency = LatencyEstimate(drained(100, 10, 100))
    waits = []
    for later in (0.0, 2.0, 4.0):
        late = latency.missed_deadline([ask(ttft_deadline=0.0)], QueueAhead(8, 800), 110.0 + later)
        waits.append(late.expected_s)
    # 10 starts in 10 s, in 12 s, in 14 s: the rate falls, and 2 s and 4 s of the work are done
    assert waits == [pytest.approx(8.0), pytest.approx(9.6 - 2), pytest.approx(11.2 - 4)]


def test_a_prompt_is_compared_with_prompts_that_are_not_much_shorter():
    latency = LatencyEstimate(drained(100, 10, 100))
    latency.record(4, Timing(1.0, 2.0, 2.1, 2.1), 1)  # 25 ms a token, nearly all of it the step's own
    assert latency.missed_deadline([ask(prompt=4000, ttft_deadline=119.0)], QueueAhead(8, 800), 110.0) is None
    latency.record(2000, Timing(1.0, 2.0, 3.0, 3.0), 1)
    late = latency.missed_deadline([ask(prompt=4000, ttft_deadline=119.0)], QueueAhead(8, 800), 110.0)
    assert late.expected_s == pytest.approx(8 + 2)


@pytest.mark.parametrize(
    ("elapsed", "fraction", "expected"),
    [
        (0.0, 0.0, UNKNOWN_S),
        (10.0, 0.5, 10),
        (30.0, 0.75, 10),
        (3.0, 0.99, 1),
        (1000.0, 0.02, LONGEST_S),
        (9.0, 1.0, 1),
    ],
)
def test_the_rest_of_a_load_is_estimated_from_its_progress(elapsed, fraction, expected):
    assert loading_retry_after_s(elapsed, fraction) == expected
