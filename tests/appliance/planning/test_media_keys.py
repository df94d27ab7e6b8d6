"""model.media in the manifest: a plan of the towers alone, of a decoder without towers, and keys that are refused."""

import json
from pathlib import Path

import pytest

from appliance.cli.main import main
from tests.appliance.planning.test_text_only_key import DEMO, manifest, seeing


def planned(folder: Path, key: str, capsys: pytest.CaptureFixture[str], more: str = "") -> str:
    file = manifest(folder, seeing(), f"  media: {{{key}: true}}\n")
    file.write_text(file.read_text() + more)
    assert main(["plan", str(file)]) == 0
    return capsys.readouterr().out


def test_a_plan_of_towers_has_no_decoder_and_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(tmp_path, "encoder_only", capsys)
    assert "model.media.encoder_only" in said and "tower" in said and "there is no decoder" in said
    weights = [line for line in said.splitlines() if line.strip().startswith(("attention", "mlp", "embedding", "head"))]
    assert not [line for line in weights if " MiB" in line or " GiB" in line or " KiB" in line]


def test_a_plan_without_towers_keeps_the_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(tmp_path, "accept_embeddings", capsys, "limits: {media: {images: 0}}\n")
    assert "model.media.accept_embeddings" in said and "KV" in said


@pytest.mark.parametrize(
    ("key", "reason"), [("encoder_only", "has no tower"), ("accept_embeddings", "prompts of the model have no media")]
)
def test_keys_are_refused_for_a_model_of_text(
    key: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    file = manifest(tmp_path, config, f"  media: {{{key}: true}}\n")
    assert main(["check", str(file)]) == 10
    said = capsys.readouterr().err
    assert f"{file}:4:" in said and f"model.media.{key}" in said and reason in said


def test_towers_without_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, seeing(), "  media: {encoder_only: true}\n")
    file.write_text(file.read_text() + "limits: {media: {images: 0}}\n")
    assert main(["check", str(file)]) == 10
    assert "limits.media turns it off" in capsys.readouterr().err
