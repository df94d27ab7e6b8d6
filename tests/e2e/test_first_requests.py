"""A model that loads and whose every request fails is never ready; a real appliance serves it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from appliance.config import exits
from tests.e2e.conftest import until

ROOT = Path(__file__).resolve().parents[2]


def weights_of_nan(folder: Path, rest: str = "") -> Path:
    """Write a manifest of the demo with NaN in its last norm."""
    shutil.copytree(ROOT / "manifests" / "demo", folder / "model")
    file = folder / "model" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")

    begin, end = json.loads(raw[8 : 8 + length])["model.norm.weight"]["data_offsets"]
    raw[8 + length + begin : 8 + length + end] = b"\xc0\x7f" * ((end - begin) // 2)  # NaN of bfloat16
    file.write_bytes(raw)
    path = folder / "m.yaml"
    path.write_text(
        f"apiVersion: slipway/v2\nmodel: {{source: {{path: model}}}}\nhardware: {{kv_cache_memory: 16MiB}}\n{rest}"
    )
    return path


@pytest.mark.nightly("tests/appliance/server/http/test_first_requests.py::test_errors_of_every_request_are_reported")
def test_weights_of_nan_end_the_start_with_the_reason(launch, tmp_path):
    appliance = launch(weights_of_nan(tmp_path))
    assert appliance.process.wait(120) == exits.CHECKPOINT.number, appliance.output()
    output = appliance.output()
    assert "POST /v1/completions failed" in output and "NaN" in output
    assert "try:" not in output  # the hint that is printed when the service is ready


@pytest.mark.nightly("tests/appliance/supervisor/test_halted.py::test_damaged_checkpoint_halts_the_appliance")
def test_weights_of_nan_halt_an_appliance(launch, tmp_path):
    appliance = launch(weights_of_nan(tmp_path, "lifecycle: {restart: {exhausted: halt}}\n"))

    def failed() -> bool:
        assert appliance.process.poll() is None, appliance.output()
        return appliance.status("/ready") == 503 and appliance.client.get("/ready").json()["status"] == "failed"

    until("/ready tells of the failure", failed)
    ready = appliance.client.get("/ready")
    assert ready.status_code == 503 and ready.json()["reason"]["exit"] == "checkpoint"
    assert "NaN" in ready.json()["reason"]["message"]
    assert appliance.status("/live") == 200
    name = appliance.client.get("/v1/models").json()["data"][0]["id"]
    refused = appliance.client.post("/v1/completions", json={"model": name, "prompt": "a"})
    assert refused.status_code == 503 and "NaN" in refused.text
    assert "engine-0" not in appliance.pids()
    assert appliance.stop() == exits.CHECKPOINT.number, appliance.output()
    assert not appliance.processes()


@pytest.mark.nightly(
    "tests/e2e/test_drift.py::test_a_bit_that_flips_has_the_engine_replaced_under_requests_and_a_second_one_ends_the_appliance"
)
def test_weights_overwritten_while_they_are_served_end_the_service(launch, tmp_path):
    shutil.copytree(ROOT / "manifests" / "demo", tmp_path / "model")
    manifest = tmp_path / "m.yaml"
    manifest.write_text("apiVersion: slipway/v2\nmodel: {source: {path: model}}\nhardware: {kv_cache_memory: 16MiB}\n")
    appliance = launch(manifest)
    appliance.wait_ready()
    file = tmp_path / "model" / "model.safetensors"
    os.utime(file)  # harmless
    until("the new time is told", lambda: "has another modification time, and the same" in appliance.output())
    assert appliance.status("/ready") == 200
    with file.open("r+b") as opened:  # in place: a new file would not change the mapped one
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(100_000))
    assert appliance.process.wait(120) == exits.CHECKPOINT.number, appliance.output()
    assert "model.safetensors was overwritten in place while the engine was using it" in appliance.output()
