"""Decoders without a declaration of their own, computed by the modelling code of transformers.

Only their attention layers are declared, with the shapes of the keys and values, because these are stored in Slipway's
pages. Decoders with other states, such as recurrent ones, have a page entry with the token's id instead, and each step
computes the complete sequence. Everything else is the code of the installed transformers package, whose source files
are read here without importing them: importing it would import torch.
"""

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError, UnknownArchitecture
from engine.models.config import Config
from engine.models.parts import Attention, Embedding, Foreign, Head, Model, ResidualBlock

PACKAGE = "transformers"
# Other names of the same settings in config.json; transformers maps them in its configuration classes.
NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "dim"),
    "num_hidden_layers": ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers",
                          "n_layers"),
    "num_attention_heads": ("decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "n_head",
                            "attention_heads", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_n_heads"),
    "intermediate_size": ("decoder_ffn_dim", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size",
                          "ffn_hidden_dim", "dff"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length",
                                "max_target_positions"),
    "vocab_size": ("vocab_size", "n_words", "n_tokens"),
    "head_dim": ("head_dim", "kv_channels", "dim_head", "d_head"),
}  # fmt: skip
INNER = ("text_config", "decoder_config", "global_config", "attn_config")  # parts of config.json with further settings
_DRAFTS = "it only drafts tokens of another model, whose keys and values it reads"
_AUDIO = "its tokens are codes of audio, several for each position"
REFUSED = {
    "Gemma4AssistantForCausalLM": _DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": _DRAFTS,
    "MusicgenForCausalLM": _AUDIO,
    "MusicgenMelodyForCausalLM": _AUDIO,
    "CpmAntForCausalLM": "tokens of its prompts attend to later ones",
    "ProphetNetForCausalLM": "it predicts several next tokens from streams without a common hidden state",
    "XLNetLMHeadModel": "it predicts masked tokens of any order, and needs an additional input to predict the next one",
}
"""Architectures of transformers' list of decoders that are refused, and the reasons."""
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
# Marks of code with other states than keys and values: recurrent ones, inputs of convolutions, keys of indexers.
_STATEFUL = re.compile(
    r"^ +_is_stateful = True|\b(past_key_values?|cache_params|cache_layer)(\.layers\[[^\]]*\])?\.update_\w+\(",
    re.MULTILINE,
)
_ENCODER = re.compile(r"(add|that) `is_decoder=True")  # in a warning of encoders whose code can also be a decoder
_CACHES = re.compile(
    r"(past_key_values?|layer_past|cache)\w*\.update\("
)  # code that keeps keys and values in transformers' cache
ID_WIDTH = 4  # elements of a key, and of a value, that hold a token's id: 4 bits in each, exact in all types of pages


def is_foreign(architecture: str) -> bool:
    """Return whether the installed transformers has code for a decoder of this name, of text alone."""
    return not architecture.endswith("ForConditionalGeneration") and architecture in _decoders()


@cache
def recomputes(architecture: str) -> bool:
    """Return whether transformers' code keeps something else than keys and values of the tokens so far, or nothing, so
    that each step computes the complete sequence."""
    code = _code(architecture)
    return _STATEFUL.search(code) is not None or _CACHES.search(code) is None


def _code(architecture: str) -> str:
    """Return the modelling code of a decoder. The folder of a text decoder of a multimodal model has another name than
    its model type."""
    kind, folder = _decoders().get(architecture), _package()
    if kind is None or folder is None:
        return ""
    files = [*(folder / "models" / kind.replace("-", "_")).glob("modeling_*.py")]
    codes = (file.read_text(encoding="utf-8") for file in files or (folder / "models").glob("*/modeling_*.py"))
    return "".join(code for code in codes if files or f"class {architecture}(" in code)


@cache
def _package() -> Path | None:
    """Return the folder of the installed package without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _decoders() -> Mapping[str, str]:
    """Return the model type of each decoder that transformers has, by architecture."""
    folder = _package()
    if folder is None:
        return {}
    tree = ast.parse((folder / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == _CAUSAL
            and isinstance(node.value, ast.Call)
        ):
            pairs = ast.literal_eval(node.value.args[0])
            return {name: kind for kind, names in pairs for name in ([names] if isinstance(names, str) else names)}
    return {}


def declare_foreign(config: Mapping[str, Any]) -> Model:
    """Return the model of a decoder that only transformers knows. Raises CheckpointError for settings that are missing
    or that paged attention does not support."""
    architecture = config["architectures"][0]
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"config.json: quantization_config: {architecture} is computed by transformers' code, which Slipway runs "
            "with plain weights only; serve the original checkpoint"
        )
    if why := REFUSED.get(architecture):
        raise UnknownArchitecture(f"config.json: the architecture {architecture!r} is not supported: {why}")
    if _ENCODER.search(_code(architecture)) and config.get("is_decoder") is not True:
        raise CheckpointError(
            f"config.json: is_decoder is not true, so {architecture} attends to later tokens and cannot generate text"
        )
    parts = [config, *(config[key] for key in INNER if isinstance(config.get(key), Mapping))]
    found = {key: _first(parts, names) for key, names in NAMES.items()}
    c = Config.of({key: value for key, value in {**config, **found}.items() if value is not None})
    hidden, again = c.whole("hidden_size"), recomputes(architecture)
    heads, kv_heads, width, layers = 1, 1, ID_WIDTH, 1
    if not again:
        heads, layers = c.whole("num_attention_heads"), c.whole("num_hidden_layers")
        kv_heads, width = _cached(c, hidden, heads)
    attention = Attention(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=width, rope=None)
    inner = c.whole("intermediate_size") if "intermediate_size" in c.values else 4 * hidden
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=hidden),
        blocks=((ResidualBlock(body=attention),),) * layers,
        norm=None,
        head=Head(tied=False),
        max_context=_context(c),
        foreign=Foreign(architecture=architecture, width=4 * hidden + 3 * inner, recomputes=again),
    )


def _first(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """Return the first of these settings in the first part of config.json that has one, or None."""
    return next((part[name] for part in parts for name in names if part.get(name) is not None), None)


def _cached(c: Config, hidden: int, heads: int) -> tuple[int, int]:
    """Return the number of heads and the size of the keys and values that transformers caches."""
    if "kv_lora_rank" in c.values and "qk_rope_head_dim" in c.values:
        # Latent attention: the latent vector in place of the keys, the rotated key of all heads in place of the values.
        return 1, max(c.whole("kv_lora_rank"), c.whole("qk_rope_head_dim"))
    width = c.whole("head_dim") if "head_dim" in c.values else hidden // heads
    if "num_key_value_heads" in c.values:
        return c.whole("num_key_value_heads"), width
    return (1, width) if c.values.get("multi_query") is True else (heads, width)


def _context(c: Config) -> int:
    """Return the longest supported sequence. Rotary scalings that depend on the length of a sequence are not used,
    because transformers computes them from the longest one."""
    longest = c.whole("max_position_embeddings") if "max_position_embeddings" in c.values else 2048
    for key in ("rope_scaling", "rope_parameters"):
        scaling = c.values.get(key)
        if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) in ("dynamic", "longrope"):
            original = scaling.get("original_max_position_embeddings", c.values.get("original_max_position_embeddings"))
            return min(longest, original) if isinstance(original, int) and original > 0 else longest
    return longest
