"""Transcription with a decoder that reads audio in its prompt (Voxtral). The reply is the text, without timestamps."""

import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from appliance.config.gateway import Transcriber
from appliance.observability.log import Outcome
from appliance.observability.metrics import now
from appliance.server.chat.parsed import Served
from appliance.server.chat.window import check_length
from appliance.server.errors.api import BadRequest, EngineFailed, Unavailable, error_object
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.pipeline import Call, as_json, route
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, Service
from appliance.server.http.sse import EventStream, guarded
from appliance.server.schema.speech import SpeechFields, TranscriptionRequest, TranslationRequest
from appliance.server.speech.events import transcript_events
from appliance.server.speech.form import FILE
from appliance.server.speech.languages import LANGUAGES, language_code
from appliance.server.speech.plan import check_fields
from engine.api.errors import RequestError
from engine.api.messages import Sampling, Submit
from engine.api.ranges import effective_temperature, effective_top_k
from engine.media.processed import MediaError, Processed
from engine.media.prompt import MediaPromptError, expand
from engine.text import IncrementalDecoder


def check_decoder(body: SpeechFields, form: Transcriber) -> None:
    """Raise RequestError for a field that needs timestamps, a translation or a prompt, which the model does not
    have."""
    check_fields(body)
    if isinstance(body, TranslationRequest):
        raise RequestError("This model transcribes and does not translate. Use /v1/audio/transcriptions.", "model")
    if body.response_format not in ("json", "text"):
        raise RequestError(
            f"response_format {body.response_format} requires timestamps, which this model does not have. Use json or "
            "text.",
            "response_format",
        )
    if isinstance(body, TranscriptionRequest) and "word" in body.timestamp_granularities:
        message = "This model has no timestamps. Leave out timestamp_granularities."
        raise RequestError(message, "timestamp_granularities")
    if body.prompt and body.prompt.strip() and "{prompt}" not in form.prompt:
        raise RequestError("This model has no prompt before a recording. Leave it out.", "prompt")


def plan_decoder(body: SpeechFields, served: Served, item: Processed) -> Submit:
    """Return the sequence of a transcript. Raise RequestError."""
    config, text = served.config, served.text
    form = config.transcriber
    assert form is not None, "only for models with a form of transcription"
    placeholder = text.known_media["audio"].tokens.placeholder
    prompt = form.prompt.replace("{audio}", placeholder).replace("{language}", _language(body.language, form))
    prompt = prompt.replace("{prompt}", (body.prompt or "").strip())
    try:
        found = expand(prompt, [item], text.known_media, partial(text.tokenizer.encode, add_special_tokens=False))
    except MediaPromptError as error:
        raise RequestError(str(error), FILE) from None
    check_length(len(found.ids) + 1, config.max_context, param=FILE)
    room = config.max_context - len(found.ids)
    ttft_deadline, deadline = served.deadlines.resolve(body, served.arrived_s)
    own = text.tokenizer.eos_id
    return Submit(
        id=f"{served.request_id}-0",
        prompt=tuple(found.ids),
        sampling=Sampling(
            temperature=effective_temperature(body.temperature),
            top_k=effective_top_k(body.top_k),
            top_p=body.top_p,
            min_p=body.min_p,
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
        ),
        max_tokens=min(room, body.max_completion_tokens or room),
        eos_token_ids=config.eos_token_ids or (() if own is None else (own,)),
        priority=served.resolved_priority(body.priority),
        owner=served.owner,
        share=served.share,
        ttft_deadline=ttft_deadline,
        deadline=deadline,
        media=found.media,
    )


def _language(given: str | None, form: Transcriber) -> str:
    if not given or not given.strip():
        return ""
    code = language_code(given)
    if code not in LANGUAGES:
        raise RequestError(
            f"language {given[:40]!r} is not known. Use an ISO 639-1 code such as en, or leave it out.", "language"
        )
    return form.language.replace("{code}", code).replace("{name}", LANGUAGES[code].title())


@dataclass
class Transcription:
    """One request: pieces of its text, counted in metrics and in the log when it ends for any reason."""

    call: Call
    submit: Submit
    seconds: float
    marker: str = ""
    """The transcript follows this text; without it, the reply is the transcript."""
    tokens: int = 0
    finished: bool = False
    began_s: float = 0.0
    first_s: float | None = None

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yield the transcript."""
        before = "" if self.marker else None
        async with aclosing(self._pieces()) as found:
            async for piece in found:
                if before is None:
                    yield piece
                    continue
                before += piece
                _, marker, after = before.partition(self.marker)
                if marker:
                    before = None
                    if after:
                        yield after
        if before:
            yield before

    async def _pieces(self) -> AsyncGenerator[str, None]:
        text = self.call.context.text
        decoder, ends = IncrementalDecoder(text.tokenizer, self.submit.prompt), set(self.submit.eos_token_ids)
        self.began_s = now()
        try:
            async with route(self.call, (self.submit,)) as stream:
                async for _, delta in stream.deltas():
                    if delta.finish == "abort":
                        raise Unavailable(
                            "The service is shutting down. Repeat the request later.", DRAIN_RETRY_AFTER_S
                        )
                    self.first_s = self.first_s or now()
                    self.tokens += len(delta.ids)
                    if piece := "".join(decoder.push(token) for token in delta.ids if token not in ends):
                        yield piece
                    self.finished = self.finished or delta.finish is not None
            if not self.finished:
                raise EngineFailed
        finally:
            self._count()

    def _count(self) -> None:
        service = self.call.service
        service.metrics.request_done(1, self.tokens)
        service.metrics.add("audio_seconds", self.seconds)
        service.log.completed(
            self.call.subject,
            Outcome(
                model=service.reply_name(None),
                prompt_tokens=len(self.submit.prompt),
                completion_tokens=self.tokens,
                finish_reason="stop" if self.finished else "cancelled",
                ttft_s=round(self.first_s - self.began_s, 4) if self.first_s else None,
                seconds=round(now() - self.began_s, 4),
            ),
        )

    async def whole(self) -> str:
        async with aclosing(self.pieces()) as found:
            return "".join([piece async for piece in found]).strip()

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.seconds)}


async def audio_item(service: Service, data: bytes) -> Processed:
    """Return the processed recording. Raise BadRequest."""
    assert service.media is not None, "the model reads audio"
    try:
        return await service.media.audio(data, service.config.limits.max_audio_seconds)
    except MediaError as error:
        raise BadRequest(str(error), FILE) from None


async def transcribe(call: Call, request: Request, body: SpeechFields, data: bytes) -> Response:
    form = call.service.config.transcriber
    assert form is not None, "only for models with a form of transcription"
    check_decoder(body, form)
    item = await until_disconnect(request, audio_item(call.service, data))
    made = Transcription(
        call, plan_decoder(body, call.context, item), item.seconds, "" if body.language else form.marker
    )
    if body.stream:
        pieces = made.pieces()
        events = transcript_events(pieces, lambda: made.usage)
        records = guarded(events, lambda error: error_object(error, call.identity.request_id))
        return EventStream(records, aclosing(pieces), pause_s=call.service.config.endpoints.stream_keep_alive)
    text = await until_disconnect(request, made.whole())
    if body.response_format == "text":
        return Response(text + "\n", media_type="text/plain")
    return as_json(call, {"text": text, "usage": made.usage})
