"""HTTP server at the gateway's address while a checkpoint without known metadata is downloaded. `/live` returns 200,
`/ready` returns 503 with the progress, everything else 503. The gateway, which needs the tokenizer, replaces it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from appliance.checkpoints.progress import Progress
from appliance.runtime.probe import DOWNLOADING

RETRY_AFTER_S = 10
_POLL_S = 0.1


@contextlib.contextmanager
def placeholder_server(host: str, port: int, progress: Progress) -> Iterator[None]:
    """Run the server during the block. It is not started with port 0, or if the address is in use, which the start of
    the service reports later."""
    try:
        server = _server(host)((host, port), _answers(progress)) if port else None
    except OSError:
        server = None
    if server is None:
        yield
        return
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="placeholder-server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _server(host: str) -> type[ThreadingHTTPServer]:
    import socket

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True
        block_on_close = False

    return Server


def _answers(progress: Progress) -> type[BaseHTTPRequestHandler]:
    class Answers(BaseHTTPRequestHandler):
        timeout = 10.0

        def log_message(self, *_: object) -> None:
            """Probes are not logged."""

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/live":
                return self._send(200, {"status": "live"})
            if path == "/ready":
                state = {"status": "loading", "phase": DOWNLOADING, "progress": round(progress.fraction, 4)}
                return self._send(503, state | {"engines": [], "detail": progress.text()})
            if path in ("/health", "/ping"):
                return self._send(503, None)
            message = f"The model is being downloaded: {progress.text()}."
            error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
            self._send(503, {"error": error})

        do_POST = do_HEAD = do_PUT = do_DELETE = do_OPTIONS = do_GET

        def _send(self, status: int, body: dict[str, object] | None) -> None:
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 503:
                self.send_header("Retry-After", str(RETRY_AFTER_S))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Answers
