"""Google Vertex AI: its health and predict routes, instances and raw bodies."""

import socket

import pytest

from tests.contracts.conftest import HEALTH, PREDICT

PROMPT = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}


def test_vx_03_health_is_served_at_the_platforms_route_without_a_key(anyone):
    assert anyone.get(HEALTH).status_code == 200
    assert anyone.post(HEALTH).status_code == 401, "only the probe is open"
    assert anyone.get(f"{HEALTH}/x").status_code == 401


def test_vx_01_vx_02_vx_04_the_port_of_the_platform_accepts_connections(url):
    host, _, port = url.removeprefix("http://").partition(":")
    socket.create_connection((host, int(port)), 5).close()


def test_vx_05_instances_give_as_many_predictions_in_their_order(client):
    alone = [
        client.post("/v1/completions", json={**PROMPT, "prompt": text}).json()["choices"][0]["text"]
        for text in ("Hello", "One two")
    ]
    instances = [
        {"prompt": "Hello"},
        "One two",
        {"@requestFormat": "x", "messages": [{"role": "user", "content": "x"}]},
    ]
    body = {"instances": instances, "parameters": {"max_tokens": 2, "temperature": 0}}
    reply = client.post(PREDICT, json=body)
    assert reply.status_code == 200, reply.text
    first, second, third = reply.json()["predictions"]
    assert [one["choices"][0]["text"] for one in (first, second)] == alone
    assert third["object"] == "chat.completion" and third["usage"]["completion_tokens"] <= 2
    assert len({first["id"], second["id"], third["id"]}) == 3


def test_vx_05_raw_predictions_pass_the_body_with_its_stream(client):
    assert client.post(PREDICT, json=PROMPT).json()["object"] == "text_completion"
    assert client.post(PREDICT, json={**PROMPT, "stream": True}).text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"instances": []}, "body.instances"),
        ({"instances": "x"}, "body.instances"),
        ({"instances": [PROMPT, 7]}, "instances[1]"),
        ({"instances": [PROMPT, {**PROMPT, "max_tokens": -1}]}, "instances[1].max_tokens"),
        ({"instances": [{**PROMPT, "stream": True}]}, "instances[0].stream"),
        ({"instances": [PROMPT] * 1025}, "instances"),
    ],
)
def test_vx_05_a_wrong_instance_is_named(client, body, param):
    reply = client.post(PREDICT, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_vx_09_predictions_need_a_key(anyone):
    for body in (PROMPT, {"instances": [PROMPT]}):
        assert anyone.post(PREDICT, json=body).status_code == 401
