"""An OpenAI-compatible server with scripted replies and log probabilities, in a thread."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer(ThreadingHTTPServer):
    """`reply`: text of the reply to a prompt. `logprob`: of a token (white space and a word) after a text.
    `forms`: served forms of prompt log probabilities. `failing`: number of next requests that get `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.bodies: list[tuple[str, dict[str, Any], str | None]] = []
        self.reply: Callable[[str], str] = lambda prompt: "unknown"
        self.logprob: Callable[[str, str], float] = lambda before, token: -1.0
        self.forms = ("echo", "prompt_logprobs")
        self.failing, self.status = 0, 503
        self.finish = "stop"
        self.url = f"http://127.0.0.1:{self.server_port}"

    def sent(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.bodies]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append((self.path, body, self.headers.get("Authorization")))
            failing = self.server.failing > 0
            self.server.failing -= failing
        if failing:
            return self._send(self.server.status, {"error": {"message": "busy"}})
        if form := next((each for each in ("echo", "prompt_logprobs") if each in body), None):
            if form not in self.server.forms:
                return self._send(400, {"error": {"message": f"no {form}"}})
            return self._send(200, {"choices": [self._scored(form, body["prompt"])]})
        chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        text = self.server.reply(prompt)
        choice = {"message": {"content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}
        return self._send(200, {"choices": [{**choice, "finish_reason": self.server.finish}], "usage": usage})

    def _scored(self, form: str, prompt: str) -> dict[str, Any]:
        words = [found[0] for found in re.finditer(r"\s*\S+\s*$|\s*\S+", prompt)]
        places = [len("".join(words[:index])) for index in range(len(words))]
        values = [
            None if not at else self.server.logprob(prompt[:at], word) for at, word in zip(places, words, strict=True)
        ]
        if form == "echo":
            return {"text": prompt, "logprobs": {"tokens": words, "token_logprobs": values, "text_offset": places}}
        tokens = [
            None if value is None else {str(index): {"logprob": value, "rank": 1, "decoded_token": word}}
            for index, (word, value) in enumerate(zip(words, values, strict=True))
        ]
        return {"text": "x", "prompt_logprobs": tokens}

    def _send(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
