"""One real request of each kind, before the service is ready.

A ready engine does not prove that requests can be answered: weights may be NaN, the chat template may fail, or a head
may return empty vectors. Each engine therefore gets one request for every task of the model, through the routes that
clients use. These requests do not appear in request metrics, logs or the journal.
"""

import asyncio
import io
import logging
import uuid
import wave
from base64 import b64encode
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.types import ASGIApp, Message, Scope

from appliance.config.gateway import with_values
from appliance.observability.log import RequestLog, Subject
from appliance.observability.metrics import Metrics, now
from appliance.runtime.picture import PICTURE
from appliance.server.errors.api import EngineFailed, Unavailable, api_error, is_unexpected
from appliance.server.http.service import Service
from engine.api.errors import CheckpointError, EngineGone, StepError

log = logging.getLogger(__name__)

TEXT = "Hello"
TOKENS = 2
POLL_S = 0.02
RETRY_S = 0.5
RANK = "x-data-parallel-rank"
REQUEST_ID = "first-request-"
"""Beginning of the IDs of these requests and of their sequences."""
SAMPLE_RATE = 16_000  # of the silence for speech models

Variants = Sequence[dict[str, Any]]
"""Bodies of one kind of request. The model has to answer only one of them, since a template may reject the others."""


class Unanswered(Exception):
    """Raised when a request fails in a way that affects every request. The message gives the request and the reason.

    `code` starts the last line of the log, which determines the exit code.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def kinds(service: Service) -> dict[str, Variants]:
    """Return the path of each kind of request that the model serves, with its bodies."""
    config = service.config
    wanted: dict[str, Variants] = {}
    if "generate" in config.tasks:
        wanted["/v1/completions"] = [{"prompt": TEXT, "max_tokens": TOKENS}]
        if service.template is not None and config.encoder is None:
            user = {"role": "user", "content": TEXT}
            conversations = ([user], [{"role": "system", "content": TEXT}, user])
            wanted["/v1/chat/completions"] = [{"messages": each, "max_tokens": TOKENS} for each in conversations]
    if "embed" in config.tasks:
        wanted["/v1/embeddings"] = [{"input": TEXT}]
    if "classify" in config.tasks:
        wanted["/classify"] = [{"input": TEXT}]
    if "score" in config.tasks:
        wanted["/score"] = [{"text_1": TEXT, "text_2": TEXT}]
    if "encode" in config.tasks:
        image = {"type": "image_url", "image_url": {"url": PICTURE}}
        sound = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{b64encode(silence()).decode()}"}}
        parts = {"image": image, "audio": sound}
        each = [parts[kind] for kind in config.modalities if kind in parts]
        wanted |= {f"/v1/media/embeddings#{part['type']}": [{"input": [part]}] for part in each}
    if config.speech is not None:
        wanted["/v1/audio/transcriptions"] = [{"file": silence(), "temperature": "1", "max_completion_tokens": "2"}]
    for task in ("token_embed", "token_classify"):
        if task in config.tasks:
            wanted[f"/pooling#{task}"] = [{"input": TEXT, "task": task}]
    return wanted


def silence() -> bytes:
    """Return a WAV file of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, SAMPLE_RATE, 0, "NONE", "not compressed"))
        writer.writeframes(bytes(2 * SAMPLE_RATE))
    return file.getvalue()


def _encoded(body: dict[str, Any]) -> tuple[bytes, str]:
    """Return a body and its content type: a form if it has a file, else JSON."""
    if "file" not in body:
        return orjson.dumps(body), "application/json"
    import httpx  # takes 0.1 s, and only speech models need it here

    fields = {name: value for name, value in body.items() if name != "file"}
    form = httpx.Request("POST", "http://engine", data=fields, files={"file": ("silence.wav", body["file"])})
    return form.read(), form.headers["content-type"]


async def answer_each(service: Service, routes: ASGIApp, failed: Callable[[str], None]) -> None:
    """Send first requests to each ready engine that has not answered any yet. Runs until it is cancelled.

    Calls `failed` with the reason when a request fails in a way that affects every request.
    """
    while not service.has_text:
        await asyncio.sleep(POLL_S)
    while True:
        for engine in service.router.engines:
            if not engine.serves or engine.answers:
                continue
            began = now()
            try:
                engine.answers = await ask_each_kind(service, routes, engine.index) and engine.serves
            except Unanswered as error:
                failed(f"{error.code}: engine {engine.label}: {error}")
                return
            if engine.answers:
                log.info("engine %s answered one request for each endpoint in %.2f s", engine.label, now() - began)
            else:
                await asyncio.sleep(RETRY_S)
        await asyncio.sleep(POLL_S)


async def ask_each_kind(service: Service, routes: ASGIApp, engine: int) -> bool:
    """Return True if the engine answered, False if it exited or is busy. Raise Unanswered."""
    unseen = _unseen(service)
    for path, variants in kinds(service).items():
        failures = []
        for body in variants:
            try:
                await _request(unseen, routes, path.partition("#")[0], body, engine)
                break
            except Exception as error:
                if _passes(error):
                    return False
                failures.append(error)
        else:
            _judge(path, failures)
    return True


def _passes(error: Exception) -> bool:
    """Return if the same request may succeed later, because the engine is busy or has exited."""
    ended = isinstance(error, EngineFailed) and not isinstance(error.__cause__, StepError)
    return ended or isinstance(error, Unavailable | EngineGone)


def _judge(path: str, failures: Sequence[Exception]) -> None:
    """Raise Unanswered for a fault of the service. A model may have its own reasons to reject a short text."""
    replies = [api_error(failure) for failure in failures]
    faults = [failure for failure, reply in zip(failures, replies, strict=True) if reply.status >= 500]
    if not faults:
        log.warning("the model rejected a short test request to POST %s: %s", path, replies[0].message)
        return
    fault = faults[0]
    if is_unexpected(fault):
        log.error("POST %s failed", path, exc_info=fault)
    cause = fault.__cause__
    code = CheckpointError.code if isinstance(cause, StepError) else "first_request"
    raise Unanswered(code, f"POST {path} failed: {cause or api_error(fault).message}") from fault


def _unseen(service: Service) -> Service:
    """Return a copy of the service for these requests, with separate metrics, log and journal that are discarded."""
    silent = {"observability.log_requests": False, "observability.log_outputs": "off"}
    config = with_values(service.config, silent)
    unseen = Service(config, service.router, Metrics(config), RequestLog(config, silent=True))
    unseen.set_text(service.text)
    return unseen


async def _request(service: Service, routes: ASGIApp, path: str, body: dict[str, Any], engine: int) -> None:
    """Send a request to the routes without the middleware: it needs no key and is not counted.

    Raise the route's errors.
    """
    data, content_type = _encoded(body)
    given: Message = {"type": "http.request", "body": data}
    client_stays = asyncio.Event()

    async def receive() -> Message:
        nonlocal given
        message, given = given, {}
        if not message:
            await client_stays.wait()
        return message

    async def send(message: Message) -> None:
        return None

    request_id = f"{REQUEST_ID}{uuid.uuid4().hex}"
    headers = [(b"content-type", content_type.encode()), (RANK.encode(), str(engine).encode())]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "app": SimpleNamespace(state=SimpleNamespace(service=service)),
        "state": {
            "request_id": request_id,
            "subject": Subject(request_id),
            "key": None,
            "owner": "",
            "send_body": send,
        },
    }
    await AsyncExitStackMiddleware(routes)(scope, receive, send)
