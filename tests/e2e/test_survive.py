"""Requests outlive engines: the real demo, its engine killed under streams of every kind."""

import asyncio

from benchmarks.kills import Engine, torment


def test_no_request_notices_that_its_engine_was_killed(launch):
    """Streamed and whole, greedy and sampled, logprobs, n > 1, stop strings, JSON schemas, tool calls: token by token
    what an undisturbed run gives"""
    appliance = launch()
    appliance.wait_ready()
    result = asyncio.run(torment(appliance.url, Engine(appliance.process.pid), kills=3, streams=12, tokens=80))
    assert result.kills == 3 and result.requests >= 12
    assert result.failed == []
    assert result.differing == []
    assert appliance.metric("slipway_request_interruptions_total") > 0
    assert appliance.metric("slipway_engine_restarts_total") == 3
    assert appliance.metric("slipway_requests_held") == appliance.metric("slipway_open_requests") == 0
    assert appliance.metric("slipway_requests_quarantined_total") == 0
    assert appliance.stop() == 0
