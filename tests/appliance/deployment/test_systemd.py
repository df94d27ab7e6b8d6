"""The systemd unit, checked by systemd's own tools, and the manifest in its folder."""

import configparser
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.config import exits
from appliance.config.settings import Given, load
from appliance.deployment.systemd import layout, python_folders, systemd
from tests.appliance.deployment.manifests import CPU, GPU, deployed, write_demo, write_manifest
from tests.manifests.shapes import make_checkpoint


def parsed(unit: str) -> dict[str, list[str]]:
    """The values of [Service] by their names."""
    found: dict[str, list[str]] = {}
    for line in unit.partition("[Service]\n")[2].partition("\n[Install]")[0].splitlines():
        if line:
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_demo(tmp_path, CPU)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="requires systemd-analyze (Debian: systemd)")
@pytest.mark.parametrize("port", [80, 8100])
def test_systemd_accepts_the_unit(manifest: Path, tmp_path: Path, port: int) -> None:
    one = deployed(manifest, "cpu:4:16GiB", layout("m"))
    unit = tmp_path / "m.service"
    unit.write_text(systemd(replace(one, port=port))["m.service"])
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=50", unit]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="requires systemd-analyze (Debian: systemd)")
def test_systemd_finds_the_command_in_a_folder_with_special_characters(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "a $b %c:d" / "slipway"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command.parent / "python"))
    unit = tmp_path / "m.service"
    unit.write_text(systemd(deployed(manifest, "cpu:4:16GiB", layout("m")))["m.service"])
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_is_an_ini_file_with_the_three_sections(manifest: Path) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(systemd(deployed(manifest, "cpu:4:16GiB", layout("m")))["m.service"])
    assert parser.sections() == ["Unit", "Service", "Install"]


def test_python_below_the_folder_of_a_user_is_visible(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ProtectHome hides the environment of a checkout in /home, and a Python of pyenv or uv."""
    monkeypatch.setattr(sys, "prefix", "/home/a/slipway/.venv")
    monkeypatch.setattr(sys, "base_prefix", "/root/.pyenv/versions/3.11.7")
    service = parsed(systemd(deployed(manifest, "cpu:4:16GiB", layout("m")))["m.service"])
    assert service["ProtectHome"] == ["tmpfs"]
    assert service["BindReadOnlyPaths"][1:] == ['"/home/a/slipway/.venv"', '"/root/.pyenv/versions/3.11.7"']
    monkeypatch.setattr(sys, "base_prefix", "/home/a")
    assert [str(path) for path in python_folders()] == ["/home/a"], "the environment is within"


def test_exits_that_a_restart_cannot_fix_are_final(manifest: Path) -> None:
    (found,) = parsed(systemd(deployed(manifest, "cpu:4:16GiB", layout("m")))["m.service"])["RestartPreventExitStatus"]
    assert str(exits.ENGINE.number) in found.split() and str(exits.RESTARTS.number) not in found.split()


def test_secrets_are_credentials_and_written_data_is_in_folders_of_the_service(manifest: Path) -> None:
    one = deployed(manifest, "cpu:4:16GiB", layout("m"))
    service = parsed(systemd(one)["m.service"])
    credentials = [f"clients:{manifest.parent}/keys", "hub:/etc/slipway/m/secrets/hub"]
    assert service["LoadCredential"] == credentials and service["StateDirectory"] == ["m"]
    found = load(Given(Path("/etc/slipway/m/manifest.yaml"), (), {}, text=one.files["manifest.yaml"])).manifest
    files = {key: secret.file for key, secret in found.secrets.items()}  # type: ignore[union-attr]
    assert files == {"clients": "/run/credentials/m.service/clients", "hub": "/run/credentials/m.service/hub"}
    assert found.lifecycle.journal.folder == "/var/lib/m/journal"
    assert found.model.source.path == str(manifest.parent / "demo") and found.endpoints.port == 8100


def test_times_and_memory_follow_the_plan(manifest: Path) -> None:
    one = deployed(manifest, "cpu:4:16GiB", layout("m"))
    service = parsed(systemd(replace(one, memory=3 * 2**30 + 1))["m.service"])
    assert service["TimeoutStopSec"] == ["32s"] and "SLIPWAY_GRACE=27" in service["Environment"]
    assert service["MemoryMax"] == ["4G"] and service["PrivateDevices"] == ["yes"]


def test_a_service_with_gpus_sees_devices(tmp_path: Path) -> None:
    make_checkpoint("Llama-3.1-8B-Instruct", tmp_path / "llama")
    one = deployed(write_manifest(tmp_path, GPU), "h200x2", layout("m"))
    assert "PrivateDevices" not in parsed(systemd(one)["m.service"])


def test_paths_with_special_characters_are_escaped(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.deployment.systemd.python_folders", list)
    one = replace(deployed(manifest, "cpu:4:16GiB", layout("m")), model_path=Path('/models/a b%c:d"e'))
    assert parsed(systemd(one)["m.service"])["BindReadOnlyPaths"] == ['"/models/a b%%c\\:d\\"e"']
