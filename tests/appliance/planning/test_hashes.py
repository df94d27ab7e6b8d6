"""The hash of a configuration split into files, overlays, variables and profiles equals the hash of the single file."""

import itertools
import json
from pathlib import Path

import pytest

from appliance.config.settings import Given
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.report import as_json
from appliance.planning.validate import validate

DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo"
CPU = Machine(8, "affinity", 2**36, "MemAvailable", no_gpu="no driver", kernels=("avx512", "avx2", "base"))
WHOLE = """apiVersion: slipway/v2
model: {source: {path: demo}, chat_template: chat.jinja}
hardware: {device: cpu, threads: 2}
engine: {scheduling: {max_running: 8}, record: steps.bin}
endpoints: {port: 81, api_keys: a}
secrets: {b: {env: B}, a: {file: keys.txt}}
lifecycle: {journal: {folder: kept}}
"""
SPLIT = {
    "m.yaml": """apiVersion: slipway/v2
extends: [conf/model.yaml, conf/more.yaml]
secrets: {b: {env: B}}
overlays: {site: {endpoints: {port: "${var.port}", api_keys: a}}}
variables: {port: 80}
hardware:
  device: ${DEVICE}
  profiles: [{name: p, match: {}, set: {engine: {scheduling: {max_running: 8}}}}]
""",
    "conf/model.yaml": "model: {source: {path: ../demo}, chat_template: ./../chat.jinja}\nengine: {record: ../steps.bin}\n",  # noqa: E501
    "conf/more.yaml": "secrets: {a: {file: ../keys.txt}}\nhardware: {threads: 3}\n"
    "lifecycle: {journal: {folder: ../kept}}\n",
}
GIVEN = {"DEVICE": "cpu", "B": "x", "SLIPWAY__HARDWARE__THREADS": "2", "SLIPWAY__VARIABLES__PORT": "81"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "demo").symlink_to(DEMO)
    for name in ("chat.jinja", "keys.txt"):
        (tmp_path / name).write_text("x\n")
    return tmp_path


def planned(folder: Path, files: dict[str, str], environ: dict[str, str], *overlays: str) -> Plan:
    for name, text in files.items():
        (folder / name).write_text(text)
    return validate(Given(folder / "m.yaml", (), environ, overlays), CPU)


def hashes(found: Plan) -> tuple[str, str, str]:
    return found.sha256, found.gateway.outputs_sha256, json.loads(as_json(found))["graphs_sha256"]


def test_a_manifest_in_parts_has_the_hashes_of_the_one_file(folder: Path) -> None:
    whole = planned(folder, {"m.yaml": WHOLE}, {"B": "x"})
    parts = planned(folder, SPLIT, GIVEN, "site")
    assert hashes(parts) == hashes(whole)
    assert parts.engines == whole.engines and parts.gateway == whole.gateway
    assert parts.layers and not whole.layers


def test_every_value_of_a_part_counts(folder: Path) -> None:
    """A change in any part changes the manifest's hash, and all changes give different hashes."""
    (folder / "other.jinja").write_text("x\n")
    (folder / "conf" / "keys.txt").write_text("x\n")
    changes = [
        ("m.yaml", "max_running: 8", "max_running: 9"),
        ("conf/model.yaml", "./../chat.jinja", "../other.jinja"),
        ("conf/model.yaml", "../steps.bin", "steps.bin"),
        ("conf/more.yaml", "../keys.txt", "keys.txt"),
        ("conf/more.yaml", "../kept", "kept"),
        ("conf/more.yaml", "folder: ../kept", "keep: 0s"),
        ("m.yaml", "{env: B}", "{env: DEVICE}"),
    ]
    found = [hashes(planned(folder, SPLIT, GIVEN, "site"))[0]]
    for name, old, new in changes:
        found.append(hashes(planned(folder, SPLIT | {name: SPLIT[name].replace(old, new)}, GIVEN, "site"))[0])
    found.append(hashes(planned(folder, SPLIT, GIVEN | {"SLIPWAY__VARIABLES__PORT": "82"}, "site"))[0])
    assert all(one != other for one, other in itertools.combinations(found, 2))


def test_a_path_counts_as_the_manifests_own_folder_sees_it(folder: Path) -> None:
    """The same relative path in another folder names another file."""
    text = "apiVersion: slipway/v2\nextends: conf/model.yaml\nhardware: {device: cpu}\n"
    inside = planned(folder, {"m.yaml": text, "conf/model.yaml": "model: {source: {path: ../demo}}\n"}, {})
    (folder / "conf" / "demo").symlink_to(DEMO)
    beside = planned(folder, {"m.yaml": text, "conf/model.yaml": "model: {source: {path: demo}}\n"}, {})
    plain = planned(
        folder, {"m.yaml": text.replace("extends: conf/model.yaml", "model: {source: {path: conf/demo}}")}, {}
    )
    assert inside.sha256 != beside.sha256 == plain.sha256
