"""An OpenAI-compatible server that streams known replies, in a thread."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TinyServer(ThreadingHTTPServer):
    """`bodies`: path, body and Authorization header of each generating request. `broken`: how the n-th one fails.
    `tokens_per_word`: what /tokenize counts; 0 without the route. `usage`: without, the client has to count."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.bodies: list[tuple[str, dict[str, Any], str | None]] = []
        self.broken: dict[int, str] = {}
        self.tokens_per_word = 0
        self.usage = True
        self.url = f"http://127.0.0.1:{self.server_port}"

    def sent(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.bodies]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TinyServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}).encode())

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/audio/transcriptions":
            return self._transcribe(content)
        body = json.loads(content)
        if self.path == "/tokenize":
            count = len(body["prompt"].split()) * self.server.tokens_per_word
            return self._reply(200 if count else 404, json.dumps({"count": count}).encode())
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append((self.path, body, self.headers.get("Authorization")))
        how = self.server.broken.get(number)
        if how == "busy":
            return self._reply(503, b'{"error": {"message": "busy"}}')
        records = self._records(body, number)
        if how == "error":
            records[1:] = [{"error": {"message": "engine died"}}]
        lines = [f"data: {json.dumps(record)}\n\n" for record in records]
        if how == "garbage":
            lines = ["data: {\n\n"]
        end = "" if how == "cut" else "data: [DONE]\n\n"
        return self._reply(200, ("".join(lines) + end).encode(), "text/event-stream")

    def _transcribe(self, content: bytes) -> None:
        """Answer each recording with two words and a usage of 9 tokens, or without a stream if `usage` is off."""
        fields = {
            re.search(rb'name="(\w+)"', part)[1].decode(): part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            for part in content.split(b"--" + self.headers["Content-Type"].partition("boundary=")[2].encode())[1:-1]
        }
        with self.server.lock:
            self.server.bodies.append((self.path, fields, self.headers.get("Authorization")))
        if not self.server.usage:
            return self._reply(200, b'{"text": "two words"}')
        events = [{"type": "transcript.text.delta", "delta": word} for word in ("two", " words")]
        usage = {"type": "tokens", "input_tokens": 9, "output_tokens": 2}
        events.append({"type": "transcript.text.done", "text": "two words", "usage": usage})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return self._reply(200, lines.encode(), "text/event-stream")

    def _records(self, body: dict[str, Any], number: int) -> list[dict[str, Any]]:
        """A reply of `max_tokens` words, which name the request."""
        chat = self.path == "/v1/chat/completions"
        records = [_chunk(chat, {"role": "assistant", "content": ""})] if chat else []
        records += [_chunk(chat, {"content": f"r{number} "}) for _ in range(body["max_tokens"])]
        records.append(_chunk(chat, {}, "length"))
        if self.server.usage:
            counts = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            records.append({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": 3}}})
        return records

    def _reply(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _chunk(chat: bool, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    text = {"delta": delta} if chat else {"text": delta.get("content", "")}
    return {"choices": [{"index": 0, "finish_reason": finish, **text}]}


@contextmanager
def tiny_server() -> Iterator[TinyServer]:
    server = TinyServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
