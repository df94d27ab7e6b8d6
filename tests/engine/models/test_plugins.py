"""Architectures that other packages register as entry points."""

import json

import pytest

from engine.api.errors import CheckpointError, UnknownArchitecture
from engine.models.checkpoint import assume_checkpoint

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "width": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
TOY = """
from engine.models import llama

def declare(config):
    width = config["width"]
    own = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3, "num_attention_heads": 2}
    return llama.declare({**config, **own, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"]})
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs a distribution into a folder of sys.path, and returns a checkpoint folder."""

    def made(source, value="toy_model:declare"):
        site, info = tmp_path / "site", tmp_path / "site" / "toy_model-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[slipway.models]\nToyForCausalLM = {value}\n")
        (site / "toy_model.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(__import__("sys").modules, "toy_model", raising=False)
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        return folder

    return made


def test_a_package_declares_an_architecture(install):
    found = assume_checkpoint(install(TOY))
    assert found.architecture == "ToyForCausalLM" and len(found.model.blocks) == 3
    assert found.model.embed.hidden == 32 and found.model.embed.vocab == 64


def test_without_the_package_the_architecture_is_unknown(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnknownArchitecture, match="ToyForCausalLM"):
        assume_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("source", "value", "said"),
    [
        ("raise RuntimeError('broken')", "toy_model:declare", "package toy-model cannot be imported"),
        (TOY, "toy_model:nothing", "cannot be imported"),
        ("declare = lambda config: 5", "toy_model:declare", "returns no Model"),
        ("declare = 5", "toy_model:declare", "returns no Model"),
    ],
)
def test_an_unusable_package_is_named(install, source, value, said):
    with pytest.raises(CheckpointError, match=said):
        assume_checkpoint(install(source, value))
