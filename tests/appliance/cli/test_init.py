"""`slipway init`: `check` accepts the manifest of every form of checkpoint, unchanged and uncommented. Checkpoints of
every architecture are in tests/appliance/planned_engines/test_init.py."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from appliance.cli.init import SCHEMA
from appliance.cli.main import main
from appliance.config import exits
from appliance.config.settings import Given, load
from appliance.hardware.described import hardware
from appliance.lockfile.files import read_names
from appliance.planning.validate import validate
from tests.manifests.shapes import make_checkpoint, make_gguf

ROOT = Path(__file__).resolve().parents[3]


def uncommented(text: str) -> str:
    """With every offered key written."""
    return re.sub(r"^( *)#(?! \S)( *\w+:)", r"\1\2", text, flags=re.MULTILINE)


@pytest.mark.parametrize("model", ["Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen3-30B-A3B", "Llama-3.1-8B-Instruct", "gguf"])
@pytest.mark.parametrize("words", ["avx512:16:300GiB", "h200x1"])
@pytest.mark.sampled(3)
def test_published_models_on_their_machines(
    model: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = hardware(words)
    make = (lambda _, folder: make_gguf("Qwen2.5-7B-Instruct", folder)) if model == "gguf" else make_checkpoint
    folder, path = make(model, tmp_path / "model"), tmp_path / "m.yaml"
    assert main(["init", str(folder), "-o", str(path), "--hardware", words]) == 0, capsys.readouterr().err
    text = path.read_text()
    assert f"is the value on {words}" in text
    assert "chat template" in text, "neither has one, and chat needs one"
    assert ("cuda: there is a NVIDIA H200" in text) == bool(machine.gpus)
    assert all(len(line) <= 120 for line in text.splitlines())
    before = validate(Given(path), machine)
    path.write_text(uncommented(text))
    assert main(["check", str(path), "--hardware", words]) == 0, capsys.readouterr().err
    assert validate(Given(path), machine).engines == before.engines, "what is offered is what it comes to anyhow"


def test_a_manifest_is_not_written_over_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "manifests" / "demo", tmp_path / "demo")
    path = tmp_path / "m.yaml"
    path.write_text("mine")
    assert main(["init", str(tmp_path / "demo"), "-o", str(path)]) == exits.MANIFEST.number
    assert path.read_text() == "mine" and "--force" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "demo"), "-o", str(path), "--force"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["demo", "m.yaml", SCHEMA], "a draft was left"
    assert load(Given(path)).manifest.model.names == ("demo",)
    assert f"$schema={SCHEMA}" in path.read_text() and (tmp_path / SCHEMA).read_text().startswith("{")
    assert "path: demo\n" in path.read_text(), "below the manifest's folder the path is relative"


def test_printed_it_is_the_same_and_no_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(ROOT / "manifests" / "demo"), "-o", "-"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["names"] == ["demo"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_checkpoint_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, said in ((tmp_path, "config.json"), (tmp_path / "gone", "no such directory")):
        assert main(["init", str(folder), "-o", str(tmp_path / "m.yaml")]) == exits.CHECKPOINT.number
        assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_is_reported_and_no_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "avx512:8:14GiB"
    folder = make_checkpoint("Mixtral-8x7B-Instruct-v0.1", tmp_path / "m")
    command = ["init", str(folder), "-o", str(tmp_path / "m.yaml"), "--hardware", small]
    assert main(command) == exits.MEMORY.number
    assert f"cannot be served on {small}" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["1e3", "no", "a b", "x: y", "#1", "0x10", "häuser", "-dash", "2026-01-01", "it's"])
def test_odd_names_of_folders_are_written_so_that_they_stay_texts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "manifests" / "demo", tmp_path / name)
    path = tmp_path / "m.yaml"
    assert main(["init", "-o", str(path), "--", str(tmp_path / name)]) == 0, capsys.readouterr().err
    assert load(Given(path)).manifest.model.names == (name,)
    assert main(["check", str(path)]) == 0, capsys.readouterr().err
    assert read_names(tmp_path / name)
