"""Immediate and pending changes when a manifest is edited while the appliance runs."""

from pathlib import Path

import pytest

from appliance.config.gateway import GatewayConfig
from appliance.config.settings import Given
from appliance.hardware.machine import Machine, read_machine
from appliance.planning.diff.config_snapshot import ConfigSnapshot, read_snapshot
from appliance.planning.diff.pending_changes import Step, step

ROOT = Path(__file__).resolve().parents[4]
HEAD = f"apiVersion: slipway/v2\nmodel: {{source: {{path: {ROOT / 'manifests' / 'demo'}}}}}\n"
MACHINE: Machine = read_machine(gpus=False)


class Running:
    """The manifest-related part of an appliance."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file = folder / "m.yaml"
        for name in ("one", "two"):
            (folder / f"{name}.txt").write_text(name)
        self.snapshot = self.read(text)
        self.gateway: GatewayConfig = self.snapshot.plan.gateway

    def read(self, text: str) -> ConfigSnapshot:
        self.file.write_text(HEAD + text)
        return read_snapshot(Given(self.file, (), {"KEYS": "three"}), MACHINE)

    def reload(self, text: str) -> Step:
        found = step(self.snapshot, self.gateway, self.read(text))
        self.snapshot, self.gateway = found.running, found.gateway
        return found


def keys(changes) -> list[str]:
    return [change.key for change in changes]


def test_live_keys_apply_and_others_wait_until_reverted(tmp_path: Path) -> None:
    running = Running(tmp_path, "")
    both = "limits: {max_stop: 3}\nengine: {scheduling: {max_running: 4}}\n"
    before = running.gateway
    found = running.reload(both)
    assert keys(found.at_once) == ["limits.max_stop"] and "engine.scheduling.max_running" in keys(found.waiting)
    assert found.cost == "engine"
    assert found.gateway.limits.max_stop == 3
    assert found.gateway.manifest_sha256 == before.manifest_sha256, "it is not that manifest yet"
    assert found.gateway.outputs_sha256 == before.outputs_sha256, "engines compute what they did"
    again = running.reload(both)
    assert not again.at_once and keys(again.waiting) == keys(found.waiting)
    back = running.reload("limits: {max_stop: 3}\n")
    assert not back.at_once and not back.waiting
    assert back.gateway.manifest_sha256 != before.manifest_sha256


def test_with_swapped_engines_all_of_it_is_that_manifest(tmp_path: Path) -> None:
    running = Running(tmp_path, "")
    wanted = running.read("limits: {max_stop: 3}\nhardware: {batch_invariant: true}\nquantization: {weights: int8}\n")
    found = step(running.snapshot, running.gateway, wanted).whole(wanted)
    assert not found.waiting and "quantization.weights" in keys(found.swapped)
    assert wanted.plan is not None
    assert found.gateway == wanted.plan.gateway, "what a start would have told it"
    assert not keys(step(found.running, found.gateway, wanted).waiting)


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("endpoints: {port: 9000}\n", "service"),
        ("lifecycle: {journal: {folder: .}}\n", "gateway"),
        ("lifecycle: {journal: {folder: .}, drain: 3s}\nengine: {cache: {prefix: false}}\n", "service"),
        ("engine: {cache: {prefix: false}}\n", "engine"),
        ("limits: {max_stop: 3}\n", ""),
    ],
)
def test_the_largest_restart_is_the_cost(tmp_path: Path, text: str, cost: str) -> None:
    assert Running(tmp_path, "").reload(text).cost == cost


def test_api_keys_of_a_file_apply_and_new_variables_wait(tmp_path: Path) -> None:
    running = Running(tmp_path, "")
    named = "endpoints: {api_keys: clients}\nsecrets: {clients: {%s}}\n"
    one = running.reload(named % "file: one.txt")
    assert set(keys(one.at_once)) == {"endpoints.api_keys", "secrets.clients.file"} and not one.waiting
    assert one.gateway.api_keys.file == str(tmp_path / "one.txt")
    two = running.reload(named % "file: two.txt")
    assert keys(two.at_once) == ["secrets.clients.file"]
    assert two.gateway.api_keys.file == str(tmp_path / "two.txt")
    three = running.reload(named % "env: KEYS")
    assert "secrets.clients.env" in keys(three.waiting) and three.cost == "service"
    assert three.gateway.api_keys == two.gateway.api_keys, "the old ones hold on"


def test_sampling_follows_one_by_one(tmp_path: Path) -> None:
    running = Running(tmp_path, "engine: {sampling: {temperature: 0.5, top_k: 3}}\n")
    found = running.reload("engine: {sampling: {temperature: 0.25, top_k: 3, min_p: 0.1}}\n")
    assert found.gateway.sampling.temperature == 0.25 and found.gateway.sampling.min_p == 0.1
    assert found.gateway.sampling.top_k == 3
    assert found.gateway.outputs_sha256 == read_snapshot(Given(running.file), MACHINE).outputs_sha256
