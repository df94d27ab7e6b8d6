"""Gateway settings for speech models."""

from collections.abc import Iterator
from typing import Any

from appliance.config.gateway import SpeechModel, Transcriber
from engine.models import qwen3_asr, voxtral
from engine.models.checkpoint import Checkpoint

ENGLISH_VOCABULARY = 51_864
"""Tokens of Whisper's models of English alone; multilingual ones have more. Used if generation_config.json does not
have `is_multilingual`."""


TRANSCRIBERS = {
    **dict.fromkeys(voxtral.ARCHITECTURES, voxtral.TRANSCRIPTION),
    **dict.fromkeys(qwen3_asr.ARCHITECTURES, qwen3_asr.TRANSCRIPTION),
}
"""Prompt, language and marker of the decoders that transcribe audio, by architecture."""


def speech_model(checkpoint: Checkpoint) -> SpeechModel | None:
    """Return the settings of a speech model, or None for other models."""
    model, generation = checkpoint.model, checkpoint.generation
    if model.audio is None:
        return None
    latest = generation.get("max_initial_timestamp_index")
    multilingual = generation.get("is_multilingual", model.embed.vocab > ENGLISH_VOCABULARY)
    return SpeechModel(
        mels=model.audio.mels,
        positions=model.audio.positions,
        reply=model.max_context - model.max_encoder_input,
        multilingual=multilingual is True,
        latest_first=latest if isinstance(latest, int) and not isinstance(latest, bool) and latest >= 0 else None,
        suppressed=tuple(_ids(checkpoint, "suppress_tokens")),
        suppressed_first=tuple(_ids(checkpoint, "begin_suppress_tokens")),
    )


def transcriber(checkpoint: Checkpoint) -> Transcriber | None:
    """Return the prompt of a decoder that transcribes audio, or None for other models."""
    if checkpoint.model.media is None or checkpoint.architecture not in TRANSCRIBERS:
        return None
    prompt, language, marker = TRANSCRIBERS[checkpoint.architecture]
    return Transcriber(prompt=prompt, language=language, marker=marker)


def _ids(checkpoint: Checkpoint, key: str) -> Iterator[int]:
    """Yield the ids of a list in generation_config.json, or else in config.json, that are in the vocabulary."""
    given: Any = checkpoint.generation.get(key, checkpoint.config.get(key))
    for one in given if isinstance(given, list) else ():
        if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < checkpoint.model.embed.vocab:
            yield one
