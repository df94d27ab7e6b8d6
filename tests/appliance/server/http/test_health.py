"""Health probes while the engine loads, serves, crashes and drains."""

import threading

import msgspec
import pytest

from engine.api.messages import Failed, Loading, PhaseMemory, RankMemory


@pytest.fixture
def gateway(start_gateway, engine):
    """Start a gateway on a port, with a fake engine."""
    return start_gateway(engine)


def test_the_gateway_answers_with_phase_and_progress_while_the_engine_loads(start_gateway, new_engine, eventually):
    engine = new_engine()
    engine.first = [Loading("loading", 0.41)]
    gateway = start_gateway(engine.start(), ready=False)
    eventually("loading", lambda: gateway.client.get("/ready").json()["status"] == "loading")
    reply = gateway.client.get("/ready")
    assert reply.status_code == 503
    assert reply.json() == {
        "status": "loading",
        "phase": "loading",
        "progress": 0.41,
        "engines": [{"name": "engine-0", "phase": "loading", "progress": 0.41}],
    }
    assert gateway.client.get("/live").status_code == 200
    assert gateway.client.get("/health").status_code == 503
    engine.say(engine.READY)
    eventually("ready", lambda: gateway.client.get("/ready").status_code == 200)
    assert gateway.client.get("/ready").json()["status"] == "ready"


def test_before_there_is_an_engine_the_service_is_starting(start_gateway, new_engine):
    gateway = start_gateway(new_engine(), ready=False)
    reply = gateway.client.get("/ready")
    assert (reply.status_code, reply.json()["status"], reply.json()["progress"]) == (503, "starting", 0.0)


def test_requests_during_loading_get_retry_after(start_gateway, new_engine, eventually):
    engine = new_engine()
    engine.first = [Loading("warming", 0.5)]
    gateway = start_gateway(engine.start(), ready=False)
    eventually("warming", lambda: gateway.client.get("/ready").json()["phase"] == "warming")
    reply = gateway.generate()
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert "warming (50%)" in reply.json()["error"]["message"]


def test_health_is_empty_and_ping_is_its_alias_for_get_and_post(gateway):
    for reply in (gateway.client.get("/health"), gateway.client.get("/ping"), gateway.client.post("/ping")):
        assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping"])
def test_probes_answer_head(gateway, path):
    assert gateway.client.head(path).status_code == 200


def test_version_is_the_configured_one(gateway):
    assert gateway.client.get("/version").json() == {"version": "1.2.3"}


def test_an_engine_that_gave_up_is_shown_as_failed(start_gateway, engine, eventually):
    gateway = start_gateway(engine)
    engine.say(Failed(None, "memory", "no memory for one block"))
    eventually("failed", lambda: gateway.client.get("/ready").json()["phase"] == "failed")
    assert gateway.client.get("/health").status_code == 503
    assert gateway.client.get("/live").status_code == 200


def test_an_engine_crash_and_restart_change_the_health_status(gateway, engine, eventually):
    """ER-12 engine crashed: /health returns 503, new requests wait for its restart, the gateway keeps running."""
    engine.die()
    eventually("unhealthy", lambda: gateway.client.get("/health").status_code == 503)
    assert gateway.client.get("/ready").json()["status"] == "restarting"
    assert gateway.client.get("/live").status_code == 200
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(gateway.generate()))
    waiting.start()
    eventually("it waits", lambda: gateway.metric("slipway_requests_held") == 1)
    engine.start()
    eventually("back", lambda: gateway.client.get("/ready").status_code == 200)
    waiting.join()
    assert replies[0].status_code == 200 and gateway.metric("slipway_requests_held") == 0
    assert gateway.metric("slipway_engine_restarts_total") == 1


def test_new_requests_are_refused_where_a_restart_takes_longer_than_they_would_wait(
    start_gateway, new_engine, eventually
):
    """ER-12 503 with Retry-After for new requests"""
    engine = new_engine()
    engine.first = [msgspec.structs.replace(engine.READY, seconds={"loading": 31.0})]
    gateway = start_gateway(engine.start(), **{"lifecycle.restart.hold": 30.0})
    engine.die()
    eventually("unhealthy", lambda: gateway.client.get("/health").status_code == 503)
    refused = gateway.generate()
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert int(refused.headers["retry-after"]) >= 1


def test_one_of_two_engines_is_enough_to_be_ready(start_gateway, new_engine, eventually):
    first, second = new_engine().start(), new_engine().start()
    gateway = start_gateway(first, second)
    eventually("both", lambda: gateway.client.get("/ready").json()["progress"] == 1.0)
    first.die()
    eventually("one", lambda: gateway.client.get("/ready").json()["engines"][0]["phase"] == "restarting")
    assert gateway.client.get("/ready").status_code == 200
    assert gateway.generate().status_code == 200
    assert len(second.submits) == 1


def test_load_counts_open_requests_and_returns_to_zero(gateway, engine, eventually):
    """API-05 the load equals the open requests, streams included; 0 after finish, error and disconnect."""

    def load() -> int:
        return gateway.client.get("/load").json()["server_load"]

    assert load() == 0
    engine.holding = True
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 2, "stream": True}) as stream:
        eventually("one open", lambda: load() == 1)
        eventually("submitted", lambda: len(engine.open) == 1)
        engine.give(2)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    eventually("finish", lambda: load() == 0)
    assert gateway.generate(raises="RuntimeError").status_code == 500
    assert load() == 0
    with gateway.client.stream("POST", "/test/generate", json={"max_tokens": 9, "stream": True}):
        eventually("one open", lambda: load() == 1)
    eventually("disconnect", lambda: load() == 0)
    assert gateway.metric("slipway_open_requests") == 0


def test_a_ready_engine_reports_planned_and_real_memory(start_gateway, new_engine, eventually):
    engine = new_engine()
    engine.first = [Loading("loading", 0.5)]
    gateway = start_gateway(engine.start(), ready=False)
    eventually("loading", lambda: gateway.client.get("/ready").json()["status"] == "loading")
    assert "memory" not in gateway.client.get("/ready").json()["engines"][0]
    held, planned = {"mlp": 300, "kv": 64}, {"mlp": 290, "head": 0}
    engine.say(
        msgspec.structs.replace(
            engine.READY,
            memory=(RankMemory(held, 77, planned, {"loading": PhaseMemory("cpu", 5, 9)}), RankMemory({"kv": 60}, 0)),
        )
    )
    eventually("ready", lambda: gateway.client.get("/ready").status_code == 200)
    assert gateway.client.get("/ready").json()["engines"][0]["memory"] == [
        {
            "parts": {
                "mlp": {"planned": 290, "real": 300},
                "head": {"planned": 0, "real": None},
                "kv": {"planned": None, "real": 64},
            },
            "mapped": 77,
            "measured": {"loading": {"kept": 5, "peak": 9}},
        },
        {"parts": {"kv": {"planned": None, "real": 60}}, "mapped": 0, "measured": {}},
    ]
