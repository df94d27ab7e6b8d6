"""Servers with scripted faults, and a hub made of one folder: real sockets, real clients."""

import hashlib
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Files:
    """Web server of files by path. Each GET takes the next of `faults`: a status, ("cut", n) closes the connection
    after n bytes of the body, ("stall", n) stops sending after n, ("wrong range", n) sends from n whatever range was
    requested, "whole" ignores ranges, ("redirect", url); None is no fault."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[object]] = field(default_factory=dict)
    answers: dict[str, Callable[[], bytes]] = field(default_factory=dict)  # JSON, made when it is asked for
    headers: Callable[[str], dict[str, str]] = lambda path: {}
    status_headers: dict[str, str] = field(default_factory=dict)  # of answers that are a fault's status
    token: str = ""
    ranges: bool = True
    tags: bool = True
    weak: bool = False
    modified: str = ""
    slow_s: float = 0.0
    seen: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    authorizations: list[str | None] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    forms: list[dict[str, list[str]]] = field(default_factory=list)  # of POST requests, in path and body
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)  # ends stalls at the end of the test

    def gets(self, path: str) -> list[str]:
        return [asked for method, seen, asked in self.seen if method == "GET" and seen == path]


def handler(state: Files) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.response(body=False)

        def do_GET(self) -> None:
            self.response(body=True)

        def do_PUT(self) -> None:  # the token of a metadata service
            self.response(body=True)

        def do_POST(self) -> None:  # a token for a token
            text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            state.forms.append(parse_qs(f"{urlsplit(self.path).query}&{text}"))
            self.response(body=True)

        def status(self, code: int, **headers: str) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def response(self, *, body: bool) -> None:
            path, asked = unquote(urlsplit(self.path).path), self.headers.get("Range", "")
            state.seen.append((self.command, path, asked))
            state.authorizations.append(self.headers.get("Authorization"))
            if state.token and self.headers.get("Authorization") != f"Bearer {state.token}":
                return self.status(401)
            data = state.answers[path]() if path in state.answers else state.files.get(path)
            queue = state.faults.get(path, [])
            fault = queue.pop(0) if queue and body else None
            if isinstance(fault, int):
                return self.status(fault, **state.status_headers)
            if isinstance(fault, tuple) and fault[0] == "redirect":
                return self.status(302, Location=str(fault[1]))
            if data is None:
                return self.status(404, X_Error_Code="EntryNotFound")
            tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            if self.headers.get("If-Match", tag) != tag:
                return self.status(412)
            start, stop, code = 0, len(data), 200
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            if (
                match
                and state.ranges
                and fault != "whole"
                and self.headers.get("If-Range", tag) in (tag, state.modified)
            ):
                start, code = int(match[1]), 206
                stop = min(int(match[2]) + 1, len(data)) if match[2] else len(data)
                if start >= len(data):
                    return self.status(416)
            if isinstance(fault, tuple) and fault[0] == "wrong range":
                start = int(fault[1])
            self.send_response(code)
            self.send_header("Content-Length", str(stop - start))
            if state.tags:
                self.send_header("ETag", f"W/{tag}" if state.weak else tag)
            if state.modified:
                self.send_header("Last-Modified", state.modified)
            if code == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            for name, value in state.headers(path).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.send(path, data[start:stop], fault)

        def send(self, path: str, data: bytes, fault: object) -> None:
            kind, limit = fault if isinstance(fault, tuple) and fault[0] in ("cut", "stall") else ("", len(data))
            data = data[:limit]
            try:
                for at in range(0, len(data), 1 << 16):
                    self.wfile.write(data[at : at + (1 << 16)])
                    state.sent[path] = state.sent.get(path, 0) + len(data[at : at + (1 << 16)])
                    if state.slow_s:
                        time.sleep(state.slow_s)
                self.wfile.flush()
                if kind == "stall":
                    state.released.wait(100)
            except OSError:
                pass
            if kind:
                self.close_connection = True

    return Handler


@contextmanager
def serving(certificate: tuple[Path, Path] | None = None) -> Iterator[Files]:
    """Run a server; stop it and its stalled replies at the end of the block.

    certificate: of localhost with its key, for HTTPS."""
    state = Files()
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    http.daemon_threads = True
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        http.socket = context.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
        state.url = f"https://localhost:{http.server_address[1]}"
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield state
    finally:
        state.released.set()
        http.shutdown()
        http.server_close()


def publish(hub: Files, repo: str, files: dict[str, bytes], commit: str = COMMIT, branch: str = "main") -> None:
    """Puts a repository on a fake hub, as its API and its files are described in huggingface_hub."""

    def info() -> bytes:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            | (
                {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}
                if name.endswith((".safetensors", ".gguf"))
                else {}
            )
            for name, data in files.items()
        ]
        return json.dumps({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}).encode()

    def oid(name: str, data: bytes) -> str:
        large = name.endswith((".safetensors", ".gguf"))
        return (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()

    def tree() -> bytes:
        found = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        return json.dumps(found).encode()

    def headers(path: str) -> dict[str, str]:
        name = path.rpartition("/")[2]
        if "/resolve/" not in path or name not in files:
            return {}
        tag = f'"{oid(name, files[name])}"'
        return {"X-Repo-Commit": commit, "X-Linked-Etag": tag, "X-Linked-Size": str(len(files[name]))}

    hub.headers = headers
    hub.answers[f"/api/models/{repo}/tree/{commit}"] = tree
    for revision in (branch, commit):
        hub.answers[f"/api/models/{repo}/revision/{revision}"] = info
    for name, data in files.items():
        hub.files[f"/{repo}/resolve/{commit}/{name}"] = data
