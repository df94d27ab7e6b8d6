"""Keys, limits, request ids, origins. Ids RT-* of docs/http.md."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

from appliance.config.gateway import SecretRef
from appliance.security.keys import ApiKey, digest, read_keys
from engine.api.errors import ConfigError


@pytest.fixture
def gateway(start_gateway, engine):
    """Start a gateway on a port, with a fake engine."""
    return start_gateway(engine)


BEARER = {"authorization": "Bearer key-two"}


@pytest.fixture
def guarded(start_gateway, engine):
    return start_gateway(engine, keys=["key-one", "key-two"], **{"endpoints.cors_origins": ("https://app.example",)})


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-one"},
        {"authorization": "bearer key-two"},
        {"x-api-key": "key-one"},
        {"x-api-key": "key-two", "authorization": "Bearer wrong"},
    ],
)
def test_any_of_several_keys_works_in_either_header(guarded, headers):
    """RT-01 several keys, Bearer or x-api-key"""
    assert guarded.client.post("/test/generate", json={}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer key-on"},
        {"authorization": "Bearer key-one2"},
        {"authorization": "Bearer"},
        {"authorization": "Basic key-one"},
        {"authorization": "key-one"},
        {"x-api-key": ""},
        {"x-api-key": "KEY-ONE"},
        {"x-api-key": "k\xe9y".encode("latin-1")},
    ],
)
def test_a_missing_or_wrong_key_is_a_full_error(guarded, headers):
    """RT-03 401 with error object and WWW-Authenticate"""
    reply = guarded.client.post("/test/generate", json={}, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == 401
    assert "key-" not in reply.text


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/tiny", "/invocations", "/load", "/openapi.json", "/nowhere", "/v1/completions"],
)
def test_every_route_but_the_probes_is_guarded(guarded, path):
    """RT-02 every path is guarded, including unknown ones"""
    assert guarded.client.get(path).status_code == 401
    assert guarded.client.post(path, json={}).status_code == 401


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping", "/version", "/metrics"])
def test_probes_want_no_key(guarded, path):
    """RT-02 probes stay open"""
    assert guarded.client.get(path).status_code == 200


def test_options_requires_no_key_and_returns_allowed_origins(guarded):
    """RT-01 OPTIONS exempt: a browser's preflight carries no key"""
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    reply = guarded.client.options("/v1/models", headers=preflight)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    refused = guarded.client.options("/v1/models", headers=preflight | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_a_browser_may_read_error_replies(guarded):
    """RT-01 errors carry the origin header too"""
    reply = guarded.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert reply.status_code == 401
    assert reply.headers["access-control-allow-origin"] == "https://app.example"


def test_without_configured_origins_no_origin_is_allowed(gateway):
    reply = gateway.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in reply.headers


def test_the_client_s_request_id_is_echoed_else_one_is_made(gateway):
    """RT-04 own profile: header on"""
    reply = gateway.client.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert re.fullmatch("[0-9a-f]{32}", gateway.client.get("/v1/models").headers["x-request-id"])


def test_the_vllm_profile_sends_no_request_id_header(start_gateway, engine):
    """RT-04 vllm profile: header off"""
    gateway = start_gateway(engine, **{"endpoints.compat": "vllm"})
    reply = gateway.client.get("/nowhere", headers={"x-request-id": "abc-1"})
    assert "x-request-id" not in reply.headers
    assert reply.json()["error"]["request_id"] == "abc-1"


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "tab\there", "\xe9"])
def test_a_request_id_that_could_break_a_header_or_a_log_line_is_replaced(gateway, bad):
    """RT-04 hostile ids"""
    reply = gateway.client.get("/v1/models", headers={"x-request-id": bad.encode("latin-1")})
    assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])


def test_a_body_over_the_limit_is_refused_announced_or_not(start_gateway, engine):
    """RT-09 body size limit enforced"""
    gateway = start_gateway(engine, **{"limits.max_body": 1000})
    fits = b'{"n": 1' + b" " * 992 + b"}"
    headers = {"content-type": "application/json"}
    assert len(fits) == 1000
    assert gateway.client.post("/test/generate", content=fits, headers=headers).status_code == 200
    for content in (fits + b" ", iter([fits, b" "])):
        reply = gateway.client.post("/test/generate", content=content, headers=headers)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == 413
        assert "limits.max_body" in reply.json()["error"]["message"]
    assert gateway.generate().status_code == 200


def test_a_huge_announced_body_is_refused_before_it_is_sent(start_gateway, engine):
    """RT-09 a body whose Content-Length is too large is not read"""
    gateway = start_gateway(engine, **{"limits.max_body": 1000})
    with socket.create_connection(("127.0.0.1", gateway.client.base_url.port)) as connection:
        connection.sendall(
            b"POST /test/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_keys_are_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch):
    """RT-01 keys one a line"""
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    monkeypatch.setenv("TEST_KEYS", "three\nfour")
    assert read_keys(SecretRef(file=str(file))) == [ApiKey(digest("one")), ApiKey(digest("two"))]
    assert read_keys(SecretRef(env="TEST_KEYS")) == [ApiKey(digest("three")), ApiKey(digest("four"))]
    assert read_keys(None) == []


def test_a_secret_without_keys_is_an_error_and_not_an_open_door(tmp_path: Path, monkeypatch):
    """RT-01 an empty secret must not switch auth off"""
    empty = tmp_path / "keys"
    empty.write_text("\n \n")
    monkeypatch.delenv("TEST_KEYS", raising=False)
    for secret in (SecretRef(file=str(empty)), SecretRef(file=str(tmp_path / "absent")), SecretRef(env="TEST_KEYS")):
        with pytest.raises(ConfigError, match=r"endpoints\.api_keys"):
            read_keys(secret)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_byte_of_a_stream_is_counted(make_gateway, path):
    gateway = make_gateway(**{"endpoints.compat": "openai"}).says("hello world", each=1)
    said = {"messages": [{"role": "user", "content": "hi"}]}
    body = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}.get(path, said)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"

    async def call():
        async with gateway.client() as client:
            return await client.post(path, json={"model": "qwen", **body, limit: 9, "stream": True})

    reply = asyncio.run(call())
    assert reply.status_code == 200 and reply.content.count(b"data: ") > 3
    sample = gateway.service.metrics.registry.get_sample_value
    assert sample("http_response_size_bytes_sum", {"handler": path}) == len(reply.content)
    assert sample("http_requests_total", {"handler": path, "method": "POST", "status": "2xx"}) == 1
    assert reply.headers["x-request-id"]
