"""EXAONE 3 and 3.5 (Llama blocks with other tensor names), EXAONE 4 (norms after each body, QK norms, some windows).

Source: modeling_exaone.py of the checkpoint LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct, transformers modeling_exaone4.py. In
EXAONE 4 with windows, layers without a window have no positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("ExaoneForCausalLM", "Exaone4ForCausalLM")

_NAMES = {"hidden_act": "activation_function", "num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def declare(config: Mapping[str, Any]) -> Model:
    is_first = config["architectures"][0] == "ExaoneForCausalLM"
    c = Config.of(config, _NAMES if is_first else {}, **_DEFAULTS)
    positions = rope(c)
    attention = Attention(hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=positions)
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    model = Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
    return _third(c, model, attention, mlp, norm) if is_first else _fourth(c, model, attention, mlp, norm)


def _third(c: Config, model: Model, attention: Attention, mlp: MLP, norm: RMSNorm) -> Model:
    attention = replace(attention, sources=("q_proj", "k_proj", "v_proj", "out_proj"), name="attn.attention")
    block = (
        ResidualBlock(before=named(norm, "ln_1"), body=attention),
        ResidualBlock(before=named(norm, "ln_2"), body=replace(mlp, gate="c_fc_0", up="c_fc_1", down="c_proj")),
    )
    embed, last = replace(model.embed, name="wte"), named(norm, "ln_f")
    return replace(model, embed=embed, blocks=(block,) * c.layers, norm=last, root="transformer", layers="h")


def _fourth(c: Config, model: Model, attention: Attention, mlp: MLP, norm: RMSNorm) -> Model:
    attention = replace(attention, qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps))
    has_windows = c.whole_or_none("sliding_window") is not None

    def block(kind: str) -> tuple[ResidualBlock, ...]:
        is_sliding = kind == "sliding_attention"
        placed = replace(
            attention,
            window=c.window() if is_sliding else None,
            rope=attention.rope if is_sliding or not has_windows else None,
        )
        return (
            ResidualBlock(body=placed, after=named(norm, "post_attention_layernorm")),
            ResidualBlock(body=mlp, after=named(norm, "post_feedforward_layernorm")),
        )

    return replace(model, blocks=tuple(map(block, window_kinds(c))))


def window_kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer, "full_attention" or "sliding_attention"."""
    has_windows = c.whole_or_none("sliding_window") is not None
    return c.layer_types(_pattern(c) if has_windows else ("full_attention",) * c.layers)


def _pattern(c: Config) -> tuple[str, ...]:
    """Return the kinds of layers from sliding_window_pattern: a number, or one letter for each layer of a period."""
    pattern = c.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # As in the checkpoint LGAI-EXAONE/EXAONE-4.0-32B; the last layer is always global.
        local = [pattern[i % len(pattern)] == "L" and i != c.layers - 1 for i in range(c.layers)]
    else:
        period = Config({"sliding_window_pattern": pattern}).whole("sliding_window_pattern")
        local = [(i + 1) % period != 0 for i in range(c.layers)]
    return tuple("sliding_attention" if one else "full_attention" for one in local)
