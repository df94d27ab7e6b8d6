"""Start, crash and stop of the whole process tree."""

import http.client
import json
import os
import shutil
import signal
import socket
import struct
from pathlib import Path

import pytest

from appliance.config import exits

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "manifests" / "demo"
ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}


def manifest(model: Path, rest: str = "") -> str:
    return f"apiVersion: slipway/v2\nmodel: {{source: {{path: {model}}}, names: [demo]}}\n{rest}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, to be damaged."""
    return Path(shutil.copytree(DEMO, tmp_path / "checkpoint"))


@pytest.mark.nightly("tests/e2e/test_survive.py::test_no_request_notices_that_its_engine_was_killed")
def test_a_killed_engine_is_restarted_while_the_gateway_stays(launch, eventually):
    appliance = launch()
    appliance.wait_ready()
    before = appliance.pids()
    os.kill(before["engine-0"], signal.SIGKILL)
    eventually(
        "not ready",
        lambda: appliance.status("/ready") == 503 or appliance.pids().get("engine-0", 0) not in (0, before["engine-0"]),
    )
    appliance.wait_ready()
    eventually("a new engine", lambda: appliance.pids().get("engine-0") not in (None, before["engine-0"]))
    assert appliance.pids()["gateway"] == before["gateway"] and appliance.process.poll() is None
    assert appliance.client.post("/v1/completions", json=ASK).status_code == 200
    assert appliance.stop() == 0
    assert not appliance.processes()


def test_a_missing_shard_is_one_message_and_nothing_starts(checkpoint, refused):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    code, said = refused(manifest(checkpoint))
    assert code == exits.CHECKPOINT.number and "model-00002-of-00002.safetensors" in said and "Traceback" not in said


def test_a_truncated_shard_is_named(checkpoint, rejected):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    code, said = rejected(manifest(checkpoint))
    assert code == exits.CHECKPOINT.number and "model.safetensors" in said and "Traceback" not in said


def test_an_unknown_architecture_is_refused_with_the_nearest(checkpoint, rejected):
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLN"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    code, said = rejected(manifest(checkpoint))
    assert code == exits.CHECKPOINT.number and "Qwen3ForCausalLM" in said and "Traceback" not in said


def test_a_tensor_of_another_shape_is_refused(checkpoint, rejected):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [1, *header["model.norm.weight"]["shape"]]
    body = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data[8 + length :])
    code, said = rejected(manifest(checkpoint))
    assert code == exits.CHECKPOINT.number and "model.norm.weight" in said and "Traceback" not in said


def test_no_memory_for_one_block_names_the_key(rejected):
    code, said = rejected(manifest(DEMO, "hardware: {kv_cache_memory: 10B}\n"))
    assert code == exits.MEMORY.number and "kv_cache_memory" in said and "Traceback" not in said


def test_a_busy_port_is_one_message(demo, rejected):
    port = demo.url.rpartition(":")[2]
    code, said = rejected(ROOT / "manifests" / "demo.yaml", "--port", port)
    assert code == exits.PORT.number and port in said and "Traceback" not in said


def test_a_misspelt_key_is_shown_where_it_stands(rejected):
    code, said = rejected(manifest(DEMO, "engine:\n  schedulin: {max_running: 3}\n"))
    assert code == 2 and "manifest.yaml:4:3" in said and "scheduling" in said


def bring_own_code(checkpoint: Path) -> None:
    """Give the checkpoint its own declaration, which writes the file `ran` if it is imported."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["MyOwnForCausalLM"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "slipway_model.py").write_text(
        "from pathlib import Path\n"
        "from engine.models.qwen3 import declare\n"
        'ARCHITECTURES = ("MyOwnForCausalLM",)\n'
        'Path(__file__).with_name("ran").touch()\n'
    )


def test_a_checkpoint_with_own_code_is_refused_without_the_flag(checkpoint, rejected):
    """SEC-01"""
    bring_own_code(checkpoint)
    code, said = rejected(manifest(checkpoint))
    assert code == exits.CHECKPOINT.number and "trust_remote_code" in said and not (checkpoint / "ran").exists()


@pytest.mark.nightly("tests/engine/layers/test_fallback.py::test_unknown_activation_is_rejected_before_loading")
def test_a_checkpoint_with_own_code_is_served_with_the_flag(checkpoint, launch):
    bring_own_code(checkpoint)
    path = checkpoint / "trusting.yaml"
    path.write_text(manifest(checkpoint).replace("names:", "trust_remote_code: true, names:"))
    appliance = launch(path)
    appliance.wait_ready()
    assert appliance.client.post("/v1/completions", json=ASK).status_code == 200
    assert (checkpoint / "ran").exists()
    assert appliance.stop() == 0


@pytest.mark.nightly("tests/e2e/test_ranks.py::test_halted_appliance_reports_the_reason_and_never_becomes_ready")
def test_an_engine_that_is_killed_once_too_often_ends_all_with_its_code_and_leaves_nothing(
    launch, eventually, tmp_path
):
    """The real programs, under an open stream: killed in its start, and after it was ready"""
    bundles = ("--set", f"lifecycle.crash_bundles.folder={tmp_path}")
    appliance = launch(DEMO.with_suffix(".yaml"), "--set", "lifecycle.restart.max=1", *bundles)
    appliance.wait_ready()
    body = ASK | {"max_tokens": 2000, "ignore_eos": True, "stream": True}
    with appliance.client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
        first = appliance.pids()["engine-0"]
        os.kill(first, signal.SIGKILL)
        eventually("the next engine", lambda: appliance.pids().get("engine-0", first) != first)
        os.kill(appliance.pids()["engine-0"], signal.SIGKILL)
        assert appliance.process.wait(timeout=100) == exits.RESTARTS.number
    assert not appliance.processes()
    reason = next(json.loads(line) for line in appliance.output().splitlines() if line.startswith('{"message"'))
    assert (reason["exit"], reason["program"], reason["cause"]) == ("restarts", "engine-0", "signal")
    assert len(list(tmp_path.glob("*/death.json"))) == 2


@pytest.mark.nightly("tests/appliance/server/test_process.py::test_unread_requests_at_sigterm_get_503")
def test_requests_that_nobody_has_read_when_it_stops_get_503(launch, eventually):
    """They wait in the kernel while the gateway does not run, and must not be reset."""
    appliance = launch()
    appliance.wait_ready()
    gateway = appliance.pids()["gateway"]
    os.kill(gateway, signal.SIGSTOP)
    address = ("127.0.0.1", int(appliance.url.rpartition(":")[2]))
    body = json.dumps(ASK).encode()
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
    clients = [socket.create_connection(address, timeout=100) for _ in range(40)]
    for client in clients:
        client.sendall(head.encode() + body)
    appliance.process.send_signal(signal.SIGTERM)
    eventually("the stop", lambda: "SIGTERM: stopping" in appliance.output())
    os.kill(gateway, signal.SIGCONT)
    statuses = []
    for client in clients:
        with client:
            reply = http.client.HTTPResponse(client)
            reply.begin()
            statuses.append(reply.status)
            reply.read()
    assert set(statuses) <= {200, 503} and 503 in statuses
    assert appliance.process.wait(100) == 0
