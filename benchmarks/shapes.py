"""Random-weight checkpoints in the shape of well-known models, for benchmarks: the speed is real, the text is noise.

Each comes with a tokenizer of the model's own size whose words are made up, so that it can be served whole.

python -m benchmarks.shapes qwen2.5-0.5b --out /tmp/qwen2.5-0.5b
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.models.families import declaration
from engine.models.sources import sources

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_QWEN3_30B = _QWEN3_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
_BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "small": _QWEN2
    | {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    # A small Qwen3-30B-A3B: a quarter of the layers, half of the experts, narrower. The smallest published model
    # of this kind, OLMoE, has 7 B. 1.0 B parameters; a token uses 0.25 B, with 0.12 B in the embedding.
    "qwen3-moe-mini": _QWEN3_MOE
    | {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "head_dim": 64,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": _QWEN3_30B,
    # Qwen3-30B-A3B with 4 layers instead of 48: 3.1 B parameters.
    "qwen3-30b-a3b-4l": _QWEN3_30B | {"num_hidden_layers": 4},
    "qwen3-moe-tiny": _QWEN3_30B | _TINY | {"moe_intermediate_size": 64, "num_experts": 16, "head_dim": 32},
    # Layers of DeepSeek-V2-Lite, with the queries of low rank of DeepSeek-V2: llama.cpp expects them unless a model has
    # 26 or 27 layers.
    "deepseek-v2-lite-6l": _DEEPSEEK_V2_LITE,
    "deepseek-v2-tiny": _DEEPSEEK_V2_LITE
    | _TINY
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "kv_lora_rank": 64,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
    # Layers of Bamba-9B, a hybrid of Mamba-2 mixers and attention.
    "bamba-9b-4l": _BAMBA,
    "bamba-tiny": _BAMBA
    | _TINY
    | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_d_head": 32},
    "bert-large": _BERT
    | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "bert-small": _BERT
    | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 8192,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
SHAPES["llama-3.1-8b-fp8"] = SHAPES["llama-3.1-8b"] | {
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}
}


def declare(shape: str, out: Path) -> Path:
    """Writes the configuration alone, for engines that draw the weights themselves; returns the folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return out


def make(shape: str, out: Path) -> Path:
    """Writes the checkpoint unless it is already there; returns its folder. Weights are bf16, seeded, scaled so that
    activations stay of order one through all layers."""
    config = SHAPES[shape]
    if (out / "model.safetensors").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(config, out)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in sources(declaration(config["architectures"][0])(config)).items():
        if len(size) == 1 and "norm" in name.lower() and name.endswith("weight"):
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            scale = 1 / math.sqrt(size[-1])
            tensors[name] = torch.randn(size, generator=generator).mul_(scale).to(torch.bfloat16)
    save_file(tensors, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "model.safetensors.part").rename(out / "model.safetensors")
    return out


def write_tokenizer(config: dict[str, Any], out: Path) -> None:
    """Write tokenizer.json and its configuration.

    The byte-level tokenizer has no merges, so it encodes byte by byte. The other tokens are words of two to five
    syllables, about as long as in a real vocabulary.
    """
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    for number in range(len(vocab), config["vocab_size"]):
        word, rest = "", number
        while rest:
            rest, which = divmod(rest, len(syllables))
            word += syllables[which]
        vocab[f"Ġ{word}"] = number
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--config-only", action="store_true", help="write no weights")
    arguments = parser.parse_args()
    print((declare if arguments.config_only else make)(arguments.shape, arguments.out))


if __name__ == "__main__":
    main()
