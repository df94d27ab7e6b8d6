"""Compressed bodies, paths with a slash at the end, and headers of SageMaker."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.appliance.server.http.conftest import Gateway

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
DATA = json.dumps(BODY).encode()


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def send(gateway: Gateway, path: str, data: bytes, **headers: str) -> httpx.Response:
    given = {"content-type": "application/json", **{name.replace("_", "-"): each for name, each in headers.items()}}

    async def call() -> httpx.Response:
        async with gateway.client() as client:
            return await client.post(path, content=data, headers=given)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(DATA)),
        ("GZIP", gzip.compress(DATA)),
        ("x-gzip", gzip.compress(DATA)),
        ("gzip", gzip.compress(DATA[:20]) + gzip.compress(DATA[20:])),
        ("deflate", zlib.compress(DATA)),
        ("deflate", raw_deflate(DATA)),
        ("identity", DATA),
        ("", DATA),
    ],
    ids=["gzip", "upper case", "x-gzip", "two members", "zlib", "deflate", "identity", "empty"],
)
def test_a_compressed_body_is_read(gateway: Gateway, encoding: str, data: bytes) -> None:
    plain = send(gateway.says("ok"), CHAT, DATA)
    reply = send(gateway, CHAT, data, content_encoding=encoding)
    assert plain.status_code == reply.status_code == 200, reply.text
    assert gateway.submits[0].prompt == gateway.submits[1].prompt


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize(
    "data",
    [b"", b"xx", gzip.compress(DATA)[:-9], gzip.compress(DATA) + b"more", gzip.compress(DATA)[:3]],
    ids=["empty", "no gzip", "cut off", "more behind it", "cut in the head"],
)
def test_damaged_compression_is_an_error_of_the_request(gateway: Gateway, path: str, data: bytes) -> None:
    reply = send(gateway, path, data, content_encoding="gzip")
    assert reply.status_code == 400
    assert "Content-Encoding" in reply.json()["error"]["message"]


def test_very_many_members_are_refused(gateway: Gateway) -> None:
    data = gzip.compress(b"") * 2000 + gzip.compress(DATA)
    assert send(gateway, CHAT, data, content_encoding="gzip").status_code == 400


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "nonsense"])
def test_other_encodings_are_refused_by_name(gateway: Gateway, encoding: str) -> None:
    reply = send(gateway, CHAT, DATA, content_encoding=encoding)
    assert reply.status_code == 415
    assert encoding in reply.json()["error"]["message"]
    assert reply.headers["accept-encoding"] == "gzip, deflate"


def test_a_compressed_body_counts_as_long_as_it_is_when_it_is_unpacked(make_gateway: Callable[..., Gateway]) -> None:
    gateway = make_gateway(**{"limits.max_body": 1000}).says("ok")
    bomb = gzip.compress(b" " * 50_000_000 + DATA)
    for data in (bomb[:1000], gzip.compress(b" " * (1001 - len(DATA)) + DATA)):
        assert send(gateway, CHAT, data, content_encoding="gzip").status_code == 413
    data = gzip.compress(b" " * (1000 - len(DATA)) + DATA)
    assert send(gateway, CHAT, data, content_encoding="gzip").status_code == 200


ROUTES = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/invocations")


@pytest.mark.parametrize("path", ROUTES)
def test_a_slash_at_the_end_of_a_path_changes_nothing(gateway: Gateway, path: str) -> None:
    body = {"prompt": "hello"} if path in ("/v1/completions", "/tokenize") else BODY
    body = {"input": "hello"} if path == "/v1/responses" else {**body, "model": "qwen"}
    replies = [send(gateway.says("ok"), each, json.dumps(body).encode()) for each in (path, f"{path}/")]
    assert [reply.status_code for reply in replies] == [200, 200], replies[1].text


def test_a_slash_does_not_open_a_guarded_path(start_gateway: Any, engine: Any) -> None:
    gateway = start_gateway(engine, keys=["secret"])
    for path in ("/v1/models/", "/v1/chat/completions/", "/live//x/"):
        assert gateway.client.get(path).status_code == 401, path
    assert gateway.client.get("/live/").status_code == 200
    assert gateway.client.get("/v1/models/", headers={"x-api-key": "secret"}).status_code == 200
    assert gateway.client.get("/metrics/").status_code == 200


@pytest.mark.parametrize("path", ["/invocations", CHAT])
@pytest.mark.parametrize(
    "name",
    ["X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-Adapter-Alias"],
)
def test_sessions_and_adapters_of_sagemaker_are_refused(gateway: Gateway, path: str, name: str) -> None:
    reply = send(gateway.says("ok"), path, DATA, **{name: "one"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name and name in reply.json()["error"]["message"]
    assert send(gateway, path, DATA, **{name: ""}).status_code == 200
