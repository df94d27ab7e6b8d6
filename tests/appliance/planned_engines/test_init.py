"""`slipway init` for a checkpoint of every architecture: `check` accepts the manifest, unchanged and uncommented."""

from pathlib import Path

import pytest
import torch
import yaml

from appliance.cli.main import main
from tests.appliance.cli.test_init import uncommented
from tests.engine.layers.conftest import CASES, random_model


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    random_model(name).save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    return folder


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_init_writes_a_valid_manifest_for_every_architecture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = saved(name, tmp_path / name), tmp_path / "m.yaml"
    assert main(["init", str(folder), "-o", str(path)]) == 0, capsys.readouterr().err
    assert main(["check", str(path)]) == 0, capsys.readouterr().err
    text = path.read_text()
    written = yaml.safe_load(text)
    assert set(written) == {"apiVersion", "model"}, "only what must be written is"
    path.write_text(uncommented(text))
    assert len(yaml.safe_load(path.read_text())) > 5, "nothing was uncommented"
    assert main(["check", str(path)]) == 0, capsys.readouterr().err
