"""Measurements of a running service: operations, profiles and usage."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.documented import documented
from tests.e2e.conftest import Appliance, until

MANIFEST = """
apiVersion: slipway/v2
model:
  source: {path: %s}
  names: [demo]
observability:
  mfu_metrics: true
  profiler_folder: profiles
"""
DEMO = Path(__file__).parents[2] / "manifests" / "demo"


def test_service_counts_operations_and_writes_profiles(launch: Callable[..., Appliance], tmp_path: Path) -> None:
    manifest = tmp_path / "observed.yaml"
    manifest.write_text(MANIFEST % DEMO)
    appliance = launch(manifest)
    appliance.wait_ready()
    assert appliance.client.post("/stop_profile").status_code == 400
    before = appliance.metric("slipway_flops_total")
    assert json.loads(documented("docs/operations.md", "start_profile", appliance.url)) == {"status": "started"}
    body = {"prompt": [5] * 40, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    assert appliance.client.post("/v1/completions", json=body).status_code == 200
    stopped = json.loads(documented("docs/operations.md", "stop_profile", appliance.url))
    files = [Path(file) for file in stopped["files"]]
    assert {file.parent for file in files} == {tmp_path / "profiles"} and len(files) == 2
    steps, operations = (json.loads(file.read_text())["traceEvents"] for file in files)
    assert sum(event["name"].startswith("step ") for event in steps) == 8
    assert any(str(event.get("name", "")).startswith("step ") for event in operations)
    until("the operations are reported", lambda: appliance.metric("slipway_flops_total") > before)
    assert appliance.metric("slipway_hardware_flops_per_second") > 0
    used = appliance.client.get("/v1/usage").json()["total"]
    assert used["prompt_tokens"] >= 40 and used["completion_tokens"] >= 8
    assert appliance.stop() == 0
