"""Log records: one line each, as text or JSON, with short module paths and the request's id and trace if there are any.

A JSON line begins with `ts`, `level`, `program`, `logger` and `message`, like the lines of the launcher. Keys and
prompt text never appear in a record. Generated text appears only if the manifest enables it (OBS-03).
"""

import json
import logging
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from appliance.config.gateway import GatewayConfig
from appliance.observability.spans import RequestSpan
from appliance.observability.trace import Trace
from appliance.security.keys import ApiKey
from engine.api.printable import printable, printable_json

PROGRAM = "gateway"
FIELDS = (
    *("request_id", "trace_id", "span_id", "parent_id", "tracestate"),
    *("status", "method", "path", "seconds", "client", "key", "fields"),
    *("model", "prompt_tokens", "completion_tokens", "finish_reason", "ttft_s"),
)


def _where(record: logging.LogRecord) -> str:
    """Shorten the logger's name: `appliance.server.app` → `server.app`. Names of other packages are unchanged."""
    return record.name.removeprefix("appliance.")


def _frames(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[2] is None:
        return []
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(record.exc_info[2])]


def _quoted(value: object) -> str:
    """Return a field's value for a line of text. A value with a space is quoted, because it could look like another
    field."""
    quoted = isinstance(value, str) and (" " in value or '"' in value)
    return json.dumps(value, ensure_ascii=False) if quoted else str(value)


def _when(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class TextLines(logging.Formatter):
    """Formatter of lines such as `2026-01-01T00:00:00.000Z info http.app message request_id=…`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_when(record), record.levelname.lower(), _where(record), record.getMessage()]
        parts += [
            f"{name}={_quoted(getattr(record, name))}" for name in FIELDS if getattr(record, name, None) is not None
        ]
        parts += [f"| {frame}" for frame in _frames(record)]
        return printable(" ".join(parts))


class JsonLines(logging.Formatter):
    """Formatter of the same fields as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _when(record),
            "level": record.levelname.lower(),
            "program": PROGRAM,
            "logger": _where(record),
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, None) is not None}
        if frames := _frames(record):
            line["traceback"] = frames
        return json.dumps(printable_json(line), default=str)


def set_up_logging(config: GatewayConfig, stream: TextIO | None = None) -> None:
    """Write all records of this process from the configured level on to `stream` (by default standard error)."""
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(JsonLines() if config.observability.log_format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers = [output]
    set_level(config)


def set_level(config: GatewayConfig) -> None:
    """Set the minimum level that is logged."""
    root = logging.getLogger()
    root.setLevel(config.observability.log_level.upper())
    # uvicorn logs each start and stop; the gateway's own lines contain the same with the address.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))
    for name in ("asyncio", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


@dataclass(frozen=True)
class MediaLoad:
    """Loading of the media of a request. Times are in seconds; `start_s` is of the monotonic clock."""

    start_s: float
    stages: tuple[tuple[float, float], ...]
    """Time to fetch each item, and to decode and process it, which is 0.0 for an item from the cache."""


@dataclass(frozen=True)
class Subject:
    """The request of a log line, and the trace to which it belongs."""

    request_id: str
    trace: Trace | None = None
    arrived_s: float = 0.0
    """Arrival time on the monotonic clock."""
    span: RequestSpan | None = field(default=None, compare=False)
    """Span of the request, if it is traced."""
    media: MediaLoad | None = field(default=None, compare=False)
    """Times of its images, videos and audio clips, if it has any."""

    def fields(self) -> dict[str, Any]:
        if self.trace is None:
            return {"request_id": self.request_id}
        ids = {"trace_id": self.trace.trace_id, "parent_id": self.trace.parent_id, "tracestate": self.trace.state}
        own = {} if self.span is None else {"span_id": self.span.span_id}
        return {"request_id": self.request_id, **ids, **own}


@dataclass(frozen=True)
class Outcome:
    """Result of a generation."""

    model: str
    prompt_tokens: int
    completion_tokens: int  # of all choices
    finish_reason: str
    """One per choice, joined by commas. `cancelled`: the client disconnected; `error`, `deadline`: the request
    failed."""

    ttft_s: float | None
    """Seconds from the request's arrival to its first token, None if there was no token."""

    seconds: float


class RequestLog:
    """Log of requests, as configured in the manifest."""

    def __init__(self, config: GatewayConfig, *, silent: bool = False) -> None:
        """With `silent` only unexpected errors are logged."""
        self._log = logging.getLogger("appliance.requests")
        self._silent = silent
        self._requests = config.observability.log_requests
        self._finals = config.observability.log_outputs != "off"
        self._deltas = config.observability.log_outputs == "deltas"

    def access(
        self, subject: Subject, *, method: str, path: str, status: int, seconds: float, client: str, key: ApiKey | None
    ) -> None:
        facts = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4), "client": client}
        if key is not None:
            facts["key"] = key.shown
        self._log.info("request", extra={**subject.fields(), **facts})

    def request(self, subject: Subject, route: str, parameters: dict[str, object]) -> None:
        """Log the parameters of a request. The caller must omit prompts and messages."""
        if self._requests:
            self._log.info("parameters of %s", route, extra={**subject.fields(), "fields": parameters})

    def delta(self, subject: Subject, index: int, text: str) -> None:
        if self._deltas:
            self._log.info("delta of choice %d: %s", index, text, extra=subject.fields())

    def final(self, subject: Subject, index: int, text: str, finish: str) -> None:
        if self._finals:
            self._log.info("choice %d (%s): %s", index, finish, text, extra=subject.fields())

    def completed(self, subject: Subject, outcome: Outcome) -> None:
        """Log the end of a generation, whether or not the client is still connected."""
        if self._silent:
            return
        facts = {name: value for name, value in asdict(outcome).items() if value is not None}
        self._log.info("completed", extra={**subject.fields(), **facts})

    def model_fault(self, subject: Subject, fault: str) -> None:
        """Log a fault in a file of the model. `fault` must not quote the prompt."""
        self._log.error("fault in a file of the model: %s", fault, extra=subject.fields())

    def unexpected(self, subject: Subject, error: BaseException) -> None:
        """Log an unexpected exception: its type and where it was raised. The message is omitted because it may quote
        the prompt."""
        exc_info = (type(error), error, error.__traceback__)
        self._log.error("unexpected %s", type(error).__name__, exc_info=exc_info, extra=subject.fields())
