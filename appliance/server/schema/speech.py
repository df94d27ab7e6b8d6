"""Forms of /v1/audio/transcriptions and /v1/audio/translations, without the file."""

from typing import Literal

from appliance.server.schema.common import Wire

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["segment", "word"]


class SpeechFields(Wire):
    """Fields of both routes. Values of a form are text, so numbers and flags are read from text."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: ResponseFormat = "json"
    temperature: float = 0.0
    stream: bool = False
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_completion_tokens: int | None = None
    priority: int = 0
    ttft_deadline_ms: int | None = None
    deadline_ms: int | None = None


class TranscriptionRequest(SpeechFields):
    timestamp_granularities: list[Granularity] = ["segment"]


class TranslationRequest(SpeechFields):
    to_language: str | None = None
