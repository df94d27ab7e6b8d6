"""When a request may wait, and when a refused one is told to come back."""

import pytest

from appliance.gateway.admission import LONGEST_S, UNKNOWN_S, WINDOW_S, Admission, loading_retry_after_s


@pytest.mark.parametrize(("limit", "waiting", "full"), [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)])
def test_small_limits_admit_one_while_nobody_waits(limit, waiting, full):
    assert Admission(limit).is_full(waiting) == full


@pytest.mark.parametrize(("waiting", "full"), [(0, False), (6, False), (7, True), (8, True)])
def test_the_queue_is_full_at_its_limit(waiting, full):
    assert Admission(7).is_full(waiting) == full


def test_without_a_measured_start_the_answer_is_a_guess():
    assert Admission(7).retry_after_s(waiting=7, now_s=100.0) == UNKNOWN_S


def test_retry_after_follows_the_measured_rate():
    """H-8 Retry-After from the measured drain rate"""
    admission = Admission(10)
    for second in range(11):
        admission.started(100.0 + second)
    # 11 starts in the 10 s since the first: a place is free after one more, five after five.
    assert admission.retry_after_s(waiting=10, now_s=110.0) == 1
    assert admission.retry_after_s(waiting=14, now_s=110.0) == 5
    assert admission.retry_after_s(waiting=10_000, now_s=110.0) == LONGEST_S


def test_retry_after_of_a_token_backlog_follows_the_tokens_that_started():
    """ER-14 100 tokens a second leave the queue"""
    admission = Admission(1000)
    for second in range(11):
        admission.started(100.0 + second, 100)
    assert admission.retry_after_s(waiting=1000, now_s=110.0) == 1
    assert admission.retry_after_s(waiting=1549, now_s=110.0) == 5


def test_without_a_limit_nothing_is_full():
    """ER-14 null"""
    assert not Admission(None).is_full(10**9)


def test_a_burst_is_no_rate_of_thousands():
    """H-8 starts of the last moment count as those of a second"""
    admission = Admission(1)
    for _ in range(4):
        admission.started(100.0)
    assert admission.retry_after_s(waiting=40, now_s=100.0) == 10


def test_old_starts_are_forgotten():
    admission = Admission(1)
    admission.started(100.0)
    assert admission.retry_after_s(waiting=1, now_s=100.0 + WINDOW_S + 1) == UNKNOWN_S


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
