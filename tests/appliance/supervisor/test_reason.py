"""The termination log if no process is started."""

import json
from pathlib import Path

import pytest

from appliance.cli.main import main
from appliance.config import exits
from appliance.supervisor.reason import MAX_BYTES, Reason, write_termination

DEMO = Path(__file__).resolve().parents[3] / "manifests" / "demo"


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "termination"
    path.write_text("of an earlier start, and longer than what follows" * 100)
    monkeypatch.setenv("SLIPWAY_TERMINATION_LOG", str(path))
    return path


def manifest(folder: Path, model: Path, rest: str = "") -> str:
    path = folder / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {model}}}}}\n{rest}")
    return str(path)


def test_a_wrong_key_is_named_in_the_termination_log(log, tmp_path):
    assert main(["serve", manifest(tmp_path, DEMO, "limts: {}\n")]) == 2
    reason = json.loads(log.read_text())
    assert (reason["exit"], reason["code"]) == ("manifest", 2) and "limts" in reason["message"] and reason["cure"]


def test_a_missing_checkpoint_is_named_in_the_termination_log(log, tmp_path):
    assert main(["serve", manifest(tmp_path, tmp_path)]) == exits.CHECKPOINT.number
    reason = json.loads(log.read_text())
    assert (reason["exit"], reason["code"]) == ("checkpoint", 10) and str(tmp_path) in reason["message"]


def test_a_wrong_option_is_named_in_the_termination_log(log, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["serve", manifest(tmp_path, DEMO), "--nothing-like-it"])
    reason = json.loads(log.read_text())
    assert ended.value.code == reason["code"] == 2 and "--nothing-like-it" in reason["message"]


def test_check_does_not_write_the_termination_log(log, tmp_path):
    before = log.read_text()
    assert main(["check", manifest(tmp_path, tmp_path)]) == exits.CHECKPOINT.number
    assert log.read_text() == before


@pytest.mark.parametrize("character", ["x", "\x01", "\u00e9"])
@pytest.mark.parametrize("length", [0, 1, 680, 4096, 100_003])
def test_long_reason_is_shortened_to_valid_json(tmp_path, character, length):
    log = tmp_path / "log"
    log.touch()
    lines = tuple(character * 500 for _ in range(7))
    write_termination(Reason(message=character * length, exit="x", code=1, cure="y", last_lines=lines), log)
    assert len(log.read_bytes()) <= MAX_BYTES
    kept = json.loads(log.read_text())
    assert kept["message"] == character * len(kept["message"]) and len(kept["message"]) >= min(length, 600)


def test_missing_termination_log_is_not_created(tmp_path):
    write_termination(Reason(message="m", exit="x", code=1, cure="y"), tmp_path / "log")
    assert list(tmp_path.iterdir()) == []
