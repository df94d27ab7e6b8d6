"""The program that downloads and then becomes the engine, as Supervisor starts it."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from source_servers import COMMIT, Files, publish

from appliance.checkpoints.download_spec import DownloadSpec, Job, Secret
from appliance.checkpoints.remote import Policy
from engine.api.client import EngineClient, EngineState
from engine.api.errors import EXIT_PERMANENT
from engine.api.heartbeat import Heartbeat, State, read_heartbeat

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = f"/org/demo/resolve/{COMMIT}/model.safetensors"
PATIENCE_S = 100.0


class Program:
    """The running download program: its folder, socket and heartbeat, and the program that replaces it."""

    def __init__(self, hub: Files, folder: Path, policy: Policy, became: str = "true") -> None:
        spec = DownloadSpec(
            kind="huggingface",
            what="org/demo",
            cache=str(folder / "hub"),
            endpoint=hub.url,
            token=Secret(env="OUR_TOKEN"),
            stall_s=policy.stall_s,
        )
        job = Job(spec=spec, listing=spec.store({"OUR_TOKEN": hub.token}).listing(), policy=policy)
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        self.socket, self.pulse = folder / "e.sock", folder / "e.pulse"
        files = [str(path) for path in (folder / "job.json", self.socket, self.pulse)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "appliance.supervisor.download", *files, "/bin/sh", "-c", became],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OUR_TOKEN": "hunter2", "LC_KEPT": "kept"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def states(self, enough: Callable[[EngineState], bool]) -> list[EngineState]:
        """Return the states that it sends to a client, until one satisfies `enough`."""
        seen: list[EngineState] = []

        async def watch() -> None:
            found = asyncio.Event()

            def on_state(state: EngineState) -> None:
                if not found.is_set():
                    seen.append(state)
                if enough(state):
                    found.set()

            client = EngineClient(str(self.socket), on_state=on_state)
            running = asyncio.create_task(client.run())
            try:
                await asyncio.wait_for(found.wait(), PATIENCE_S)
            finally:
                running.cancel()

        asyncio.run(watch())
        return seen

    def end(self) -> tuple[int, list[str]]:
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err.splitlines()


@pytest.fixture
def hub(server: Callable[[], Files], checkpoint_files: dict[str, bytes]) -> Files:
    found = server()
    publish(found, "org/demo", checkpoint_files)
    found.token = "hunter2"
    return found


def test_download_reports_progress_and_execs_the_engine_without_the_token(hub: Files, tmp_path: Path) -> None:
    hub.slow_s = 0.01
    became = f'echo "$LC_KEPT$OUR_TOKEN" > {tmp_path}/became; echo $$ > {tmp_path}/pid'
    program = Program(hub, tmp_path, Policy(min_free=1), became)
    state = program.states(lambda state: state.fraction > 0.2)[-1]
    assert (state.kind, state.phase) == ("loading", "downloading") and " of 6.2 MB" in state.detail
    code, said = program.end()
    assert code == 0 and (tmp_path / "became").read_text() == "kept\n"
    assert int((tmp_path / "pid").read_text()) == program.process.pid, "the same process, which Supervisor watches"
    assert (
        said[0].startswith("slipway download: huggingface org/demo: downloading 6.2 MB into ")
        and "complete after" in said[-1]
    )


def test_heartbeat_continues_during_a_stall(hub: Files, tmp_path: Path) -> None:
    """The download has limits of its own: who watches for starts that hang must not end it"""
    hub.faults[WEIGHTS] = [("stall", 1000)]
    program = Program(hub, tmp_path, Policy(stall_s=PATIENCE_S, min_free=1))
    program.states(lambda state: "no data for" in state.detail)
    beats: set[Heartbeat] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(beats) < 3 and time.monotonic() < deadline:
        if beat := read_heartbeat(program.pulse):
            beats.add(beat)
        time.sleep(0.05)
    program.process.kill()
    program.end()
    assert len(beats) == 3 and {(beat.pid, beat.state) for beat in beats} == {(program.process.pid, State.LOADING)}


def test_permanent_failure_is_printed_and_sent_to_the_gateway(hub: Files, tmp_path: Path) -> None:
    hub.slow_s, hub.faults[WEIGHTS] = 0.05, [("cut", 2_000_000), 403]
    program = Program(hub, tmp_path, Policy(min_free=1, pause_s=1.0))
    state = program.states(lambda state: state.kind == "failed")[-1]
    code, said = program.end()
    assert code == EXIT_PERMANENT
    assert (
        said[-1].startswith("slipway download: source: http") and "403" in said[-1] and "model.credentials" in said[-1]
    )
    assert "403" in state.message
    assert any("model.safetensors: " in line and "attempt 2 of 5 follows" in line for line in said)
