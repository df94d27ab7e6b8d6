"""Gateway settings for encoder-decoder models."""

from typing import Any

from appliance.config.gateway import EncoderLimits
from engine.api.config import EngineConfig
from engine.models.checkpoint import Checkpoint


def encoder_limits(checkpoint: Checkpoint, max_context: int, engine: EngineConfig) -> EncoderLimits | None:
    """Return the limits of an encoder-decoder model, or None if the model has no encoder.

    The context must have room for the decoder's start tokens and for one generated token.
    """
    model = checkpoint.model
    if model.encoder is None:
        return None
    decoder_start_ids = checkpoint.begin_ids
    return EncoderLimits(
        max_input=min(
            model.max_encoder_input,
            engine.scheduling.max_step_tokens - engine.scheduling.slots,
            max_context - len(decoder_start_ids) - 1,
        ),
        reply=model.max_context - model.max_encoder_input,
        decoder_start_ids=decoder_start_ids,
        banned=_never(checkpoint),
    )


def _never(checkpoint: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that a reply must not contain (`bad_words_ids`).

    Marian models list their padding token: it starts each reply, so the decoder is likely to generate it again.
    """
    listed: Any = checkpoint.generation.get("bad_words_ids", checkpoint.config.get("bad_words_ids"))
    if not isinstance(listed, list):
        return ()
    vocab = checkpoint.model.embed.vocab
    return tuple(
        tuple(ids) for ids in listed if isinstance(ids, list) and ids and all(_is_id(one, vocab) for one in ids)
    )


def _is_id(value: Any, vocab: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab
