"""Locks of remote checkpoints apply before an engine starts, with and without local files."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.lockfile import lock_path
from appliance.cli.main import main
from appliance.config import exits

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "appliance" / "checkpoints"))
from source_servers import COMMIT, publish, serving  # noqa: E402

WEIGHTS = f"/org/demo/resolve/{COMMIT}/model.safetensors"


@pytest.fixture
def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (ROOT / "manifests" / "demo").iterdir() if path.is_file()}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with serving() as found:
        publish(found, "org/demo", files)
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield found


@pytest.fixture
def manifest(tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "digests"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = tmp_path / "m.yaml"
    path.write_text(
        "apiVersion: slipway/v2\n"
        f"model: {{source: {{huggingface: {{repo: org/demo}}}}, "
        f"download: {{cache: {tmp_path / 'cache'}, min_free: 1}}}}\n"
        f"hardware: {{device: cpu}}\nendpoints: {{host: 127.0.0.1, port: {port}}}\n"
    )
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints' folders with which engines would have been started; a job would still be downloaded."""
    found: list[str] = []

    def launch(plan: Any, given: Any) -> int:
        found.append("a download" if plan.job is not None else plan.engines[0].model.path)
        return 0

    monkeypatch.setattr("appliance.supervisor.launch.serve", launch)
    return found


def lock(manifest: Path, tmp_path: Path) -> None:
    """Lock the fetched checkpoint, then delete it."""
    assert main(["fetch", str(manifest)]) == 0 and main(["lock", str(manifest)]) == 0
    shutil.rmtree(tmp_path / "cache")


def test_without_a_lock_the_engine_downloads(manifest: Path, started: list[str], hub: Any) -> None:
    assert main(["serve", str(manifest)]) == 0
    assert started == ["a download"] and hub.gets(WEIGHTS) != [""]


def test_locked_files_are_downloaded_and_verified_before_an_engine_starts(
    manifest: Path, tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lock(manifest, tmp_path)
    assert main(["serve", str(manifest)]) == 0
    assert len(started) == 1 and (Path(started[0]) / "model.safetensors").is_file()


def test_changed_content_is_refused_by_name_after_the_download(
    manifest: Path, tmp_path: Path, started: list[str], hub: Any, files: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lock(manifest, tmp_path)
    weights = bytearray(files["model.safetensors"])
    weights[-5] ^= 1
    publish(hub, "org/demo", files | {"model.safetensors": bytes(weights)}, commit="b" * 40)
    capsys.readouterr()
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number
    assert "model.safetensors: changed" in capsys.readouterr().err and not started


def test_missing_required_lock_is_refused_before_the_weights_are_downloaded(
    manifest: Path, started: list[str], hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write_text(manifest.read_text().replace("model: {", "model: {lock: require, "))
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number
    assert f"{lock_path(manifest)} does not exist" in capsys.readouterr().err and not started


def test_check_and_plan_need_no_download(
    manifest: Path, tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lock(manifest, tmp_path)
    capsys.readouterr()
    assert main(["check", str(manifest)]) == main(["plan", str(manifest)]) == 0
    assert "verified once they are downloaded" in capsys.readouterr().out
    assert not list((tmp_path / "cache").rglob("model.safetensors"))


def test_missing_local_files_cannot_be_locked_or_compared(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", str(manifest)]) == exits.SOURCE.number
    assert "slipway fetch" in capsys.readouterr().err
    lock(manifest, tmp_path)
    assert main(["lock", "--check", str(manifest)]) == exits.SOURCE.number
    assert "slipway fetch" in capsys.readouterr().err


def test_code_of_a_checkpoint_is_not_run_before_its_verification(
    manifest: Path, tmp_path: Path, hub: Any, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write_text(manifest.read_text().replace("model: {", "model: {trust_remote_code: true, "))
    lock(manifest, tmp_path)
    ran = tmp_path / "ran"
    publish(hub, "org/demo", files | {"slipway_model.py": f"open({str(ran)!r}, 'w')".encode()}, commit="b" * 40)
    for command in ("check", "plan", "serve"):
        assert main([command, str(manifest)]) != 0, command
    assert not ran.exists()
