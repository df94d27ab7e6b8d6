"""A new route composes the stages of the pipeline in fewer than 60 lines, and gets streams, stop strings, resumption,
counts and logs from them."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.server.reply_store.journal import open_reply_store
from tests.appliance.server.http import tiny_route

PATH = "/v1/capitals"


@pytest.fixture
def make(make_gateway: Callable[..., Any]) -> Callable[..., Any]:
    def made(**fields: Any) -> Any:
        gateway = make_gateway(**fields)
        gateway.app.include_router(tiny_route.router)
        return gateway

    return made


def test_route_module_has_fewer_than_60_lines() -> None:
    assert tiny_route.__file__ is not None
    assert len(Path(tiny_route.__file__).read_text().splitlines()) < 60


def test_new_route_returns_complete_replies_in_its_format(make: Callable[..., Any]) -> None:
    gateway = make().says("hello world", "stop")
    assert gateway.post(PATH, {"prompt": "x", "n": 2, "temperature": 1}) == (200, {"texts": ["HELLO WORLD", "STOP"]})
    assert gateway.post(PATH, {"prompt": "x", "model": "other"})[0] == 404


def test_new_route_streams_in_its_format(make: Callable[..., Any]) -> None:
    gateway = make().says("hello world")
    records = [json.loads(line.removeprefix("data: ")) for line in gateway.lines(PATH, {"prompt": "x"})]
    assert "".join(record["text"] for record in records) == "HELLO WORLD" and len(records) > 1


def test_new_route_stops_at_stop_strings_and_is_counted(make: Callable[..., Any]) -> None:
    gateway = make().says("hello world stop END")
    assert gateway.post(PATH, {"prompt": "x", "stop": [" stop"]}) == (200, {"texts": ["HELLO WORLD"]})
    assert [generation.stopped for generation in gateway.router.generations] == [True]
    counted = re.findall(r"request_params_n_count\{.*\} (\S+)", gateway.service.metrics.render()[0].decode())
    assert set(counted) == {"1.0"}  # under the names of vLLM and of Slipway


def test_new_route_checks_grammars_before_any_engine_gets_them(make: Callable[..., Any]) -> None:
    gateway = make().says("hello")
    status, error = gateway.post(PATH, {"prompt": "x", "structured_outputs": {"regex": "(("}})
    assert status == 400 and "regex" in error["error"]["message"] and not gateway.submits


def test_new_route_replays_replies_of_an_idempotency_key(make: Callable[..., Any], tmp_path: Path) -> None:
    gateway = make(journal=str(tmp_path / "journal")).says("hello world")
    store = gateway.service.reply_store = open_reply_store(gateway.config, gateway.service.metrics)
    headers = {"Idempotency-Key": "one"}
    first = gateway.post(PATH, {"prompt": "x"}, **headers)
    assert first == (200, {"texts": ["HELLO WORLD"]}) == gateway.post(PATH, {"prompt": "x"}, **headers)
    assert len(gateway.submits) == 1
    asyncio.run(store.stop())
