"""Request headers that choose an engine and control reply details (RT-06), on both generating routes."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from appliance.server.routing.placement import ANYWHERE, Placement

ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/invocations", {"prompt": "hello"}),
]


def send(gateway: Any, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    async def call() -> httpx.Response:
        async with gateway.client() as client:
            reply: httpx.Response = await client.post(path, json=body, headers=headers)
            return reply

    return asyncio.run(call())


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "where"),
    [
        ({}, ANYWHERE),
        ({"X-data-parallel-rank": "3"}, Placement(3)),
        ({"X-Session-ID": "talk 1"}, Placement(None, "talk 1")),
        ({"X-Session-ID": "talk 1", "x-data-parallel-rank": "-1"}, Placement(-1, "talk 1")),
    ],
)
def test_headers_place_the_request(
    gateway: Any, path: str, body: dict[str, Any], stream: bool, headers: dict[str, str], where: Placement
) -> None:
    """RT-06 the router is asked for the engine or session of the headers"""
    assert send(gateway.says("x"), path, {**body, "stream": stream}, headers).status_code == 200
    assert gateway.router.placements == [where]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("given", ["", "one", "1.0", "--1", "\u00b2", "1 2", "9" * 101])
@pytest.mark.parametrize(
    ("header", "param"), [("X-data-parallel-rank", "X-data-parallel-rank"), ("X-Vllm-Priority", "priority")]
)
def test_a_header_that_is_no_integer_is_refused(
    gateway: Any, path: str, body: dict[str, Any], given: str, header: str, param: str
) -> None:
    """RT-06 never a server error"""
    reply = send(gateway, path, body, {header: given.encode("latin-1")})  # type: ignore[dict-item]
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert reply.json()["error"]["message"].startswith(f"{header} must be an integer, got '")
    assert not gateway.submits


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("wanted", ["text", "TEXT", "json", "JSON"])
def test_a_whole_reply_reports_the_load_if_asked(gateway: Any, path: str, body: dict[str, Any], wanted: str) -> None:
    """RT-06 endpoint-load-metrics"""
    report = send(gateway.says("x"), path, body, {"endpoint-load-metrics-format": wanted}).headers[
        "endpoint-load-metrics"
    ]
    if wanted.upper() == "TEXT":
        assert report == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"
    else:
        form, _, value = report.partition(" ")
        expected = {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3}}
        assert (form, json.loads(value)) == ("JSON", expected)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(("wanted", "stream"), [(None, False), ("BIN", False), ("", False), ("JSON", True)])
def test_nobody_else_gets_the_load(
    gateway: Any, path: str, body: dict[str, Any], wanted: str | None, stream: bool
) -> None:
    """RT-06 not without the header, not in a form that does not exist, not in a stream"""
    headers = {} if wanted is None else {"endpoint-load-metrics-format": wanted}
    reply = send(gateway.says("x"), path, {**body, "stream": stream}, headers)
    assert reply.status_code == 200
    assert "endpoint-load-metrics" not in reply.headers


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_parameters_and_texts_are_logged_with_the_trace(
    make_gateway: Callable[..., Any], caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    """RT-06 traceparent: not only the access log has it"""
    caplog.set_level(logging.INFO, "appliance.requests")
    gateway = make_gateway(**{"observability.log_requests": True, "observability.log_outputs": "deltas"})
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    send(gateway.says("x"), path, body, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    told = [record for record in caplog.records if record.name == "appliance.requests"]
    assert {record.msg.split()[0] for record in told} == {"parameters", "delta", "choice", "completed", "request"}
    assert all(getattr(record, "trace_id", None) == trace for record in told)
