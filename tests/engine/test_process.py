"""A real engine process over a real socket, with a device that needs no model; the client is the gateway's."""

import asyncio
import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import engine.__main__ as program
from engine.api.client import EngineClient, Interrupted
from engine.api.config import write_config
from engine.api.errors import EXIT_CRASH, EXIT_PERMANENT, EngineGone, RequestError, StepError
from engine.api.frames import FrameReader, encode, from_engine
from engine.api.messages import Output, Sampling, Submit
from engine.arguments import engine_config
from engine.core.replay import main as replay
from engine.worker.ranks import RankLost

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SYS_TGKILL = {"x86_64": 234, "aarch64": 131}[platform.machine()]
BLOCK_BYTES = 2 * 16 * 8 * 4  # keys and values, 16 tokens, one head of 8, float32


def right(prompt, count):
    """The tokens that the fake device gives after a prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append((sum(ids) + len(ids)) % 97)
    return tuple(ids[len(prompt) :])


def harmless(first, length=9):
    """A prompt after which the fake device never fails (it fails on token 13)."""
    for start in range(first, first + 500):
        prompt = tuple((start * 5 + i) % 12 for i in range(length))
        if 13 not in right(prompt, 40):
            return prompt
    raise AssertionError("no such prompt")


class Process:
    """One engine and how to start it again."""

    def __init__(self, folder, mode="", **changes):
        self.config = engine_config(
            **{
                "model": "/nowhere",
                "socket": str(folder / "e"),
                "kv_bytes": 60 * BLOCK_BYTES,
                "max_context": 300,
                **changes,
            }
        )
        self.path, self.mode = folder / "config.json", mode
        write_config(self.config, self.path)
        self.start()

    def start(self):
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "fake_engine.py"), str(self.path), self.mode],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self):
        """Wait for the process and return its exit code and output."""
        _, said = self.popen.communicate(timeout=120)
        return self.popen.returncode, said

    def stop(self):
        self.popen.send_signal(signal.SIGTERM)
        return self.end()


@pytest.fixture
def engine(tmp_path):
    processes = []

    def start(mode="", **changes):
        processes.append(Process(tmp_path, mode, **changes))
        return processes[-1]

    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.communicate()


@contextlib.asynccontextmanager
async def connected(process, **callbacks):
    client = EngineClient(process.config.socket, **callbacks)
    task = asyncio.create_task(client.run())
    try:
        await asyncio.wait_for(client.wait_ready(), 120)
        yield client
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def collect(client, submit):
    ids, last = (), None
    async with contextlib.aclosing(client.generate(submit)) as deltas:
        async for last in deltas:
            ids += last.ids
    return ids, last


def ask(id, prompt, count=20, **changes):
    return Submit(id, prompt, Sampling(), count, **changes)


def test_an_engine_serves_many_requests_refuses_wrong_ones_and_stops(engine, tmp_path):
    process = engine(record=str(tmp_path / "record"))
    states = []

    async def main():
        async with connected(process, on_state=lambda state: states.append(state.kind)) as client:
            assert client.ready.kv_blocks == 59 and client.ready.pid == process.popen.pid
            prompts = [harmless(i * 7, 5 + i) for i in range(30)]
            results = await asyncio.gather(*(collect(client, ask(str(i), p)) for i, p in enumerate(prompts)))
            for prompt, (ids, last) in zip(prompts, results, strict=True):
                assert ids == right(prompt, 20) and last.finish == "length"
                timing = last.timing
                assert timing.arrived <= timing.scheduled <= timing.first_token <= timing.last_token
            with pytest.raises(RequestError, match="max_context=300") as caught:
                await collect(client, ask("long", (1,) * 300))
            assert caught.value.param == "prompt"
            with pytest.raises(StepError, match="not finite"):
                await collect(client, ask("bad", (13,)))
            assert (await collect(client, ask("after", harmless(3))))[0] == right(harmless(3), 20)
            assert client.open == 0

    asyncio.run(main())
    assert process.stop() == (0, "")
    assert states[-2:] == ["ready", "down"]
    assert replay([str(tmp_path / "record")]) == 0


def test_a_stop_signal_ends_the_engine_whichever_thread_gets_it(engine):
    """The kernel may deliver a signal of the process to any of its threads."""
    process = engine()

    async def scenario():
        async with connected(process):
            (other, *_) = (
                int(task) for task in os.listdir(f"/proc/{process.popen.pid}/task") if int(task) != process.popen.pid
            )
            send = ctypes.CDLL(None, use_errno=True).syscall
            assert send(SYS_TGKILL, process.popen.pid, other, signal.SIGTERM) == 0, os.strerror(ctypes.get_errno())
            assert await asyncio.to_thread(process.popen.wait, 30) == 0

    asyncio.run(scenario())


def test_a_resumed_request_goes_on_where_it_was(engine):
    process = engine()
    prompt = harmless(11)
    whole = right(prompt, 20)

    async def main():
        async with connected(process) as client:
            ids, last = await collect(client, ask("a", prompt, emitted=whole[:8]))
            assert ids == whole[8:] and last.finish == "length"

    asyncio.run(main())


def test_a_killed_engine_is_reported_to_open_requests_which_go_on_with_the_next(engine):
    process = engine("slow")
    prompt = harmless(5)

    async def main():
        async with connected(process) as client:
            got = []
            with pytest.raises(Interrupted) as caught:
                async for delta in client.generate(ask("a", prompt, 40)):
                    got += delta.ids
                    if len(got) >= 3 and process.popen.poll() is None:
                        process.popen.kill()
            assert caught.value.emitted == tuple(got) == right(prompt, 40)[: len(got)]
            with pytest.raises(EngineGone, match="not ready"):
                await collect(client, ask("b", prompt))
            process.popen.communicate()
            process.start()
            await asyncio.wait_for(client.wait_ready(), 120)
            rest, _ = await collect(client, caught.value.resume())
            assert tuple(got) + rest == right(prompt, 40)

    asyncio.run(main())


def test_leaving_a_stream_or_aborting_it_frees_its_blocks(engine):
    process = engine("slow", max_running=1)
    prompt = harmless(5)

    async def main():
        async with connected(process) as client:
            left = client.generate(ask("left", prompt, 200))
            await anext(left)
            await left.aclose()
            waiting = asyncio.create_task(collect(client, ask("aborted", prompt, 200)))
            while not client.open:
                await asyncio.sleep(0)
            client.abort(["aborted"])
            _, last = await waiting
            assert last.finish == "abort"
            ids, _ = await collect(client, ask("next", prompt, 3))  # runs only if the place is free
            assert ids == right(prompt, 3)

    asyncio.run(main())


def test_a_second_gateway_replaces_the_first_and_its_requests_end(engine):
    process = engine("slow", max_running=1)
    prompt = harmless(5)

    async def main():
        async with connected(process):
            pass
        with socket.socket(socket.AF_UNIX) as first:  # a gateway that does not come back
            first.settimeout(60)
            first.connect(process.config.socket)
            first.sendall(encode([ask("same id", prompt, 200)]))
            frames, outputs = FrameReader(), 0
            while not outputs:
                for body in frames.feed(first.recv(4096)):
                    outputs += sum(isinstance(message, Output) for message in from_engine(body))
            async with connected(process) as second:
                ids, last = await collect(second, ask("same id", prompt, 5))
                assert ids == right(prompt, 5) and last.finish == "length"
            while first.recv(4096):
                pass

    asyncio.run(main())


def test_invalid_frames_close_the_connection(engine):
    process = engine()
    prompt = harmless(5)

    async def main():
        async with connected(process) as client:
            await collect(client, ask("a", prompt, 2))
        for nonsense in (b"\xff" * 9, b"\x03\0\0\0abc"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(60)
                stranger.connect(process.config.socket)
                stranger.sendall(nonsense)
                while stranger.recv(4096):
                    pass
        async with connected(process) as client:
            assert (await collect(client, ask("a", prompt, 2)))[0] == right(prompt, 2)

    asyncio.run(main())


def test_a_drained_engine_finishes_what_runs_and_exits(engine):
    process = engine("slow")
    prompt = harmless(5)

    async def main():
        async with connected(process) as client:
            stream = client.generate(ask("a", prompt, 10))
            ids = (await anext(stream)).ids
            client.control("drain")
            async for delta in stream:
                ids += delta.ids
            assert ids == right(prompt, 10)

    asyncio.run(main())
    assert process.end() == (0, "")


@pytest.mark.parametrize(
    "mode, code, words",
    [("refuse", EXIT_PERMANENT, "model.safetensors is missing"), ("crash", EXIT_CRASH, "ZeroDivisionError: a bug")],
)
def test_failed_start_reports_reason_and_exit_code(engine, mode, code, words):
    process = engine(mode)

    async def main():
        client = EngineClient(process.config.socket)
        task = asyncio.create_task(client.run())
        while client.state.kind != "failed":
            await asyncio.sleep(0.01)
        task.cancel()
        return client.state.message

    assert words in asyncio.run(asyncio.wait_for(main(), 120))
    exit_code, said = process.end()
    assert exit_code == code and words in said
    assert (len(said.splitlines()) == 1) == (code == EXIT_PERMANENT), (
        "expected errors are one line, bugs have a traceback"
    )


def test_exception_in_a_step_ends_the_process(engine):
    process = engine("die")

    async def main():
        async with connected(process) as client:
            with pytest.raises(Interrupted):
                await collect(client, ask("a", harmless(5), 30))
            assert client.state.kind == "failed" and "the device is broken" in client.state.message

    asyncio.run(main())
    assert process.end()[0] == EXIT_CRASH


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kv_bytes": 5 * BLOCK_BYTES}, f"needs 20 ({20 * BLOCK_BYTES} bytes)"),
        ({"socket": "/no/such/folder/e"}, "socket=/no/such/folder/e"),
    ],
)
def test_invalid_configuration_is_a_permanent_failure(engine, changes, words):
    code, said = engine(**changes).end()
    assert code == EXIT_PERMANENT
    assert words in said and len(said.splitlines()) == 1


def test_concurrent_failures_are_reported_once(tmp_path, monkeypatch):
    """The second one ends the process only when the first has said what happened."""
    begun, said = threading.Event(), []

    def slow(*words, **_):
        said.append(words[0])
        begun.set()
        threading.Event().wait(0.2)

    def build(config, progress, took, lost):
        threading.Thread(target=lost, args=(RankLost("rank 1 (process 7) was killed by SIGKILL"),)).start()
        assert begun.wait(100)
        raise RankLost("rank 1 (process 7) was killed by SIGKILL")

    monkeypatch.setattr(program, "print", slow, raising=False)
    monkeypatch.setattr(program, "FLUSH_S", 0.01)
    config = engine_config(
        model="", socket=str(tmp_path / "s"), device="cpu", dtype="float32", kv_bytes=1, max_context=1
    )
    assert program.serve(config, build) == EXIT_CRASH
    assert said == ["slipway engine: rank: rank 1 (process 7) was killed by SIGKILL"]
