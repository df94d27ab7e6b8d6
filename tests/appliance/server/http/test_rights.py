"""Rights of API keys: going before others, changing adapters, and /invocations without a key."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.security.keys import parse_keys
from tests.appliance.server.http.conftest import Gateway

USER = {"role": "user", "content": "hello"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/messages": {"messages": [USER], "model": "qwen", "max_tokens": 4},
    "/v1/responses": {"input": "hello"},
    "/invocations": {"messages": [USER]},
}
KEYS = ["sk-any", "sk-first name=first priority=yes"]


def with_keys(gateway: Gateway) -> Gateway:
    gateway.service.set_keys(parse_keys(KEYS, "keys"))
    return gateway.says("ok")


@pytest.mark.parametrize("path", ROUTES)
def test_going_before_others_is_a_right_of_a_key(gateway: Gateway, path: str) -> None:
    with_keys(gateway)
    for priority, key, expected in ((-1, "sk-any", 400), (0, "sk-any", 200), (7, "sk-any", 200), (-1, "sk-first", 200)):
        status, reply = gateway.post(path, {**ROUTES[path], "priority": priority}, **{"x-api-key": key})
        assert status == expected, reply
        if expected == 400:
            assert "priority=yes" in reply["error"]["message"] and not gateway.submits
        else:
            assert gateway.submits[-1].priority == priority


def test_the_header_needs_the_same_right(gateway: Gateway) -> None:
    with_keys(gateway)
    body = ROUTES["/v1/completions"]
    status, reply = gateway.post("/v1/completions", body, **{"x-api-key": "sk-any", "x-vllm-priority": "-1"})
    assert (status, reply["error"]["param"]) == (400, "priority")
    assert gateway.post("/v1/completions", body, **{"x-api-key": "sk-first", "x-vllm-priority": "-1"})[0] == 200


ADAPTER_ROUTES = [
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}, 400),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}, 404),
    ("POST", "/adapters", {"name": "a", "src": "a"}, 400),
    ("DELETE", "/adapters/a", None, 404),
    ("GET", "/adapters", None, 200),
]


@pytest.mark.parametrize(("method", "path", "body", "permitted"), ADAPTER_ROUTES)
def test_changing_adapters_is_a_right_of_a_key(
    make_gateway: Callable[..., Gateway],
    tmp_path: Path,
    method: str,
    path: str,
    body: dict[str, str] | None,
    permitted: int,
) -> None:
    """400 and 404: there is no such adapter. Without keys, every client may change adapters."""
    gateway = make_gateway(adapter_folders=(str(tmp_path),))

    def call(**headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            async with gateway.client() as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(send())

    assert call().status_code == permitted
    gateway.service.set_keys(parse_keys(["sk-any", "sk-operator adapters=yes"], "keys"))
    for key, expected in (("sk-any", permitted if method == "GET" else 403), ("sk-operator", permitted)):
        reply = call(**{"x-api-key": key})
        assert reply.status_code == expected
        if expected == 403:
            assert reply.json()["error"]["type"] == "PermissionDeniedError"
            assert "adapters=yes" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_is_a_right_of_a_key(make_gateway: Callable[..., Gateway], path: str) -> None:
    """503: no engine is ready. Without keys every client may use the profiler. Without a folder there is none."""
    gateway = make_gateway(profiler=True)
    gateway.router.engines = []

    def call(gateway: Gateway, key: str = "") -> httpx.Response:
        async def send() -> httpx.Response:
            async with gateway.client() as client:
                return await client.post(path, headers={"x-api-key": key} if key else {})

        return asyncio.run(send())

    assert call(gateway).status_code == 503
    keys = parse_keys(["sk-any adapters=yes usage=yes priority=yes", "sk-operator profile=yes"], "keys")
    gateway.service.set_keys(keys)
    assert call(gateway).status_code == 401 and call(gateway, "sk-operator").status_code == 503
    refused = call(gateway, "sk-any")
    assert refused.status_code == 403 and "profile=yes" in refused.json()["error"]["message"]
    closed = make_gateway()
    closed.service.set_keys(keys)
    assert {call(closed, key).status_code for key in ("sk-any", "sk-operator")} == {404}


def test_without_keys_every_client_may_go_first(gateway: Gateway) -> None:
    assert gateway.says("ok").post("/v1/completions", {**ROUTES["/v1/completions"], "priority": -1})[0] == 200


def test_invocations_can_be_served_without_a_key(make_gateway: Callable[..., Gateway]) -> None:
    for opened in (False, True):
        gateway = with_keys(make_gateway(**{"endpoints.invocations_without_key": opened}))
        assert gateway.post("/invocations", ROUTES["/invocations"])[0] == (200 if opened else 401)
        assert gateway.post("/invocations/", ROUTES["/invocations"])[0] == (200 if opened else 401)
        assert gateway.post("/v1/chat/completions", ROUTES["/v1/chat/completions"])[0] == 401
        assert gateway.post("/invocations/x", ROUTES["/invocations"])[0] == 401
