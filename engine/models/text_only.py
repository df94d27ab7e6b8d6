"""Text decoders of multimodal models, which are served alone if model.text_only is true.

The decoder's settings are those of `text_config`, or the flat ones of older exports. Its weights have a prefix such as
`language_model.model.` or `model.language_model.`. Rotary positions in sections (M-RoPE) equal plain RoPE for prompts
with only text, because all sections then have the same position. Source: transformers modeling_gemma3.py,
modeling_gemma3n.py, modeling_gemma4.py, modeling_llava.py, modeling_llama4.py, modeling_mistral3.py,
modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py, modeling_qwen3_5.py, modeling_phi4_multimodal.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import TaskError
from engine.models.parts import Model
from engine.models.sources import join

# Type of the decoder in text_config -> its architecture, and the defaults of settings that exporters omit.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "aria_text": ("AriaTextForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {"vocab_size": 262_208, "num_attention_heads": 8, "head_dim": 256}),
    "gemma3n_text": (
        "Gemma3nForCausalLM",
        {
            **{"hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35, "num_attention_heads": 8},
            **{"vocab_size": 262_400},
        },
    ),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {
            **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8},
            **{"vocab_size": 262_144},
        },
    ),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"vocab_size": 151_424, "attention_bias": True}),
    "glm4v_text": ("Glm4ForCausalLM", {"head_dim": None, "rms_norm_eps": 1e-5}),
    "glm_ocr_text": (
        "Glm4ForCausalLM",
        {
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 59_392, "attention_bias": False},
        },
    ),
    "granite": ("GraniteForCausalLM", {}),
    "llama": (
        "LlamaForCausalLM",
        {
            **{"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"vocab_size": 32_000},
        },
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            **{"hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 40},
            **{"vocab_size": 202_048},
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34, "num_attention_heads": 32},
            **{"vocab_size": 131_072},
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "vocab_size": 32_000},
        },
    ),
    "opt": ("OPTForCausalLM", {}),
    "phi4_multimodal": (
        "Phi3ForCausalLM",
        {
            **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "vocab_size": 200_064, "max_position_embeddings": 131_072},
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_omni_moe_text": (
        "Qwen3MoeForCausalLM",
        {
            **{"hidden_size": 2048, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28},
            **{"vocab_size": 3584, "norm_topk_prob": True},
        },
    ),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
}
FLAT = {
    "Phi4MultimodalForCausalLM": "phi4_multimodal",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
}
INSIDE = ("embed_tokens_extend.",)
"""Towers whose tensors have the prefix of the decoder's (Phi-4-multimodal)."""
KEY = "model.text_only"
PREFIX_FLAG = "use_bidirectional_attention"
_SECTIONS = ("mrope_section", "mrope_interleaved")


def text_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture of the text decoder in a config.json, or ""."""
    return DECODERS.get(_type(config), ("", {}))[0]


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder alone. Raises TaskError if there is no decoder."""
    name = _name(config)
    if not text_architecture(config):
        what = "its text decoder is not known" if isinstance(config.get("text_config"), dict) else "it is a text model"
        raise TaskError(f"{KEY}: true: config.json names the architecture {name!r}, and {what}; leave the key out")
    architecture, defaults = DECODERS[_type(config)]
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    flat = {key: value for key, value in config.items() if key != "text_config"}
    made = {**defaults, **flat, **inner, "architectures": [architecture]}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(made.get(key), dict):
            made[key] = _plain_rope(made[key])
    made.pop(PREFIX_FLAG, None)  # of the prompt alone, which `Media.attention` declares
    return made


def has_prefix_attention(config: Mapping[str, Any]) -> bool:
    """Return whether the tokens of a prompt attend to one another in both directions, but those of a reply do not
    (PaliGemma)."""
    return _name(config) == "PaliGemmaForConditionalGeneration"


def text_decoder(model: Model, tensors: Mapping[str, object]) -> Model:
    """Return the decoder with the names of its tensors; tensors of other components are ignored."""
    if not tensors or model.head is None:
        return model
    last = f"{model.embed.name}.weight"
    roots = [name.removesuffix(last).rstrip(".") for name in tensors if name.endswith(f".{last}")]
    root = roots[0] if len(roots) == 1 else model.root
    heads = [name.removesuffix(".weight") for name in tensors if name.endswith("lm_head.weight")]
    head = replace(model.head, name=heads[0]) if heads else replace(model.head, tied=True)
    rest = (name for name in tensors if not name.startswith(join(root, "")) and name not in (f"{head.name}.weight",))
    return replace(model, root=root, head=head, unread=(*model.unread, *rest, *(join(root, one) for one in INSIDE)))


def _name(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _type(config: Mapping[str, Any]) -> str:
    inner, name = config.get("text_config"), _name(config)
    if not isinstance(inner, dict):
        return FLAT.get(name, "")
    return str(inner.get("model_type", "")) if name.endswith("ForConditionalGeneration") else ""


def _plain_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in _SECTIONS}
    plain = {key: "default" for key in ("rope_type", "type") if kept.get(key) == "mrope"}
    return {**kept, **plain}
