"""Options of one request, and the sequences of its windows."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.config.gateway import SpeechModel
from appliance.server.chat.parsed import Served
from appliance.server.schema.speech import SpeechFields, TranscriptionRequest, TranslationRequest
from appliance.server.speech.languages import LANGUAGES, language_code
from appliance.server.speech.model import SpeechTokens
from appliance.server.speech.transcript import TEMPERATURES
from engine.api.errors import RequestError
from engine.api.media import MediaItem
from engine.api.messages import AlignmentOptions, Sampling, SpeechRules, Submit
from engine.api.ranges import (
    check_max_tokens,
    check_penalty,
    check_repetition,
    check_seed,
    check_truncation,
    effective_temperature,
    effective_top_k,
)


@dataclass(frozen=True)
class SpeechPlan:
    """A parsed request."""

    body: SpeechFields
    served: Served
    model: SpeechModel
    tokens: SpeechTokens
    task: str  # transcribe or translate
    language: str | None  # code; None: detected in the first window
    before: tuple[int, ...]  # tokens of the text before the recording
    temperatures: tuple[float, ...]
    seed: int
    words: bool = False  # the reply has the times of words
    segments: bool = True  # verbose_json has the segments

    def submit(self, number: int, item: MediaItem, language: str | None, attempt: int) -> Submit:
        """Return the sequence of one pass. number: distinguishes the passes of a request."""
        body, tokens = self.body, self.tokens
        prefix = (*self.before, tokens.start)
        begin = self._begin(language)
        room = self.model.reply - len(prefix)
        ttft_deadline, deadline = self.served.deadlines.resolve(body, self.served.arrived_s)
        length = self.model.reply // 2 + len(begin)
        if body.max_completion_tokens is not None:
            length = min(length, body.max_completion_tokens + len(begin))
        return Submit(
            id=f"{self.served.request_id}-{number}",
            # Positions of audio have no token; the start token is never sampled.
            prompt=(*(tokens.start,) * self.model.positions, *prefix),
            sampling=self._sampling(begin, attempt),
            max_tokens=min(room, length),
            eos_token_ids=(tokens.end,),
            priority=self.served.resolved_priority(body.priority),
            owner=self.served.owner,
            share=self.served.share,
            ttft_deadline=ttft_deadline if number == 0 else None,
            deadline=deadline,
            source=self.model.positions,
            media=(item,),
        )

    def alignment(self, number: int, item: MediaItem, language: str, text: Sequence[int], positions: int) -> Submit:
        """Return the sequence that aligns the text of a pass with its audio, which has this many positions. The rows of
        the alignment are the token before each token of the text, and the last one."""
        tokens = self.tokens
        begin = (tokens.start, *(group[0] for group in self._begin(language)))
        _, deadline = self.served.deadlines.resolve(self.body, self.served.arrived_s)
        return Submit(
            id=f"{self.served.request_id}-{number}",
            prompt=(*(tokens.start,) * self.model.positions, *begin, tokens.no_timestamps, *text),
            sampling=Sampling(alignment=AlignmentOptions(len(begin), positions)),
            max_tokens=0,
            priority=self.served.resolved_priority(self.body.priority),
            owner=self.served.owner,
            share=self.served.share,
            deadline=deadline,
            source=self.model.positions,
            media=(item,),
        )

    def _begin(self, language: str | None) -> tuple[tuple[int, ...], ...]:
        tokens = self.tokens
        if not tokens.languages:
            return ()
        languages = tuple(tokens.languages.values()) if language is None else (tokens.languages[language],)
        return languages, (tokens.task(self.task),)

    def _sampling(self, begin: tuple[tuple[int, ...], ...], attempt: int) -> Sampling:
        body, tokens, model = self.body, self.tokens, self.model
        rules = SpeechRules(
            begin=begin,
            timestamps=tokens.zero,
            no_timestamps=tokens.no_timestamps,
            latest_first=model.latest_first,
            end=tokens.end,
            suppressed=model.suppressed,
            suppressed_first=model.suppressed_first,
        )
        return Sampling(
            temperature=self.temperatures[attempt],
            top_k=effective_top_k(body.top_k),
            top_p=body.top_p,
            min_p=body.min_p,
            seed=(self.seed + attempt) % 2**63,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logprobs=0,
            logprob_ids=() if tokens.no_speech is None else (tokens.no_speech,),
            speech=rules,
        )


def plan_speech(body: SpeechFields, served: Served) -> SpeechPlan:
    """Return the parsed request. Raise RequestError for a field that the model or the server cannot use."""
    model = served.config.speech
    assert model is not None, "the routes exist only for speech models"
    tokens = SpeechTokens(served.text.tokenizer, model)
    translates = isinstance(body, TranslationRequest)
    check_fields(body)
    parts = body.timestamp_granularities if isinstance(body, TranscriptionRequest) else ["segment"]
    words = "word" in parts
    if words and body.response_format != "verbose_json" and not (body.stream and body.response_format == "json"):
        raise RequestError(
            "timestamp_granularities: word needs response_format verbose_json, or a stream of json.",
            "timestamp_granularities",
        )
    if translates and not tokens.languages:
        raise RequestError("This model transcribes English only and cannot translate. Use another model.", "model")
    if (
        isinstance(body, TranslationRequest)
        and body.to_language not in (None, "")
        and (language_code(str(body.to_language)) != "en")
    ):
        raise RequestError("to_language: this model translates into English only. Leave it out.", "to_language")
    before: tuple[int, ...] = ()
    if body.prompt and body.prompt.strip():
        ids = tokens.tokenizer.encode(f" {body.prompt.strip()}", add_special_tokens=False)
        # At most half of the decoder's positions, as in the reference implementation; the end of the text is kept.
        text = tuple(one for one in ids if tokens.is_text(one))
        before = (tokens.previous, *text[-(model.reply // 2 - 1) :])
    fixed = effective_temperature(body.temperature)
    return SpeechPlan(
        body=body,
        served=served,
        model=model,
        tokens=tokens,
        task="translate" if translates else "transcribe",
        language=_language(body.language, tokens),
        before=before,
        temperatures=(fixed,) if fixed else TEMPERATURES,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        words=words,
        segments=not words or "segment" in parts,
    )


def check_fields(body: SpeechFields) -> None:
    """Raise RequestError for values that no speech model accepts."""
    check_truncation(body.top_p, body.min_p)
    check_repetition(body.repetition_penalty)
    check_penalty("presence_penalty", body.presence_penalty)
    check_penalty("frequency_penalty", body.frequency_penalty)
    if body.seed is not None:
        check_seed(body.seed)
    if body.max_completion_tokens is not None:
        check_max_tokens(body.max_completion_tokens, "max_completion_tokens")
    if body.stream and body.response_format not in ("json", "text"):
        raise RequestError(
            f"response_format {body.response_format} cannot be streamed. Use json or text, or leave out stream.",
            "response_format",
        )


def _language(given: str | None, tokens: SpeechTokens) -> str | None:
    if not given or not given.strip():
        return None if tokens.languages else "en"
    code = language_code(given)
    known = tokens.languages or {"en": 0}
    if code not in known:
        names = ", ".join(sorted(known)) if len(known) < 4 else f"{len(known)} languages as ISO 639-1 codes such as en"
        raise RequestError(f"language {given[:40]!r} is not supported. The model supports {names}.", "language")
    return code


def language_name(code: str) -> str:
    return LANGUAGES.get(code, code)
