"""Assertions on the observations of a fault: each wrong observation breaks exactly the promise that it violates."""

from dataclasses import replace

import pytest

from appliance.chaos.assertions import Observations, check_promise
from appliance.chaos.monitor import Metrics, ReadinessSample
from appliance.chaos.probes import Probe
from appliance.chaos.scenario import Promise
from appliance.chaos.target import CrashBundle

RESTART = Promise("back", 10.0, "engine-0", causes=("signal",), exit_details=("killed by SIGKILL",))
STAY = Promise(
    "on", 10.0, first_s=2.0, increasing=("errors",), constant=("restarts",), observations={"reload": "refused"}
)
KILLED = CrashBundle("engine-0", "signal", "killed by SIGKILL", 1.0)


def probe(sent_s, kind="stream", **more):
    return Probe(kind, sent_s, took_s=0.5, status=200, matches=True, **more)


def restarted(**more):
    """Return the observations of a correct appliance whose engine is killed at 100 s."""
    seen = Observations(
        injected_s=100.0,
        recovered_s=104.0,
        probes=[probe(99.0), probe(99.9, "durable", longest_gap_s=4.0), probe(105.0, "complete")],
        samples=[ReadinessSample(99.0, True), ReadinessSample(101.0, False), ReadinessSample(104.0, True)],
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
        samples=[ReadinessSample(99.0, True), ReadinessSample(101.0, True)],
        metrics=(Metrics(errors=1.0, restarts=2.0), Metrics(errors=3.0), Metrics(errors=3.0, restarts=2.0)),
        fault={"reload": "refused"},
    )
    return replace(seen, **more)


def broken(promise, seen):
    return [finding.name for finding in check_promise(promise, seen) if not finding.kept]


def test_correct_observations_keep_all_promises():
    assert broken(RESTART, restarted()) == []
    assert broken(STAY, stayed()) == []


LOST = Probe("stream", 99.9, took_s=1.0, status=200, error="RemoteProtocolError: the stream ended without [DONE]")
OPEN = Probe("complete", 99.9, took_s=60.0, error="no end within 60 s")
REFUSED = Probe("complete", 101.0, status=503, retry_after="3", error="503: busy")
WELL = probe(105.0)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"probes": [LOST, WELL]}, "requests"),
        ({"probes": [OPEN, WELL]}, "requests"),
        ({"probes": [REFUSED, WELL]}, "requests"),
        ({"probes": [probe(99.0)]}, "requests"),
        ({"probes": []}, "requests"),
        ({"probes": [replace(probe(99.0), matches=False), WELL]}, "tokens"),
        ({"recovered_s": 111.0, "probes": [probe(99.0), probe(112.0)]}, "recovery time"),
        ({"pids": (7, 7)}, "restarted"),
        ({"pids": (7, 0)}, "restarted"),
        ({"bundles": []}, "cause"),
        ({"bundles": [replace(KILLED, cause="hang")]}, "cause"),
        ({"bundles": [replace(KILLED, how="killed by SIGSEGV")]}, "cause"),
        ({"bundles": [KILLED, KILLED]}, "cause"),
        ({"metrics": (Metrics(), None, None)}, "metrics"),
        ({"metrics": (Metrics(), None, Metrics(slipway_requests_held=2.0))}, "stuck requests"),
        ({"metrics": (Metrics(), None, Metrics(slipway_requests_waiting=1.0))}, "stuck requests"),
        ({"remaining": ["RestoreFileLimit: no such process"]}, "rollback"),
    ],
)
def test_each_wrong_restart_breaks_one_promise(planted, found):
    assert broken(RESTART, restarted(**planted)) == [found]


def test_service_without_recovery_breaks_its_promises():
    assert broken(RESTART, restarted(recovered_s=None, pids=(7, 0), bundles=[])) == [
        "recovery time",
        "restarted",
        "cause",
    ]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (
            {"samples": [ReadinessSample(99.0, True), ReadinessSample(101.0, False), ReadinessSample(102.0, True)]},
            "readiness",
        ),
        ({"samples": [ReadinessSample(99.0, True)]}, "readiness"),
        ({"fault": {"reload": "accepted"}}, "reload"),
        ({"fault": {}}, "reload"),
        ({"metrics": (Metrics(errors=3.0), Metrics(errors=3.0), Metrics(errors=3.0))}, "errors"),
        ({"metrics": (Metrics(), Metrics(errors=1.0), Metrics(errors=1.0, restarts=1.0))}, "restarts"),
        ({"probes": [probe(99.0, "durable", first_response_s=2.5), WELL]}, "reply start"),
    ],
)
def test_each_wrong_observation_without_restart_breaks_one_promise(planted, found):
    assert broken(STAY, stayed(**planted)) == [found]


def test_refusals_with_retry_after_are_excused_where_promised():
    allowed = replace(STAY, may_refuse=True)
    assert broken(allowed, stayed(probes=[REFUSED, WELL])) == []
    for wrong in (replace(REFUSED, retry_after=""), replace(REFUSED, retry_after="0"), replace(REFUSED, status=500)):
        assert broken(allowed, stayed(probes=[wrong, WELL])) == ["requests"]


def test_gateway_restart_excuses_only_requests_without_a_key():
    allowed = replace(RESTART, may_lose_requests=True)
    assert broken(allowed, restarted(probes=[LOST, WELL])) == []
    assert broken(allowed, restarted(probes=[replace(LOST, kind="durable"), WELL])) == ["requests"]


def test_tokens_are_not_compared_without_batch_invariance():
    unknown = [replace(each, matches=None) for each in restarted().probes]
    assert broken(RESTART, restarted(probes=unknown)) == []
