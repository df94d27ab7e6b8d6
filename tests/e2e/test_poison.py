"""Tests of a request that crashes the engine after a few tokens: it is isolated and all other requests finish."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[2]
MARKER = [11, 12, 13, 11, 12, 13, 12, 12]
TOKENS_BEFORE = 12

FAULT = f"""
import os
import sys

class Fault:
    def find_spec(self, name, path, target=None):
        if name != "engine.core.loop":
            return None
        sys.meta_path.remove(self)
        from engine.core.scheduler import Scheduler
        plan = Scheduler.plan
        def crash(self, now):
            planned = plan(self, now)
            for sequence in planned.sequences if planned is not None else ():
                submit = sequence.submit
                gained = len(sequence.ids) - len(submit.prompt) - len(submit.emitted)
                if submit.prompt == {tuple(MARKER)} and gained >= {TOKENS_BEFORE}:
                    os.kill(os.getpid(), 9)
            return planned
        Scheduler.plan = crash

sys.meta_path.insert(0, Fault())
"""


def other(number: int) -> dict[str, Any]:
    prompt = f"Number {number} of many"
    return {"prompt": prompt, "max_tokens": 80, "ignore_eos": True, "temperature": 1.0, "seed": number}


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a streamed reply and how it finished."""
    text, finish = "", ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                text += event["choices"][0]["text"]
                finish = event["choices"][0]["finish_reason"] or finish
    return text, finish


async def attack(
    url: str, others: int, poison: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[httpx.Response]]:
    """Return the other requests' replies without and with copies of the poison request, and the copies' replies."""
    bad = {"prompt": MARKER, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        before = await asyncio.gather(*(stream(client, other(number)) for number in range(others)))
        copies = asyncio.gather(*(client.post("/v1/completions", json=bad) for _ in range(poison)))
        beside = await asyncio.gather(*(stream(client, other(number)) for number in range(others)))
        return before, beside, [*await copies, await client.post("/v1/completions", json=bad)]


@pytest.mark.parametrize("counts", thinned([(1, 1), (1, 2), (3, 2), (31, 2)], kept=[(1, 1)]))
def test_streams_beside_a_poison_request_survive_a_restart_limit_of_two(launch, tmp_path, counts):
    """counts: other requests, and copies of the poison request."""
    others, poison = counts
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    limits = ("--set", "lifecycle.restart.max=2", "--set", "lifecycle.restart.backoff=100ms")
    appliance = launch(ROOT / "manifests" / "demo.yaml", *limits, PYTHONPATH=str(tmp_path))
    appliance.wait_ready()
    before, beside, refused = asyncio.run(attack(appliance.url, others, poison))
    assert [finish for _, finish in beside] == ["length"] * others
    assert beside == before
    assert [reply.status_code for reply in refused] == [422] * (poison + 1)
    assert all("is isolated" in reply.json()["error"]["message"] for reply in refused)
    assert appliance.metric("slipway_requests_quarantined_total") == poison
    assert 1 + poison <= appliance.metric("slipway_engine_restarts_total") <= 15
    assert appliance.status("/ready") == 200
    assert appliance.stop() == 0
