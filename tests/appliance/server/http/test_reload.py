"""A running gateway applies a new configuration: clients observe the effect of each live key."""

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cryptography import x509

from appliance.config.effects import effects
from appliance.config.gateway import SamplingDefaults, SecretRef, Tls, with_values
from appliance.config.live_keys import live_fields
from appliance.runtime.gateway_control import Answer, ApplyConfig, ThrottleJournal, send_message
from appliance.security.keys import read_keys
from appliance.server.process import load_text
from tests.appliance.certificates import write_certificate
from tests.appliance.conftest import FakeEngine, Gateway, until

LOAD_TEXT = load_text  # before `start_gateway` puts another in its place
KEY = {"Idempotency-Key": "k"}
UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


@dataclass
class World:
    """A gateway over a fake engine, and files to name in its configuration."""

    gateway: Gateway
    engine: FakeEngine
    folder: Path
    caplog: pytest.LogCaptureFixture
    schemas: int = 0

    def complete(self, **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        whole = {"prompt": [5, 6], "max_tokens": 2, **body}
        return self.gateway.client.post("/v1/completions", json=whole, headers=headers)

    def chat(self, **body: Any) -> httpx.Response:
        whole = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **body}
        return self.gateway.client.post("/v1/chat/completions", json=whole)

    def sampled(self) -> Any:
        assert self.complete().status_code == 200
        return self.engine.submits[-1].sampling

    def logged(self, text: str) -> bool:
        self.caplog.clear()
        assert self.complete().status_code == 200
        return any(text in record.getMessage() for record in self.caplog.records)

    def status_while_one_waits(self) -> int:
        """Return the status of a request that arrives while another one waits for its first token."""
        self.engine.holding = True
        statuses: list[int] = []

        def send() -> None:
            statuses.append(self.complete().status_code)

        threads = [threading.Thread(target=send) for _ in range(2)]
        threads[0].start()
        until("one waits", lambda: len(self.engine.open) == 1)
        threads[1].start()
        until("the other is in, or refused", lambda: len(self.engine.open) == 2 or bool(statuses))
        early = list(statuses)
        self.engine.give(2)
        for thread in threads:
            thread.join()
        self.engine.holding = False
        return early[0] if early else 200

    def status_while_the_engine_is_gone(self) -> int:
        self.engine.die()
        until("the engine is gone", lambda: not self.gateway.service.router.serves)
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(self.complete().status_code))
        thread.start()
        until("it is held, or refused", lambda: self.gateway.service.router.pending == 1 or bool(statuses))
        self.engine.start()
        thread.join()
        until("it is back", lambda: self.gateway.service.router.serves)
        return statuses[0]

    def comments(self) -> bool:
        """Return True if a stream that waits for its first token receives comments."""
        self.engine.holding = True
        body = {"prompt": [5], "max_tokens": 1, "stream": True}
        with self.gateway.client.stream("POST", "/v1/completions", json=body) as reply:
            pieces: list[str] = []
            reading = threading.Thread(target=lambda: pieces.extend(reply.iter_text()))
            reading.start()
            until("it waits", lambda: len(self.engine.open) == 1)
            threading.Event().wait(0.3)
            self.engine.give(1)
            reading.join()
        self.engine.holding = False
        return any(line.startswith(":") for line in "".join(pieces).splitlines())

    def can_be_hampered(self) -> bool:
        """Return True if `slipway chaos` can slow down the disk."""
        return asyncio.run(send_message(str(self.folder / "c"), ThrottleJournal(0.0, 0.0), 30)).error == ""

    def aborts_without_client(self) -> bool:
        """Return True if a request with a key is aborted soon after its client disconnected."""
        self.engine.holding = True
        before = len(self.engine.aborted)
        body = {"prompt": [5], "max_tokens": 9, "stream": True}
        headers = {"Idempotency-Key": f"left-{before}-{len(self.engine.submits)}"}
        with self.gateway.client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            until("it runs", lambda: len(self.engine.open) >= 1)
            self.engine.give(1)
            next(reply.iter_text())
        threading.Event().wait(0.5)
        self.engine.holding = False
        return len(self.engine.aborted) > before

    def replayed(self) -> bool:
        self.complete(headers=KEY)
        return "idempotent-replayed" in self.complete(headers=KEY).headers

    def remembered(self) -> int:
        reply = self.complete().json()["id"]
        return self.gateway.client.get(f"/v1/requests/{reply}/why").status_code

    def allowed(self, key: str | None) -> int:
        return self.gateway.client.get("/v1/models", headers={"x-api-key": key} if key else {}).status_code

    def status_of_a_schema(self) -> int:
        """Return the status of a request with a schema that was not sent before."""
        self.schemas += 1
        schema = {"type": "object", "properties": {f"p{self.schemas}": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        return self.chat(response_format=form).status_code

    def status_of_the_second(self) -> int:
        """Return the status of the second of two requests with one key."""
        return [self.complete(headers={"x-api-key": "one"}).status_code for _ in range(2)][-1]

    def served(self) -> str:
        """Return the name in the certificate that a new connection receives."""
        with self.connected() as connection:
            return x509.load_der_x509_certificate(connection.getpeercert(True)).subject.rdns[0].rfc4514_string()[3:]

    def speaks_old_tls(self) -> bool:
        try:
            self.connected(ssl.TLSVersion.TLSv1_2).close()
        except ssl.SSLError:
            return False
        return True

    def connected(self, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLSocket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, most
        address = httpx.URL(self.gateway.url)
        return context.wrap_socket(socket.create_connection((address.host, address.port)))

    def plain(self) -> socket.socket:
        address = httpx.URL(self.gateway.url)
        return socket.create_connection((address.host, address.port), 30)

    def status_beside_a_busy_connection(self) -> int:
        with self.plain() as busy:
            busy.sendall(UNFINISHED)
            until("it is busy", lambda: self.connections()[0] - self.connections()[1] >= 1)
            status = httpx.get(f"{self.gateway.url}/live").status_code
        until("it is gone", lambda: self.connections()[0] == self.connections()[1])
        return status

    def connections(self) -> tuple[int, int]:
        return self.gateway.service.metrics.connections()

    def keeps_silent_connections(self) -> bool:
        """Return True if more than two of five silent connections stay open."""
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(self.plain())
            assert httpx.get(f"{self.gateway.url}/live").status_code == 200
            return self.connections()[1] > 2

    def status_of_a_late(self, request: bytes) -> str:
        """Return the status of a request whose remaining bytes never arrive."""
        with self.plain() as connection:
            connection.sendall(request)
            connection.settimeout(0.5)
            try:
                return connection.recv(65536).decode().split()[1]
            except TimeoutError:
                return "none yet"

    def cors(self) -> str | None:
        headers = {"Origin": "https://a.example"}
        return self.gateway.client.get("/v1/models", headers=headers).headers.get("access-control-allow-origin")


Look = Callable[[World], Any]


@dataclass(frozen=True)
class Seen:
    """Values that a client observes before and after these settings change. `start`: settings of the gateway before."""

    look: Look
    before: Any
    after: Any
    wanted: dict[str, Any]
    start: dict[str, Any]
    to: Any = None


def seen(
    look: Look, before: Any, after: Any, start: dict[str, Any] | None = None, *, to: Any = None, **wanted: Any
) -> Seen:
    """to: new value of the key itself. wanted: new values of other fields."""
    return Seen(look, before, after, wanted, start or {}, to)


def sampling(name: str, before: float, after: float) -> Seen:
    look: Look = lambda world: getattr(world.sampled(), name)  # noqa: E731
    return seen(look, before, after, sampling=SamplingDefaults(**{name: after}))


def status(**body: Any) -> Look:
    return lambda world: world.complete(**body).status_code


def of_file(name: str) -> SecretRef:
    return SecretRef(file=name)  # below the world's folder


def tls(name: str, least_version: str = "TLSv1.2") -> Tls:
    return Tls(certificate=f"{name}.crt", key=f"{name}.key", least_version=least_version)


CASES: dict[str, Seen] = {
    "model.names": seen(
        lambda w: w.gateway.client.get("/v1/models").json()["data"][0]["id"], "tiny", "new", names=("new",)
    ),
    "model.chat_template": seen(
        lambda w: w.chat().status_code and w.gateway.service.text.tokenizer.decode(list(w.engine.submits[-1].prompt)),
        "user\nhello\nassistant\n",
        "NEW hello",
        chat_template="new.jinja",
    ),
    "model.format": seen(lambda w: w.chat(thinking_token_budget=1).status_code, 200, 400, format="plain+identity"),
    "model.generation_config": seen(
        lambda w: (w.sampled().presence_penalty, w.engine.submits[-1].eos_token_ids),
        (0.0, (9,)),
        (0.5, (7,)),
        {"eos_token_ids": (9,)},
        eos_token_ids=(7,),
        sampling=SamplingDefaults(presence_penalty=0.5),
    ),
    "engine.sampling.temperature": sampling("temperature", 1.0, 0.25),
    "engine.sampling.top_p": sampling("top_p", 1.0, 0.5),
    "engine.sampling.top_k": sampling("top_k", 0, 7),
    "engine.sampling.min_p": sampling("min_p", 0.0, 0.1),
    "engine.sampling.repetition_penalty": sampling("repetition_penalty", 1.0, 1.5),
    "endpoints.api_keys": seen(
        lambda w: (w.allowed(None), w.allowed("one"), w.allowed("two")),
        (200, 200, 200),
        (401, 200, 401),
        api_keys=of_file("one.txt"),
    ),
    "secrets.*.file": seen(
        lambda w: (w.allowed(None), w.allowed("one"), w.allowed("two")),
        (401, 200, 401),
        (401, 401, 200),
        {"api_keys": of_file("one.txt")},
        api_keys=of_file("two.txt"),
    ),
    "endpoints.tls.certificate": seen(World.served, "a", "b", {"tls": tls("a")}, tls=tls("b")),
    "endpoints.tls.key": seen(World.served, "a", "b", {"tls": tls("a")}, tls=tls("b")),
    "endpoints.tls.least_version": seen(
        World.speaks_old_tls, True, False, {"tls": tls("a")}, tls=tls("a", least_version="TLSv1.3")
    ),
    "endpoints.compat": seen(lambda w: "x-request-id" in w.complete().headers, True, False, to="vllm"),
    "endpoints.unknown_fields": seen(status(unheard_of=1), 200, 400, to="refuse"),
    "endpoints.invocations_without_key": seen(
        lambda w: w.gateway.client.post("/invocations", json={"prompt": [5], "max_tokens": 1}).status_code,
        401,
        200,
        {"api_keys": of_file("one.txt")},
        to=True,
    ),
    "endpoints.cors_origins": seen(World.cors, None, "https://a.example", to=("https://a.example",)),
    "endpoints.keep_alive": seen(
        lambda w: w.gateway.client.get("/live").headers.get("connection"), None, "close", to=0.0
    ),
    "endpoints.connections.max": seen(World.status_beside_a_busy_connection, 200, 503, to=1),
    "endpoints.connections.max_per_address": seen(World.status_beside_a_busy_connection, 200, 503, to=1),
    "endpoints.connections.max_idle": seen(World.keeps_silent_connections, True, False, to=2),
    "endpoints.connections.max_head": seen(
        lambda w: w.gateway.client.get("/live", headers={"x-long": "a" * 2000}).status_code, 200, 431, to=1000
    ),
    "endpoints.connections.max_headers": seen(
        lambda w: w.gateway.client.get("/live", headers={f"x-{n}": "1" for n in range(20)}).status_code, 200, 431, to=16
    ),
    "endpoints.connections.head_timeout": seen(
        lambda w: w.status_of_a_late(b"GET /live HTTP/1.1\r\n"), "none yet", "408", to=0.05
    ),
    "endpoints.connections.body_timeout": seen(lambda w: w.status_of_a_late(UNFINISHED), "none yet", "408", to=0.05),
    "endpoints.stream_keep_alive": seen(World.comments, False, True, {"endpoints.stream_keep_alive": 60.0}, to=0.05),
    "endpoints.trust_request_chat_template": seen(
        lambda w: w.chat(chat_template="{{ messages[0].content }}").status_code, 400, 200, to=True
    ),
    "endpoints.docs": seen(lambda w: w.gateway.client.get("/docs").status_code, 200, 404, to=False),
    "endpoints.page": seen(lambda w: w.gateway.client.get("/").status_code, 200, 404, to=False),
    "limits.max_waiting": seen(World.status_while_one_waits, 200, 503, to=1),
    "limits.max_waiting_tokens": seen(World.status_while_one_waits, 200, 503, to=2),
    "limits.max_body": seen(status(user="x" * 2000), 200, 413, to=1000),
    "limits.max_output_tokens": seen(
        lambda w: w.complete(max_tokens=9).json()["usage"]["completion_tokens"], 9, 3, to=3
    ),
    "limits.max_choices": seen(status(n=3), 200, 400, to=2),
    "limits.max_prompts": seen(status(prompt=[[5], [6]]), 200, 400, to=1),
    "limits.max_logprobs": seen(lambda w: w.chat(logprobs=True, top_logprobs=5).status_code, 200, 400, to=4),
    "limits.max_stop": seen(status(stop=["a", "b", "c"]), 200, 400, to=2),
    "limits.grammar_size": seen(World.status_of_a_schema, 200, 400, to=1),
    "limits.grammar_time": seen(World.status_of_a_schema, 200, 400, to=1e-9),
    "limits.grammar_memory": seen(World.status_of_a_schema, 200, 400, to=1),
    "limits.per_key.requests_per_minute": seen(
        World.status_of_the_second, 200, 429, {"api_keys": of_file("one.txt")}, to=1
    ),
    "limits.per_key.tokens_per_minute": seen(
        World.status_of_the_second, 200, 429, {"api_keys": of_file("one.txt")}, to=2
    ),
    "lifecycle.restart.hold": seen(
        World.status_while_the_engine_is_gone, 200, 503, {"lifecycle.restart.hold": 60.0}, to=0.0
    ),
    "lifecycle.journal.keep": seen(World.replayed, True, False, {"journal": "j"}, journal="", to=0.0),
    "lifecycle.journal.size": seen(
        status(headers={"Idempotency-Key": "big"}, n=2), 200, 503, {"journal": "j", "lifecycle.journal.keep": 0.0}, to=1
    ),
    "lifecycle.chaos": seen(World.can_be_hampered, False, True, {"journal": "j"}, to="allowed"),
    "lifecycle.journal.linger": seen(World.aborts_without_client, False, True, {"journal": "j"}, to=0.0),
    "observability.log_level": seen(
        lambda w: logging.getLogger("appliance.any").isEnabledFor(logging.DEBUG), False, True, to="debug"
    ),
    "observability.log_requests": seen(lambda w: w.logged("parameters of completions"), False, True, to=True),
    "observability.log_outputs": seen(lambda w: w.logged("choice 0 (length)"), False, True, to="final"),
    "observability.timelines": seen(World.remembered, 200, 404, to=0),
    "observability.vllm_metrics": seen(
        lambda w: "vllm:num_requests_running" in w.gateway.client.get("/metrics").text, True, False, to=False
    ),
}
ELSEWHERE = {
    "lifecycle.linger",  # tests/appliance/server/test_process.py: it acts when the process ends
    "limits.max_audio_file",  # tests/appliance/server/speech/test_speech.py: it needs a speech model
    "limits.max_audio_seconds",  # the same test
    "observability.traces.headers",  # tests/appliance/observability/test_tracing.py: needs a collector
}


@pytest.fixture
def world(
    start_gateway: Callable[..., Gateway],
    engine: FakeEngine,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr("appliance.server.process.load_text", LOAD_TEXT)
    for name, text in {"one.txt": "one\n", "two.txt": "two\n", "new.jinja": "NEW {{ messages[0].content }}"}.items():
        (tmp_path / name).write_text(text)
    for name in ("a", "b"):
        write_certificate(tmp_path, name)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)

    def make(**values: Any) -> World:
        facts = {"model": str(checkpoint), "vocab_size": 420, "control": str(tmp_path / "c"), "drain_s": 0.0}
        given = placed(values, tmp_path)
        keys = read_keys(given.get("api_keys"))
        gateway = start_gateway(engine, keys=keys, ready=False, **facts, **given)
        until("it serves", lambda: gateway.service.serves)
        return World(gateway, engine, tmp_path, caplog)

    yield make
    logging.getLogger().setLevel(level)


def placed(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values with their files in the folder."""
    found = dict(values)
    for name in ("journal", "chat_template"):
        if found.get(name):
            found[name] = str(folder / found[name])
    if found.get("api_keys"):
        found["api_keys"] = SecretRef(file=str(folder / found["api_keys"].file))
    if found.get("tls"):
        files = {name: str(folder / getattr(found["tls"], name)) for name in ("certificate", "key")}
        found["tls"] = msgspec.structs.replace(found["tls"], **files)
    return found


def tell(world: World, **values: Any) -> Answer:
    wanted = with_values(world.gateway.service.config, placed(values, world.folder))
    return asyncio.run(send_message(str(world.folder / "c"), ApplyConfig(wanted), 30))


def test_every_live_key_is_tried_here() -> None:
    marked = {key for key, effect in effects().items() if effect.live}
    assert set(CASES) | ELSEWHERE == marked == set(live_fields())


@pytest.mark.parametrize("key", CASES)
@pytest.mark.sampled(2)
def test_a_live_key_takes_effect_in_a_running_gateway(world: Callable[..., World], key: str) -> None:
    case = CASES[key]
    there = world(**case.start)
    assert case.look(there) == case.before
    fields = {part for field in live_fields()[key] for part in (field, field.partition(".")[0])}
    wanted = case.wanted | ({} if case.to is None else {key: case.to})
    assert set(wanted) <= fields, "the case changes what the key changes"
    assert tell(there, **wanted).error == ""
    assert case.look(there) == case.after


def test_open_streams_keep_their_settings(world: Callable[..., World]) -> None:
    """Keys, limits, names and the template change under a stream"""
    there = world()
    there.engine.holding = True
    lines: list[str] = []
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}

    def read() -> None:
        with there.gateway.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines.extend(line for line in reply.iter_lines() if line.startswith("data: "))

    thread = threading.Thread(target=read)
    thread.start()
    until("it runs", lambda: len(there.engine.open) == 1)
    there.engine.give(2)
    changes = {"limits.max_output_tokens": 1, "names": ("other",), "api_keys": of_file("one.txt"), "limits.max_body": 1}
    assert (
        tell(there, **changes, chat_template="new.jinja", **{"limits.max_waiting": 0, "endpoints.docs": False}).error
        == ""
    )
    there.engine.give(2)
    thread.join()
    assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]
    assert '"model":"tiny"' in lines[-2]


def test_a_rejected_reload_changes_nothing(world: Callable[..., World]) -> None:
    there = world(api_keys=of_file("one.txt"))
    before = there.gateway.service.config
    (there.folder / "empty.txt").write_text("\n")
    for wrong, said in (
        ({"api_keys": of_file("empty.txt")}, "contains no key"),
        ({"api_keys": of_file("absent.txt")}, "cannot be read"),
        ({"chat_template": "absent.jinja"}, "absent.jinja"),
        ({"max_context": 32}, "max_context can only be changed by a restart"),
        ({"journal": "one.txt/j"}, "lifecycle.journal.folder"),
    ):
        assert said in tell(there, names=("other",), **wrong, **{"limits.max_choices": 1}).error
        assert there.gateway.service.config is before
        assert there.allowed("one") == 200 and there.allowed(None) == 401


def test_a_key_file_is_reread_although_nothing_else_changed(world: Callable[..., World]) -> None:
    there = world(api_keys=of_file("one.txt"))
    (there.folder / "one.txt").write_text("three\nfour\n")
    assert there.allowed("one") == 200
    assert tell(there).keys == 2
    assert (there.allowed("one"), there.allowed("three"), there.allowed("four")) == (401, 200, 200)


def test_the_journal_is_switched_on_in_a_running_gateway_and_on_again(world: Callable[..., World]) -> None:
    there = world()
    assert not there.replayed()
    for _ in range(2):
        assert tell(there, journal="j", **{"lifecycle.journal.keep": 900.0}).error == ""
        assert there.replayed()
        assert tell(there, journal="", **{"lifecycle.journal.keep": 0.0}).error == ""
        assert not there.replayed()
