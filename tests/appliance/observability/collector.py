"""A collector of traces: an HTTP server that parses each batch with the protobuf definitions of OpenTelemetry."""

import base64
import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest as LogsRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

BYTES = ("traceId", "spanId", "parentSpanId")  # hexadecimal in OTLP's JSON, unlike other fields of bytes


def parse(body: bytes) -> ExportTraceServiceRequest | LogsRequest:
    """Return the message of OTLP's JSON encoding. Unknown fields and wrong types raise ParseError."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            name: base64.b64encode(bytes.fromhex(each)).decode() if name in BYTES else convert(each)
            for name, each in value.items()
        }

    value = convert(json.loads(body))
    return json_format.ParseDict(value, ExportTraceServiceRequest() if "resourceSpans" in value else LogsRequest())


def plain(value: Any) -> Any:
    """Return an AnyValue as Python's value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


@dataclass
class Collector:
    """Collector with the received requests and the configured replies."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)  # of the next replies; then 200
    body: bytes = b"{}"
    pause_s: float = 0.0
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    num_calls: int = 0

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for _, _, message in self.requests
            for resource in getattr(message, "resource_spans", ())
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def records(self) -> list[Any]:
        return [
            record
            for _, _, message in self.requests
            for resource in getattr(message, "resource_logs", ())
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            collector.num_calls += 1
            time.sleep(collector.pause_s)
            status = collector.statuses.pop(0) if collector.statuses else 200
            if status == 200:
                try:
                    text = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
                    collector.requests.append((self.path, dict(self.headers), parse(text)))
                except Exception as error:  # the test reads it
                    collector.faults.append(error)
            self.send_response(status)
            self.send_header("Content-Length", str(len(collector.body)))
            self.end_headers()
            self.wfile.write(collector.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
