"""Startup output of the launcher, with a gateway whose answers are given here."""

import asyncio

import pytest

from appliance.config.gateway import GatewayConfig
from appliance.config.sections.endpoints import Endpoints
from appliance.runtime import probe
from appliance.supervisor.monitor import Policy
from appliance.supervisor.startup import Startup
from appliance.supervisor.supervise import Service


class Console:
    redraws = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, program: str, text: str) -> None:
        self.lines.append(f"{program} {text.split()[0]}")

    def plain(self, text: str) -> None:
        self.lines.append(text.split()[0])

    def progress(self, text: str) -> None:
        self.lines.append(text)

    def end_progress(self) -> None:
        pass


def service() -> Service:
    gateway = GatewayConfig(
        endpoints=Endpoints(host="127.0.0.1", port=1),
        names=("demo",),
        model="/m",
        engines=(),
        max_context=7,
        vocab_size=97,
    )
    return Service(gateway=gateway, engines=(), startup_s=600.0, restarts=Policy(1, 1.0))


def test_ready_service_is_not_polled_until_a_program_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = b'{"engines": [{"name": "engine-0", "phase": "loading", "progress": 0.5}]}'
    answers = [None, (503, loading), (200, b"{}"), (503, loading), (200, b"{}")]

    async def get(*_: object, **__: object) -> tuple[int, bytes] | None:
        return answers.pop(0)  # IndexError: asked once too often

    monkeypatch.setattr(probe, "get", get)
    console = Console()

    async def run() -> None:
        startup = Startup(service(), console)  # type: ignore[arg-type]
        watching = asyncio.create_task(startup.watch())
        for left in (2, 0):
            while len(answers) > left:
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not watching.done()
            startup.restarted() if left else None
        watching.cancel()

    asyncio.run(run())
    assert console.lines == [
        *("gateway up", "engine-0 loading 50 %", "ready http://127.0.0.1:1", "curl", "ready again"),
    ]
