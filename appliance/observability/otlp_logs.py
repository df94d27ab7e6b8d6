"""Log records as OTLP log records (https://opentelemetry.io/docs/specs/otel/logs/data-model/), with their traces."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from appliance.observability.spans import Value, encode_attributes

SEVERITIES = {logging.DEBUG: 5, logging.INFO: 9, logging.WARNING: 13, logging.ERROR: 17, logging.CRITICAL: 21}
EXPORTING = ("appliance.observability.otlp", "httpx", "httpcore")
"""Loggers of the export, whose records are not exported, because each would cause another one."""
MAX_TEXT = 65_536  # characters


@dataclass(frozen=True)
class ExportedRecord:
    """One log record."""

    unix_ns: int
    level: int
    body: str
    attributes: dict[str, Value] = field(default_factory=dict)
    trace_id: str = ""
    span_id: str = ""

    def encoded(self) -> dict[str, Any]:
        """Return the record in OTLP's JSON encoding."""
        trace = {"traceId": self.trace_id} if self.trace_id else {}
        span = {"spanId": self.span_id} if self.span_id else {}
        return {
            "timeUnixNano": str(self.unix_ns),
            "observedTimeUnixNano": str(time.time_ns()),
            "severityNumber": SEVERITIES.get(self.level, 9),
            "severityText": logging.getLevelName(self.level),
            "body": {"stringValue": self.body[:MAX_TEXT].encode("utf-8", "replace").decode()},
            "attributes": encode_attributes(self.attributes),
            **trace,
            **span,
        }


class OtlpHandler(logging.Handler):
    """Passes records to `add` in the event loop. Records of other threads are passed on, too."""

    def __init__(self, add: Callable[[ExportedRecord], None], fields: tuple[str, ...]) -> None:
        """fields: attributes of records that are exported."""
        super().__init__()
        self._add, self._fields, self._loop = add, fields, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(EXPORTING):
            return
        try:
            made = self._exported(record)
        except Exception:  # a message that does not fit its arguments must not end the request that logs it
            self.handleError(record)
            return
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._add, made)

    def _exported(self, record: logging.LogRecord) -> ExportedRecord:
        given = {name: getattr(record, name, None) for name in self._fields}
        trace_id, span_id = given.pop("trace_id", None), given.pop("span_id", None)
        found: dict[str, Value] = {"code.namespace": record.name}
        for name, value in given.items():
            if value is not None:
                found[name] = value if isinstance(value, bool | int | float | str) else str(value)
        if record.exc_info and record.exc_info[0] is not None:
            found["exception.type"] = record.exc_info[0].__name__
        return ExportedRecord(
            int(record.created * 1e9), record.levelno, record.getMessage(), found, trace_id or "", span_id or ""
        )
