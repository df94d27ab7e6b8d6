"""Kinds of files of encoders and of encoder-decoder models."""

from collections.abc import Mapping
from types import MappingProxyType

from engine.models.gguf_families.keys import Family, Keys, Settings


def _t5(keys: Keys) -> Settings:
    """T5 and UMT5, which has a table of biases in each layer; mT5 is T5 with a gate and a head of its own."""
    each = keys.has("enc.blk.1.attn_rel_b.weight")
    return {
        "architectures": ["UMT5ForConditionalGeneration" if each else "T5ForConditionalGeneration"],
        "d_model": keys.positive("embedding_length"),
        "d_ff": keys.positive("feed_forward_length"),
        "d_kv": keys.positive("attention.key_length"),
        "num_heads": keys.heads,
        "num_layers": keys.layers,
        "num_decoder_layers": keys.get("decoder_block_count", keys.layers),
        "n_positions": keys.positive("context_length"),
        "layer_norm_epsilon": keys.positive("attention.layer_norm_rms_epsilon"),
        "relative_attention_num_buckets": keys.positive("attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if keys.has("enc.blk.0.ffn_gate.weight") else "relu",
        "tie_word_embeddings": not keys.has("output.weight"),
        "decoder_start_token_id": keys.get("decoder_start_token_id", 0),
    }


def _t5_encoder(keys: Keys) -> Settings:
    found = _t5(keys)
    return {**found, "architectures": [found["architectures"][0].replace("ForConditionalGeneration", "EncoderModel")]}


def _encoder(keys: Keys) -> Settings:
    return {
        "hidden_size": keys.positive("embedding_length"),
        "intermediate_size": keys.positive("feed_forward_length"),
        "max_position_embeddings": keys.positive("context_length"),
        "num_attention_heads": keys.heads,
        "num_hidden_layers": keys.layers,
    }


def _bert(keys: Keys) -> Settings:
    """BERT, and RoBERTa and XLM-RoBERTa, whose first positions, which no token has, the converter leaves out."""
    return {**_encoder(keys), **_segments(keys), "hidden_act": "gelu"}


def _segments(keys: Keys) -> Settings:
    table = keys.tensor("token_types.weight")
    return {
        "layer_norm_eps": keys.positive("attention.layer_norm_epsilon"),
        "type_vocab_size": 1 if table is None or len(table.shape) == 1 else table.shape[0],
    }


def _jina_bert(keys: Keys) -> Settings:
    own = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    return {**_encoder(keys), **_segments(keys), **own, "hidden_act": "gelu", "rope_theta": None}


def _nomic_moe(keys: Keys) -> Settings:
    return {
        **_encoder(keys),
        **_segments(keys),
        "hidden_act": "gelu",
        "moe_every_n_layers": keys.positive("moe_every_n_layers"),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
    }


def _modern_bert(keys: Keys) -> Settings:
    return {
        **_encoder(keys),
        "norm_eps": keys.positive("attention.layer_norm_epsilon"),
        "local_attention": keys.positive("attention.sliding_window"),
        "global_attn_every_n_layers": keys.get("attention.sliding_window_pattern", 3),
        "global_rope_theta": keys.positive("rope.freq_base", 160_000.0),
        "local_rope_theta": keys.positive("rope.freq_base_swa", 10_000.0),
        "hidden_activation": keys.get("hidden_activation", "gelu"),
        "attention_bias": keys.has_in_layer("attn_qkv.bias"),
        "mlp_bias": keys.has_in_layer("ffn_up.bias"),
        "norm_bias": keys.has("output_norm.bias"),
        "rope_theta": None,
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": Family(("BertModel",), _bert, is_decoder=False),
        "nomic-bert": Family(
            ("NomicBertModel",),
            lambda keys: {**_encoder(keys), **_segments(keys), "hidden_act": "silu"},
            is_decoder=False,
        ),
        "nomic-bert-moe": Family(("NomicBertModel",), _nomic_moe, is_decoder=False),
        "eurobert": Family(("EuroBertModel",)),
        "jina-bert-v2": Family(("JinaBertModel",), _jina_bert, is_decoder=False),
        "jina-bert-v3": Family(("JinaEmbeddingsV3Model",), _bert, is_decoder=False),
        "modern-bert": Family(("ModernBertModel",), _modern_bert, is_decoder=False),
        "t5": Family(
            ("T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "MT5ForConditionalGeneration"),
            _t5,
            is_decoder=False,
        ),
        "t5encoder": Family(("T5EncoderModel", "UMT5EncoderModel", "MT5EncoderModel"), _t5_encoder, is_decoder=False),
    }
)
