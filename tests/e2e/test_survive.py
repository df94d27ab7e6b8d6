"""Requests survive the crash of their engine and the stop of the service, with streams of every kind; the real demo."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable

import httpx
import pytest

from benchmarks.fault_injection import KillTarget, kill_under_load
from benchmarks.service import run_directory
from engine.api.heartbeat import State, read_heartbeat
from tests.e2e.conftest import DEMO, ROOT, Appliance
from tests.e2e.poison import FAULT, attack
from tests.tiers import thinned

ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def appliance(launch: Callable[..., Appliance], tmp_path_factory: pytest.TempPathFactory) -> Appliance:
    """A service from its first moment to its last one. Its engine crashes at a poison request. Three crashes are
    allowed: the engine is killed once, so two are left."""
    fault = tmp_path_factory.mktemp("fault")
    (fault / "sitecustomize.py").write_text(FAULT)
    lifecycle = "{drain: 100s, restart: {max: 3, backoff: 100ms}}"
    settings = ("speculation.method=suffix", f"lifecycle={lifecycle}")
    words = (word for each in settings for word in ("--set", each))
    return launch(DEMO, *words, threads="", PYTHONPATH=f"{fault}:{ROOT}")


def test_the_gateway_answers_before_the_engine_serves(appliance, eventually):
    eventually("/live", lambda: appliance.status("/live") == 200)
    seen = appliance.client.get("/ready")
    if seen.status_code == 503:  # a fast machine may be ready already
        assert {"status", "phase", "progress"} <= seen.json().keys()
        refused = appliance.client.post("/v1/completions", json=ASK)
        assert refused.status_code in (200, 503)
    appliance.wait_ready()
    eventually("a curl line", lambda: "curl" in appliance.output())


def test_no_request_notices_that_its_engine_was_killed(appliance):
    """Compare each token with an undisturbed run: streamed and complete replies, greedy and sampled, logprobs, n > 1,
    stop strings, JSON schemas and tool calls, with speculative decoding."""
    appliance.wait_ready()
    result = asyncio.run(
        kill_under_load(appliance.url, [KillTarget(appliance.process.pid)], kills=1, streams=10, tokens=40)
    )
    assert result.kills == 1 and result.requests >= 10
    assert result.failed == []
    assert result.differing == []
    assert appliance.metric("slipway_request_interruptions_total") > 0
    assert appliance.metric("slipway_engine_restarts_total") == 1
    assert appliance.metric("slipway_requests_held") == appliance.metric("slipway_open_requests") == 0
    assert appliance.metric("slipway_requests_quarantined_total") == 0
    assert 0 < appliance.metric("slipway_draft_accepted_tokens_total") < appliance.metric("slipway_draft_tokens_total")
    assert appliance.metric("slipway_draft_search_seconds_total") > 0


@pytest.mark.parametrize("counts", thinned([(1, 1), (1, 2), (3, 2), (31, 2)], kept=[(1, 1)]))
def test_streams_beside_a_poison_request_survive_a_restart_limit_of_two(appliance, counts):
    """counts: other requests, and copies of the poison request. Crashes that it causes do not count."""
    others, poison = counts
    appliance.wait_ready()
    isolated, restarts = "slipway_requests_quarantined_total", "slipway_engine_restarts_total"
    earlier = appliance.metric(isolated), appliance.metric(restarts)
    before, beside, refused = asyncio.run(attack(appliance.url, others, poison, more_tokens=sum(counts)))
    assert [finish for _, finish in beside] == ["length"] * others
    assert beside == before
    assert [reply.status_code for reply in refused] == [422] * (poison + 1)
    assert all("is isolated" in reply.json()["error"]["message"] for reply in refused)
    assert appliance.metric(isolated) - earlier[0] == poison
    assert 1 + poison <= appliance.metric(restarts) - earlier[1] <= 15
    assert appliance.status("/ready") == 200


# The last test of this service: it stops it.
def test_an_open_stream_finishes_after_sigterm_and_no_process_is_left(appliance, eventually):
    appliance.wait_ready()
    lines = open_stream(appliance)
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert not [line for line in lines if '"error"' in line]
    finishes = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines if line.startswith("data: {")]
    assert finishes[-1] == "length"
    eventually("no process left", lambda: not appliance.processes())


def open_stream(appliance) -> list[str]:
    """Stop the appliance while a stream is open, and return the lines of the stream."""
    lines: list[str] = []
    started = threading.Event()

    def read() -> None:
        body = ASK | {"max_tokens": 300, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=appliance.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            for line in reply.iter_lines():
                lines.append(line)
                started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(100)
    assert appliance.stop() == 0
    reader.join()
    return lines


@pytest.mark.nightly("tests/e2e/test_sourced.py::test_a_reply_with_a_key_goes_on_in_another_gateway")
def test_clients_that_come_back_to_a_gateway_that_was_killed_get_the_exact_rest(launch):
    """The gateway and the engine in turns, under requests with an Idempotency-Key"""
    appliance = launch()
    appliance.wait_ready()
    targets = [KillTarget(appliance.process.pid, name) for name in ("gateway", "engine-0")]
    wanted = {"kills": 2, "streams": 8, "tokens": 60, "durable": True, "seed": 2}
    result = asyncio.run(kill_under_load(appliance.url, targets, **wanted))
    assert result.kills == 2 and result.requests >= 8 and result.reconnects > 0
    assert result.failed == []
    assert result.differing == []
    assert appliance.metric("slipway_requests_joined_total") > 0
    assert appliance.metric("slipway_journal_skipped_records_total") == 0
    assert appliance.stop() == 0


STALLS = ("--set", "health.stalled_busy=3s", "--set", "health.stalled_idle=3s")


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_repeated_hangs_end_the_appliance_with_cause_hang"
)
def test_an_engine_that_is_stopped_without_work_is_noticed_and_replaced(launch, eventually):
    """SIGSTOP: it answers no signal and no probe"""
    # Only the idle engine has a short limit. On a busy machine the next one must be able to start.
    appliance = launch(DEMO, "--set", "health.stalled_idle=6s")
    appliance.wait_ready()
    stopped, file = appliance.pids()["engine-0"], run_directory(appliance.process.pid) / "engine-0.pulse"

    def stopped_without_work() -> bool:
        os.kill(stopped, signal.SIGSTOP)
        if read_heartbeat(file).state is State.IDLE:
            return True
        os.kill(stopped, signal.SIGCONT)  # in a step, such as one of its own probes
        return False

    eventually("a stop between two steps", stopped_without_work)
    eventually("another engine", lambda: appliance.pids().get("engine-0", stopped) != stopped)
    eventually("the reason", lambda: "hung: it finished no idle probe" in appliance.output())
    appliance.wait_ready()
    assert appliance.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
    assert appliance.stop() == 0


@pytest.mark.nightly("tests/e2e/test_chaos.py::test_promises_are_kept_and_files_are_unchanged")
def test_a_stream_goes_on_when_its_engine_was_stopped_under_it(launch, eventually):
    appliance = launch(DEMO, *STALLS)
    appliance.wait_ready()
    body = {"prompt": "Tell me", "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    expected = appliance.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stopped = appliance.pids()["engine-0"]
    text = ""
    with appliance.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if stopped and len(text) > 20:
                    os.kill(stopped, signal.SIGSTOP)
                    stopped = 0
    assert text == expected
    assert "hung: no step finished" in appliance.output()
    assert appliance.stop() == 0
