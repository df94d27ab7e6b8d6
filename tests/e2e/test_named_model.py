"""`slipway serve MODEL`: a model without a manifest."""

from collections.abc import Callable

from tests.e2e.conftest import ROOT, Appliance

DEMO = ROOT / "manifests" / "demo"


def test_a_folder_is_served_without_a_manifest(launch: Callable[..., Appliance]) -> None:
    appliance = launch(DEMO)
    appliance.wait_ready()
    assert [model["id"] for model in appliance.client.get("/v1/models").json()["data"]] == ["demo"]
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
    assert appliance.client.post("/v1/completions", json=body).status_code == 200
    said = appliance.output()
    assert f"slipway serve:       path: {DEMO}" in said
    assert f"save it with `slipway init {DEMO} -o my.yaml`" in said
    assert appliance.stop() == 0
