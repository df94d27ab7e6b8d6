"""Kinds of files of decoders of 2019 to 2023, which have names of their own for common settings."""

from collections.abc import Mapping
from types import MappingProxyType

from engine.models.gguf_families.keys import Family, Keys, Settings


def _qwen1(keys: Keys) -> Settings:
    return {"rotary_emb_base": keys.positive("rope.freq_base", 10000.0)}


_BAICHUAN_13B = 40  # layers of the models with ALiBi


def _baichuan(keys: Keys) -> Settings:
    key = "model_max_length" if keys.layers == _BAICHUAN_13B else "max_position_embeddings"
    return {key: keys.positive("context_length")}


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


_MPT_NAMES = {
    "hidden_size": "d_model",
    "max_position_embeddings": "max_seq_len",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}


def _mpt(keys: Keys) -> Settings:
    own = {
        "alibi": keys.get("attention.max_alibi_bias", 0.0) > 0,
        "alibi_bias_max": keys.get("attention.max_alibi_bias", 0.0),
        "clip_qkv": keys.get("attention.clamp_kqv"),
    }
    return {
        "attn_config": own,
        "expansion_ratio": keys.positive("feed_forward_length") // keys.positive("embedding_length"),
        "no_bias": not keys.has_in_layer("attn_qkv.bias"),
    }


def _falcon(keys: Keys) -> Settings:
    """The files of Falcon 40B and later have two norms in a layer; all have one after another key."""
    return {
        "new_decoder_architecture": keys.has_in_layer("attn_norm_2.weight"),
        "multi_query": keys.kv_heads == 1,
        "bias": keys.has_in_layer("attn_qkv.bias"),
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(("GPT2LMHeadModel",), norm="layer_norm_epsilon", layer_norm=True, names=_GPT2_NAMES),
        "starcoder": Family(
            ("GPTBigCodeForCausalLM",),
            lambda keys: {"multi_query": True},
            norm="layer_norm_epsilon",
            layer_norm=True,
            names=_GPT2_NAMES,
        ),
        "gptneox": Family(
            ("GPTNeoXForCausalLM",),
            lambda keys: {
                "attention_bias": keys.has_in_layer("attn_qkv.bias"),
                "use_parallel_residual": bool(keys.get("use_parallel_residual", True)),
            },
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "bloom": Family(("BloomForCausalLM",), norm="layer_norm_epsilon", layer_norm=True),
        "falcon": Family(
            ("FalconForCausalLM",),
            _falcon,
            norm="layer_norm_epsilon",
            layer_norm=True,
            names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        ),
        "mpt": Family(("MPTForCausalLM",), _mpt, norm="layer_norm_epsilon", layer_norm=True, names=_MPT_NAMES),
        "qwen": Family(
            ("QWenLMHeadModel",),
            _qwen1,
            norm="layer_norm_epsilon",
            names={"max_position_embeddings": "seq_length", "head_dim": "kv_channels"},
        ),
        "baichuan": Family(
            ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
            _baichuan,
            without=("max_position_embeddings",),
            permuted=True,
            separate=("q_proj", "k_proj", "v_proj", "o_proj"),
        ),
    }
)
