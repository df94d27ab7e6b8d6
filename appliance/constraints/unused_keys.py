"""Keys that have no effect for some models.

Examples are keys of text generation for a pooling model, or keys of the prefix cache for a model without a KV cache.
Such a key is an error, because the operator expects an effect. In an extended file it may be meant for other services
that share the file, and is only a warning.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.config.fix import Remove
from appliance.config.merge import at
from appliance.config.problems import Problem, given
from appliance.config.settings import Settings
from engine.models.parts import Model, TokenLogits, attentions, has_experts, is_bidirectional

ANY = object()  # marks keys for which no value is harmless


@dataclass(frozen=True)
class UnusedKeys:
    """Keys that have no effect for some models."""

    keys: Mapping[str, Any]
    """Value of each key that is accepted because it describes the model (ANY: none). `auto` and null are also
    accepted.
    """
    applies_to: Callable[[Model], bool]
    models: str  # the models, as text
    because: str  # why the keys have no effect for them


def _pools(model: Model) -> bool:
    return model.pooler is not None


def _keeps_only(model: Model) -> bool:
    """Return whether the model fills a KV cache but never reuses prefixes.

    This is so if its output depends on the states of all tokens, which must then be computed for every request.
    """
    pooler = model.pooler
    if pooler is None or is_bidirectional(model):
        return False
    return pooler.pool != "last" or pooler.task == "token_classify"


def _is_encoder_decoder(model: Model) -> bool:
    return model.encoder is not None


def _is_recurrent(model: Model) -> bool:
    return not attentions(model) and not is_bidirectional(model)


def _makes_no_vectors(model: Model) -> bool:
    return model.pooler is None or model.pooler.task != "embed" or not model.pooler.whole


def _is_encoder_only(model: Model) -> bool:
    return model.encoder_only


def _returns_no_experts(model: Model) -> bool:
    return model.pooler is not None or not has_experts(model)


def _names_no_tokens(model: Model) -> bool:
    stages = () if model.pooler is None else model.pooler.stages
    return not any(isinstance(stage, TokenLogits) for stage in stages)


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_REPLIES = ("max_output_tokens", "max_choices", "max_logprobs", "max_stop")
_GRAMMARS = ("grammar_size", "grammar_time", "grammar_memory")
RECURRENT = "models without attention"
POOLS, WHOLE = "pooling models", "models with bidirectional attention"
ENCODER_DECODER = "encoder-decoder models"

UNUSED_KEYS = (
    UnusedKeys(
        {"model.generation_config": ANY, **{f"engine.sampling.{name}": ANY for name in _SAMPLING}},
        *(_pools, POOLS),
        because="the model is a pooling model and samples no tokens",
    ),
    UnusedKeys(
        {f"limits.{name}": ANY for name in (*_REPLIES, *_GRAMMARS)},
        *(_pools, POOLS),
        because="the model is a pooling model and has no generated replies",
    ),
    UnusedKeys(
        {"model.format": ANY, "endpoints.stream_keep_alive": 0.0, "observability.log_outputs": "off"},
        *(_pools, POOLS),
        because="the model is a pooling model and generates no text",
    ),
    UnusedKeys(
        {
            **{f"endpoints.responses.{name}": ANY for name in ("size", "count")},
            **{f"lifecycle.journal.{name}": ANY for name in ("folder", "size", "linger")},
            **{f"{name}.keep": 0.0 for name in ("endpoints.responses", "lifecycle.journal")},
        },
        *(_pools, POOLS),
        because="the model is a pooling model, whose results are not stored but computed again",
    ),
    UnusedKeys(
        {
            "lifecycle.self_test.prompts": 0,
            "lifecycle.self_test.at_start": False,
            "lifecycle.self_test.every": 0.0,
            "lifecycle.self_test.budget": ANY,
            "lifecycle.self_test.tolerance": ANY,
            "health.stalled_testing": 0.0,
        },
        *(_pools, POOLS),
        because="the model is a pooling model and has no logits for golden prompts",
    ),
    UnusedKeys(
        {"hardware.graphs": False},
        *(_pools, POOLS),
        because="the model is a pooling model and has no decode steps to capture as graphs",
    ),
    UnusedKeys(
        {
            "quantization.kv_cache": ANY,
            "hardware.kv_cache_memory": ANY,
            "engine.cache.block_tokens": ANY,
            "engine.cache.prefix": False,
        },
        *(is_bidirectional, WHOLE),
        because="this model has bidirectional attention and no KV cache",
    ),
    UnusedKeys(
        {"quantization.kv_cache": ANY, "hardware.kv_cache_memory": ANY},
        *(_is_recurrent, RECURRENT),
        because="this model has no attention, and keeps recurrent state instead of a KV cache",
    ),
    UnusedKeys(
        {"engine.cache.prefix": False},
        *(_keeps_only, "decoders that pool all states of a prompt"),
        because="the model pools the states of all tokens of a prompt, so none can come from the cache",
    ),
    UnusedKeys(
        {"engine.cache.prefix": False},
        *(_is_encoder_decoder, ENCODER_DECODER),
        because="cached states of this model depend on the complete encoder input, so requests cannot share them",
    ),
    UnusedKeys(
        {
            "model.chat_template": ANY,
            "model.format": "plain",
            "endpoints.trust_request_chat_template": False,
            **{f"endpoints.responses.{name}": ANY for name in ("size", "count")},
            "endpoints.responses.keep": 0.0,
        },
        *(_is_encoder_decoder, ENCODER_DECODER),
        because="encoder-decoder models do not support conversations",
    ),
    UnusedKeys(
        {"model.pooling.max_input": ANY},
        *(_makes_no_vectors, "models that do not embed"),
        because="only embedding inputs can be split, and this model is not served for embeddings",
    ),
    UnusedKeys(
        {"model.pooling.score_tokens": ANY},
        *(_names_no_tokens, "models other than rerankers (`model.task: score`)"),
        because="only a generative model that is served with `model.task: score` has answer tokens",
    ),
    UnusedKeys(
        {"engine.return_routed_experts": False},
        *(_returns_no_experts, "models other than decoders with experts"),
        because="only generated text is returned with the selected experts",
    ),
    UnusedKeys(
        {
            "model.chat_template": ANY,
            **{f"quantization.{name}": ANY for name in ("weights", "group_size", "embedding")},
        },
        *(_is_encoder_only, "models with `model.media.encoder_only`"),
        because="only the towers are loaded, which are not quantized and read no conversations",
    ),
)


def problems(settings: Settings, model: Model) -> Iterator[Problem]:
    """Yield a problem for each written key that has no effect for this model. Some are only warnings."""
    for one in UNUSED_KEYS:
        if one.applies_to(model):
            for key, so in one.keys.items():
                path = tuple(key.split("."))
                if path in settings.tree.values and _asks(settings, path, so):
                    yield _problem(settings, path, one.because)


def _asks(settings: Settings, path: tuple[str, ...], so: Any) -> bool:
    value: Any = settings.manifest
    for part in path:
        value = getattr(value, part)
    return value is not None and value != "auto" and (so is ANY or value != so)


def _problem(settings: Settings, path: tuple[str, ...], because: str) -> Problem:
    spelled = settings.tree.interpolated.get(path)
    said, where = given(path, at(settings.tree, path), spelled.text if spelled else ""), settings.place(path)
    message, key = f"{said} has no effect: {because}", ".".join(path)
    if where.via:
        return Problem(where, key, message, said, code="no-effect")
    return Problem(where, key, f"{message}; leave it out", said, hint="leave it out", fix=Remove(), certain=False)
