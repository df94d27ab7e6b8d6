"""Tiny random checkpoints of the families whose tests are in test_families.py, two for each architecture.

Architectures whose code is not part of transformers are made from a model of transformers that computes the same: its
tensors are renamed and joined, and config.json is written as the original checkpoints have it.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

VOCAB = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **SPECIAL,
}
ONE_KV = {"hidden_size": 40, "intermediate_size": 65, "num_attention_heads": 5, "num_key_value_heads": 1}
GPT = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, **SPECIAL}
GPT_ODD = {"n_embd": 40, "n_head": 5, "n_inner": 65}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6, **SPECIAL}
MPT = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64, **SPECIAL}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # loops that support all sizes
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"moe_intermediate_size": 22, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 1,
       "routed_scaling_factor": 1.5}  # fmt: skip
GRANITE = {"intermediate_size": 22, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
           "attention_multiplier": 0.2, "logits_scaling": 2.0}  # fmt: skip
EXAONE = {"moe_intermediate_size": 22, "num_experts": 6, "num_experts_per_tok": 3}
GPT_OSS = {"intermediate_size": 22, "sliding_window": 5, "swiglu_limit": 0.6, "rope_parameters": {
    **YARN, "rope_theta": 100.0, "truncate": False}}  # fmt: skip
MIMO = {"head_dim": 24, "v_head_dim": 7, "num_attention_heads": 8, "moe_intermediate_size": 22, "n_routed_experts": 6,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "sliding_window": 5}  # fmt: skip
GEMMA_3N = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 90, "sliding_window": 5,
            "laurel_rank": 7}  # fmt: skip
GEMMA_4 = {"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "hidden_size_per_layer_input": 10,
           "vocab_size_per_layer_input": VOCAB, "sliding_window": 5}  # fmt: skip
LLAMA4 = {"intermediate_size": 22, "intermediate_size_mlp": 66, "num_local_experts": 4, "attention_chunk_size": 8,
          "floor_scale": 3, "attn_scale": 0.7}  # fmt: skip
AFMOE = {"moe_intermediate_size": 22, "num_experts": 6, "num_experts_per_tok": 3, "num_dense_layers": 1,
         "sliding_window": 5, "route_scale": 1.7}  # fmt: skip
ERNIE = {"moe_intermediate_size": 22, "moe_num_experts": 6, "moe_k": 3}
MINIMAX = {"intermediate_size": 22, "block_size": 8, "linear_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.8,
           "full_attn_alpha_factor": 0.7, "full_attn_beta_factor": 1.5, "mlp_alpha_factor": 1.4,
           "mlp_beta_factor": 0.6}  # fmt: skip
ZAMBA = {"n_mamba_heads": 12, "mamba_ngroups": 2, "mamba_d_state": 10, "chunk_size": 8, "adapter_rank": 7,
         "time_step_min": 0.3}  # fmt: skip
MLA = {**SIZES, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
       "qk_rope_head_dim": 6, "v_head_dim": 10}  # fmt: skip
MLA_ODD = {**SIZES, **ONE_KV, "num_key_value_heads": 5, "q_lora_rank": None, "kv_lora_rank": 19, "qk_nope_head_dim": 9,
           "qk_rope_head_dim": 4, "v_head_dim": 7}  # fmt: skip
LONGCAT = {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 66, "moe_topk": 3, "n_routed_experts": 5,
           "zero_expert_num": 4, "expert_ffn_hidden_size": 22, "routed_scaling_factor": 1.5}  # fmt: skip
STEP = {**SIZES, "num_experts_per_tok": 3, "n_routed_experts": 6, "moe_intermediate_size": 22, "share_expert_dim": 30,
        "num_sliding_attention_heads": 4, "head_dim": 16, "sliding_window": 5, "layer_types": HYBRID,
        "moe_router_scaling_factor": 1.5}  # fmt: skip
INDEX = {"index_n_heads": 9, "index_head_dim": 10, "index_topk": 6}
MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}

RECURRENT = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "chunk_size": 8, **SPECIAL}
MAMBA_1 = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, **SPECIAL}
MAMBA_2 = {"mamba_n_heads": 12, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 8}
KIMI = {"layer_types": RECURRENT, "linear_num_heads": 6, "linear_head_dim": 10, "moe_intermediate_size": 22,
        "num_experts_per_token": 3, "num_shared_experts": 1}  # fmt: skip
FALCON_H1 = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.6, "key_multiplier": 0.7,
             "mlp_multipliers": [0.8, 0.4], "attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.5,
             "ssm_multipliers": [0.4, 0.6, 1.2, 0.8, 1.5]}  # fmt: skip
NEMOTRON_H = {**SIZES, "head_dim": 8, "mamba_num_heads": 12, "mamba_head_dim": 8, "ssm_state_size": 10, "n_groups": 3,
              "chunk_size": 8}  # fmt: skip
DELTA = {"layer_types": RECURRENT, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
         "linear_value_head_dim": 12}  # fmt: skip

# name -> configuration class, all settings
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**SIZES, **AFMOE, "head_dim": 16, "mup_enabled": True, "global_attn_every_n_layers": 2}),
    "afmoe-odd": ("Afmoe", {**SIZES, **ONE_KV, **AFMOE, "head_dim": 8, "num_shared_experts": 1, "num_dense_layers": 0,
                            "layer_types": HYBRID, "attention_bias": True, "tie_word_embeddings": True}),
    "arctic": ("Mixtral", {**SIZES, "intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "arctic-odd": ("Mixtral", {**SIZES, **ONE_KV, "intermediate_size": 35, "num_local_experts": 3,
                               "num_experts_per_tok": 3, "num_hidden_layers": 2}),
    "bailing": ("GraniteMoeShared", {**SIZES, "intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 2,
                                     "shared_intermediate_size": 44, "attention_multiplier": 8**-0.5}),
    "bailing2": ("Glm4Moe", {**SIZES, **MOE, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "head_dim": 16,
                             "use_qk_norm": True, "first_k_dense_replace": 1,
                             "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "bailing2-odd": ("Glm4Moe", {**SIZES, **ONE_KV, **MOE, "head_dim": 8, "n_shared_experts": 2, "use_qk_norm": True,
                                 "attention_bias": True, "first_k_dense_replace": 0,
                                 "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "cwm": ("Cwm", {**SIZES, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 5, "rope_parameters": LLAMA3}),
    "cwm-odd": ("Cwm", {**SIZES, **ONE_KV, "head_dim": 8, "sliding_window": 4, "layer_types": HYBRID,
                        "rope_parameters": DEFAULT, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm": ("Glm", {**SIZES, "head_dim": 16}),
    "glm-odd": ("Glm", {**SIZES, **ONE_KV, "head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {**GPT}),
    "gpt2-odd": ("GPT2", {**GPT, **GPT_ODD, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "starcoder": ("GPTBigCode", {**GPT}),
    "starcoder-heads": ("GPTBigCode", {**GPT, **GPT_ODD, "multi_query": False, "scale_attn_weights": False}),
    "neox": ("GPTNeoX", {**SIZES, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "neox-odd": ("GPTNeoX", {**SIZES, **ONE_KV, "use_parallel_residual": False, "attention_bias": False,
                             "hidden_act": "gelu_fast", "tie_word_embeddings": True,
                             "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "gptj-odd": ("GPTJ", {**GPT, **GPT_ODD, "rotary_dim": 8}),
    "codegen": ("CodeGen", {**GPT, "n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "codegen-one-each": ("CodeGen", {**GPT, "n_embd": 40, "n_head": 4, "n_inner": 66, "rotary_dim": 6}),
    "opt": ("OPT", {**SIZES, "ffn_dim": 66, "word_embed_proj_dim": 48}),
    "opt-after": ("OPT", {**SIZES, **ONE_KV, "ffn_dim": 35, "word_embed_proj_dim": 40, "do_layer_norm_before": False,
                          "enable_bias": False, "tie_word_embeddings": False}),
    "opt-350m": ("OPT", {**SIZES, "ffn_dim": 66, "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    "opt-350m-odd": ("OPT", {**SIZES, **ONE_KV, "ffn_dim": 35, "word_embed_proj_dim": 56, "enable_bias": False,
                             "tie_word_embeddings": False}),
    "opt-no-affine": ("OPT", {**SIZES, "ffn_dim": 66, "word_embed_proj_dim": 48,
                              "layer_norm_elementwise_affine": False}),
    "persimmon": ("Persimmon", {**SIZES, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "phi": ("Phi", {**SIZES, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "phi-odd": ("Phi", {**SIZES, **ONE_KV, "qk_layernorm": True,
                        "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "phimoe": ("Phimoe", {**SIZES, "intermediate_size": 22, "num_local_experts": 5, "router_jitter_noise": 0.2,
                          "lm_head_bias": True, "attention_bias": True, "sliding_window": 7, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.3, 1.6], "short_mscale": 1.2,
        "long_factor": [1.0, 2.5, 5.0, 9.0], "long_mscale": 1.2, "original_max_position_embeddings": 64}}),
    "stablelm": ("StableLm", {**SIZES, "use_qkv_bias": True,
                              "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "stablelm-parallel": ("StableLm", {**SIZES, **ONE_KV, "use_parallel_residual": True, "qk_layernorm": True,
                                       "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "stablelm-qk-norm": ("StableLm", {**SIZES, "qk_layernorm": True,
                                      "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "falcon": ("Falcon", {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-one-norm": ("Falcon", {**SIZES, **ONE_KV, "num_kv_heads": 1, "new_decoder_architecture": True,
                                   "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 65, "bias": True}),
    "falcon-7b": ("Falcon", {**SIZES, **ONE_KV, "tie_word_embeddings": False}),
    "falcon-heads": ("Falcon", {**SIZES, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon-alibi": ("Falcon", {**SIZES, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    "falcon-alibi-odd": ("Falcon", {**SIZES, **ONE_KV, "num_kv_heads": 1, "new_decoder_architecture": True,
                                    "alibi": True}),
    "bloom": ("Bloom", {**BLOOM}),
    "bloom-odd": ("Bloom", {**BLOOM, "hidden_size": 60, "n_head": 12, "tie_word_embeddings": False}),
    "bloom-wide": ("Bloom", {**BLOOM, "hidden_size": 96, "n_layer": 2, "n_head": 12}),
    "mpt": ("Mpt", {**MPT}),
    "mpt-odd": ("Mpt", {**MPT, "d_model": 40, "n_heads": 5, "tie_word_embeddings": False,
                        "attn_config": {"alibi_bias_max": 3, "softmax_scale": 0.2}}),
    "exaone4": ("Exaone4", {**SIZES, "sliding_window": 7, "layer_types": HYBRID}),
    "exaone4-no-windows": ("Exaone4", {**SIZES, **ONE_KV, "sliding_window": None, "layer_types": ["full_attention"] * 3,
                                       "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "nemotron": ("Nemotron", {**SIZES, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "nemotron-odd": ("Nemotron", {**SIZES, **ONE_KV, "head_dim": 16, "attention_bias": True, "mlp_bias": True,
                                  "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}),
    "cohere2": ("Cohere2", {**SIZES, "sliding_window": 4, "layer_types": HYBRID, "logit_scale": 0.25}),
    "cohere2-odd": ("Cohere2", {**SIZES, **ONE_KV, "num_hidden_layers": 4, "sliding_window": 9,
                                "attention_bias": True}),
    "smollm3": ("SmolLM3", {**SIZES, "num_hidden_layers": 4}),
    "smollm3-windows": ("SmolLM3", {**SIZES, **ONE_KV, "no_rope_layers": [0, 1, 0], "use_sliding_window": True,
                                    "sliding_window": 5, "attention_bias": True, "mlp_bias": True,
                                    "tie_word_embeddings": False}),
    "seed-oss": ("SeedOss", {**SIZES, "head_dim": 16}),
    "seed-oss-odd": ("SeedOss", {**SIZES, **ONE_KV, "head_dim": 8, "attention_bias": False, "attention_out_bias": True,
                                 "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {**SIZES, "head_dim": 16}),
    "ernie4_5-odd": ("Ernie4_5", {**SIZES, **ONE_KV, "head_dim": 24, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("Helium", {**SIZES, "head_dim": 8}),
    "helium-odd": ("Helium", {**SIZES, **ONE_KV, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "olmo": ("Olmo", {**SIZES}),
    "olmo-odd": ("Olmo", {**SIZES, **ONE_KV, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {**SIZES, "sliding_window": 8, "layer_types": HYBRID, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "olmo3-odd": ("Olmo3", {**SIZES, **ONE_KV, "num_hidden_layers": 4, "sliding_window": 3, "attention_bias": True}),
    "apertus": ("Apertus", {**SIZES, "attention_bias": True, "rope_parameters": LLAMA3}),
    "arcee": ("Arcee", {**SIZES}),
    "arcee-odd": ("Arcee", {**SIZES, **ONE_KV, "head_dim": 16, "attention_bias": True, "mlp_bias": True,
                            "tie_word_embeddings": True, "rope_parameters": YARN}),
    "ministral": ("Ministral", {**SIZES, "head_dim": 16, "sliding_window": 4, "layer_types": HYBRID}),
    "ministral-odd": ("Ministral", {**SIZES, **ONE_KV, "head_dim": 8, "sliding_window": 5}),
    "hunyuan": ("HunYuanDenseV1", {**SIZES, "head_dim": 16, "attention_bias": True, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 7.0}}),
    "hunyuan-moe": ("HunYuanMoEV1", {**SIZES, **ONE_KV, "head_dim": 8, "intermediate_size": 35, "num_experts": 5,
                                     "moe_topk": [3, 1, 2], "tie_word_embeddings": True}),
    "hunyuan-moe-heads": ("HunYuanMoEV1", {**SIZES, "head_dim": 8, "intermediate_size": 22, "num_experts": 4,
                                           "moe_topk": 2}),
    "internlm3": ("InternLM3", {**SIZES, "head_dim": 8, "rope_parameters": {**DEFAULT, "rope_type": "dynamic",
                                                                          "factor": 2.0}}),
    "internlm3-odd": ("InternLM3", {**SIZES, **ONE_KV, "head_dim": 16, "qkv_bias": True, "bias": True}),
    "ministral3": ("Ministral3", {**SIZES, "head_dim": 16, "sliding_window": 9, "rope_parameters": {
        **YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.6}}),
    "internlm2": ("Llama", {**SIZES}),
    "internlm2-odd": ("Llama", {**SIZES, **ONE_KV, "attention_bias": True}),
    "baichuan": ("Llama", {**SIZES, "num_key_value_heads": 6}),
    "baichuan-odd": ("Llama", {**SIZES, **ONE_KV, "num_key_value_heads": 5}),
    "baichuan2": ("Llama", {**SIZES, "num_key_value_heads": 6, "vocab_size": 125_696, "num_hidden_layers": 1}),
    "baichuan13b": ("Llama", {**SIZES, "num_key_value_heads": 6}),
    "baichuan13b-odd": ("Llama", {**SIZES, **ONE_KV, "num_key_value_heads": 5}),
    "qwen1": ("Qwen2", {**SIZES, "num_key_value_heads": 6}),
    "qwen1-odd": ("Qwen2", {**SIZES, **ONE_KV, "num_key_value_heads": 5, "rms_norm_eps": 1e-3}),
    "mimo7b": ("Qwen2", {**SIZES}),
    "mimo7b-odd": ("Qwen2", {**SIZES, **ONE_KV, "use_sliding_window": True, "sliding_window": 5,
                             "max_window_layers": 1}),
    "minicpm": ("Granite", {**SIZES, "embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 3**0.5,
                            "attention_multiplier": 8**-0.5, "logits_scaling": 3.0, "tie_word_embeddings": True}),
    "minicpm-odd": ("Granite", {**SIZES, **ONE_KV, "embedding_multiplier": 5.0, "residual_multiplier": 0.8 / 3**0.5,
                                "attention_multiplier": 8**-0.5, "logits_scaling": 2.0, "attention_bias": True}),
    "exaone3": ("Llama", {**SIZES}),
    "glm4-moe": ("Glm4Moe", {**SIZES, **MOE, "head_dim": 16, "num_hidden_layers": 4, "attention_bias": True,
                             "use_qk_norm": True, "first_k_dense_replace": 2,
                             "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "glm4-moe-groups": ("Glm4Moe", {**SIZES, **ONE_KV, **MOE, "head_dim": 8, "n_routed_experts": 12, "n_group": 4,
                                    "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False,
                                    "first_k_dense_replace": 0,
                                    "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}),
    "solar-open": ("SolarOpen", {**SIZES, **MOE, "head_dim": 16}),
    "solar-open-odd": ("SolarOpen", {**SIZES, **ONE_KV, **MOE, "head_dim": 8, "n_group": 2, "topk_group": 1,
                                     "tie_word_embeddings": True}),
    "dots1": ("Dots1", {**SIZES, **MOE, "first_k_dense_replace": 1, "sliding_window": 5, "max_window_layers": 1}),
    "dots1-odd": ("Dots1", {**SIZES, **ONE_KV, **MOE, "n_routed_experts": 9, "n_group": 3, "topk_group": 2,
                            "norm_topk_prob": True, "attention_bias": True, "sliding_window": None}),
    "exaone-moe": ("ExaoneMoe", {**SIZES, **EXAONE, "head_dim": 16, "sliding_window": 7, "layer_types": HYBRID}),
    "exaone-moe-odd": ("ExaoneMoe", {**SIZES, **ONE_KV, **EXAONE, "num_experts": 8, "n_group": 4, "topk_group": 3,
                                     "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"],
                                     "sliding_window": 4, "sliding_window_pattern": 2}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {**SIZES, **ERNIE}),
    "ernie4_5-moe-odd": ("Ernie4_5_Moe", {**SIZES, **ONE_KV, **ERNIE, "num_hidden_layers": 4, "use_bias": True,
                                          "moe_num_experts": 5, "moe_num_shared_experts": 0, "moe_layer_interval": 2,
                                          "moe_layer_start_index": 0, "tie_word_embeddings": False}),
    "mimo-v2": ("MiMoV2Flash", {**SIZES, **MIMO, "num_hidden_layers": 4, "attention_bias": True}),
    "mimo-v2-odd": ("MiMoV2Flash", {**SIZES, **MIMO, "v_head_dim": 24, "attention_value_scale": None, "layer_types":
        HYBRID, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads": 1, "n_group": 2,
        "topk_group": 1, "tie_word_embeddings": True}),
    "minimax": ("MiniMax", {**SIZES, **MINIMAX, "num_local_experts": 6, "num_experts_per_tok": 3,
                            "layer_types": [*RECURRENT, "full_attention"], "num_hidden_layers": 4}),
    "minimax-odd": ("MiniMax", {**SIZES, **ONE_KV, **MINIMAX, "head_dim": 8, "num_local_experts": 5,
                                "num_experts_per_tok": 1, "intermediate_size": 35, "sliding_window": 7,
                                "mlp_alpha_factor": 1.0, "tie_word_embeddings": True}),
    "minimax-m2": ("MiniMaxM2", {**SIZES, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3,
                                 "intermediate_size": 22, "rotary_dim": 8}),
    "minimax-m2-odd": ("MiniMaxM2", {**SIZES, **ONE_KV, "head_dim": 8, "num_local_experts": 5,
                                     "num_experts_per_tok": 1, "intermediate_size": 35}),
    "granite-moe": ("GraniteMoe", {**SIZES, **GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe-odd": ("GraniteMoe", {**SIZES, **ONE_KV, "intermediate_size": 35, "num_local_experts": 5,
                                       "num_experts_per_tok": 1, "attention_bias": True,
                                       "tie_word_embeddings": True}),
    "granite-moe-shared": ("GraniteMoeShared", {**SIZES, **GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2,
                                                "shared_intermediate_size": 26}),
    "granite-moe-shared-odd": ("GraniteMoeShared", {**SIZES, **ONE_KV, "intermediate_size": 35, "num_local_experts": 3,
                                                    "num_experts_per_tok": 3, "shared_intermediate_size": 0}),
    "gemma": ("Gemma", {**SIZES, "head_dim": 16, "attention_bias": True, "hidden_act": "gelu"}),
    "gemma3n": ("Gemma3nText", {**SIZES, **GEMMA_3N, "head_dim": 16, "num_hidden_layers": 4, "layer_types":
        HYBRID[:2] * 2, "num_kv_shared_layers": 2, "intermediate_size": [66, 66, 50, 66],
        "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0], "attention_bias": True}),
    "gemma3n-odd": ("Gemma3nText", {**SIZES, **ONE_KV, **GEMMA_3N, "head_dim": 8, "num_hidden_layers": 3, "layer_types":
        ["sliding_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "intermediate_size": 65, "activation_sparsity_pattern": [0.8, 0.0, 0.5], "altup_num_inputs": 3,
        "altup_correct_scale": False}),
    "gemma4": ("Gemma4Text", {**SIZES, **GEMMA_4, "attention_bias": True, "layer_types": HYBRID[:2] * 2,
                              "use_double_wide_mlp": True, "num_kv_shared_layers": 2}),
    "gemma4-moe": ("Gemma4Text", {**SIZES, **ONE_KV, **GEMMA_4, "num_hidden_layers": 5, "layer_types": [
        "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 3, "moe_intermediate_size": 22, "intermediate_size": 66, "tie_word_embeddings": False}),
    "aria": ("AriaText", {**SIZES, "intermediate_size": 22, "moe_num_experts": 5, "moe_topk": 2,
                          "moe_num_shared_experts": 2, "attention_bias": True, "mlp_bias": True}),
    "gpt-oss": ("GptOss", {**SIZES, **GPT_OSS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "gpt-oss-odd": ("GptOss", {**SIZES, **ONE_KV, **GPT_OSS, "head_dim": 8, "intermediate_size": 35,
                               "num_local_experts": 5, "num_experts_per_tok": 1, "num_hidden_layers": 4,
                               "swiglu_limit": 0.25, "attention_bias": False, "tie_word_embeddings": True}),
    "llama4": ("Llama4", {**SIZES, **LLAMA4, "head_dim": 16, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
                          "rope_parameters": LLAMA3}),
    "llama4-odd": ("Llama4", {**SIZES, **ONE_KV, **LLAMA4, "head_dim": 8, "intermediate_size": 35,
                              "num_local_experts": 5, "num_experts_per_tok": 3, "moe_layers": [0, 2],
                              "attention_chunk_size": 3,
                              "no_rope_layers": [0, 1, 1], "attention_bias": True, "tie_word_embeddings": True}),
    "flex-olmo": ("FlexOlmo", {**SIZES, "intermediate_size": 22, "num_experts": 7, "num_experts_per_tok": 5}),
    "flex-olmo-odd": ("FlexOlmo", {**SIZES, **ONE_KV, "intermediate_size": 35, "num_experts": 3,
                                   "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True}),
    "deepseek-v2": ("DeepseekV2", {**MLA, **MOE, "n_routed_experts": 12, "topk_method": "group_limited_greedy",
                                   "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
                                   "attention_bias": True, "mlp_bias": True, "rope_parameters": MSCALE}),
    "deepseek-v2-odd": ("DeepseekV2", {**MLA_ODD, **MOE, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "n_group": 1,
                                       "topk_group": 1}),
    "deepseek-v3": ("DeepseekV3", {**MLA, **MOE, "n_routed_experts": 12, "n_group": 4, "topk_group": 2,
                                   "first_k_dense_replace": 1, "rope_parameters": MSCALE}),
    "deepseek-v3-odd": ("DeepseekV3", {**MLA_ODD, **MOE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
                                       "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False}),
    "deepseek-v32": ("DeepseekV32", {**MLA, **MOE, **INDEX, "n_routed_experts": 12, "n_group": 4, "topk_group": 2,
                                     "first_k_dense_replace": 1, "rope_parameters": MSCALE}),
    "deepseek-v32-odd": ("DeepseekV32", {**MLA_ODD, **MOE, **INDEX, "q_lora_rank": 11, "n_group": 1, "topk_group": 1,
                                         "index_n_heads": 7, "index_head_dim": 4, "index_topk": 1,
                                         "attention_bias": True}),
    "glm4-moe-lite": ("Glm4MoeLite", {**MLA, **MOE}),
    "glm4-moe-lite-odd": ("Glm4MoeLite", {**MLA_ODD, **MOE, "q_lora_rank": 11, "n_group": 2, "topk_group": 1,
                                          "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm-moe-dsa": ("GlmMoeDsa", {**MLA, **MOE, **INDEX, "num_hidden_layers": 4, "first_k_dense_replace": 3,
                                  "indexer_types": ["full", "shared", "full", "shared"]}),
    "glm-moe-dsa-odd": ("GlmMoeDsa", {**MLA_ODD, **MOE, **INDEX, "q_lora_rank": 11, "index_topk": 17,
                                      "index_topk_freq": 2, "index_skip_topk_offset": 1}),
    "longcat": ("LongcatFlash", {**MLA, **LONGCAT, "head_dim": 6, "rope_parameters": MSCALE}),
    "longcat-odd": ("LongcatFlash", {**MLA_ODD, **LONGCAT, "head_dim": 4, "q_lora_rank": 11, "num_layers": 1,
                                     "num_hidden_layers": 2, "moe_topk": 2, "n_routed_experts": 2,
                                     "zero_expert_num": 7, "tie_word_embeddings": True}),
    "step3p5": ("Step3p7", {**STEP, "mlp_layer_types": ["dense", "sparse", "sparse"],
                            "swiglu_limits": [0.0, 0.05, None], "swiglu_limits_shared": [0.1, 0, 0.2],
                            "rope_parameters": {"full_attention": {**LLAMA3, "partial_rotary_factor": 0.5},
                                                "sliding_attention": {**DEFAULT, "rope_theta": 100.0}}}),
    "step3p5-odd": ("Step3p7", {**STEP, **ONE_KV, "head_dim": 8, "num_sliding_attention_heads": 3,
                                "layer_types": ["full_attention"] * 3, "mlp_layer_types": ["sparse"] * 3,
                                "rope_parameters": {"full_attention": DEFAULT}}),
    "youtu": ("Youtu", {**MLA, "rope_parameters": MSCALE}),
    "youtu-odd": ("Youtu", {**MLA_ODD, "tie_word_embeddings": False}),
    "minicpm3": ("MiniCPM3", {**MLA, "dim_model_base": 16, "max_position_embeddings": 256, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 3.0],
        "original_max_position_embeddings": 64}}),
    "minicpm3-odd": ("MiniCPM3", {**MLA_ODD, "v_head_dim": None, "attention_bias": True, "mlp_bias": True,
                                  "scale_depth": 0.8, "tie_word_embeddings": False}),
    "exaone3-odd": ("Llama", {**SIZES, **ONE_KV, "head_dim": 16, "tie_word_embeddings": True}),
    "mamba2": ("Mamba2", {**MAMBA, "num_heads": 12, "head_dim": 8, "state_size": 10, "n_groups": 4, "conv_kernel": 3}),
    "mamba2-odd": ("Mamba2", {**MAMBA, "hidden_size": 40, "num_heads": 5, "head_dim": 16, "state_size": 7,
                              "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True,
                              "time_step_limit": (0.1, 1.5)}),
    "mamba": ("Mamba", {**MAMBA_1, "state_size": 10, "conv_kernel": 3}),
    "falcon-mamba": ("FalconMamba", {**MAMBA_1, "hidden_size": 40, "intermediate_size": 54, "time_step_rank": 5,
                                     "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}),
    "jamba": ("Jamba", {**SIZES, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
                        "expert_layer_offset": 1, "num_experts": 5, "mamba_d_state": 9}),
    "bamba": ("Bamba", {**SIZES, **MAMBA_2, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1", {**SIZES, **MAMBA_2, **FALCON_H1, "mamba_d_ssm": 72, "attention_in_multiplier": 0.8,
                               "ssm_in_multiplier": 1.3}),
    "falcon-h1-norm": ("FalconH1", {**SIZES, **ONE_KV, **MAMBA_2, "mamba_d_ssm": None, "mamba_n_heads": 10,
                                    "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True,
                                    "attention_bias": True, "mlp_bias": True, "key_multiplier": 0.5,
                                    "ssm_multipliers": [0.5, 1.0, 0.7, 1.0, 2.0], "tie_word_embeddings": True}),
    "granite-hybrid": ("GraniteMoeHybrid", {**SIZES, **GRANITE, **MAMBA_2, "num_local_experts": 6,
                                            "num_experts_per_tok": 3, "shared_intermediate_size": 30,
                                            "layer_types": RECURRENT}),
    "granite-hybrid-dense": ("GraniteMoeHybrid", {**SIZES, **ONE_KV, **GRANITE, **MAMBA_2, "mamba_n_heads": 10,
                                                  "num_local_experts": 0, "shared_intermediate_size": 30,
                                                  "position_embedding_type": "rope", "mamba_proj_bias": True,
                                                  "layer_types": RECURRENT}),
    "nemotron-h": ("NemotronH", {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}),
    "nemotron-h-moe": ("NemotronH", {**NEMOTRON_H, "n_groups": 1, "n_routed_experts": 6, "num_experts_per_tok": 3,
                                     "moe_intermediate_size": 22, "moe_shared_expert_intermediate_size": 30,
                                     "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
                                     "layers_block_type": ["linear_attention", "moe", "full_attention"]}),
    "recurrent-gemma": ("RecurrentGemma", {**SIZES, "intermediate_size": 68, "attention_window_size": 5,
                                           "num_hidden_layers": 4}),
    "recurrent-gemma-odd": ("RecurrentGemma", {**SIZES, **ONE_KV, "lru_width": 60, "conv1d_width": 3,
                                               "attention_window_size": 8, "block_types": ["attention", "recurrent"],
                                               "attention_bias": True, "logits_soft_cap": 3.0,
                                               "hidden_activation": "gelu", "tie_word_embeddings": False}),
    "zamba2": ("Zamba2", {**SIZES, **ZAMBA, "num_hidden_layers": 5, "num_mem_blocks": 2, "use_mem_rope": True,
                          "use_shared_attention_adapter": True, "num_key_value_heads": 6, "layers_block_type": [
        "linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"]}),
    "zamba2-odd": ("Zamba2", {**SIZES, **ONE_KV, **ZAMBA, "n_mamba_heads": 5, "mamba_ngroups": 1, "mamba_d_conv": 3,
                              "add_bias_linear": True, "tie_word_embeddings": False, "layers_block_type": [
        "hybrid", "hybrid", "linear_attention"]}),
    "lfm2": ("Lfm2", {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 10}),
    "lfm2-bias": ("Lfm2", {**SIZES, **ONE_KV, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
                           "conv_L_cache": 5, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "lfm2-moe": ("Lfm2Moe", {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
                             "moe_intermediate_size": 22, "num_experts": 6, "num_experts_per_tok": 3,
                             "routed_scaling_factor": 1.5}),
    "lfm2-moe-odd": ("Lfm2Moe", {**SIZES, **ONE_KV, "layer_types": ["full_attention", "conv", "conv"],
                                 "conv_bias": True, "conv_L_cache": 5, "num_dense_layers": 0,
                                 "moe_intermediate_size": 35,
                                 "num_experts": 5, "num_experts_per_tok": 2, "use_expert_bias": False,
                                 "norm_topk_prob": False, "tie_word_embeddings": False}),
    "kimi_linear": ("KimiLinear", {**MLA, **KIMI, "q_lora_rank": None, "num_experts": 6,
                                   "mlp_layer_types": ["dense", "dense", "sparse"]}),
    "olmo_hybrid": ("OlmoHybrid", {**SIZES, **DELTA, "rope_parameters": {**DEFAULT, "rope_theta": None}}),
    "qwen3_5-moe-heads": ("Qwen3_5MoeText", {**SIZES, **DELTA, "head_dim": 16, "num_experts": 4,
                                             "num_experts_per_tok": 2, "moe_intermediate_size": 22,
                                             "shared_expert_intermediate_size": 30}),
    "qwen3_5": ("Qwen3_5Text", {**SIZES, **DELTA, "head_dim": 16}),
    "qwen3_5-moe": ("Qwen3_5MoeText", {**SIZES, **ONE_KV, **DELTA, "head_dim": 16, "num_experts": 6,
                                       "num_experts_per_tok": 2, "moe_intermediate_size": 22,
                                       "shared_expert_intermediate_size": 30}),
}  # fmt: skip
CONFIGURATIONS = {"Llama4": "Llama4TextConfig"}  # of kinds whose configuration has another name
LOOSE = ("internlm3",)  # transformers' dynamic rotation keeps state: every call needs a fresh model


def random_family(name: str, more: dict[str, Any] | None = None) -> Any:
    """Return transformers' model of a case, with `more` settings. Norms and biases are random too."""
    kind, settings = CASES[name]
    settings = {**settings, **(more or {})}
    name_of = CONFIGURATIONS.get(kind, f"{kind}Config")
    config = getattr(transformers, name_of)(**(beside_vision(settings) if kind == "Step3p7" else settings))
    torch.manual_seed(len(name))
    # The eager attention of transformers' Falcon adds the bias of ALiBi twice: by itself and in the mask.
    attention = "sdpa" if name.startswith("falcon-alibi") else "eager"
    auto = transformers.AutoModelForImageTextToText if kind == "Step3p7" else transformers.AutoModelForCausalLM
    model = auto.from_config(config, **{**EAGER, "attn_implementation": attention}).eval()
    if name.startswith("arctic"):
        _add_residual_mlps(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Convolutions with small weights have small outputs, whose rounding norms of queries and keys would raise.
            scale = 0.5 if "conv" in parameter_name else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.15)
            if buffer_name.endswith("layer_scalar"):
                buffer.fill_(0.8)
        if name == "baichuan2":
            head = model.lm_head.weight
            head.copy_(torch.nn.functional.normalize(head))
    if name == "mpt-odd":  # transformers reads alibi_bias_max but does not use it
        model.transformer.build_mpt_alibi_tensor = partial(_mpt_alibi, model.config.attn_config.alibi_bias_max)
    if name.startswith("baichuan13b"):
        _replace_rope_by_alibi(model)
    return model


def beside_vision(settings: dict[str, Any]) -> dict[str, Any]:
    """Add a small vision tower to the settings of a text model; transformers has no class for the text model alone."""
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "mlp_ratio": 1.0, "image_size": 14}
    return {"text_config": settings, "vision_config": tower}


def _mpt_alibi(max_bias: int, heads: int, length: int, device: torch.device) -> Tensor:
    return build_mpt_alibi_tensor(heads, length, max_bias, device)


def _replace_rope_by_alibi(model: Any) -> None:
    """Let a Llama of transformers compute what Baichuan 13B does."""
    forward, heads = model.forward, model.config.num_attention_heads
    slopes = _get_alibi_slopes(heads, torch.device("cpu")).view(1, heads, 1, 1)

    def without_rotation(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.zeros(*position_ids.shape, model.config.head_dim)
        return angles.cos(), angles.sin()

    def biased(ids: Tensor) -> Any:
        position = torch.arange(ids.shape[1])
        distance = position - position.unsqueeze(1)
        mask = torch.zeros(distance.shape).masked_fill(distance > 0, float("-inf"))
        return forward(ids, attention_mask=slopes * distance + mask)

    model.model.rotary_emb.forward = without_rotation
    model.forward = biased


def _add_residual_mlps(model: Any) -> None:
    """Let a Mixtral of transformers compute what Arctic does: experts read the input of the layer, and a small MLP is
    beside them."""
    hidden, eps = model.config.hidden_size, model.config.rms_norm_eps

    def compute(layer: Any, x: Tensor, **more: Any) -> Tensor:
        y = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **more)[0]
        return y + layer.residual_mlp(layer.residual_layernorm(y)) + layer.mlp(layer.post_attention_layernorm(x))

    for layer in model.model.layers:
        layer.residual_layernorm = type(layer.input_layernorm)(hidden, eps=eps)
        layer.residual_mlp = LlamaMLP(
            transformers.LlamaConfig(hidden_size=hidden, intermediate_size=hidden, num_attention_heads=1)
        )
        layer.forward = partial(compute, layer)


def save_family(name: str, model: Any, path: Path) -> None:
    """Save the checkpoint in the layout of the original."""
    write = WRITERS.get(name.partition("-")[0])
    if write is None:
        model.save_pretrained(path)
        return
    model.save_pretrained(path / "source")
    config = json.loads((path / "source" / "config.json").read_text())
    tensors, settings = write(dict(model.state_dict()), config)
    save_file({key: one.clone().contiguous() for key, one in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"torch_dtype": "float32", **SPECIAL, **settings}))


def saved_architecture(name: str, path: Path) -> str:
    """Return the architecture that the checkpoint of a case names. A checkpoint that no writer changes is not made: it
    has the name of transformers' class."""
    kind, settings = CASES[name]
    if name.partition("-")[0] not in WRITERS:
        config = getattr(transformers, CONFIGURATIONS.get(kind, f"{kind}Config"))(**settings)
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    save_family(name, random_family(name), path)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    return architecture


Written = tuple[dict[str, Tensor], dict[str, Any]]


def _renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Replace parts of names, in order."""
    found = {}
    for key, tensor in tensors.items():
        for old, new in names.items():
            key = key.replace(old, new)
        found[key] = tensor
    return found


def _joined(tensors: dict[str, Tensor], layers: int, name: str, groups: int) -> dict[str, Tensor]:
    """Join q, k and v of each layer into one tensor: in each group its rows of q, then of k, then of v."""
    for index in range(layers):
        path = f"model.layers.{index}.self_attn"
        for suffix in ("weight", "bias"):
            if f"{path}.q_proj.{suffix}" in tensors:
                parts = [tensors.pop(f"{path}.{one}_proj.{suffix}").unflatten(0, (groups, -1)) for one in "qkv"]
                tensors[f"{path}.{name}.{suffix}"] = torch.cat(parts, 1).flatten(0, 1)
    return tensors


def _llama_config(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")  # fmt: skip
    kept = {key: config[key] for key in keys}
    return {**kept, "architectures": [architecture], "rope_theta": config["rope_parameters"]["rope_theta"]}


def _longcat(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """transformers stores a projection of the zero-computation experts too, which nothing reads. Original checkpoints
    have none; here, the tied case keeps them."""
    count = config["n_routed_experts"] + (config["zero_expert_num"] if config["tie_word_embeddings"] else 0)
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        path, _, last = key.rpartition(".")
        if last == "gate_up_proj":
            for number, (gate, up) in enumerate(one.chunk(2) for one in tensor[:count]):
                found |= {f"{path}.{number}.gate_proj.weight": gate, f"{path}.{number}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{path}.{number}.down_proj.weight": one for number, one in enumerate(tensor)}
        else:
            found[key] = tensor
    return found, config


def _each_expert(tensors: dict[str, Tensor], gate: str, up: str, down: str) -> dict[str, Tensor]:
    """Divide the stacked tensors of experts, and name their projections."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        path, _, last = key.rpartition(".")
        if last == "gate_up_proj":
            for number, (first, second) in enumerate(one.chunk(2) for one in tensor):
                found |= {f"{path}.{number}.{gate}.weight": first, f"{path}.{number}.{up}.weight": second}
        elif last == "down_proj":
            found |= {f"{path}.{number}.{down}.weight": one for number, one in enumerate(tensor)}
        else:
            found[key] = tensor
    return found


def _arctic(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    names = {".mlp.": ".block_sparse_moe.", "residual_mlp.gate_proj": "residual_mlp.w1",
             "residual_mlp.up_proj": "residual_mlp.w3", "residual_mlp.down_proj": "residual_mlp.w2"}  # fmt: skip
    settings = {key: config[key] for key in ("num_local_experts", "num_experts_per_tok")}
    more = {"moe_layer_frequency": 1, "use_residual": True, "parallel_attn_mlp_res": True}
    return _renamed(_each_expert(tensors, "w1", "w3", "w2"), names), {
        **_llama_config(config, "ArcticForCausalLM"), **settings, **more}  # fmt: skip


_BAILING = {"embed_tokens": "word_embeddings", "self_attn": "attention", "o_proj": "dense", "q_norm": "query_layernorm",
            "k_norm": "key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias"}  # fmt: skip


def _bailing(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """The experts of Granite are those of Ling 1, with a shared expert of twice their size."""
    found: dict[str, Tensor] = {}
    for key, tensor in _each_expert(tensors, "gate_proj", "up_proj", "down_proj").items():
        if key.endswith("shared_mlp.input_linear.weight"):
            path = key.replace("shared_mlp.input_linear.weight", "mlp.shared_experts")
            found |= {
                f"{path}.{name}_proj.weight": one for name, one in zip(("gate", "up"), tensor.chunk(2), strict=True)
            }
        else:
            found[key] = tensor
    names = {"shared_mlp.output_linear": "mlp.shared_experts.down_proj", "block_sparse_moe.router": "mlp.gate",
             "block_sparse_moe": "mlp", **_BAILING}  # fmt: skip
    tensors = _renamed(_joined(found, config["num_hidden_layers"], "query_key_value", 1), names)
    return tensors, {
        **_llama_config(config, "BailingMoeForCausalLM"),
        "moe_intermediate_size": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "num_shared_experts": 2,
        "norm_topk_prob": True,
        "use_bias": False,
    }


def _bailing2(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    tensors = _joined(_each_expert(tensors, "gate_proj", "up_proj", "down_proj"), config["num_hidden_layers"],
                      "query_key_value", 1)  # fmt: skip
    keys = ("head_dim", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group",
            "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob", "use_qk_norm")  # fmt: skip
    return _renamed(tensors, _BAILING), {
        **_llama_config(config, "BailingMoeV2ForCausalLM"),
        **{key: config[key] for key in keys},
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "partial_rotary_factor": config["rope_parameters"]["partial_rotary_factor"],
        "score_function": "sigmoid",
        "use_qkv_bias": config["attention_bias"],
    }


def _step3p5(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """The text model of Step-3.7-Flash, with the names of Step-3.5-Flash."""
    text, found = config["text_config"], {}
    names = {"model.language_model.": "model.", ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
             ".mlp.gate.weight": ".moe.gate.weight", ".mlp.shared_experts.": ".share_expert.",
             ".mlp.experts.down_proj": ".moe.down_proj.weight"}  # fmt: skip
    for key, tensor in _renamed(
        {one: tensors[one] for one in tensors if "language" in one or "lm_" in one}, names
    ).items():
        if key.endswith("gate_up_proj"):
            path = key.replace(".mlp.experts.gate_up_proj", ".moe")
            gate, up = tensor.chunk(2, 1)
            found |= {f"{path}.gate_proj.weight": gate, f"{path}.up_proj.weight": up}
        else:
            found[key] = tensor
    ropes = [text["rope_parameters"][kind] for kind in text["layer_types"]]
    scaled = {key: one for key, one in text["rope_parameters"]["full_attention"].items() if key != "rope_theta"}
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "max_position_embeddings", "moe_intermediate_size", "share_expert_dim", "sliding_window", "layer_types",
            "swiglu_limits", "swiglu_limits_shared", "moe_router_scaling_factor")  # fmt: skip
    return found, {
        **{key: text[key] for key in keys},
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": text["num_key_value_heads"],
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "attention_other_setting": {"num_attention_heads": text["num_sliding_attention_heads"]},
        "moe_layers_enum": ",".join(str(i) for i, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"),
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "use_head_wise_attn_gate": True,
        "rope_theta": [one["rope_theta"] for one in ropes],
        "partial_rotary_factors": [one.get("partial_rotary_factor", 1.0) for one in ropes],
        "rope_scaling": scaled,
        "yarn_only_types": ["full_attention"],
    }


def _internlm2(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    tensors = _joined(tensors, config["num_hidden_layers"], "wqkv", config["num_key_value_heads"])
    names = {"embed_tokens": "tok_embeddings", "self_attn": "attention", "o_proj": "wo", "mlp.gate_proj":
             "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
             "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
             "lm_head": "output"}  # fmt: skip
    settings = _llama_config(config, "InternLM2ForCausalLM")
    return _renamed(tensors, names), {**settings, "bias": config["attention_bias"]}


def _internlm3(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """transformers computes it with its Llama, which it also names in config.json."""
    settings = {**config, "architectures": ["InternLM3ForCausalLM"]}
    return tensors, {**settings, "qkv_bias": settings.pop("attention_bias"), "bias": settings.pop("mlp_bias")}


def _baichuan(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    settings = _llama_config(config, "BaichuanForCausalLM")
    del settings["num_key_value_heads"]
    return _joined(tensors, config["num_hidden_layers"], "W_pack", 1), settings


def _baichuan2(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """The rows of the head have random lengths, which the model divides them by."""
    lengths = torch.rand(config["vocab_size"], 1, generator=torch.Generator().manual_seed(1)) + 0.5
    return _baichuan({**tensors, "lm_head.weight": tensors["lm_head.weight"] * lengths}, config)


def _baichuan13b(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    tensors, settings = _baichuan(tensors, config)
    return tensors, {"model_max_length": settings.pop("max_position_embeddings"), **settings}


def _qwen1(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    tensors = _joined(tensors, config["num_hidden_layers"], "c_attn", 1)
    names = {"model.": "transformer.", "layers.": "h.", "embed_tokens": "wte", "self_attn": "attn", "o_proj": "c_proj",
             "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "gate_proj": "w2", "up_proj": "w1",
             "down_proj": "c_proj", "transformer.norm": "transformer.ln_f"}  # fmt: skip
    settings = {
        "architectures": ["QWenLMHeadModel"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": 2 * config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "seq_length": config["max_position_embeddings"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "no_bias": True,
        "tie_word_embeddings": False,
    }
    return _renamed(tensors, names), settings


def _minicpm(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    settings = {
        **_llama_config(config, "MiniCPMForCausalLM"),
        "attention_bias": config["attention_bias"],
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
    }
    return _without_tied(tensors, config), settings


def _exaone3(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    names = {"model.": "transformer.", "layers.": "h.", "embed_tokens": "wte", "self_attn": "attn.attention",
             "o_proj": "out_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
             "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj",
             "transformer.norm": "transformer.ln_f"}  # fmt: skip
    settings = _llama_config(config, "ExaoneForCausalLM")
    old = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
    settings = {old.get(key, key): value for key, value in settings.items()}
    return _renamed(_without_tied(tensors, config), names), {**settings, "head_dim": config["head_dim"]}


def _olmo_hybrid(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """transformers also renames norms of layers with attention, and divides convolutions into equal parts."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    names = {"post_attention_layernorm": "feedforward_layer_norm", "input_layernorm": "attention_layer_norm"}
    for index, kind in enumerate(config["layer_types"]):
        path = f"model.layers.{index}."
        if kind == "linear_attention":
            own = {key: tensors.pop(key) for key in [*tensors] if key.startswith(path)}
            conv = own.pop(f"{path}linear_attn.conv1d.weight")
            pieces = zip("qkv", conv.split((keys, keys, len(conv) - 2 * keys)), strict=True)
            own |= {f"{path}linear_attn.{name}_conv1d.weight": piece for name, piece in pieces}
            tensors |= _renamed(own, names)
    return _without_tied(tensors, config), config


def _kimi_linear(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """transformers renames the MLPs of layers without experts too."""
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.replace("forget_gate.", "")
        if ".mlp." in name and config["mlp_layer_types"][int(name.split(".")[2])] == "sparse":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        path, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for number, (gate, up) in enumerate(one.chunk(2) for one in tensor):
                found |= {f"{path}.{number}.w1.weight": gate, f"{path}.{number}.w3.weight": up}
        elif last == "down_proj":
            found |= {f"{path}.{number}.w2.weight": one for number, one in enumerate(tensor)}
        elif path.endswith("conv1d"):
            pieces = zip("qkv", tensor.chunk(3), strict=True)
            found |= {f"{path[:-6]}{one}_conv1d.weight": piece for one, piece in pieces}
        else:
            found[name] = tensor
    return found, config


def _without_tied(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    return {key: one for key, one in tensors.items() if key != "lm_head.weight" or not config["tie_word_embeddings"]}


def _mimo(tensors: dict[str, Tensor], config: dict[str, Any]) -> Written:
    """MiMo 7B without its prediction head is a Qwen2."""
    return tensors, {**config, "architectures": ["MiMoForCausalLM"], "model_type": "mimo"}


WRITERS: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], Written]] = {
    "arctic": _arctic,
    "bailing": _bailing,
    "bailing2": _bailing2,
    "internlm2": _internlm2,
    "internlm3": _internlm3,
    "baichuan": _baichuan,
    "baichuan2": _baichuan2,
    "baichuan13b": _baichuan13b,
    "qwen1": _qwen1,
    "mimo7b": _mimo,
    "minicpm": _minicpm,
    "exaone3": _exaone3,
    "longcat": _longcat,
    "step3p5": _step3p5,
    "kimi_linear": _kimi_linear,
    "olmo_hybrid": _olmo_hybrid,
}
