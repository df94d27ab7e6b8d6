"""Plans of folders with a config.json and no weights equal plans with weights, and they list their assumptions."""

import json
import shutil
from pathlib import Path

import pytest

from appliance.cli.main import main

DEMO = Path(__file__).resolve().parents[3] / "manifests/demo"


def folder(home: Path, *names: str, **changes: object) -> Path:
    """Copy these files of the demo model, change its config.json, and write a manifest next to it."""
    made = home / "model"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for name in names:
        shutil.copy(DEMO / name, made)
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (made / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    manifest = home / "m.yaml"
    manifest.write_text("apiVersion: slipway/v2\nmodel: {source: {path: model}}\nhardware: {device: cpu}\n")
    return manifest


def planned(manifest: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["plan", "--hardware", "cpu:4:8GiB", "--json", str(manifest)]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_without_weights_is_that_with_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
    whole = planned(folder(tmp_path, *files, "model.safetensors"), capsys)
    alone = planned(folder(tmp_path, *files), capsys)
    assert whole.pop("assumed") == []
    assumed = alone.pop("assumed")
    assert isinstance(assumed, list) and len(assumed) == 3
    for plan in (whole, alone):
        plan["outlook"].pop("file_bytes")  # type: ignore[attr-defined]  # a file has a header as well
        plan["outlook"].pop("load_s")  # type: ignore[attr-defined]
        plan["outlook"].pop("download_s")  # type: ignore[attr-defined]
    assert alone == whole


def test_config_json_alone_is_enough_and_assumptions_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = folder(tmp_path)
    assert main(["check", str(manifest)]) == 0
    said = capsys.readouterr().out
    assert "not checked, because" in said and "46 tensors" in said and "a tokenizer" in said
    assert "weights of type bfloat16 (config.json)" in said and "quantization: none" in said
    assert main(["plan", str(manifest)]) == 0
    assert "assumed, because there are no weights:\n  the 46 tensors" in capsys.readouterr().out


def test_an_element_type_missing_in_config_json_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder(tmp_path, dtype=None, torch_dtype=None)
    assert "weights of type bfloat16 (config.json names none)" in str(planned(manifest, capsys)["assumed"])


def test_a_quantization_of_config_json_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(folder(tmp_path), capsys)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    packed = planned(folder(tmp_path, quantization_config=settings), capsys)
    assert "quantization: 4 bits (gptq, groups of 32) (config.json)" in str(packed["assumed"])
    weights = [plan["memory"]["weights"] for plan in (plain, packed)]  # type: ignore[index]
    assert weights[1] < weights[0] / 2


def test_serving_refuses_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder(tmp_path, "tokenizer.json")
    assert main(["serve", str(manifest)]) == 10
    said = capsys.readouterr().err
    assert f"{manifest}:2:24" in said and "no weights" in said and "only `slipway plan` and `slipway check`" in said


def test_weights_of_another_kind_are_no_reason_to_assume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = folder(tmp_path)
    (tmp_path / "model/pytorch_model.bin").touch()
    assert main(["check", str(manifest)]) == 10
    assert "convert the checkpoint to safetensors" in capsys.readouterr().err


def test_an_invalid_config_json_is_an_error_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder(tmp_path, num_key_value_heads=3))]) == 10
    assert "num_key_value_heads" in capsys.readouterr().err
