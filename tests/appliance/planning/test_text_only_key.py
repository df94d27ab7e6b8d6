"""model.text_only in the manifest: refused at its key if it has no effect, suggested if it is needed."""

import json
from pathlib import Path

import pytest

from appliance.cli.main import main

DEMO = Path(__file__).resolve().parents[3] / "manifests/demo"


def manifest(folder: Path, config: dict[str, object], text_only: str = "") -> Path:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(config))
    file = folder / "m.yaml"
    file.write_text(
        f"apiVersion: slipway/v2\nmodel:\n  source: {{path: model}}\n{text_only}hardware: {{device: cpu}}\n"
    )
    return file


def seeing(architecture: str = "Qwen3VLForConditionalGeneration") -> dict[str, object]:
    """The demo's decoder within a model of images, as config.json writes it."""
    text = json.loads((DEMO / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    return {"architectures": [architecture], "text_config": text, "vision_config": {}}


def test_the_decoder_is_planned_where_the_key_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(manifest(tmp_path, seeing(), "  text_only: true\n"))]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out


def test_the_message_without_the_key_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, seeing("OvisForConditionalGeneration"))  # a tower without a declaration
    assert main(["check", str(file)]) == 10
    assert "set model.text_only: true to serve it as Qwen3ForCausalLM" in capsys.readouterr().err


def test_the_decoder_is_planned_if_images_are_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, seeing())
    file.write_text(file.read_text() + "limits: {media: {images: 0}}\n")
    assert main(["check", str(file)]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out


def test_the_key_is_refused_for_a_model_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest(tmp_path, json.loads((DEMO / "config.json").read_text()), "  text_only: true\n")
    assert main(["check", str(file)]) == 10
    said = capsys.readouterr().err
    assert f"{file}:4:14: model.text_only" in said and "it is a text model; leave the key out" in said
