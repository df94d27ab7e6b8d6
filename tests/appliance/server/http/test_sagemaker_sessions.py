"""Sessions of SageMaker over the application: placement, expiry, limits, restarts of the gateway."""

import os
from pathlib import Path

import pytest

from appliance.server.errors.api import BadRequest
from appliance.server.http.sessions import Sessions

HEADER = "X-Amzn-SageMaker-Session-Id"
BODY = {"prompt": "hello", "max_tokens": 2}


def test_requests_of_a_session_run_on_one_engine_and_others_anywhere(make_gateway):
    gateway = make_gateway(**{"endpoints.sessions.keep": 60.0}).says("ok")
    name, _ = gateway.service.sessions.open()
    for path in ("/invocations", "/v1/completions"):
        assert gateway.post(path, BODY, **{HEADER: name})[0] == 200
    assert gateway.post("/invocations", BODY, **{HEADER: "NEW_SESSION"})[0] == 200
    assert [one.session for one in gateway.router.placements] == [name, name, ""]


def test_sessions_are_off_by_default(gateway):
    for body in ({"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}):
        status, reply = gateway.post("/invocations", body)
        assert status == 400 and "not enabled" in reply["error"]["message"]


def test_an_expired_session_is_refused_at_each_request():
    sessions = Sessions(1e-9, 10)
    name, _ = sessions.open()
    for _ in range(2):
        with pytest.raises(BadRequest, match="has expired"):
            sessions.check(name)


def test_the_oldest_session_is_closed_when_there_are_too_many():
    sessions = Sessions(60, 2)
    first, second, third = (sessions.open()[0] for _ in range(3))
    sessions.check(second)
    sessions.check(third)
    with pytest.raises(BadRequest):
        sessions.check(first)


def test_sessions_survive_a_restart_and_closed_and_expired_ones_do_not(tmp_path: Path):
    folder = tmp_path / "sessions"
    sessions = Sessions(60, 10, folder)
    kept, closed, expired = (sessions.open()[0] for _ in range(3))
    sessions.close(closed)
    os.utime(folder / expired, (1, 1))
    again = Sessions(60, 10, folder)
    again.check(kept)
    for name in (closed, expired):
        with pytest.raises(BadRequest):
            again.check(name)
    assert {path.name for path in folder.iterdir()} == {kept}
