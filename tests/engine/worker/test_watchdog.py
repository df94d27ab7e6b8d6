"""Tests of the rank watchdog: when it reports failed ranks. The tests pass in the time, so that nothing waits."""

import pytest

from engine.worker.watchdog import BEHIND_S, LOADING_SILENT_S, SILENT_S, STEP_S, RankWatchdog


def pass_time(watch, seconds, *alive):
    """The first thing that is wrong while so much time goes by, in seconds; these ranks are heard of each second."""
    for _ in range(int(seconds)):
        for rank in alive:
            watch.message_received(rank)
        if (wrong := watch.time_passed(1.0)) is not None:
            return wrong
    return None


def serving(size):
    watch = RankWatchdog(size)
    for rank in range(1, size):
        watch.started_serving(rank)
    return watch


def test_idle_ranks_with_messages_are_healthy():
    assert pass_time(serving(3), 10 * STEP_S, 1, 2) is None


def test_silent_rank_is_reported_except_rank_0():
    assert "rank 2 has sent no message for 5 s" in pass_time(serving(3), SILENT_S + 1, 1)


def test_loading_rank_may_be_silent_for_longer():
    assert pass_time(RankWatchdog(2), LOADING_SILENT_S) is None
    assert "rank 1 has sent no message" in pass_time(RankWatchdog(2), LOADING_SILENT_S + 1)


def test_rank_that_falls_behind_is_reported_with_the_step():
    watch = serving(3)
    for _ in range(2):
        watch.step_sent()
        assert watch.step_finished(0, 7) is watch.step_finished(1, 7) is None
    watch.step_finished(2, 7)
    assert pass_time(watch, BEHIND_S, 1, 2) is None
    wrong = pass_time(watch, 2, 1, 2)
    assert wrong == "rank 2 has not finished step 2, which others finished 30 s ago"


def test_rank_that_catches_up_is_healthy():
    watch = serving(2)
    for _ in range(3):
        watch.step_sent()
        watch.step_finished(0, 7)
    for _ in range(3):
        assert pass_time(watch, BEHIND_S - 1, 1) is None
        watch.step_finished(1, 7)
    assert pass_time(watch, 2 * BEHIND_S, 1) is None


def test_step_that_no_rank_finishes_is_reported():
    watch = serving(2)
    watch.step_sent()
    assert pass_time(watch, STEP_S, 1) is None
    assert "no rank has finished step 1" in pass_time(watch, 1, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_diverged_ranks_are_detected_in_any_order(order):
    watch = serving(3)
    for rank in order:
        assert watch.step_finished(rank, 11) is None
    found = [watch.step_finished(rank, 13 if rank == 2 else 12) for rank in order]
    assert found[:-1] == [None, None]
    assert found[-1] == "rank 2 sampled other tokens than rank 0 in step 2: the ranks diverged"
