"""Checkpoint folders made to hang, to fill memory or to end in a traceback: each raises a CheckpointError."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from engine.api.errors import CheckpointError
from engine.models.checkpoint import read_checkpoint
from engine.models.families import ARCHITECTURES
from engine.models.stored import stored_tensors

# The sizes of a small model under the names of all architectures.
SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128},
    **{"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "norm_eps": 1e-6, "norm_epsilon": 1e-6},
    **{"rope_theta": 1e4, "hidden_act": "silu", "hidden_activation": "gelu", "activation_function": "gelu"},
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 1, "topk_group": 1, "num_kv_shared_layers": 0},
    **{"index_topk": 4, "index_n_heads": 2, "index_topk_pattern": None, "indexer_types": None},
    **{"moe_layer_frequency": 2, "use_residual": True, "num_dense_layers": 1, "use_expert_bias": True},
    **{"routed_scaling_factor": 1.0, "type_vocab_size": 2, "num_shared_experts": 1},
    **{"moe_topk": 2, "zero_expert_num": 2, "moe_router_activation": "sigmoid", "swiglu_limits": None},
    **{"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": None},
    **{"sliding_window": 64, "max_window_layers": 2, "use_sliding_window": True, "sliding_window_pattern": 2},
    **{"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0},
    **{"rotary_dim": 8, "postnorm": True},
    **{"num_heads": 8, "n_groups": 2, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_limit": [0.0, 1.0]},
    **{"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": "auto", "mamba_d_conv": 4},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "hybrid_override_pattern": "M*-E"},
    **{"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "conv_L_cache": 3},
    **{"attn_layer_indices": [1], "full_attn_idxs": [1], "full_attention_interval": 2, "block_multiple_of": 16},
    **{"logits_scaling": 1.0, "logit_scale": 1.0, "query_pre_attn_scalar": 16, "partial_rotary_factor": 0.5},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_local_base_freq": 1e4},
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "scale_embedding": False},
    **{"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"},
    **{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6},
    **{"n_positions": 128, "scale_decoder_outputs": True},
    **{"type_vocab_size": 2, "global_attn_every_n_layers": 2, "local_attention": 16},
    **{"global_rope_theta": 1e4, "local_rope_theta": 1e4, "num_labels": 2, "id2label": None, "dtype": "float32"},
    **{"rope_scaling": None, "rope_parameters": None, "layer_types": None, "text_config": None},
    **{"tie_word_embeddings": True, "attention_bias": False, "quantization_config": None},
    **{"matryoshka_dimensions": None, "problem_type": None, "sentence_transformers": None},
}
ABSURD: tuple[Any, ...] = (
    *(10**9, 10**18, 10**39, -1, 0, 0.5, -(10**30), 1e300, math.nan, math.inf, True, None),
    *("x", "", [], [1], [[]], {}, {"a": 1}, {"rope_type": "yarn", "factor": 0}, {"rope_type": []}),
)


def read(folder: Path, config: dict[str, Any]) -> None:
    """Read the folder with this config.json. A model or CheckpointError is expected, and no other exception."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        checkpoint = read_checkpoint(folder, weights=False)
        stored_tensors(checkpoint.model, checkpoint.quantization)
    except CheckpointError as error:
        assert "config.json" in str(error) or "model.pooling" in str(error)
        assert len(str(error)) < 1000


EYES = {"vision_config": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}}
JINA = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
MORE = {
    **dict.fromkeys(("CLIPModel", "SiglipModel", "Siglip2Model"), EYES),
    **dict.fromkeys(("JinaBertModel", "JinaBertForMaskedLM"), JINA),
    "MiMoV2FlashForCausalLM": {"head_dim": 128},
    "EuroBertForSequenceClassification": {"classifier_pooling": "mean"},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled(31)
def test_absurd_values_of_config_json_are_refused_or_served(architecture: str, tmp_path: Path) -> None:
    base = {**SMALL, **MORE.get(architecture, {}), "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(base))
    read_checkpoint(tmp_path, weights=False)
    shift = list(ARCHITECTURES).index(architecture)
    for number, key in enumerate(base):
        for third in range(3):  # over all architectures each key has each value
            value = ABSURD[(number + shift + third * len(ABSURD) // 3) % len(ABSURD)]
            read(tmp_path, {**base, key: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 4,096"),
        ({"num_hidden_layers": 4096, "num_local_experts": 65}, "num_local_experts is 65; it must be at most 64"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648; it must be at most 2,147,483,647"),
        ({"num_hidden_layers": math.inf}, "num_hidden_layers is inf; it must be a whole number"),
    ],
)
def test_the_message_names_the_largest_number(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["MixtralForCausalLM"], **config}))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path, weights=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000; it must be at most 65,536"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but num_local_experts is 4"),
    ],
)
def test_numbers_of_experts_of_an_encoder_are_limited(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    own = {"architectures": ["NomicBertModel"], "moe_every_n_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **own, **config}))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path, weights=False)


def test_infinity_and_nan_that_no_model_reads_are_accepted(tmp_path: Path) -> None:
    config = {**SMALL, "architectures": ["LlamaForCausalLM"], "time_step_limit": [0.0, math.inf], "note": math.nan}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(read_checkpoint(tmp_path, weights=False).model.blocks) == 4


FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_is_a_pipe_a_device_or_damaged(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["LlamaForCausalLM"]}))
    file = tmp_path / name
    for content in (None, "/dev/zero", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}", b""):
        file.unlink(missing_ok=True)
        if content is None:
            os.mkfifo(file)
        elif isinstance(content, str):
            file.symlink_to(content)
        else:
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(tmp_path)


def test_a_header_of_terabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["LlamaForCausalLM"]}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        read_checkpoint(tmp_path)
