"""Architectures of GGUF files: the architecture of Hugging Face that each one is, and its configuration.

`general.architecture` names the kind of a file. `FAMILIES` derives for each kind what config.json would say: most of it
from keys that all kinds share (`shared`), the rest by the function of the family, which knows what the file leaves out.
Sources: the converter of llama.cpp (conversion/*.py), which writes the keys, and its loader (src/llama-model.cpp),
which knows the constants.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.api.errors import CheckpointError
from engine.gguf.file import GgufFile, GgufTensor, read_gguf
from engine.models.config import MAX_LAYERS
from engine.models.parts import Pool

POSITIONS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Scaling factors of RoPE: of llama3, and of longrope. config.json also has them."""
MAX_FACTOR_BYTES = 1 << 16
# Keys of tokens that end a reply, and texts of such control tokens for files of old converters without these keys.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_CONTROL = 3  # tokenizer.ggml.token_type
_RECURRENT_CONTEXT = 131_072  # the converter writes 2**20 for models without a longest sequence
Settings = dict[str, Any]


@dataclass(frozen=True)
class Keys:
    """The keys of one file, without the name of the architecture in front."""

    file: GgufFile
    kind: str

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; a list of equal values is one value."""
        found = self.file.keys.get(f"{self.kind}.{key}", default)
        return found[0] if isinstance(found, tuple) and len(set(found)) == 1 else found

    def positive(self, key: str, default: float | None = None) -> Any:
        """Return a number above 0. Raises CheckpointError if it is missing without a default."""
        name = f"{self.kind}.{key}"
        found = self.file.require(name) if default is None else self.file.keys.get(name, default)
        if isinstance(found, tuple) and len(set(found)) == 1:
            found = found[0]
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
            raise CheckpointError(f"{self.file.path}: {name} is {found!r}; it must be a number above 0")
        return found

    def largest(self, key: str, default: float | None = None) -> Any:
        """Return a number above 0, or the largest one of a list with one for each layer. Raises CheckpointError as
        `positive`."""
        found = self.get(key)
        if isinstance(found, tuple) and {type(one) for one in found} == {int} and max(found) > 0:
            return max(found)
        return self.positive(key, default)

    def each_layer(self, key: str, default: Any = None) -> list[Any]:
        """Return the value of each layer: a list has one for each, and may have more."""
        name = f"{self.kind}.{key}"
        found = self.file.require(name) if default is None else self.file.keys.get(name, default)
        listed = list(found[: self.layers]) if isinstance(found, tuple) else [found] * self.layers
        if len(listed) != self.layers:
            raise CheckpointError(f"{self.file.path}: {name} has {len(listed)} values for {self.layers} layers")
        return listed

    def tensor(self, name: str) -> GgufTensor | None:
        return next((one for one in self.file.tensors if one.name == name), None)

    def has(self, name: str) -> bool:
        return self.tensor(name) is not None

    def has_in_layer(self, name: str) -> bool:
        """Return whether any layer has this tensor."""
        return bool(self.layers_with(name))

    def layers_with(self, name: str) -> list[int]:
        """Return the layers that have this tensor, in order."""
        names = (one.name.split(".", 2) for one in self.file.tensors)
        return sorted(int(parts[1]) for parts in names if parts[0] == "blk" and parts[2:] == [name])

    @property
    def layers(self) -> int:
        """Number of layers without those that predict further tokens."""
        count = self.positive("block_count")
        if not count <= MAX_LAYERS:
            raise CheckpointError(
                f"{self.file.path}: {self.kind}.block_count is {count}; it must be at most {MAX_LAYERS:,}"
            )
        return int(count) - int(self.get("nextn_predict_layers", 0))

    @property
    def heads(self) -> int:
        return int(self.largest("attention.head_count"))

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values, in layers that have any."""
        return int(self.largest("attention.head_count_kv", self.heads))

    @property
    def head_dim(self) -> int:
        return int(self.positive("attention.key_length", self.positive("embedding_length") // self.heads))


@dataclass(frozen=True)
class Family:
    """One kind of file."""

    architectures: tuple[str, ...]
    """Architectures of Hugging Face that are stored as this kind; the first is assumed without a config.json."""
    more: Callable[[Keys], Settings] = lambda keys: {}
    """Return the settings beside `shared`."""
    without: tuple[str, ...] = ()  # settings of `shared` that this kind does not have
    permuted: bool = False
    """Rows of q and k are permuted from the halves of a head, which RoPE rotates together, to neighbouring pairs."""
    norm: str = "rms_norm_eps"  # config key of the epsilon of norms
    layer_norm: bool = False  # norms are LayerNorm
    yarn: Callable[[Keys], Settings] = lambda keys: {}
    """Return further settings of YaRN."""
    has_attention: bool = True  # in any layer
    is_decoder: bool = True  # False: `more` returns all settings
    separate: tuple[str, str, str, str] | None = None
    """Projections to q, k and v, and of the output, into which the converter divides a fused one."""
    names: Mapping[str, str] = field(default_factory=dict)  # own names of settings of `shared` in config.json


def shared(keys: Keys, family: Family) -> Settings:
    """Return the settings that most kinds state in the same keys."""
    embedding, eps = keys.tensor("token_embd.weight"), "attention.layer_norm_rms_epsilon"
    if embedding is None:
        raise CheckpointError(f"{keys.file.path}: lacks token_embd.weight")
    if not family.is_decoder:
        return {"vocab_size": embedding.shape[0]}
    if f"{keys.kind}.{eps}" not in keys.file.keys or family.layer_norm:
        eps = "attention.layer_norm_epsilon"
    if not family.has_attention:
        return {
            "hidden_size": keys.positive("embedding_length"),
            "max_position_embeddings": min(keys.positive("context_length"), _RECURRENT_CONTEXT),
            "num_hidden_layers": keys.layers,
            family.norm: keys.positive(eps),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": not keys.has("output.weight"),
        }
    return {
        "hidden_size": keys.positive("embedding_length"),
        "intermediate_size": keys.largest("feed_forward_length", keys.get("expert_feed_forward_length")),
        "max_position_embeddings": keys.positive("context_length"),
        "num_attention_heads": keys.heads,
        "num_hidden_layers": keys.layers,
        "num_key_value_heads": keys.kv_heads,
        family.norm: keys.positive(eps),
        "head_dim": keys.head_dim,
        "partial_rotary_factor": keys.positive("rope.dimension_count", keys.head_dim) / keys.head_dim,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not keys.has("output.weight"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
    }


def _layer_types(keys: Keys, default: int | None = None, unstated: int | None = None) -> Settings:
    """Return the windows and which layers have them. default: every layer but each n-th, if the file does not list
    them. unstated: the window of a file that states none."""
    window = keys.get("attention.sliding_window", unstated)
    listed = keys.get("attention.sliding_window_pattern", default)
    if not window:
        return {"sliding_window": None}
    if isinstance(listed, bool):
        listed = (listed,) * keys.layers
    if isinstance(listed, int) and listed > 0:
        listed = tuple(bool((layer + 1) % listed) for layer in range(keys.layers))
    if not isinstance(listed, tuple):
        return {"sliding_window": window}
    kinds = ["sliding_attention" if one else "full_attention" for one in listed[: keys.layers]]
    return {"sliding_window": window, "layer_types": kinds}


def _experts(keys: Keys) -> Settings:
    """Return the settings of experts that are chosen by groups and scores."""
    return {
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "n_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
    }


def _mixtral(keys: Keys) -> Settings:
    if not keys.get("expert_count"):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
    }


def _llama(keys: Keys) -> Settings:
    return {"mlp_bias": keys.has("blk.0.ffn_up.bias"), **_mixtral(keys)}


def _qwen2_moe(keys: Keys) -> Settings:
    return {
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": keys.kind == "qwen3moe",
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def _gemma(keys: Keys) -> Settings:
    return {"hidden_act": "gelu_pytorch_tanh"}


_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale queries by hidden_size / heads


_GEMMA2_CAPS, _GEMMA2_WINDOW = (50.0, 30.0), 4096  # the first files of gemma2 do not state them


def _later_gemma(keys: Keys) -> Settings:
    wide, caps = keys.layers == _GEMMA_27B[keys.kind], _GEMMA2_CAPS if keys.kind == "gemma2" else (None, None)
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": keys.positive("embedding_length") // keys.heads if wide else keys.head_dim,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", caps[0]),
        "final_logit_softcapping": keys.get("final_logit_softcapping", caps[1]),
        **(_layer_types(keys, 2, _GEMMA2_WINDOW) if keys.kind == "gemma2" else _layer_types(keys, 6)),
    }
    return found | ({"rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0)} if keys.kind == "gemma3" else {})


def _phi3(keys: Keys) -> Settings:
    context = keys.positive("context_length")
    return {
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", context),
    }


def _granite(keys: Keys) -> Settings:
    found = {
        "attention_multiplier": keys.get("attention.scale", 1.0),
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "logits_scaling": keys.get("logit_scale", 1.0),
    }
    if not keys.get("expert_count"):
        return {**found, "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    shared_size = keys.get("expert_shared_feed_forward_length")
    kind = "GraniteMoeSharedForCausalLM" if shared_size else "GraniteMoeForCausalLM"
    return {
        **found,
        "architectures": [kind],
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "shared_intermediate_size": shared_size or 0,
    }


def _gpt_oss(keys: Keys) -> Settings:
    return {
        "intermediate_size": keys.positive("expert_feed_forward_length"),
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        **_layer_types(keys, 2),
    }


def _minicpm(keys: Keys) -> Settings:
    layers, hidden = keys.layers, keys.positive("embedding_length")
    return {
        "scale_emb": keys.get("embedding_scale", 12.0),
        "scale_depth": keys.get("residual_scale", 1.4 / math.sqrt(layers)) * math.sqrt(layers),
        "dim_model_base": hidden / keys.get("logit_scale", hidden / 256),
    }


def _ernie_moe(keys: Keys) -> Settings:
    return {
        "moe_num_experts": keys.positive("expert_count"),
        "moe_k": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
        "use_bias": keys.has_in_layer("attn_q.bias"),
    }


def _lfm2(keys: Keys) -> Settings:
    listed = keys.file.require(f"{keys.kind}.attention.head_count_kv")
    listed = listed if isinstance(listed, tuple) else (listed,) * keys.layers
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in listed],
        "conv_L_cache": keys.positive("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "conv_bias": keys.has_in_layer("shortconv.conv.bias"),
    }


def _lfm2_moe(keys: Keys) -> Settings:
    return {
        **_lfm2(keys),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "num_dense_layers": keys.get("leading_dense_block_count", 0),
        "use_expert_bias": keys.has_in_layer("exp_probs_b.bias"),
    }


def _phimoe(keys: Keys) -> Settings:
    return {
        **_phi3(keys),
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "attention_bias": keys.has_in_layer("attn_q.bias"),
        "lm_head_bias": keys.has("output.bias"),
    }


def _hunyuan_moe(keys: Keys) -> Settings:
    return {"num_experts": keys.positive("expert_count"), "moe_topk": keys.positive("expert_used_count")}


def _olmo(keys: Keys) -> Settings:
    if not keys.get("attention.sliding_window"):
        return {}
    theta = keys.positive("rope.freq_base", 10000.0)
    ropes = {
        "full_attention": {"rope_theta": theta, **(rope_scaling(keys) or {"rope_type": "default"})},
        "sliding_attention": {"rope_theta": keys.get("rope.freq_base_swa", theta), "rope_type": "default"},
    }
    one = {"rope_theta": None, "rope_scaling": None}  # instead of one rotation for all layers
    return {"architectures": ["Olmo3ForCausalLM"], **_layer_types(keys, 4), "rope_parameters": ropes, **one}


def _ministral3_yarn(keys: Keys) -> Settings:
    mscale, beta = keys.get("rope.scaling.yarn_log_multiplier"), keys.get("attention.temperature_scale")
    return {"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": beta}


_SIGMOID = 2  # expert_gating_func


def _deepseek2(keys: Keys) -> Settings:
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and Youtu. Files state one head of keys and values."""
    rotated, corrected = keys.positive("rope.dimension_count"), keys.has_in_layer("exp_probs_b.bias")
    found = {
        "num_key_value_heads": keys.heads,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.positive("attention.key_length_mla") - rotated,
        "v_head_dim": keys.positive("attention.value_length_mla"),
        "attention_bias": keys.has_in_layer("attn_kv_a_mqa.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }
    if not keys.get("expert_count"):
        return {**found, "architectures": ["YoutuForCausalLM"]}
    found |= {**_experts(keys), "n_routed_experts": keys.positive("expert_count")}
    if corrected or keys.get("expert_gating_func") == _SIGMOID:
        return found
    grouped = found["n_group"] > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**found, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _deepseek2_yarn(keys: Keys) -> Settings:
    mscale = keys.get("rope.scaling.yarn_log_multiplier", 0.0) * 10  # the converter of llama.cpp divides it by 10
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}


def _glm_dsa(keys: Keys) -> Settings:
    """GLM-5. A layer without an indexer uses the selection of the layer before."""
    selecting = keys.layers_with("indexer.proj.weight")
    return {
        **_deepseek2(keys),
        "index_n_heads": keys.positive("attention.indexer.head_count"),
        "index_head_dim": keys.positive("attention.indexer.key_length"),
        "index_topk": keys.positive("attention.indexer.top_k"),
        "indexer_types": ["full" if layer in selecting else "shared" for layer in range(keys.layers)],
    }


_LLAMA4_MAVERICK = 128  # experts of the model without norms of queries and keys


def _llama4(keys: Keys) -> Settings:
    count = keys.positive("expert_count")
    return {
        "intermediate_size": keys.positive("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.positive("feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "interleave_moe_layer_step": keys.get("interleave_moe_layer_step", 1),
        "use_qk_norm": count != _LLAMA4_MAVERICK,
        "attention_chunk_size": keys.get("attention.chunk_size", 8192),
    }


def _exaone_moe(keys: Keys) -> Settings:
    dense = min(keys.get("leading_dense_block_count", 0), keys.layers)
    return {
        **_experts(keys),
        "num_shared_experts": keys.get("expert_shared_count", 0),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (keys.layers - dense),
        **_layer_types(keys, 4),
    }


def _mixer(keys: Keys, prefix: str = "") -> Settings:
    """Return the settings of Mamba mixers that both versions have. prefix: of their keys in config.json."""
    names = ("use_bias", "use_conv_bias", "conv_kernel", "state_size")
    if prefix:
        names = "proj_bias", "conv_bias", "d_conv", "d_state"
    values = (
        keys.has_in_layer("ssm_in.bias"),
        keys.has_in_layer("ssm_conv1d.bias"),
        keys.positive("ssm.conv_kernel"),
        keys.positive("ssm.state_size"),
    )
    return {prefix + name: value for name, value in zip(names, values, strict=True)}


def _mamba(keys: Keys) -> Settings:
    kind = "FalconMambaForCausalLM" if keys.get("ssm.dt_b_c_rms") else "MambaForCausalLM"
    return {
        "architectures": [kind],
        **_mixer(keys),
        "intermediate_size": keys.positive("ssm.inner_size"),
        "time_step_rank": keys.positive("ssm.time_step_rank"),
    }


def _mamba2(keys: Keys) -> Settings:
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    return {
        **_mixer(keys),
        "expand": inner / keys.positive("embedding_length"),
        "head_dim": inner // heads,
        "num_heads": heads,
        "n_groups": keys.positive("ssm.group_count"),
    }


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """Return the distance of the layers of a kind and the first of them, of `count` layers."""
    if not layers:
        return count + 1, count
    return (layers[1] - layers[0] if len(layers) > 1 else count), layers[0]


def _jamba(keys: Keys) -> Settings:
    attention = _period(keys.layers_with("attn_q.weight"), keys.layers)
    experts = _period(keys.layers_with("ffn_gate_inp.weight"), keys.layers)
    return {
        **_mixer(keys, "mamba_"),
        "mamba_expand": keys.positive("ssm.inner_size") // keys.positive("embedding_length"),
        "mamba_dt_rank": keys.positive("ssm.time_step_rank"),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
    }


def _granite_hybrid(keys: Keys) -> Settings:
    recurrent, heads = keys.layers_with("ssm_in.weight"), keys.positive("ssm.time_step_rank")
    inner, count = keys.positive("ssm.inner_size"), keys.get("expert_count", 0)
    return {
        **_granite(keys),
        **_mixer(keys, "mamba_"),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba" if layer in recurrent else "attention" for layer in range(keys.layers)],
        "mamba_expand": inner // keys.positive("embedding_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.positive("ssm.group_count"),
        "num_local_experts": count,
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length", keys.get("feed_forward_length")),
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", True) else "nope",
    }


def _falcon_h1(keys: Keys) -> Settings:
    """The converter multiplies all multipliers into the weights."""
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    return {
        **_mixer(keys, "mamba_"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.positive("ssm.group_count"),
        "mamba_rms_norm": keys.has_in_layer("ssm_norm.weight"),
        "mlp_bias": keys.has_in_layer("ffn_up.bias"),
        "projectors_bias": keys.has_in_layer("ssm_in.bias"),
    }


def _nemotron_h(keys: Keys) -> Settings:
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    found = {
        "layers_block_type": [_nemotron_h_layer(keys, layer) for layer in range(keys.layers)],
        "conv_kernel": keys.positive("ssm.conv_kernel"),
        "mamba_head_dim": inner // heads,
        "mamba_num_heads": heads,
        "mamba_proj_bias": keys.has_in_layer("ssm_in.bias"),
        "n_groups": keys.positive("ssm.group_count"),
        "ssm_state_size": keys.positive("ssm.state_size"),
        "use_conv_bias": keys.has_in_layer("ssm_conv1d.bias"),
        "mlp_bias": keys.has_in_layer("ffn_up.bias"),
    }
    if not keys.get("expert_count"):
        return found
    return {
        **found,
        **_experts(keys),
        "n_routed_experts": keys.positive("expert_count"),
        "moe_shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
    }


def _nemotron_h_layer(keys: Keys, layer: int) -> str:
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    return next((kind for name, kind in kinds.items() if keys.has(f"blk.{layer}.{name}.weight")), "mlp")


def _qwen3_next(keys: Keys) -> Settings:
    return {**_qwen2_moe(keys), "norm_topk_prob": True, **_delta_net(keys)}


def _delta_net(keys: Keys) -> Settings:
    recurrent, heads = keys.layers_with("ssm_out.weight"), keys.positive("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if layer in recurrent else "full_attention" for layer in range(keys.layers)],
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.positive("ssm.inner_size") // heads,
    }


def _qwen3_5(keys: Keys) -> Settings:
    """Files may have layers that predict further tokens, which are not read."""
    found = _qwen3_next(keys) if keys.get("expert_count") else _delta_net(keys)
    return {**found, "mtp_num_hidden_layers": 0}


def _apertus(keys: Keys) -> Settings:
    return {"hidden_act": "xielu"}


def _kimi_linear(keys: Keys) -> Settings:
    """Files state one head of keys and values in layers with attention, and 0 in the others."""
    rotated, recurrent = keys.positive("rope.dimension_count"), keys.layers_with("ssm_conv1d_q.weight")
    decay = keys.tensor(f"blk.{recurrent[0]}.ssm_a") if recurrent else None
    return {
        "num_key_value_heads": keys.heads,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.positive("attention.key_length_mla") - rotated,
        "v_head_dim": keys.positive("attention.value_length_mla"),
        "layer_types": ["linear_attention" if layer in recurrent else "full_attention" for layer in range(keys.layers)],
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "linear_head_dim": keys.positive("kda.head_dim"),
        "linear_num_heads": keys.heads if decay is None else math.prod(decay.shape),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_token": keys.positive("expert_used_count"),
        "num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "moe_renormalize": bool(keys.get("expert_weights_norm", True)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "num_expert_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
    }


def _qwen1(keys: Keys) -> Settings:
    return {"rotary_emb_base": keys.positive("rope.freq_base", 10000.0)}


_BAICHUAN_13B = 40  # layers of the models with ALiBi


def _baichuan(keys: Keys) -> Settings:
    key = "model_max_length" if keys.layers == _BAICHUAN_13B else "max_position_embeddings"
    return {key: keys.positive("context_length")}


def _bailing(keys: Keys) -> Settings:
    found = _experts(keys)
    return {**found, "num_shared_experts": found.pop("n_shared_experts"), "use_bias": False}


def _bailing2(keys: Keys) -> Settings:
    return {
        **_bailing(keys),
        "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
        "use_qkv_bias": keys.has_in_layer("attn_qkv.bias"),
    }


def _afmoe(keys: Keys) -> Settings:
    found = _experts(keys)
    return {
        **found,
        "num_shared_experts": found.pop("n_shared_experts"),
        "num_dense_layers": found.pop("first_k_dense_replace"),
        "route_scale": found.pop("routed_scaling_factor"),
        "mup_enabled": True,
        **_layer_types(keys, 4),
    }


def _arctic(keys: Keys) -> Settings:
    return {
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_layer_frequency": 1,
        "use_residual": True,
    }


def _minicpm3(keys: Keys) -> Settings:
    """Files do not state the multipliers and the size of values; llama.cpp's loader has those of MiniCPM3-4B."""
    rotated, expansion = keys.positive("rope.dimension_count"), keys.tensor("blk.0.attn_kv_b.weight")
    nope = keys.positive("attention.key_length") - rotated
    return {
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": nope,
        "v_head_dim": None if expansion is None else expansion.shape[0] // keys.heads - nope,
        "attention_bias": keys.has_in_layer("attn_kv_a_mqa.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


_MIMO_VALUE_SCALE = 0.707  # of the files of old converters, which do not state it


def _mimo2(keys: Keys) -> Settings:
    """The pattern of windows has an entry for each layer that predicts further tokens, too."""
    windowed = [bool(one) for one in keys.file.require(f"{keys.kind}.attention.sliding_window_pattern")]
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed[: keys.layers]]
    listed = keys.file.keys.get(f"{keys.kind}.attention.head_count_kv")
    heads = listed if isinstance(listed, tuple) else (listed,) * keys.layers
    full = next((count for count, kind in zip(heads, kinds, strict=False) if kind == "full_attention"), None)
    partial = keys.positive("rope.dimension_count", keys.head_dim) / keys.head_dim
    bases = {
        "full_attention": keys.positive("rope.freq_base", 10000.0),
        "sliding_attention": keys.positive("rope.freq_base_swa", 10000.0),
    }
    sparse = keys.layers_with("ffn_gate_inp.weight")
    found = _experts(keys)
    return {
        **found,
        "n_routed_experts": found.pop("num_experts"),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "num_key_value_heads": keys.kv_heads // 2 if full is None else full,
        "v_head_dim": keys.positive("attention.value_length"),
        "attention_value_scale": keys.get("attention.value_scale", _MIMO_VALUE_SCALE),
        "sliding_window": keys.positive("attention.sliding_window"),
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(keys.layers)],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": partial}
            for kind, base in bases.items()
        },
        "rope_theta": None,
    }


def _step35(keys: Keys) -> Settings:
    """Full layers rotate half of each head, and RoPE is scaled in them alone. Lists may have entries of the layers that
    predict further tokens, too."""
    windowed = [bool(one) for one in keys.each_layer("attention.sliding_window_pattern")]
    by_kind = [dict(zip(windowed, keys.each_layer(f"attention.{one}"), strict=True)) for one in _HEADS]
    (full, other), kv_heads = (by_kind[0].get(kind, keys.heads) for kind in (False, True)), set(by_kind[1].values())
    if len(kv_heads) > 1:
        raise CheckpointError(f"{keys.file.path}: layers have {sorted(kv_heads)} KV heads; all must have as many")
    scaling, sparse = rope_scaling(keys), keys.layers_with("ffn_gate_inp.weight")
    if scaling is not None and scaling["rope_type"] == "longrope":
        half = keys.head_dim // 4
        scaling |= {one: scaling[one][:half] for one in ("short_factor", "long_factor")}
    base, of_windows = keys.positive("rope.freq_base", 10000.0), keys.get("rope.freq_base_swa", 10000.0)
    return {
        "num_attention_heads": full,
        "attention_other_setting": {"num_attention_heads": other},
        "num_attention_groups": keys.kv_heads,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": keys.positive("attention.sliding_window"),
        "rope_theta": [of_windows if one else base for one in windowed],
        "partial_rotary_factors": [1.0 if one else 0.5 for one in windowed],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "moe_num_experts": keys.positive("expert_count"),
        "moe_top_k": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "share_expert_dim": keys.positive("expert_shared_feed_forward_length"),
        "moe_layers_enum": ",".join(map(str, sparse)),
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_expert_weight": bool(keys.get("expert_weights_norm", True)),
        "use_moe_router_bias": keys.has_in_layer("exp_probs_b.bias"),
        "use_head_wise_attn_gate": keys.has_in_layer("attn_gate.weight"),
        "swiglu_limits": keys.each_layer("swiglu_clamp_exp", 0.0),
        "swiglu_limits_shared": keys.each_layer("swiglu_clamp_shexp", 0.0),
    }


_HEADS = ("head_count", "head_count_kv")


def _per_layer_inputs(keys: Keys) -> Settings:
    table = keys.tensor("per_layer_token_embd.weight")
    return {
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _sizes(keys: Keys) -> list[int]:
    """Return the sizes of the layers' MLPs."""
    found = keys.file.require(f"{keys.kind}.feed_forward_length")
    return list(found[: keys.layers]) if isinstance(found, tuple) else [found] * keys.layers


def _gemma3n(keys: Keys) -> Settings:
    """Files have the number of standard deviations above which gate values stay, instead of their share."""
    limits = keys.file.keys.get(f"{keys.kind}.activation_sparsity_scale", ())
    laurel = keys.tensor("blk.0.laurel_l.weight")
    return {
        **_per_layer_inputs(keys),
        "altup_num_inputs": keys.positive("altup.num_inputs"),
        "altup_active_idx": keys.get("altup.active_idx", 0),
        "altup_correct_scale": keys.has_in_layer("altup_correct_scale.weight"),
        "laurel_rank": 64 if laurel is None else laurel.shape[0],
        "intermediate_size": _sizes(keys),
        "activation_sparsity_pattern": [math.erfc(-one / math.sqrt(2.0)) / 2 for one in limits[: keys.layers]] or None,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        **_layer_types(keys, 5),
    }


_TURNING = 1e20  # divisors of frequencies above this are of dimensions that are not rotated


def _gemma4(keys: Keys) -> Settings:
    """Layers with and without windows have heads of different sizes and numbers."""
    sizes, shared = _sizes(keys), keys.get("attention.shared_kv_layers", 0)
    windows = _layer_types(keys, 6)
    full = [layer for layer, kind in enumerate(windows.get("layer_types", ())) if kind == "full_attention"]
    listed = keys.file.keys.get(f"{keys.kind}.attention.head_count_kv")
    heads = listed if isinstance(listed, tuple) else (listed,) * keys.layers
    divisors = keys.tensor("rope_freqs.weight")
    turned = [one < _TURNING for one in _numbers(divisors)] if divisors is not None else [True]
    size = keys.positive("attention.key_length")
    found = {
        **_per_layer_inputs(keys),
        **windows,
        "head_dim": keys.positive("attention.key_length_swa", size),
        "global_head_dim": size,
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": bool(shared) and max(sizes) > min(sizes),
        "num_key_value_heads": next((count for layer, count in enumerate(heads) if layer not in full), heads[0]),
        "num_global_key_value_heads": heads[full[0]] if full else None,
        "attention_k_eq_v": bool(full) and not keys.has(f"blk.{full[0]}.attn_v.weight"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": keys.positive("rope.freq_base", 1e6),
                "partial_rotary_factor": sum(turned) / len(turned),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)},
        },
        "rope_scaling": None,
        "rope_theta": None,
        "partial_rotary_factor": None,
    }
    if not keys.get("expert_count"):
        return found
    return {
        **found,
        "enable_moe_block": True,
        "num_experts": keys.positive("expert_count"),
        "top_k_experts": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
    }


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
        "llama": Family(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _llama, permuted=True),
        "qwen2": Family(("Qwen2ForCausalLM",), without=("attention_bias",)),
        "qwen3": Family(("Qwen3ForCausalLM",)),
        "qwen2moe": Family(("Qwen2MoeForCausalLM",), _qwen2_moe),
        "qwen3moe": Family(("Qwen3MoeForCausalLM",), _qwen2_moe),
        "gemma": Family(("GemmaForCausalLM",), _gemma),
        "gemma2": Family(("Gemma2ForCausalLM",), _later_gemma),
        "gemma3": Family(("Gemma3ForCausalLM",), _later_gemma),
        "phi2": Family(
            ("PhiForCausalLM",), lambda keys: {"qk_layernorm": False}, norm="layer_norm_eps", layer_norm=True
        ),
        "phi3": Family(("Phi3ForCausalLM",), _phi3),
        "granite": Family(("GraniteForCausalLM",), _granite, permuted=True),
        "granitemoe": Family(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _granite, permuted=True),
        "gpt-oss": Family(("GptOssForCausalLM",), _gpt_oss, yarn=lambda keys: {"truncate": False}),
        "glm4": Family(("Glm4ForCausalLM",)),
        "glm4moe": Family(
            ("Glm4MoeForCausalLM",),
            lambda keys: {
                **_experts(keys),
                "n_routed_experts": keys.positive("expert_count"),
                "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
            },
        ),
        "dots1": Family(
            ("Dots1ForCausalLM",),
            lambda keys: {
                **_experts(keys),
                "n_routed_experts": keys.positive("expert_count"),
                **_layer_types(keys),
            },
        ),
        "command-r": Family(
            ("CohereForCausalLM",),
            lambda keys: {
                "logit_scale": keys.positive("logit_scale"),
                "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
            },
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "cohere2": Family(
            ("Cohere2ForCausalLM",),
            lambda keys: {"logit_scale": keys.positive("logit_scale"), **_layer_types(keys, 4)},
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "olmo": Family(
            ("OlmoForCausalLM",),
            lambda keys: {"clip_qkv": keys.get("attention.clamp_kqv")},
            permuted=True,
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "olmo2": Family(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _olmo),
        "olmoe": Family(
            ("OlmoeForCausalLM",),
            lambda keys: {
                "num_experts": keys.positive("expert_count"),
                "num_experts_per_tok": keys.positive("expert_used_count"),
                "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
            },
        ),
        "stablelm": Family(
            ("StableLmForCausalLM",),
            lambda keys: {
                "use_qkv_bias": keys.has_in_layer("attn_q.bias"),
                "use_parallel_residual": bool(keys.get("use_parallel_residual", False)),
            },
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "starcoder2": Family(
            ("Starcoder2ForCausalLM",),
            lambda keys: {"use_bias": keys.has_in_layer("attn_q.bias")},
            norm="norm_epsilon",
            layer_norm=True,
        ),
        "smollm3": Family(
            ("SmolLM3ForCausalLM",), lambda keys: {"mlp_bias": keys.has("blk.0.ffn_up.bias")}, permuted=True
        ),
        "exaone": Family(("ExaoneForCausalLM",), norm="layer_norm_epsilon"),
        "exaone4": Family(("Exaone4ForCausalLM",), lambda keys: _layer_types(keys, 4)),
        "seed_oss": Family(
            ("SeedOssForCausalLM",),
            lambda keys: {
                "attention_out_bias": keys.has("blk.0.attn_output.bias"),
                "mlp_bias": keys.has("blk.0.ffn_up.bias"),
            },
        ),
        "ernie4_5": Family(
            ("Ernie4_5ForCausalLM",), lambda keys: {"use_bias": keys.has("blk.0.attn_q.bias")}, permuted=False
        ),
        "ernie4_5-moe": Family(("Ernie4_5_MoeForCausalLM",), _ernie_moe),
        "arcee": Family(("ArceeForCausalLM",), lambda keys: {"mlp_bias": keys.has("blk.0.ffn_up.bias")}, permuted=True),
        "nemotron": Family(
            ("NemotronForCausalLM",),
            lambda keys: {"mlp_bias": keys.has("blk.0.ffn_up.bias")},
            norm="norm_eps",
            layer_norm=True,
        ),
        "minicpm": Family(("MiniCPMForCausalLM",), _minicpm, permuted=True),
        "mistral3": Family(
            ("Ministral3ForCausalLM",), lambda keys: {"sliding_window": None}, permuted=True, yarn=_ministral3_yarn
        ),
        "deepseek2": Family(
            ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
            _deepseek2,
            without=("head_dim", "partial_rotary_factor"),
            yarn=_deepseek2_yarn,
        ),
        "glm-dsa": Family(("GlmMoeDsaForCausalLM",), _glm_dsa, without=("head_dim", "partial_rotary_factor")),
        "step35": Family(("Step3p5ForCausalLM",), _step35, names={"num_key_value_heads": "num_attention_groups"}),
        "llama4": Family(("Llama4ForCausalLM",), _llama4),
        "minimax-m2": Family(
            ("MiniMaxM2ForCausalLM",),
            lambda keys: {
                "intermediate_size": keys.positive("expert_feed_forward_length"),
                "num_local_experts": keys.positive("expert_count"),
                "num_experts_per_tok": keys.positive("expert_used_count"),
                "rotary_dim": keys.positive("rope.dimension_count"),
            },
        ),
        "exaone-moe": Family(("ExaoneMoeForCausalLM",), _exaone_moe),
        "hunyuan-dense": Family(("HunYuanDenseV1ForCausalLM",)),
        "lfm2": Family(("Lfm2ForCausalLM",), _lfm2),
        "lfm2moe": Family(("Lfm2MoeForCausalLM",), _lfm2_moe),
        "hunyuan-moe": Family(("HunYuanMoEV1ForCausalLM",), _hunyuan_moe),
        "phimoe": Family(("PhimoeForCausalLM", "PhiMoEForCausalLM"), _phimoe),
        "mamba": Family(
            ("MambaForCausalLM", "FalconMambaForCausalLM"), _mamba, norm="layer_norm_epsilon", has_attention=False
        ),
        "mamba2": Family(("Mamba2ForCausalLM",), _mamba2, norm="layer_norm_epsilon", has_attention=False),
        "jamba": Family(("JambaForCausalLM",), _jamba),
        "granitehybrid": Family(("GraniteMoeHybridForCausalLM",), _granite_hybrid, permuted=True),
        "falcon-h1": Family(("FalconH1ForCausalLM",), _falcon_h1),
        "nemotron_h": Family(("NemotronHForCausalLM",), _nemotron_h, norm="layer_norm_epsilon"),
        "nemotron_h_moe": Family(("NemotronHForCausalLM",), _nemotron_h, norm="layer_norm_epsilon"),
        "qwen3next": Family(("Qwen3NextForCausalLM",), _qwen3_next),
        "internlm2": Family(
            ("InternLM2ForCausalLM",),
            lambda keys: {"bias": keys.has_in_layer("attn_q.bias")},
            permuted=True,
            separate=("wq", "wk", "wv", "wo"),
        ),
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
        "qwen35": Family(("Qwen3_5ForCausalLM",), _qwen3_5),
        "qwen35moe": Family(("Qwen3_5MoeForCausalLM",), _qwen3_5),
        "qwen2vl": Family(("Qwen2ForCausalLM",), without=("attention_bias",)),
        "qwen3vl": Family(("Qwen3ForCausalLM",)),
        "qwen3vlmoe": Family(("Qwen3MoeForCausalLM",), lambda keys: {**_qwen2_moe(keys), "norm_topk_prob": True}),
        "apertus": Family(("ApertusForCausalLM",), _apertus),
        "kimi-linear": Family(
            ("KimiLinearForCausalLM",),
            _kimi_linear,
            without=("head_dim", "partial_rotary_factor"),
            names={"max_position_embeddings": "model_max_length"},
        ),
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
        "bailingmoe": Family(("BailingMoeForCausalLM",), _bailing, permuted=True, separate=("wq", "wk", "wv", "dense")),
        "bailingmoe2": Family(("BailingMoeV2ForCausalLM",), _bailing2),
        "afmoe": Family(("AfmoeForCausalLM",), _afmoe),
        "arctic": Family(("ArcticForCausalLM",), _arctic, permuted=True),
        "minicpm3": Family(("MiniCPM3ForCausalLM",), _minicpm3, without=("head_dim", "partial_rotary_factor")),
        "mimo2": Family(("MiMoV2FlashForCausalLM",), _mimo2),
        "gemma3n": Family(("Gemma3nForCausalLM",), _gemma3n),
        "gemma4": Family(("Gemma4ForCausalLM",), _gemma4),
        "bert": Family(("BertModel",), _bert, is_decoder=False),
        "nomic-bert": Family(
            ("NomicBertModel",),
            lambda keys: {**_encoder(keys), **_segments(keys), "hidden_act": "silu"},
            is_decoder=False,
        ),
        "modern-bert": Family(("ModernBertModel",), _modern_bert, is_decoder=False),
        "t5": Family(
            ("T5ForConditionalGeneration", "UMT5ForConditionalGeneration", "MT5ForConditionalGeneration"),
            _t5,
            is_decoder=False,
        ),
    }
)
"""By `general.architecture`."""

KINDS: Mapping[str, str] = MappingProxyType(
    {architecture: kind for kind, family in reversed(list(FAMILIES.items())) for architecture in family.architectures}
)
"""Kinds of files by architecture of Hugging Face."""


def made_config(file: Path) -> dict[str, Any]:
    """Return the contents of config.json, derived from the keys of a file. Raises CheckpointError if keys are
    missing."""
    found = read_gguf(file)
    kind = str(found.require("general.architecture"))
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{file}: the architecture is {kind!r}; supported from GGUF are {', '.join(FAMILIES)}. Serve other models "
            "from a checkpoint in Hugging Face's layout"
        )
    family, keys = FAMILIES[kind], Keys(found, kind)
    try:
        return _made(found, family, keys)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: its keys have values that no {kind} model has ({error}); copy the file again, or convert the "
            "model again"
        ) from error


def _made(found: GgufFile, family: Family, keys: Keys) -> dict[str, Any]:
    made = {
        **shared(keys, family),
        "rope_theta": keys.positive("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys),
        "eos_token_id": _end_ids(found) or None,
        "bos_token_id": found.keys.get("tokenizer.ggml.bos_token_id"),
    }
    made = {key: value for key, value in made.items() if value is not None and key not in family.without}
    made = {family.names.get(key, key): value for key, value in made.items()}
    return {"architectures": [family.architectures[0]], "model_type": keys.kind, **made, **family.more(keys)}


_POOLS: Mapping[object, Pool | None] = {0: None, 1: "mean", 2: "first", 3: "last"}  # by pooling_type
_RERANKER = 4  # pooling_type


def stated_pool(file: Path) -> Pool | None:
    """Return the pooling that a file of an embedding model states, or None. Raises CheckpointError for others."""
    found = read_gguf(file)
    key = f"{found.require('general.architecture')}.pooling_type"
    stated = found.keys.get(key, 0)
    if stated not in _POOLS:
        what = "a reranker, which is not supported from GGUF" if stated == _RERANKER else "supported are 0 to 3"
        raise CheckpointError(f"{file}: {key} is {stated!r}, {what}; serve a checkpoint in Hugging Face's layout")
    return _POOLS[stated]


def _end_ids(found: GgufFile) -> list[int]:
    """Return the tokens that end a reply, beginning with tokenizer.ggml.eos_token_id."""
    ids = [found.keys.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    tokens, kinds = (found.keys.get(f"tokenizer.ggml.{key}") or () for key in ("tokens", "token_type"))
    controls = (token for token, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL)
    ids += [token for token in controls if tokens[token] in END_TEXTS]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def rope_scaling(keys: Keys) -> dict[str, Any] | None:
    """Return the RoPE scaling in the form of config.json, or None.

    llama3's scaling is stored as a tensor of divisors of the frequencies, which equals longrope with one list of
    factors and no attention scale.
    """
    context = keys.get("context_length")
    trained = keys.get("rope.scaling.original_context_length", context)
    factors = {name: keys.tensor(one) for name, one in zip(("one", "short", "long"), POSITIONS, strict=True)}
    numbers = {name: _numbers(one) for name, one in factors.items() if one is not None}
    if "short" in numbers and "long" in numbers:
        return {
            "rope_type": "longrope",
            "short_factor": numbers["short"],
            "long_factor": numbers["long"],
            "attention_factor": keys.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": trained,
        }
    if "one" in numbers:
        return {
            "rope_type": "longrope",
            "short_factor": numbers["one"],
            "long_factor": numbers["one"],
            "attention_factor": 1.0,
            "original_max_position_embeddings": trained,
        }
    form = keys.get("rope.scaling.type", "none")
    if form == "none":
        return None
    if form not in ("linear", "yarn"):
        name = f"{keys.kind}.rope.scaling.type"
        raise CheckpointError(f"{keys.file.path}: {name} is {form!r}; supported are linear and yarn")
    scaling = {"rope_type": form, "factor": keys.positive("rope.scaling.factor")}
    if form == "yarn":
        scaling["original_max_position_embeddings"] = keys.positive("rope.scaling.original_context_length")
        scaling |= {one: keys.get(f"rope.scaling.yarn_{one}") for one in ("beta_fast", "beta_slow")}
        scaling["attention_factor"] = keys.get("rope.scaling.yarn_attn_factor")
        scaling |= FAMILIES[keys.kind].yarn(keys)
    return {key: value for key, value in scaling.items() if value is not None}


def _numbers(tensor: GgufTensor) -> list[float]:
    """Return the values of a small tensor in float32."""
    if tensor.type != "F32" or tensor.bytes > MAX_FACTOR_BYTES:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has type {tensor.type} and {tensor.bytes:,} bytes; it must have type F32 "
            f"and at most {MAX_FACTOR_BYTES:,} bytes"
        )
    with tensor.file.open("rb") as data:
        data.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.bytes // 4}f", data.read(tensor.bytes)))
