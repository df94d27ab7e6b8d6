"""The demo follows its manifest while it serves: reload in place, engines swapped under streams, refusals."""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from appliance.cli.main import main
from tests.e2e.conftest import ROOT, SLIPWAY, Appliance

BODY = {"prompt": "Tell me", "max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "stream": True}
STREAMS = 3


class Served:
    """An appliance with a manifest of its own, to be edited."""

    def __init__(self, launch: Callable[..., Appliance], folder: Path, *options: str) -> None:
        self.file, self.keys = folder / "m.yaml", folder / "keys.txt"
        self.keys.write_text("one\n")
        self.engine = ""  # sections of the engine that runs
        self.write("")
        self.appliance = launch(self.file, *options, threads="")
        self.appliance.wait_ready()

    def write(self, more: str) -> None:
        path = ROOT / "manifests" / "demo"
        self.file.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {path}}}, names: [demo]}}\n{more}")

    def reload(self, *options: str, which: str = "") -> tuple[int, str]:
        """Run `slipway reload` in this process, and return its exit code and output. A process takes 0.7 s of CPU."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["reload", which or self.appliance.url, *options])
        return code, said.getvalue()


@pytest.fixture(scope="module")
def served(launch: Callable[..., Appliance], tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(launch, tmp_path_factory.mktemp("reload"))


async def stream(client: httpx.AsyncClient, seed: int) -> tuple[str, list[str]]:
    """Its text, and how it ended."""
    text, ends = "", []
    async with client.stream("POST", "/v1/completions", json=BODY | {"seed": seed}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in lines(reply):
            record = json.loads(line)
            assert "error" not in record, line
            text += record["choices"][0]["text"]
            ends += [reason for choice in record["choices"] if (reason := choice["finish_reason"])]
    return text, ends


async def lines(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield line.removeprefix("data: ")


async def during(served: Served, work: Callable[[], object]) -> tuple[list[tuple[str, list[str]]], object, int]:
    """Run streams and short requests during `work`; no short request may fail.

    Return the streams, the result of `work` and the number of short requests."""
    async with httpx.AsyncClient(base_url=served.appliance.url, timeout=120, headers={"x-api-key": "one"}) as client:
        streams = [asyncio.create_task(stream(client, seed)) for seed in range(STREAMS)]
        await asyncio.sleep(0.5)
        working = asyncio.create_task(asyncio.to_thread(work))
        asked = 0
        while not working.done():
            reply = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert reply.status_code == 200, reply.text
            asked += 1
            await asyncio.sleep(0.05)
        return await asyncio.gather(*streams), await working, asked


def test_streams_notice_neither_a_reload_nor_a_swap_of_their_engine(served: Served) -> None:
    """Keys, limits and log level in place; a smaller cache with another engine: the same tokens"""
    expected, _, _ = asyncio.run(during(served, lambda: None))
    assert [ends for _, ends in expected] == [["length"]] * STREAMS
    engine, gateway = served.appliance.pids()["engine-0"], served.appliance.pids()["gateway"]

    # With `hold` at 0 no request waits for a crashed engine, so any wait here is due to the swap.
    live = "limits: {max_stop: 3}\nobservability: {log_level: debug}\nlifecycle: {restart: {hold: 0s}}\n"
    served.write(live)
    got, (code, said), _ = asyncio.run(during(served, served.reload))
    assert code == 0 and "limits.max_stop" in said and "in effect" in said
    assert got == expected
    refused = served.appliance.client.post("/v1/completions", json={"prompt": "a", "stop": list("abcd")})
    assert refused.status_code == 400

    told = run_directory(served) / "engine-0.exec"
    assert json.loads(told.read_text())["environment"]["OMP_NUM_THREADS"] != "1"
    changed = "engine: {scheduling: {max_running: 8}}\nhardware: {threads: 1}\n"
    served.write(live + changed)
    code, said = served.reload()
    assert code == 3 and "engine.scheduling.max_running" in said and "reload --restart" in said
    running = served.appliance.pids()
    assert (running["engine-0"], running["gateway"]) == (engine, gateway), "nothing has started again"
    got, (code, said), asked = asyncio.run(during(served, lambda: served.reload("--restart")))
    assert code == 0 and "engine-0 was replaced after" in said
    served.engine = changed
    assert got == expected
    assert asked >= 1
    now = served.appliance.pids()
    assert now["engine-0"] != engine and now["gateway"] == gateway
    assert json.loads(told.read_text())["environment"]["OMP_NUM_THREADS"] == "1"
    assert json.loads((run_directory(served) / "engine-0.json").read_text())["scheduling"]["max_running"] == 8
    assert served.reload() == (0, f"{served.file} is in effect: no change without a restart\n")
    assert served.appliance.metric("slipway_request_interruptions_total") >= 1
    assert served.appliance.metric("slipway_requests_quarantined_total") == 0
    assert " exited (" not in served.appliance.output()


def run_directory(served: Served) -> Path:
    said = next(line for line in served.appliance.output().splitlines() if "run directory " in line)
    return Path(said.rpartition("run directory ")[2])


# The last test of this service: it stops it.
def test_what_is_refused_changes_nothing_and_keys_are_read_anew(
    served: Served, eventually: Callable[[str, Callable[[], bool]], None]
) -> None:
    client = served.appliance.client

    def allowed(key: str) -> bool:
        return client.get("/v1/models", headers={"x-api-key": key}).status_code == 200

    secret = f"endpoints: {{api_keys: clients}}\nsecrets: {{clients: {{file: {served.keys}}}}}\n"
    engine = served.engine
    served.write(secret + engine)
    code, said = served.reload()
    assert code == 0 and "; 1 API key" in said
    assert allowed("one") and not allowed("")

    served.write(secret + engine + "limits: {max_stop: 1, max_stopp: 2}\n")
    code, said = served.reload()
    assert code == 2 and f"m.yaml:{5 + engine.count(chr(10))}:23" in said and "nothing was changed" in said
    served.write(secret + engine + "limits: {max_stop: 1}\nendpoint: {port: 1}\n")
    assert served.reload()[0] == 2
    record = f"engine: {{record: {served.file.parent}/no/steps"
    recorded = engine.replace("engine: {", f"{record}, ") if engine else f"{record}}}\n"
    served.write(secret + recorded + "limits: {max_stop: 1}\n")
    assert served.reload()[0] != 0
    served.write(secret + engine + "limits: {max_stop: 1}\nlifecycle: {drain: 3s}\n")
    code, said = served.reload("--restart")
    assert code == 2 and "lifecycle.drain" in said and "nothing was changed" in said
    body = {"prompt": "a", "max_tokens": 1, "stop": ["x", "y"]}
    assert client.post("/v1/completions", json=body, headers={"x-api-key": "one"}).status_code == 200

    served.keys.write_text("two\n")
    assert allowed("one")
    os.kill(served.appliance.process.pid, signal.SIGHUP)
    eventually("the new key", lambda: allowed("two"))
    assert not allowed("one")
    assert client.post("/v1/completions", json=body, headers={"x-api-key": "two"}).status_code == 400

    code, said = served.reload(which=str(served.file))
    assert code == 3 and "lifecycle.drain" in said and "stop `slipway serve`" in said
    code, said = served.reload(which="http://127.0.0.1:1")
    assert code == 2 and served.appliance.url in said
    # A gateway that restarts after a crash uses the reloaded configuration.
    os.kill(served.appliance.pids()["gateway"], signal.SIGKILL)
    eventually("a gateway", lambda: served.appliance.status("/ready") == 200)
    assert allowed("two") and not allowed("one")
    assert client.post("/v1/completions", json=body, headers={"x-api-key": "two"}).status_code == 400
    served.keys.write_text("three\n")
    assert served.reload()[0] == 3 and allowed("three")
    assert served.appliance.stop() == 0


@pytest.mark.nightly("tests/e2e/test_reload.py::test_streams_notice_neither_a_reload_nor_a_swap_of_their_engine")
def test_streams_go_on_while_a_swap_meets_a_crash(launch: Callable[..., Appliance], tmp_path: Path) -> None:
    """Kill the new engine while it starts: it is handled like any crash, and the next engine takes over."""
    served = Served(launch, tmp_path)
    expected, _, _ = asyncio.run(during(served, lambda: None))
    first = served.appliance.pids()["engine-0"]

    def swap_and_kill() -> tuple[int, str]:
        order = subprocess.Popen([*SLIPWAY, "reload", served.appliance.url, "--restart"], cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE)  # fmt: skip
        while served.appliance.pids().get("engine-0", first) == first:
            pass
        os.kill(served.appliance.pids()["engine-0"], signal.SIGKILL)
        said, _ = order.communicate(timeout=120)
        return order.returncode, said

    async def streams() -> list[tuple[str, list[str]]]:
        async with httpx.AsyncClient(base_url=served.appliance.url, timeout=120) as client:
            running = [asyncio.create_task(stream(client, seed)) for seed in range(STREAMS)]
            await asyncio.sleep(0.5)
            code, said = await asyncio.to_thread(swap_and_kill)
            assert code == 0 and "engine-0 was replaced" in said
            return await asyncio.gather(*running)

    assert asyncio.run(streams()) == expected
    assert "engine-0   exited (killed by SIGKILL); restart 1 of" in served.appliance.output()
    assert served.appliance.stop() == 0


@pytest.mark.nightly("tests/e2e/test_reload.py::test_streams_notice_neither_a_reload_nor_a_swap_of_their_engine")
def test_of_several_engines_one_serves_at_all_times(launch: Callable[..., Appliance], tmp_path: Path) -> None:
    served = Served(launch, tmp_path, "--set", "parallelism.data=2", "--set", "hardware.threads=1")
    before = served.appliance.pids()
    expected, _, _ = asyncio.run(during(served, lambda: None))

    def swap() -> tuple[int, str, set[int]]:
        seen: set[int] = set()
        with ThreadPoolExecutor(1) as pool:
            order = pool.submit(served.reload, "--restart")
            while not order.done():
                seen.add(served.appliance.status("/ready"))
        return *order.result(), seen

    got, (code, said, seen), _ = asyncio.run(during(served, swap))
    assert code == 0 and "engine-0 was replaced" in said and "engine-1 was replaced" in said
    assert seen == {200}
    assert got == expected
    now = served.appliance.pids()
    assert now["gateway"] == before["gateway"] and {now["engine-0"], now["engine-1"]}.isdisjoint(before.values())
    assert served.appliance.stop() == 0
