"""WebSocket /v1/realtime: transcription of audio that arrives in pieces, with OpenAI's events (docs/speech.md).

A client appends PCM samples to a buffer and commits it, or the server commits it where speech ends
(`turn_detection`). Each committed buffer is an item, whose transcript arrives in deltas and then completely. Items of a
connection are transcribed in order, while the client sends further audio.
"""

import asyncio
import base64
import math
import uuid
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import orjson
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.websockets import WebSocket, WebSocketDisconnect

from appliance.observability.log import Subject
from appliance.observability.metrics import now
from appliance.server.errors.api import (
    ApiError,
    Forbidden,
    RateLimited,
    Unauthorized,
    Unavailable,
    error_object,
    error_response,
)
from appliance.server.http.api_keys import key_of
from appliance.server.http.pipeline import Call, receive
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, DRAINING, Service
from appliance.server.schema.speech import TranscriptionRequest
from appliance.server.speech.decoder import Transcription, check_decoder, plan_decoder
from appliance.server.speech.events import text_deltas
from appliance.server.speech.plan import plan_speech
from appliance.server.speech.routes import Recognition, runner_of
from appliance.server.speech.turns import LOUD_FRAMES, SAMPLE_BYTES, Turn, TurnDetection, TurnDetector
from engine.api.errors import RequestError
from engine.media.processed import MediaError

if TYPE_CHECKING:
    from engine.media.spectrogram import Samples

PATH = "/v1/realtime"
PCM = "audio/pcm"
VAD = "server_vad"
RATES = (8_000, 48_000)
SHORTEST_S = 0.1
MAX_WAITING = 16
"""Committed items that wait for their transcripts."""
KEY_PROTOCOL = "openai-insecure-api-key."
"""Subprotocol with the API key, for browsers, which cannot set headers."""

router = APIRouter()


@dataclass(frozen=True)
class Session:
    """Settings of a connection."""

    rate: int = 24_000
    """Samples per second that the client sends."""
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    turns: TurnDetection | None = None
    """Detection of turns. None if the client commits."""

    def shown(self, id: str) -> dict[str, Any]:
        """Return the session of an event."""
        transcription = {"model": self.model, "language": self.language, "prompt": self.prompt}
        return {
            "id": id,
            "object": "realtime.session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": PCM, "rate": self.rate},
                    "transcription": transcription,
                    "turn_detection": None if self.turns is None else {"type": VAD, **asdict(self.turns)},
                    "noise_reduction": None,
                }
            },
        }


@dataclass(frozen=True)
class Item:
    """A committed buffer."""

    id: str
    audio: bytes
    session: Session

    @property
    def seconds(self) -> float:
        return len(self.audio) / SAMPLE_BYTES / self.session.rate


@dataclass
class Connection:
    """One client. Belongs to one event loop."""

    service: Service
    socket: WebSocket
    session: Session
    id: str = field(default_factory=lambda: f"sess_{uuid.uuid4().hex}")
    buffer: bytearray = field(default_factory=bytearray)
    first: int = 0
    """Number of the buffer's first sample, since turns are detected."""
    detector: TurnDetector | None = None
    speech: str = ""
    """Id of the item whose speech has begun."""
    previous: str | None = None
    items: asyncio.Queue[Item] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    waiting_s: float = 0.0
    """Duration of the committed items that have no transcript yet."""
    accepted: int = 0
    """Committed items that have no transcript yet. A drain waits for them."""

    async def send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **fields}
        try:
            await self.socket.send_text(orjson.dumps(event).decode())
        except RuntimeError as error:  # the connection is being closed
            raise WebSocketDisconnect(1006) from error

    async def run(self) -> None:
        """Read events until the client disconnects. Transcribe items meanwhile."""
        await self.send("session.created", session=self.session.shown(self.id))
        worker = asyncio.create_task(self._transcribe())
        try:
            while not self.service.closed:
                message = await self.socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                await self._read(message)
            joined = asyncio.ensure_future(self.items.join())
            await asyncio.wait((joined, worker), return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
            if not worker.done():  # it ends only without a client
                await self.socket.close(1001, DRAINING)
        except WebSocketDisconnect:
            return
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            self._count(-self.accepted)

    async def _read(self, message: MutableMapping[str, Any]) -> None:
        event_id: str | None = None
        try:
            event = _event(message)
            # Another type is not returned: it may be nested more deeply than JSON is written.
            given = event.get("event_id")
            event_id = given if isinstance(given, str) else None
            await self._handle(event)
        except (ApiError, RequestError) as error:
            await self._refuse(error, event_id)

    async def _refuse(self, error: ApiError | RequestError, event_id: str | None) -> None:
        text = error.message if isinstance(error, ApiError) else str(error)
        fault = {"type": "invalid_request_error", "code": "invalid_event", "message": text}
        await self.send("error", error={**fault, "param": error.param, "event_id": event_id})

    async def _handle(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "session.update" | "transcription_session.update":
                self._update(_updated(self.service, self.session, event.get("session")))
                await self.send("session.updated", session=self.session.shown(self.id))
            case "input_audio_buffer.append":
                await self._append(event.get("audio"))
            case "input_audio_buffer.clear":
                self._drop(len(self.buffer) // SAMPLE_BYTES)
                self.buffer.clear()
                if self.detector is not None:
                    self.detector.restart(self.first)
                await self.send("input_audio_buffer.cleared")
            case "input_audio_buffer.commit":
                await self._commit_buffer()
            case kind:
                shown = kind[:100] if isinstance(kind, str) else type(kind).__name__
                raise RequestError(
                    f"The event type {shown!r} is not supported. Use session.update or "
                    "input_audio_buffer.append, .commit or .clear.",
                    "type",
                )

    def _update(self, session: Session) -> None:
        if session.turns != self.session.turns or session.rate != self.session.rate:
            longest = int(self.service.config.limits.max_audio_seconds * session.rate)
            self.detector = None if session.turns is None else _detector(session.turns, session.rate, longest)
            self.buffer.clear()
            self.first = 0
        self.session = session

    async def _append(self, audio: Any) -> None:
        try:
            if not isinstance(audio, str):
                raise TypeError
            data = base64.b64decode(audio, validate=True)
        except (TypeError, ValueError):  # binascii.Error is a ValueError, as is the error for other characters
            raise RequestError("audio must be a text in base64.", "audio") from None
        longest = self.service.config.limits.max_audio_seconds
        seconds = (len(self.buffer) + len(data)) / SAMPLE_BYTES / self.session.rate
        # With turn detection, the detector cuts the buffer below this limit.
        if (seconds if self.detector is None else len(data) / SAMPLE_BYTES / self.session.rate) > longest:
            raise RequestError(
                f"The buffer is longer than {longest:g} seconds, the server's limits.max_audio_seconds. Commit it "
                "before you append more audio.",
                "audio",
            )
        if seconds + self.waiting_s > 2 * longest:
            raise RequestError(
                f"The buffer and the items without a transcript are longer than {2 * longest:g} seconds, twice the "
                "server's limits.max_audio_seconds. Wait for a transcript.",
                "audio",
            )
        self.buffer += data
        if self.detector is not None:
            for turn in list(self.detector.feed(data)):  # completely, because of its position
                await self._turn(turn, self.detector)
            if not self.detector.speaking:
                self._drop(self.detector.position - self.detector.kept - self.first)

    async def _turn(self, turn: Turn, detector: TurnDetector) -> None:
        milliseconds = turn.sample * 1000 // detector.rate
        if turn.kind == "started":
            self._drop(turn.sample - (detector.kept - LOUD_FRAMES * detector.frame) - self.first)
            self.speech = f"item_{uuid.uuid4().hex}"
            await self.send("input_audio_buffer.speech_started", audio_start_ms=milliseconds, item_id=self.speech)
            return
        await self.send("input_audio_buffer.speech_stopped", audio_end_ms=milliseconds, item_id=self.speech)
        end = (turn.sample - self.first) * SAMPLE_BYTES
        spoken = bytes(self.buffer[:end])
        self._drop(turn.sample - self.first)
        try:
            await self._commit(spoken, self.speech)
        except RequestError as error:  # the later turns of this audio are independent of it
            await self._refuse(error, None)

    def _drop(self, samples: int) -> None:
        """Drop samples at the beginning of the buffer."""
        if samples > 0:
            del self.buffer[: samples * SAMPLE_BYTES]
            self.first += samples

    async def _commit_buffer(self) -> None:
        audio = bytes(self.buffer)
        await self._commit(audio, f"item_{uuid.uuid4().hex}")
        self._drop(len(audio) // SAMPLE_BYTES)
        if self.detector is not None:
            self.detector.reset()

    async def _commit(self, audio: bytes, id: str) -> None:
        seconds = len(audio) / SAMPLE_BYTES / self.session.rate
        if seconds < SHORTEST_S:
            raise RequestError(f"The buffer has {seconds:.2f} s of audio; {SHORTEST_S} s are needed.", "audio")
        if len(audio) % SAMPLE_BYTES:
            raise RequestError("The buffer has an odd number of bytes; a sample has two.", "audio")
        if self.service.closed:
            raise RequestError(DRAINING, "type")
        if self.items.full():
            raise RequestError(f"{MAX_WAITING} items wait for their transcripts. Wait for one of them.", "type")
        item = Item(id, audio, self.session)
        await self.send("input_audio_buffer.committed", item_id=item.id, previous_item_id=self.previous)
        content = [{"type": "input_audio", "transcript": None}]
        message = {"id": item.id, "object": "realtime.item", "type": "message", "role": "user", "status": "completed"}
        await self.send("conversation.item.added", item={**message, "content": content}, previous_item_id=self.previous)
        self.previous = item.id
        self.waiting_s += seconds
        self._count(1)
        self.items.put_nowait(item)

    async def _transcribe(self) -> None:
        while True:
            item = await self.items.get()
            await self._transcribe_item(item)
            self.waiting_s -= item.seconds
            self._count(-1)
            self.items.task_done()

    async def _transcribe_item(self, item: Item) -> None:
        kind = "conversation.item.input_audio_transcription"
        place = {"item_id": item.id, "content_index": 0}
        text = ""
        try:
            async with aclosing(self._deltas(item)) as deltas:
                async for delta in deltas:
                    text += delta
                    await self.send(f"{kind}.delta", **place, delta=delta)
        except (ApiError, RequestError) as error:
            fault = error_object(error, self.socket.state.request_id)["error"]
            await self.send(f"{kind}.failed", **place, error=fault)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # the later items are transcribed nevertheless
            self.service.log.unexpected(self.socket.state.subject, error)
            fault = error_object(error, self.socket.state.request_id)["error"]
            await self.send(f"{kind}.failed", **place, error=fault)
        else:
            usage = {"type": "duration", "seconds": math.ceil(item.seconds)}
            await self.send(f"{kind}.completed", **place, transcript=text, usage=usage)

    async def _deltas(self, item: Item) -> AsyncGenerator[str, None]:
        """Yield the text of an item in pieces."""
        service, session = self.service, item.session
        self.socket.state.request_id = uuid.uuid4().hex
        self.socket.state.subject = Subject(self.socket.state.request_id, arrived_s=now())
        self._enter()
        body = TranscriptionRequest(model=session.model, language=session.language, prompt=session.prompt)
        # A connection has the headers and the state that a request has.
        call = receive(service, cast(Request, self.socket), body.model, "realtime")
        samples = await asyncio.to_thread(resampled, item.audio, session.rate)
        pieces = await _pieces(call, body, samples)
        async with aclosing(pieces):
            async for delta in text_deltas(pieces):
                yield delta

    def _enter(self) -> None:
        """Raise RateLimited beyond the limits of the API key, and Unauthorized if a reload has removed the key."""
        service, key = self.service, self.socket.state.key
        if service.keys and (key is None or all(key.digest != one.digest for one in service.keys)):
            raise Unauthorized
        spent = None if key is None else service.allowances.enter(key.owner, now())
        if spent is not None:
            service.metrics.add("key_refusals", 1, key.shown, spent.unit)
            raise RateLimited(spent.unit, spent.per_minute, spent.seconds, {})

    def _count(self, change: int) -> None:
        self.accepted += change
        self.service.open_requests += change
        self.service.metrics.set("open_requests", self.service.open_requests)


async def _pieces(call: Call, body: TranscriptionRequest, samples: "Samples") -> AsyncGenerator[str, None]:
    """Return the pieces of a transcript. Raise RequestError."""
    if call.service.config.transcriber is not None:
        form = call.service.config.transcriber
        check_decoder(body, form)
        media = call.service.media
        assert media is not None, "the model reads audio"
        try:
            item = await media.audio(
                await asyncio.to_thread(wav_of, samples), call.service.config.limits.max_audio_seconds
            )
        except MediaError as error:
            raise RequestError(str(error), "audio") from None
        marker = "" if body.language else form.marker
        return Transcription(call, plan_decoder(body, call.context, item), item.seconds, marker).pieces()
    from appliance.server.speech.recognize import Recognizer  # imports NumPy

    plan = await asyncio.to_thread(plan_speech, body, call.context)
    return _segment_texts(Recognition(call, body, Recognizer(plan, samples, runner_of(call))))


async def _segment_texts(made: Recognition) -> AsyncGenerator[str, None]:
    async with aclosing(made.segments()) as segments:
        async for found in segments:
            for segment in found:
                yield segment.text


def _event(message: MutableMapping[str, Any]) -> dict[str, Any]:
    text = message.get("text")
    try:
        event = orjson.loads(text if text is not None else message.get("bytes") or b"")
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise RequestError("An event must be a JSON object.", "event")
    return event


def _updated(service: Service, session: Session, given: Any) -> Session:
    """Return the session with the settings of an update, of the present or the former API. Raise RequestError."""
    if not isinstance(given, dict):
        raise RequestError("session must be an object.", "session")
    if given.get("type", "transcription") != "transcription":
        raise RequestError("session.type must be transcription.", "session.type")
    audio = given.get("audio")
    source = audio.get("input") if isinstance(audio, dict) else None
    former = {
        "format": given.get("input_audio_format"),
        "transcription": given.get("input_audio_transcription"),
        **({"turn_detection": given["turn_detection"]} if "turn_detection" in given else {}),
    }
    settings: dict[str, Any] = source if isinstance(source, dict) else former
    turns = _turns(settings["turn_detection"]) if "turn_detection" in settings else session.turns
    found = replace(session, rate=_rate(settings.get("format"), session.rate), turns=turns)
    wanted = settings.get("transcription")
    if wanted is None:
        return found
    try:
        fields = {name: wanted.get(name) for name in ("model", "language", "prompt")}
        body = TranscriptionRequest.model_validate(fields)
    except (AttributeError, ValidationError):
        raise RequestError(
            "transcription must be an object with texts in model, language and prompt.",
            "session.audio.input.transcription",
        ) from None
    service.model_name(body.model or session.model)
    return replace(found, model=body.model or session.model, language=body.language, prompt=body.prompt)


def _detector(turns: TurnDetection, rate: int, longest: int) -> TurnDetector:
    """Return a detector whose items have up to `longest` samples, including those before the speech."""
    detector = TurnDetector(turns, rate, longest)
    detector.longest -= detector.kept + detector.frame  # speech ends with a frame
    if detector.longest < rate * SHORTEST_S:
        raise RequestError(
            f"prefix_padding_ms is not shorter than {longest / rate:g} seconds, the server's limits.max_audio_seconds.",
            "session.audio.input.turn_detection.prefix_padding_ms",
        )
    return detector


def _turns(given: Any) -> TurnDetection | None:
    """Return the settings of turn detection, or None if the client commits."""
    place = "session.audio.input.turn_detection"
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != VAD:
        raise RequestError(f"turn_detection must be null, or an object of the type {VAD}.", place)
    limits = {"threshold": 1.0, "prefix_padding_ms": 5_000, "silence_duration_ms": 10_000}
    wanted = {name: value for name, value in given.items() if name != "type" and value is not None}
    for name, value in wanted.items():
        if name not in limits:
            raise RequestError(
                f"turn_detection: {name[:100]!r} is not supported. Leave it out.", f"{place}.{name[:100]}"
            )
        types = (int, float) if name == "threshold" else (int,)
        if not isinstance(value, types) or isinstance(value, bool) or not 0 <= value <= limits[name]:
            raise RequestError(f"{name} must be a number from 0 to {limits[name]:g}.", f"{place}.{name}")
    return TurnDetection(**wanted)


def _rate(given: Any, rate: int) -> int:
    """Return the sampling rate of a format."""
    if given is None:
        return rate
    if given == "pcm16":
        return 24_000
    wanted = given.get("rate", rate) if isinstance(given, dict) and given.get("type") == PCM else None
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not RATES[0] <= wanted <= RATES[1]:
        raise RequestError(
            f"format must have the type {PCM} and a rate of {RATES[0]} to {RATES[1]}.", "session.audio.input.format"
        )
    return wanted


def resampled(audio: bytes, rate: int) -> "Samples":
    """Return 16-bit samples as float32 at 16 kHz."""
    import numpy as np
    import soxr

    from engine.media.spectrogram import SAMPLE_RATE

    samples = np.frombuffer(audio, "<i2").astype(np.float32) / np.float32(32_768)
    if rate == SAMPLE_RATE:
        return cast("Samples", samples)
    return np.ascontiguousarray(soxr.resample(samples, rate, SAMPLE_RATE), np.float32)


def wav_of(samples: "Samples") -> bytes:
    """Return a WAV file of these samples at 16 kHz."""
    import io

    import soundfile

    from engine.media.spectrogram import SAMPLE_RATE

    stream = io.BytesIO()
    soundfile.write(stream, samples, SAMPLE_RATE, format="WAV", subtype="FLOAT")
    return stream.getvalue()


@router.websocket(PATH)
async def realtime(socket: WebSocket) -> None:
    service: Service = socket.app.state.service
    protocols: list[str] = socket.scope.get("subprotocols", [])
    try:
        key = key_of(service, _authorization(socket.headers, protocols)) if service.keys else None
        service.model_name(socket.query_params.get("model"))
        if service.closed or not service.has_text:
            raise Unavailable(DRAINING if service.closed else "The service is starting.", DRAIN_RETRY_AFTER_S)
        if not _same_origin(service, socket.headers):
            raise Forbidden("The page of this site may not connect: endpoints.cors_origins does not have it.")
    except (ApiError, RequestError) as error:
        await socket.send_denial_response(error_response(error, uuid.uuid4().hex))
        return
    socket.state.key, socket.state.owner = key, "" if key is None else key.owner
    socket.state.request_id = uuid.uuid4().hex
    await socket.accept("realtime" if "realtime" in protocols else None)
    await Connection(service, socket, Session(model=socket.query_params.get("model"))).run()


def _authorization(headers: Headers, protocols: list[str]) -> Headers:
    """Return the headers with the API key of a client, which may be a subprotocol."""
    given = next((one.removeprefix(KEY_PROTOCOL) for one in protocols if one.startswith(KEY_PROTOCOL)), "")
    return Headers({"authorization": f"Bearer {given}"}) if given else headers


def _same_origin(service: Service, headers: Headers) -> bool:
    """Return whether a connection is not from a page of another site, unless endpoints.cors_origins has that site.
    Browsers send the origin of the page; the same-origin policy does not cover WebSockets."""
    origin, allowed = headers.get("origin"), service.config.endpoints.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return True
    return urlsplit(origin).netloc == headers.get("host")
