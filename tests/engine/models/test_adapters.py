"""Reading of adapter folders: every kind of adapter that is not plain LoRA is refused with the file and the key."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.api.errors import CheckpointError
from engine.models.adapters import read_adapter
from tests.engine.adapters import Pairs, write_adapter

MODULE = "model.layers.0.self_attn.q_proj"
PAIRS: Pairs = {MODULE: (torch.zeros(4, 6), torch.zeros(5, 4))}


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        read_adapter("a", folder)
    return str(raised.value)


def test_an_adapter_has_the_rank_and_scale_of_each_module(tmp_path: Path):
    layers = {f"model.layers.{layer}.{name}": (torch.zeros(rank, 6), torch.zeros(5, rank))
              for layer in (0, 1) for name, rank in (("q_proj", 4), ("v_proj", 2))}  # fmt: skip
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.1\.q_proj": 1, "q_proj": 6}}
    folder = write_adapter(tmp_path, layers, lora_alpha=16, **patterns)
    adapter = read_adapter("a", folder)
    assert {name: (one.rank, one.scale) for name, one in adapter.modules.items()} == {
        "model.layers.0.q_proj": (4, 1.5),
        "model.layers.0.v_proj": (2, 8.0),
        "model.layers.1.q_proj": (4, 0.25),
        "model.layers.1.v_proj": (2, 8.0),
    }
    assert (adapter.rank, adapter.base) == (4, "tiny/base")


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path):
    adapter = read_adapter("a", write_adapter(tmp_path, PAIRS, lora_alpha=6, use_rslora=True))
    assert adapter.modules[MODULE].scale == 3.0


def test_a_pattern_matches_whole_names_only(tmp_path: Path):
    """PEFT matches `(.*\\.)?(pattern)$`: `proj` is no name of a module here, and `q_proj` is not `xq_proj`."""
    folder = write_adapter(tmp_path, PAIRS, alpha_pattern={"proj": 100, "layers.0.self_attn.q_pro": 100, "0": 100})
    assert read_adapter("a", folder).modules[MODULE].scale == 2.0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported is LORA"),
        ({"use_dora": True}, "DoRA is not supported, merge the adapter"),
        ({"use_qalora": True}, "QALoRA is not supported"),
        ({"bias": "all"}, "trained biases are not supported"),
        ({"lora_bias": True}, "trained biases are not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set, and is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4, which changes the base model"),
        ({"init_lora_weights": "olora"}, "which changes the base model"),
        ({"r": 3}, r"lora_A of .* has shape \[4, 6\] and lora_B \[5, 4\], but adapter_config.json implies rank 3"),
        ({"r": 0}, "r is 0; it must be a number of at least 1"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "many"}, "lora_alpha is 'many'"),
        ({"rank_pattern": {"q_proj": 2}}, "implies rank 2"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has the invalid pattern '\('"),
        ({"layers_to_transform": [1]}, "whose layer is not in layers_to_transform"),
        ({"layers_to_transform": "all"}, "layers_to_transform is 'all'"),
    ],
)
def test_other_kinds_of_adapters_are_refused(config: dict[str, Any], why: str, tmp_path: Path):
    message = refused(write_adapter(tmp_path, PAIRS, **config))
    assert message.startswith(str(tmp_path))
    assert re.search(why, message), message


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        (f"{MODULE}.lora_magnitude_vector.weight", torch.zeros(5), "DoRA is not supported"),
        ("model.embed_tokens.lora_embedding_A", torch.zeros(4, 9), "adapters of embeddings are not supported"),
        (f"{MODULE}.lora_B.bias", torch.zeros(5), "supported are the weights of lora_A and lora_B"),
        ("lm_head.weight", torch.zeros(9, 6), r"whole modules are not supported \(modules_to_save\)"),
        (f"{MODULE}.lora_A.weight", torch.zeros(4, 6, dtype=torch.int8), "is I8 of shape"),
        (f"{MODULE}.lora_A.weight", torch.zeros(4), r"is F32 of shape \[4\]"),
        ("model.layers.0.o_proj.lora_A.weight", torch.zeros(4, 5), "lacks lora_B of model.layers.0.o_proj"),
    ],
)
def test_other_tensors_are_refused(name: str, tensor: torch.Tensor, why: str, tmp_path: Path):
    message = refused(write_adapter(tmp_path, PAIRS, extra={f"base_model.model.{name}": tensor}))
    assert re.search(why, message), message


def test_names_of_one_adapter_in_a_file_are_read(tmp_path: Path):
    """PEFT up to 0.4 kept the adapter's name."""
    write_adapter(tmp_path, PAIRS)
    a, b = PAIRS[MODULE]
    tensors = {f"base_model.model.{MODULE}.lora_{side}.default.weight": one for side, one in (("A", a), ("B", b))}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert list(read_adapter("a", tmp_path).modules) == [MODULE]


def test_missing_and_damaged_files_are_refused(tmp_path: Path):
    assert "no such directory; adapter a must be a directory" in refused(tmp_path / "none")
    assert "no adapter_config.json" in refused(tmp_path)
    write_adapter(tmp_path, PAIRS)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated" in refused(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    assert "only adapter_model.bin; convert it to safetensors" in refused(tmp_path)
    save_file({}, weights)
    assert "has no tensors" in refused(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    assert "adapter_config.json" in refused(tmp_path)


@pytest.mark.parametrize(("a", "b"), [(3, 4), (4, 3)])
def test_both_matrices_must_have_the_rank_of_the_configuration(a: int, b: int, tmp_path: Path):
    folder = write_adapter(tmp_path, {MODULE: (torch.zeros(a, 6), torch.zeros(5, b))})
    assert "implies rank 4" in refused(folder)
