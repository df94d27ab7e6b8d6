"""Tests of the restart policy: the demo after its engine was killed too often."""

import json
import os
import signal
from pathlib import Path

import pytest

from appliance.config import exits

DEMO = Path(__file__).resolve().parents[2] / "manifests" / "demo.yaml"
ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}


def test_halted_appliance_reports_the_reason_and_never_becomes_ready(launch, eventually, tmp_path):
    keys = ("--set", "lifecycle.restart.exhausted=halt", "--set", "lifecycle.restart.max=0")
    termination = tmp_path / "message"
    termination.touch()
    appliance = launch(
        DEMO, *keys, "--set", f"lifecycle.crash_bundles.folder={tmp_path / 'crashes'}",
        SLIPWAY_TERMINATION_LOG=str(termination),
    )  # fmt: skip
    appliance.wait_ready()
    body = ASK | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    with appliance.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(appliance.pids()["engine-0"], signal.SIGSEGV)
        rest = "".join(lines)
    assert "The service has halted" in rest and "error" in rest
    eventually("failed", lambda: appliance.client.get("/ready").json()["status"] == "failed")
    seen = appliance.client.get("/ready")
    assert seen.status_code == 503 and seen.json()["reason"]["exit"] == "restarts"
    assert "killed by SIGSEGV" in seen.json()["reason"]["message"]
    assert [appliance.status(path) for path in ("/live", "/health", "/ping")] == [200, 503, 503]
    refused = appliance.client.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and "needs an operator" in refused.json()["error"]["message"]
    assert "engine-0" not in appliance.pids() and "gateway" in appliance.pids()
    (bundle,) = (tmp_path / "crashes").iterdir()
    told = json.loads((bundle / "death.json").read_text())
    assert (told["cause"], told["follows"], told["death"]["signal"]) == ("signal", "halt", "SIGSEGV")
    (open_one,) = told["open_requests"]
    assert open_one["emitted"] >= 1 and open_one["prompt"] >= 1
    assert "max_step_tokens" in (bundle / "engine-0.json").read_text() and (bundle / "gateway.json").exists()
    assert json.loads(termination.read_text())["bundle"] == str(bundle)
    assert appliance.stop() == exits.RESTARTS.number
    assert not appliance.processes()


@pytest.mark.nightly(
    "tests/appliance/supervisor/test_crash_loops.py::test_a_crash_loop_ends_with_the_documented_code_and_nothing_left"
)
def test_an_exhausted_policy_ends_the_tree(launch, tmp_path):
    appliance = launch(
        DEMO, "-tp", "2", "--set", "lifecycle.restart.max=0",
        "--set", f"lifecycle.crash_bundles.folder={tmp_path / 'crashes'}",
    )  # fmt: skip
    appliance.wait_ready()
    os.kill(appliance.pids()["engine-0"], signal.SIGKILL)
    assert appliance.process.wait(100) == exits.RESTARTS.number
    assert not appliance.processes()
    assert "killed by SIGKILL" in appliance.output() and len(list((tmp_path / "crashes").iterdir())) == 1
