"""Tests of a short soak: all kinds of bad clients for some seconds leave no leak, and injected leaks are found."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.leak_check import ResourceUsage, leaks
from benchmarks.service import Service, run_directory
from benchmarks.soak import SETTINGS, soak, summary, table
from tests.tiers import NIGHTLY

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo.yaml"


@pytest.mark.parametrize(
    ("minutes", "aborts", "streams", "least"),
    [(0.08, 16, 4, 0), pytest.param(0.2, 40, 6, 10, marks=NIGHTLY)],
    ids=["short", "long"],
)
def test_after_bad_clients_of_every_kind_nothing_is_held(launch, tmp_path, minutes, aborts, streams, least):
    """least: requests and malformed requests that even a busy machine serves in this time."""
    settings = (*SETTINGS, f"lifecycle.crash_bundles.folder={tmp_path}")
    appliance = launch(DEMO, *(word for each in settings for word in ("--set", each)))
    appliance.wait_ready()
    service = Service(appliance.url, appliance.process.pid, run_directory(appliance.process.pid))
    report = asyncio.run(soak(service, minutes=minutes, aborts=aborts, streams=streams))
    assert report["wrong"] == [], "\n".join(table(report))
    tally = report["tally"]
    assert tally["aborts"] >= aborts and tally["requests"] > least and tally["malformed"] > least
    assert tally["slow_streams"] >= streams - 2
    assert {"400", "413"} <= tally["answers"].keys() or tally["malformed"] < 60
    # Every token had keys and values, else there was nothing to leak. A sample can miss them on a busy machine.
    assert report["samples"] and appliance.metric("slipway_generation_tokens_total") > least
    assert "hung" not in appliance.output()
    assert appliance.stop() == 0


def test_samples_are_summarised_by_series():
    samples = [
        {"at_s": at, "kv_used": at / 10, "memory": {"gateway": at * 8}, "files": {"gateway": 7}} for at in (3, 1, 2)
    ]
    ranges = {"kv_used": [0.1, 0.2, 0.3], "memory.gateway": [8, 16, 24], "files.gateway": [7, 7, 7]}
    assert summary(samples) == {"count": 3, "min, median, max": ranges}


MIB = 2**20
HELD = ResourceUsage(
    gauges={"kv_used": 0.0, "open_requests": 0.0, "restarts": 1.0, "hang_alarms": 0.0},
    memory={"gateway": 50 * MIB, "engine-0": 270 * MIB},
    files={"gateway": 17},
    threads={"gateway": 7},
    entries=["engine-0.sock"],
)


@pytest.mark.parametrize(
    ("planted", "word"),
    [
        ({"gauges": HELD.gauges | {"kv_used": 0.001}}, "kv_used"),
        ({"gauges": HELD.gauges | {"open_requests": 1.0}}, "open_requests"),
        ({"gauges": HELD.gauges | {"restarts": 2.0}}, "restarts"),
        ({"gauges": HELD.gauges | {"hang_alarms": 1.0}}, "hang_alarms"),
        ({"memory": HELD.memory | {"gateway": 90 * MIB}}, "memory of gateway"),
        ({"memory": {"gateway": 50 * MIB}}, "missing files: engine-0"),
        ({"files": {"gateway": 30}}, "open files of gateway"),
        ({"threads": {"gateway": 70}}, "threads of gateway"),
        ({"entries": ["engine-0.sock", "engine-0-ranks-x"]}, "engine-0-ranks-x"),
    ],
)
def test_a_planted_leak_is_found(planted, word):
    assert leaks(HELD, HELD) == []
    (found,) = leaks(HELD, replace(HELD, **planted))
    assert word in found
