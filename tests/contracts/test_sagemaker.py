"""Amazon SageMaker and AWS's model hosting container standards. Each test names its lines of docs/platforms.md."""

import json
import subprocess
import sys

import httpx
import pytest

from tests.e2e.conftest import ROOT

PROMPT = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
SESSION = "X-Amzn-SageMaker-Session-Id"
NEW = {"requestType": "NEW_SESSION"}


def open_session(client: httpx.Client) -> str:
    reply = client.post("/invocations", json=NEW, headers={SESSION: "NEW_SESSION"})
    assert reply.status_code == 200, reply.text
    name, _, end = reply.headers["X-Amzn-SageMaker-New-Session-Id"].partition("; Expires=")
    assert len(name) == 36 and len(end) == 20 and end.endswith("Z")
    return name


def test_sm_01_train_is_an_error():
    done = subprocess.run([sys.executable, "-m", "appliance", "train"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "train" in done.stderr


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_sm_10_mh_20_ping_is_200_with_an_empty_body(anyone, method):
    reply = anyone.request(method, "/ping")
    assert reply.status_code == 200 and reply.content == b""


def test_sm_20_mh_21_invocations_are_served_by_the_shape_of_the_body(client):
    assert client.post("/invocations", json=PROMPT).json()["object"] == "text_completion"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert client.post("/invocations", json=chat).json()["object"] == "chat.completion"
    scoring = {"query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}
    assert len(client.post("/invocations", json=scoring).json()["data"]) == 2


@pytest.mark.parametrize("size", [6_291_456, 25_000_000])
def test_sm_20_sm_26_a_body_of_the_largest_size_is_read(client, size):
    """Limits: 6 MiB in the shapes of botocore, 25 MB in the documentation."""
    body = json.dumps({**PROMPT, "user": ""})
    body = body.replace('"user": ""', f'"user": "{"x" * (size - len(body))}"')
    reply = client.post("/invocations", content=body, headers={"content-type": "application/json"})
    assert len(body) == size and reply.status_code == 200, reply.text


def test_sm_21_invocations_need_a_key_unless_the_manifest_says_otherwise(anyone):
    assert anyone.post("/invocations", json=PROMPT).status_code == 401


def test_sm_22_the_request_id_is_returned_in_the_attributes_that_the_platform_forwards(client):
    reply = client.post("/invocations", json=PROMPT, headers={"X-Request-Id": "abc"})
    assert reply.headers["X-Amzn-SageMaker-Custom-Attributes"] == "request_id=abc"


def test_sm_23_a_stream_is_chunked(client):
    with client.stream("POST", "/invocations", json={**PROMPT, "stream": True}) as reply:
        assert reply.headers["transfer-encoding"] == "chunked"
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) >= 2


def test_sm_24_errors_are_short_json(client):
    reply = client.post("/invocations", json={**PROMPT, "max_tokens": -1})
    assert reply.status_code == 400 and set(reply.json()) == {"error"} and len(reply.content) < 1024


def test_sm_29_metrics_are_on_the_same_port(anyone):
    assert "# TYPE" in anyone.get("/metrics").text


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}"])
def test_mh_23_a_body_that_is_no_request_is_400(client, body):
    reply = client.post("/invocations", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/metrics", "/v1/requests", "/invocations", "/v1/responses/x/cancel", "//v1/messages"]
)
def test_mh_24_a_custom_attribute_selects_only_routes_of_inference(client, model, path):
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    attributes = {"X-Amzn-SageMaker-Custom-Attributes": "trace=1,route=/v1/messages"}
    assert client.post("/invocations", json=body, headers=attributes).json()["type"] == "message"
    refused = client.post("/invocations", json=body, headers={"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"})
    assert refused.status_code == 400 and "/v1/messages" in refused.json()["error"]["message"]


def test_mh_31_mh_32_a_session_is_opened_and_used(client):
    name = open_session(client)
    assert client.post("/invocations", json=PROMPT, headers={SESSION: name}).status_code == 200
    unknown = client.post("/invocations", json=PROMPT, headers={SESSION: "0" * 36})
    assert unknown.status_code == 400 and "session was not found" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("body", [{**NEW, "prompt": "x"}, {"requestType": "new"}, {"requestType": None}])
def test_mh_31_other_bodies_of_sessions_are_400(client, body):
    assert client.post("/invocations", json=body).status_code == 400


def test_mh_33_a_session_is_closed_once(client):
    name, close = open_session(client), {"requestType": "CLOSE"}
    assert client.post("/invocations", json=close).status_code == 424
    closed = client.post("/invocations", json=close, headers={SESSION: name})
    assert closed.status_code == 200 and closed.headers["X-Amzn-SageMaker-Closed-Session-Id"] == name
    assert client.post("/invocations", json=close, headers={SESSION: name}).status_code == 400
    assert client.post("/invocations", json=PROMPT, headers={SESSION: name}).status_code == 400


def test_mh_35_new_session_in_the_header_alone_is_an_ordinary_request(client):
    reply = client.post("/invocations", json=PROMPT, headers={SESSION: "NEW_SESSION"})
    assert reply.status_code == 200 and "X-Amzn-SageMaker-New-Session-Id" not in reply.headers
