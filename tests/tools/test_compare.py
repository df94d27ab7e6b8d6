"""tools/compare.py: agrees with itself, and sees one changed weight."""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file


def _tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare_tool", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_tool"] = module
    spec.loader.exec_module(module)
    return module


tool = _tool()


@pytest.fixture(scope="module", params=["Qwen3", "Gemma2", "dynamic Llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    more: dict[str, Any] = {"head_dim": 16}
    if request.param.startswith("dynamic"):
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        more = {"rope_parameters": rope, "max_position_embeddings": 24}
    config = getattr(transformers, f"{request.param.split()[-1]}Config")(
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **more,
        }
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("compare") / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def changed(checkpoint: Path, path: Path, by: float) -> Path:
    """A copy with one weight of the last layer changed."""
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += by
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_checkpoint_agrees_with_itself(checkpoint, capsys):
    assert tool.main([str(checkpoint), "--tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert "all 4 prompts agree" in out and out.count("no difference") == 4


def test_changed_weight_is_detected_with_its_first_position(checkpoint, tmp_path, capsys):
    other = changed(checkpoint, tmp_path / "changed", 3.0)
    assert tool.main([str(checkpoint), "--tokens", "5", "--reference", str(other)]) == 1
    out = capsys.readouterr().out
    assert "first difference at position" in out and "4 of 4 prompts differ" in out


def test_prompts_are_read_from_a_file_and_errors_name_the_line(checkpoint, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("1 2 3\n\n60 0 60\n")
    assert tool.main([str(checkpoint), "--tokens", "3", "--prompts", str(file)]) == 0
    assert "all 2 prompts agree" in capsys.readouterr().out
    file.write_text("1 2 x\n")
    assert tool.main([str(checkpoint), "--prompts", str(file)]) == 2
    assert "prompts.txt" in capsys.readouterr().err


def test_a_missing_checkpoint_is_an_error_in_one_line(tmp_path, capsys):
    assert tool.main([str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("compare: ") and err.count("\n") == 1
