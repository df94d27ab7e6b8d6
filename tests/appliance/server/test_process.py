"""The gateway process: startup, memory, shutdown. Real sockets, real signals."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from appliance.config.gateway import read_config, write_config
from appliance.runtime.gateway_control import ApplyConfig, send_message
from appliance.server.process import main
from engine.api.errors import EXIT_PERMANENT
from tests.tiers import thinned

PATIENCE_S = 120.0


@pytest.fixture
def checkpoint(tmp_path):
    """Write a folder with a word-level tokenizer of a prime number of words, enough for the gateway's side of a
    model."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 997)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}))
    (folder / "config.json").write_text("{}")
    return folder


class Process:
    """A gateway process whose standard error is collected line by line."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-P", "-m", "appliance.server", str(path)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(iter(self.popen.stderr.readline, "")))
        self._reader.start()

    @property
    def said(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str | None:
        match = re.search(r"listening on (http://\S+)", self.said)
        return match[1] if match else None

    def get(self, path: str) -> int:
        try:
            return httpx.get(self.url + path).status_code
        except httpx.TransportError:
            return 0

    def kill(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        code = self.popen.wait(PATIENCE_S)
        self._reader.join()
        return code


@pytest.fixture
def run(tmp_path, new_config, checkpoint, eventually):
    """Start the gateway process over fake engines and wait until it answers."""
    started = []

    def start(*engines, answers=True, **values):
        path = tmp_path / "gateway.json"
        write_config(new_config(*engines, model=str(checkpoint), **values), path)
        started.append(Process(path))
        if answers:
            process = started[-1]
            eventually("the address", lambda: process.url is not None or process.popen.poll() is not None)
            assert process.url, process.said
            eventually("/live", lambda: process.get("/live") == 200)
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.kill(signal.SIGKILL)
        process.wait()
        process.popen.stdout.close()
        process.popen.stderr.close()


def stream_in_background(url, max_tokens):
    """Open a stream; return (lines so far, thread)."""
    lines = []

    def read():
        body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
            lines.extend(line for line in reply.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return lines, thread


def finishes(lines):
    records = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    reasons = [choice["finish_reason"] for record in records for choice in record.get("choices", ())]
    return [reason for reason in reasons if reason]


def stored(folder):
    """Return settings that keep responses in a folder."""
    return {"responses": str(folder / "responses.journal"), "endpoints.responses.keep": 86400.0}


def test_it_answers_on_a_free_port_without_an_engine_and_ends_with_0(run, new_engine, tmp_path):
    """RT-07 SIGTERM with nothing open. The log states that a restart deletes responses in the run directory."""
    process = run(new_engine(), run=str(tmp_path), **stored(tmp_path))
    assert process.get("/live") == 200
    assert process.get("/ready") == 503
    process.kill(signal.SIGTERM)
    assert process.wait() == 0
    (line,) = [line for line in process.lines if "storage: stored responses for 24h, in" in line]
    assert "a restart of the service deletes them" in line


def test_it_has_no_torch_and_weighs_less_than_200_mb(run, engine, eventually, tmp_path):
    """The log states that a restart keeps responses in another folder."""
    (tmp_path / "kept").mkdir()
    process = run(engine, run=str(tmp_path), **stored(tmp_path / "kept"))
    (line,) = [line for line in process.lines if "storage: stored responses for 24h, in" in line]
    assert "keeps them" in line
    eventually("ready", lambda: process.get("/ready") == 200)
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert "torch" not in maps
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    kilobytes = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])
    assert kilobytes < 200_000


def test_an_occupied_port_is_one_line_and_an_exit_code(run, new_engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = run(new_engine(), answers=False, **{"endpoints.port": port})
        assert process.wait() == EXIT_PERMANENT
    assert f"port: port {port} on 127.0.0.1 is in use by another process" in process.lines[-1]
    assert "endpoints.port" in process.lines[-1]


def test_a_missing_tokenizer_is_one_clear_line_and_a_code(run, new_engine, checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    process = run(new_engine(), answers=False)
    assert process.wait() == EXIT_PERMANENT
    assert "tokenizer.json" in process.lines[-1]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["absent.json"]])
def test_a_wrong_command_line_is_reported(arguments, capsys):
    assert main(arguments) in (2, EXIT_PERMANENT)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_open_streams_finish_in_the_drain_and_new_requests_go_elsewhere(run, engine, eventually):
    """ER-23 SIGTERM with a drain budget"""
    process = run(engine, drain_s=PATIENCE_S)
    eventually("ready", lambda: process.get("/ready") == 200)
    engine.holding = True
    lines, reading = stream_in_background(process.url, max_tokens=3)
    eventually("submitted", lambda: len(engine.open) == 1)
    engine.give(1)
    process.kill(signal.SIGTERM)
    eventually("not ready", lambda: process.get("/ready") == 503)
    assert process.get("/live") == 200
    refused = httpx.post(f"{process.url}/v1/completions", json={"prompt": [1], "max_tokens": 1})
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert int(refused.headers["retry-after"]) >= 1
    engine.give(2)
    reading.join()
    assert finishes(lines) == ["length"]
    assert lines[-1] == "data: [DONE]"
    assert process.wait() == 0


def test_open_requests_and_the_linger_end_with_the_drain(run, engine, eventually):
    """ER-23 after the budget, in-flight requests get finish_reason abort"""
    process = run(engine, drain_s=0.3, drain_linger_s=PATIENCE_S)
    eventually("ready", lambda: process.get("/ready") == 200)
    engine.holding = True
    lines, reading = stream_in_background(process.url, max_tokens=9)
    eventually("submitted", lambda: len(engine.open) == 1)
    engine.give(1)
    process.kill(signal.SIGTERM)
    reading.join()
    assert finishes(lines) == ["abort"]
    assert lines[-1] == "data: [DONE]"
    assert process.wait() == 0


@pytest.mark.parametrize("second", thinned([signal.SIGTERM, signal.SIGINT], kept=[signal.SIGINT]))
def test_a_second_signal_ends_at_once(run, engine, eventually, second):
    """RT-07 an impatient operator"""
    process = run(engine, drain_s=PATIENCE_S)
    eventually("ready", lambda: process.get("/ready") == 200)
    engine.holding = True
    with httpx.stream(
        "POST",
        f"{process.url}/v1/completions",
        json={"prompt": [1], "max_tokens": 9, "stream": True},
        timeout=PATIENCE_S,
    ):
        eventually("submitted", lambda: len(engine.open) == 1)
        process.kill(signal.SIGTERM)
        eventually("draining", lambda: process.get("/ready") == 503)
        process.kill(second)
        assert process.wait() == 128 + second


def complete(process):
    return httpx.post(f"{process.url}/v1/completions", json={"prompt": [1], "max_tokens": 1}, timeout=PATIENCE_S)


@pytest.mark.parametrize("reloaded", thinned([False, True], kept=[True]))
def test_new_requests_are_still_taken_while_load_balancers_notice(run, engine, eventually, tmp_path, reloaded):
    """RT-07: load balancers remove an endpoint after SIGTERM is sent, so requests still arrive"""
    linger = {"drain_linger_s": 0.0 if reloaded else 1.0}
    process = run(engine, drain_s=PATIENCE_S, control=str(tmp_path / "control"), **linger)
    eventually("ready", lambda: process.get("/ready") == 200)
    if reloaded:
        wanted = msgspec.structs.replace(read_config(tmp_path / "gateway.json"), drain_linger_s=1.0)
        assert asyncio.run(send_message(wanted.control, ApplyConfig(wanted), PATIENCE_S)).error == ""
    process.kill(signal.SIGTERM)
    eventually("not ready", lambda: process.get("/ready") == 503)
    reply = complete(process)
    assert reply.status_code == 200 and reply.headers["connection"] == "close"
    assert process.wait() == 0


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize("drain_s", thinned([0.0, 2.0], kept=[2.0]))
def test_unread_requests_at_sigterm_get_503(run, engine, eventually, drain_s):
    """On new connections and on a reused one: no client sees a reset"""
    process = run(engine, drain_s=drain_s)
    eventually("ready", lambda: process.get("/ready") == 200)
    address = httpx.URL(process.url)
    body = b'{"prompt": [1, 2, 3], "max_tokens": 2}'
    with ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection((address.host, address.port), PATIENCE_S))

        used = connect()
        used.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        reply = b""
        while not reply.endswith(b"}"):
            reply += used.recv(4096)
        process.kill(signal.SIGSTOP)
        connections = [used, *(connect() for _ in range(100))]
        for connection in connections:
            connection.sendall(REQUEST % (len(body), body))
        process.kill(signal.SIGTERM)
        process.kill(signal.SIGCONT)
        for connection in connections:
            reply = b""
            while piece := connection.recv(4096):
                reply += piece
            head = reply.partition(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.1 503")
            assert b"\r\nconnection: close" in head and b"\r\nretry-after: 5" in head
    assert process.wait() == 0


def test_a_request_resumes_although_the_in_flight_file_cannot_be_written(run, engine, eventually, tmp_path):
    """The run directory does not exist, which behaves like a full disk"""
    process = run(engine, run=str(tmp_path / "nowhere"))
    eventually("ready", lambda: process.get("/ready") == 200)
    engine.holding = True
    lines, reading = stream_in_background(process.url, max_tokens=3)
    eventually("submitted", lambda: len(engine.open) == 1)
    engine.give(1)
    eventually("a token", lambda: len(lines) > 1)
    engine.die()
    eventually("not ready", lambda: process.get("/ready") == 503)
    engine.holding = False  # set while the engine is down, so that the resumed request can finish
    engine.start()
    reading.join()
    assert finishes([line for line in lines if line.startswith("data: {")]) == ["length"]


def test_a_gateway_that_lost_an_engine_by_its_own_error_ends(run, engine, eventually, tmp_path, monkeypatch):
    """Otherwise it would keep the engine's requests open forever"""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "class Break:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'appliance.server.process':\n"
        "            import appliance.observability.metrics as metrics\n"
        "            def down(self, index): raise KeyError(index)\n"
        "            metrics.Metrics.engine_down = down\n"
        "sys.meta_path.insert(0, Break())\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{broken}:{Path(__file__).resolve().parents[3]}")
    process = run(engine)
    eventually("ready", lambda: process.get("/ready") == 200)
    engine.die()
    assert process.wait() == 1
    assert process.lines[-1] == "internal: the connection to an engine failed in the gateway\n"
