"""The judge against appliances that misbehave: each planted misbehaviour breaks the promise that it should break."""

from dataclasses import replace

import pytest

from appliance.chaos.assertions import Seen, judge
from appliance.chaos.monitor import Look, Metrics
from appliance.chaos.probes import Probe
from appliance.chaos.scenario import Promise
from appliance.chaos.target import Bundle

RESTART = Promise("back", 10.0, "engine-0", causes=("signal",), hows=("killed by SIGKILL",))
STAY = Promise("on", 10.0, first_s=2.0, rises=("errors",), stands=("restarts",), says={"reload": "refused"})
KILLED = Bundle("engine-0", "signal", "killed by SIGKILL", 1.0)


def probe(sent_s, kind="stream", **more):
    return Probe(kind, sent_s, took_s=0.5, status=200, same=True, **more)


def restarted(**more):
    """Return the observations of a correct appliance whose engine is killed at 100 s."""
    seen = Seen(
        made_s=100.0,
        whole_s=104.0,
        probes=[probe(99.0), probe(99.9, "durable", longest_pause_s=4.0), probe(105.0, "whole")],
        looks=[Look(99.0, True), Look(101.0, False), Look(104.0, True)],
        bundles=[KILLED],
        pids=(7, 8),
        metrics=(Metrics(), Metrics(), Metrics()),
    )
    return replace(seen, **more)


def stayed(**more):
    """Return the observations of a correct appliance in which no process crashes."""
    seen = restarted(
        bundles=[],
        pids=(0, 0),
        looks=[Look(99.0, True), Look(101.0, True)],
        metrics=(Metrics(errors=1.0, restarts=2.0), Metrics(errors=3.0), Metrics(errors=3.0, restarts=2.0)),
        said={"reload": "refused"},
    )
    return replace(seen, **more)


def broken(promise, seen):
    return [finding.name for finding in judge(promise, seen) if not finding.kept]


def test_an_appliance_that_does_as_it_promises_is_found_to():
    assert broken(RESTART, restarted()) == []
    assert broken(STAY, stayed()) == []


LOST = Probe("stream", 99.9, took_s=1.0, status=200, error="RemoteProtocolError: the stream ended without [DONE]")
OPEN = Probe("whole", 99.9, took_s=60.0, error="no end within 60 s")
REFUSED = Probe("whole", 101.0, status=503, retry_after="3", error="503: busy")
WELL = probe(105.0)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"probes": [LOST, WELL]}, "requests"),
        ({"probes": [OPEN, WELL]}, "requests"),
        ({"probes": [REFUSED, WELL]}, "requests"),
        ({"probes": [probe(99.0)]}, "requests"),
        ({"probes": []}, "requests"),
        ({"probes": [replace(probe(99.0), same=False), WELL]}, "tokens"),
        ({"whole_s": 111.0, "probes": [probe(99.0), probe(112.0)]}, "back in time"),
        ({"pids": (7, 7)}, "restarted"),
        ({"pids": (7, 0)}, "restarted"),
        ({"bundles": []}, "cause"),
        ({"bundles": [replace(KILLED, cause="hang")]}, "cause"),
        ({"bundles": [replace(KILLED, how="killed by SIGSEGV")]}, "cause"),
        ({"bundles": [KILLED, KILLED]}, "cause"),
        ({"metrics": (Metrics(), None, None)}, "metrics"),
        ({"metrics": (Metrics(), None, Metrics(slipway_requests_held=2.0))}, "nothing is stuck"),
        ({"metrics": (Metrics(), None, Metrics(slipway_requests_waiting=1.0))}, "nothing is stuck"),
        ({"left": ["Limited: no such process"]}, "taken back"),
    ],
)
def test_each_way_to_fail_a_restart_is_found(planted, found):
    assert broken(RESTART, restarted(**planted)) == [found]


def test_a_service_that_never_comes_back_is_found():
    assert broken(RESTART, restarted(whole_s=None, pids=(7, 0), bundles=[])) == ["back in time", "restarted", "cause"]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"looks": [Look(99.0, True), Look(101.0, False), Look(102.0, True)]}, "ready all the time"),
        ({"looks": [Look(99.0, True)]}, "ready all the time"),
        ({"said": {"reload": "taken"}}, "reload"),
        ({"said": {}}, "reload"),
        ({"metrics": (Metrics(errors=3.0), Metrics(errors=3.0), Metrics(errors=3.0))}, "errors"),
        ({"metrics": (Metrics(), Metrics(errors=1.0), Metrics(errors=1.0, restarts=1.0))}, "restarts"),
        ({"probes": [probe(99.0, "durable", begun_s=2.5), WELL]}, "replies begin"),
    ],
)
def test_each_way_to_fail_without_a_restart_is_found(planted, found):
    assert broken(STAY, stayed(**planted)) == [found]


def test_a_refusal_is_excused_only_where_it_is_promised_and_says_when_to_come_back():
    allowed = replace(STAY, refusals=True)
    assert broken(allowed, stayed(probes=[REFUSED, WELL])) == []
    for wrong in (replace(REFUSED, retry_after=""), replace(REFUSED, retry_after="0"), replace(REFUSED, status=500)):
        assert broken(allowed, stayed(probes=[wrong, WELL])) == ["requests"]


def test_with_a_gateway_only_requests_without_a_key_may_be_lost():
    allowed = replace(RESTART, lost=True)
    assert broken(allowed, restarted(probes=[LOST, WELL])) == []
    assert broken(allowed, restarted(probes=[replace(LOST, kind="durable"), WELL])) == ["requests"]


def test_where_sums_depend_on_batches_tokens_are_not_compared():
    unknown = [replace(each, same=None) for each in restarted().probes]
    assert broken(RESTART, restarted(probes=unknown)) == []
