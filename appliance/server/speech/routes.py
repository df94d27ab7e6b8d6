"""POST /v1/audio/transcriptions and /v1/audio/translations (docs/speech.md)."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from appliance.observability.log import Outcome
from appliance.observability.metrics import now
from appliance.server.errors.api import BadRequest, EngineFailed, Unavailable, error_object
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.pipeline import Call, as_json, log_request, receive, route
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, Service, service_of
from appliance.server.http.sse import EventStream, guarded
from appliance.server.schema.speech import SpeechFields, TranscriptionRequest, TranslationRequest
from appliance.server.speech.decoder import transcribe
from appliance.server.speech.events import transcript_events
from appliance.server.speech.form import FILE, form_body, read_form
from appliance.server.speech.formats import Segment, joined, srt, verbose_segment, verbose_words, vtt
from appliance.server.speech.plan import SpeechPlan, language_name, plan_speech
from engine.api.messages import Delta, Submit
from engine.media.processed import MediaError

if TYPE_CHECKING:
    from appliance.server.speech.recognize import Recognizer, Run
    from engine.media.spectrogram import Samples

router = APIRouter()


def _usage(recognizer: "Recognizer") -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(recognizer.seconds)}


def runner_of(call: Call) -> "Run":
    async def run(submit: Submit) -> list[Delta]:
        """Return the deltas of one sequence."""
        found: list[Delta] = []
        async with route(call, (submit,)) as stream:
            async for _, delta in stream.deltas():
                if delta.finish == "abort":
                    raise Unavailable("The service is shutting down. Repeat the request later.", DRAIN_RETRY_AFTER_S)
                found.append(delta)
        if not found or found[-1].finish is None:
            raise EngineFailed
        return found

    return run


class Recognition:
    """One request: its segments, counted in metrics and in the log when it ends for any reason."""

    def __init__(self, call: Call, body: SpeechFields, recognizer: "Recognizer") -> None:
        self.call, self.body, self.recognizer = call, body, recognizer
        self._began_s = now()
        self._first_s: float | None = None
        self.finished = False
        self.sent: list[Segment] = []  # segments of a stream so far

    async def segments(self) -> AsyncGenerator[list[Segment], None]:
        try:
            async with aclosing(self.recognizer.segments()) as found:
                async for segments in found:
                    self._first_s = self._first_s or now()
                    yield segments
            self.finished = True
        finally:
            self._count()

    def _count(self) -> None:
        service, made = self.call.service, self.recognizer
        service.metrics.request_done(1, made.tokens)
        service.metrics.add("audio_seconds", made.seconds)
        service.metrics.add("audio_fallbacks", made.fallbacks)
        service.log.completed(
            self.call.subject,
            Outcome(
                model=service.reply_name(self.body.model),
                prompt_tokens=0,
                completion_tokens=made.tokens,
                finish_reason="stop" if self.finished else "cancelled",
                ttft_s=round(self._first_s - self._began_s, 4) if self._first_s else None,
                seconds=round(now() - self._began_s, 4),
            ),
        )

    async def whole(self) -> list[Segment]:
        async with aclosing(self.segments()) as found:
            return [segment async for segments in found for segment in segments]


async def _texts(segments: AsyncIterator[list[Segment]], sent: list[Segment]) -> AsyncGenerator[str, None]:
    """Yield the text of each segment, which is added to `sent`."""
    async for found in segments:
        for segment in found:
            sent.append(segment)
            yield segment.text


def _reply(request: Recognition, plan: SpeechPlan, segments: list[Segment]) -> Response:
    call, recognizer = request.call, request.recognizer
    match request.body.response_format:
        case "text":
            return Response(joined(segments) + "\n", media_type="text/plain")
        case "srt":
            return Response(srt(segments), media_type="text/plain")
        case "vtt":
            return Response(vtt(segments), media_type="text/vtt")
        case "verbose_json":
            language = "en" if plan.task == "translate" else recognizer.language or "en"
            value = {
                "task": plan.task,
                "language": language_name(language),
                "duration": round(recognizer.seconds, 2),
                "text": joined(segments),
            }
            if plan.words:
                value["words"] = verbose_words(segments)
            if plan.segments:
                value["segments"] = [verbose_segment(index, one) for index, one in enumerate(segments)]
            return as_json(call, {**value, "usage": _usage(recognizer)})
    return as_json(call, {"text": joined(segments), "usage": _usage(recognizer)})


async def _samples(service: Service, data: bytes) -> "Samples":
    """Return the samples of an audio file. Raise BadRequest."""
    assert service.media is not None, "a speech model has a loader"
    try:
        return await service.media.samples(data, service.config.limits.max_audio_seconds)
    except MediaError as error:
        raise BadRequest(str(error), FILE) from None


async def create_transcript(service: Service, request: Request, body: SpeechFields, data: bytes, kind: str) -> Response:
    # NumPy takes 0.1 s to import, which only a speech model should cost.
    from appliance.server.speech.recognize import Recognizer

    call = receive(service, request, body.model, kind)
    log_request(call, body, {"prompt"})
    if service.config.transcriber is not None:
        return await transcribe(call, request, body, data)
    plan = await asyncio.to_thread(plan_speech, body, call.context)
    samples = await until_disconnect(request, _samples(service, data))
    made = Recognition(call, body, Recognizer(plan, samples, runner_of(call)))
    if not body.stream:
        return _reply(made, plan, await until_disconnect(request, made.whole()))
    segments = made.segments()
    events = transcript_events(
        _texts(segments, made.sent), lambda: _usage(made.recognizer), lambda: verbose_words(made.sent)
    )
    records = guarded(events, lambda error: error_object(error, call.identity.request_id))
    pause_s = service.config.endpoints.stream_keep_alive
    return EventStream(records, aclosing(segments), pause_s=pause_s)


@router.post(
    "/v1/audio/transcriptions", openapi_extra=form_body(TranscriptionRequest), summary="Transcribe an audio file"
)
async def transcriptions(request: Request) -> Response:
    service = service_of(request)
    body, data = await read_form(service, request, TranscriptionRequest)
    return await create_transcript(service, request, body, data, "transcriptions")


@router.post(
    "/v1/audio/translations", openapi_extra=form_body(TranslationRequest), summary="Translate speech into English"
)
async def translations(request: Request) -> Response:
    service = service_of(request)
    body, data = await read_form(service, request, TranslationRequest)
    return await create_transcript(service, request, body, data, "translations")
