"""Each decoder that transformers knows is declared, computed by its own code, or refused with a reason."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from engine.api.config import TaskConfig
from engine.api.errors import EngineError
from engine.llm import LLM, Params
from engine.models import foreign
from engine.models.checkpoint import read_checkpoint
from engine.models.families import ARCHITECTURES
from tests.engine.test_foreign import check
from tests.tiers import thinned

DECODERS = foreign._decoders()  # model type by architecture
FOREIGN = {
    name: kind
    for name, kind in DECODERS.items()
    if name not in ARCHITECTURES and foreign.is_foreign(name) and name not in foreign.REFUSED
}


def sized(value: Any, *keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys, value)


SMALL: dict[str, Any] = {
    **sized(97, "vocab_size", "n_words"),
    **sized(48, "hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"),
    **sized(48, "input_embedding_size", "output_embedding_size", "embedding_dim"),
    **sized(2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    **sized(2, "num_decoder_layers", "num_encoder_layers"),
    **sized(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
    **sized(4, "encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"),
    **sized(4, "num_encoder_attention_heads", "linear_num_value_heads"),
    **sized(2, "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"),
    **sized(12, "head_dim", "swa_head_dim", "d_head", "dim_head", "kv_channels", "router_hidden_size"),
    **sized(64, "intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "d_inner", "dim_ff"),
    **sized(64, "ffn_hidden_size", "feed_forward_size", "shared_expert_intermediate_size"),
    **sized(64, "shared_intermediate_size", "shared_experts_intermediate_size"),
    **sized(24, "moe_intermediate_size"),
    **sized(64, "max_position_embeddings", "n_positions", "max_seq_len", "context_length", "rel_extent", "index_topk"),
    **sized(8, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **sized(2, "num_experts_per_tok", "moe_topk", "moe_k", "n_group", "o_groups", "index_n_heads"),
    **sized(1, "topk_group", "n_shared_experts", "bos_token_id"),
    **sized(5, "sliding_window", "window_size", "sliding_window_size"),
    **sized(8, "qk_nope_head_dim", "index_head_dim", "o_lora_rank", "linear_key_head_dim", "linear_value_head_dim"),
    **{"kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 4, "v_head_dim": 10, "d_rel": 4},
    **{"pad_token_id": 0, "eos_token_id": 2},
}
OPTIONAL = (
    "n_group",
    "topk_group",
    "sliding_window",
    "kv_lora_rank",
    "q_lora_rank",
)  # stay None if that is the default
LISTS = ("layer_types", "mlp_layer_types")  # follow from the number of layers
SMALL_VISION = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OWN: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 4, "num_key_value_heads": 4},
    "axk2": {"head_dim": 4, "num_key_value_heads": 4},
    "dots3_note_text": {"head_dim": 4, "num_key_value_heads": 4},
    "hy_v4": {"head_dim": 12, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
        for kind in ("full_attention", "sliding_attention")}},
    "big_bird": {"attention_type": "original_full"},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 24}},
    "git": {"vision_config": {**SMALL_VISION, "image_size": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "roc_bert": {"shape_vocab_size": 20, "pronunciation_vocab_size": 20, "shape_embed_dim": 8,
                 "pronunciation_embed_dim": 8},
    "whisper": {"max_target_positions": 64},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "attention_hidden_size": 96,
              "attention_head_dim": 24, "mamba_d_state": 8, "n_mamba_heads": 2, "use_mamba_kernels": False,
              "num_key_value_heads": 4},
}  # fmt: skip
"""Settings by model type, in addition to SMALL."""


def small(kind: str) -> Any:
    """Return a configuration of a model with few weights."""
    made = CONFIG_MAPPING[kind]
    given = made().to_dict()
    known = {key: value for key, value in SMALL.items() if key in given}
    known = {key: value for key, value in known.items() if given[key] is not None or key not in OPTIONAL}
    lists = {key: None for key in LISTS if key in given}
    return made(**{**known, **lists, "is_decoder": True, "is_encoder_decoder": False, **OWN.get(kind, {})})


def save(folder: Path, name: str) -> Any:
    """Write a tiny random checkpoint and return the model in transformers."""
    config = small(FOREIGN[name])
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in getattr(transformers, name)(config).parameters()]
    assert sum(sizes) < 4_000_000, "the model is not tiny"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


@contextmanager
def engine(folder: Path) -> Iterator[LLM]:
    sizes = {"block_tokens": 4, "max_context": 40, "kv_bytes": 1 << 20, "max_step_tokens": 7, "max_running": 4}
    with LLM(folder, threads=1, **sizes) as llm:
        yield llm


UNTESTED = ("BltForCausalLM", "Emu3ForCausalLM", "FuyuForCausalLM", "MllamaForCausalLM", "Phi4MultimodalForCausalLM")
"""Text decoders of larger models. transformers saves no checkpoint of such a decoder alone."""


@pytest.mark.parametrize(
    "name", thinned([name for name in FOREIGN if name not in UNTESTED], ["DbrxForCausalLM", "xLSTMForCausalLM"])
)
def test_code_of_transformers_computes_the_same_with_pages(name: str, tmp_path: Path) -> None:
    model = save(tmp_path, name)
    params = Params(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    with engine(tmp_path) as llm:
        for made in llm.generate([(3,), tuple(range(5, 22)), (9, 11, 4, 7)], params):
            check(model, made)


COMPLETE = {"deepseek_v2": {"num_experts_per_tok": 6}, "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6}}
"""Settings that default configurations lack, by model type."""
WITH_MEDIA = {"Gemma4UnifiedForConditionalGeneration": "its text decoder is not known"}
"""Multimodal entries of the list whose text decoder has no declaration: a part of the message."""


def default(name: str, kind: str) -> dict[str, Any]:
    """Return config.json of the default configuration."""
    config = json.loads(CONFIG_MAPPING[kind](**COMPLETE.get(kind, {})).to_json_string(use_diff=False))
    return config | {"architectures": [name]} | ({"is_decoder": True} if "is_decoder" in config else {})


def test_no_default_configuration_of_a_decoder_is_refused(tmp_path: Path) -> None:
    refused = {}
    for name, kind in DECODERS.items():
        config = {"architectures": [name]} if name in foreign.REFUSED else default(name, kind)
        (tmp_path / "config.json").write_text(json.dumps(config))
        text_only = TaskConfig(text_only=name.endswith("ForConditionalGeneration"))
        try:
            if name in FOREIGN or name in foreign.REFUSED:
                foreign.declare_foreign(config)
            else:
                read_checkpoint(tmp_path, weights=False, task=text_only)
        except EngineError as error:
            refused[name] = str(error)
    expected = foreign.REFUSED | WITH_MEDIA
    assert [f"{name}: {why}" for name, why in refused.items() if name not in expected] == []
    assert all(expected[name] in why for name, why in refused.items()) and refused.keys() == expected.keys()


def test_encoders_are_refused_as_decoders() -> None:
    config = default("BertLMHeadModel", "bert") | {"is_decoder": False}
    with pytest.raises(EngineError, match="is_decoder is not true, so BertLMHeadModel attends to later tokens"):
        foreign.declare_foreign(config)
