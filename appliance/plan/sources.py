"""What the gateway is told of an encoder-decoder model."""

from typing import Any

from appliance.gateway.config import SourceModel
from engine.api.config import EngineConfig
from engine.models.checkpoint import Checkpoint


def source_model(checkpoint: Checkpoint, max_context: int, engine: EngineConfig) -> SourceModel | None:
    """None without an encoder. A request needs room for what a reply begins with, and for one token of it."""
    model = checkpoint.model
    if model.encoder is None:
        return None
    slots = min(engine.max_running, engine.max_step_tokens)
    begins = checkpoint.begin_ids
    return SourceModel(
        longest=min(model.max_encoder_input, engine.max_step_tokens - slots, max_context - len(begins) - 1),
        reply=model.max_context - model.max_encoder_input,
        begins=begins,
        never=_never(checkpoint),
    )


def _never(checkpoint: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """Sequences of tokens that no reply may have: Marian's name its padding, which begins replies and is likely."""
    listed: Any = checkpoint.generation.get("bad_words_ids", checkpoint.config.get("bad_words_ids"))
    if not isinstance(listed, list):
        return ()
    vocab = checkpoint.model.embed.vocab
    return tuple(
        tuple(ids) for ids in listed if isinstance(ids, list) and ids and all(_is_id(one, vocab) for one in ids)
    )


def _is_id(value: Any, vocab: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab
