"""Limits on client connections before authentication: size, speed and number. Real sockets against the real server."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.config.gateway import Tls
from appliance.server.http.connections import client_address
from tests.appliance.certificates import write_certificate
from tests.appliance.conftest import Gateway, until

PATIENCE_S = 100.0
LIVE = b"GET /live HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture
def limited(start_gateway, new_engine) -> Callable[..., Gateway]:
    """Start a gateway without an engine under these limits."""

    def start(values: dict[str, Any] | None = None, **limits: Any) -> Gateway:
        values = (values or {}) | {f"endpoints.connections.{name}": limit for name, limit in limits.items()}
        return start_gateway(new_engine(), ready=False, **values)

    return start


@contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    address = httpx.URL(gateway.url)
    with socket.create_connection((address.host, address.port), PATIENCE_S) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes. Raise if the connection is reset."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def status_and_error(reply: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


def exchange(gateway: Gateway, request: bytes) -> tuple[int, dict[str, Any]]:
    with connected(gateway) as connection:
        connection.sendall(request)
        return status_and_error(everything(connection))


def closed(gateway: Gateway, reason: str) -> float:
    return gateway.metric("slipway_connections_closed_total", reason=reason)


# Size


def test_a_head_of_60_kib_is_served(limited):
    gateway = limited()
    assert gateway.client.get("/live", headers={"x-long": "a" * 60_000}).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"a" * 900) for n in range(80)) + b"\r\n",
        b"GET /live?" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["one header", "many headers", "query"],
)
def test_a_head_over_the_limit_gets_431(limited, head):
    gateway = limited()
    status, error = exchange(gateway, head)
    assert (status, error["type"]) == (431, "RequestHeaderFieldsTooLargeError")
    assert "65536 bytes" in error["message"] and "endpoints.connections.max_head" in error["message"]
    assert closed(gateway, "max_head") == 1


def test_a_head_without_end_is_refused_before_it_is_read_and_probes_are_answered_meanwhile(limited):
    gateway = limited()
    sent = 0
    with connected(gateway) as connection:
        connection.sendall(LIVE + b"x-long: ")
        try:
            for _ in range(60):
                connection.sendall(b"a" * 2**20)
                sent += 1
                assert gateway.client.get("/live").status_code == 200
        except ConnectionError:
            pass
    assert closed(gateway, "max_head") == 1


def test_a_head_in_small_pieces_is_counted_as_well(limited):
    gateway = limited(max_head=20_000)
    with connected(gateway) as connection:
        connection.sendall(LIVE + b"x-long: ")
        for _ in range(60):
            connection.sendall(b"a" * 999)
        connection.shutdown(socket.SHUT_WR)
        assert status_and_error(everything(connection))[0] == 431


def test_too_many_headers_get_431(limited):
    gateway = limited()
    headers = b"".join(b"x-%d: 1\r\n" % number for number in range(101))
    status, error = exchange(gateway, b"GET /live HTTP/1.1\r\n" + headers + b"\r\n")
    assert status == 431 and "more than 100 header fields" in error["message"]
    assert "endpoints.connections.max_headers" in error["message"]
    assert closed(gateway, "max_headers") == 1


CHUNKED = b"POST /test/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"1\r\n{\r\n0\r\nx-long: " + b"a" * 90_000 + b"\r\n\r\n",
        b"1\r\n{\r\n0\r\n" + b"".join(b"x-%d: 1\r\n" % number for number in range(101)) + b"\r\n",
        b"1;" + b"a" * 200_000 + b"\r\n{\r\n0\r\n\r\n",
    ],
    ids=["one trailer", "many trailers", "chunk extension"],
)
def test_trailers_over_the_limit_get_431(limited, body):
    status, error = exchange(limited(), CHUNKED + b"\r\n" + body)
    assert (status, error["type"]) == (431, "RequestHeaderFieldsTooLargeError")


def test_a_body_in_tiny_chunks_is_no_head(limited):
    gateway = limited(max_head=1000)
    body = json.dumps({"prompt": [1], "raises": "NotImplementedError", "padding": "a" * 5000}).encode()
    chunks = b"".join(b"1;x=%s\r\n%c\r\n" % (b"y" * 200, byte) for byte in body)
    with connected(gateway) as connection:
        connection.sendall(CHUNKED + b"Connection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert b" 501 " in everything(connection)


def test_trailers_do_not_become_headers_of_the_request(limited):
    gateway = limited()
    with connected(gateway) as connection:
        connection.sendall(CHUNKED + b"Connection: close\r\n\r\n2\r\n{}\r\n0\r\nX-Request-Id: from-a-trailer\r\n\r\n")
        assert b"from-a-trailer" not in everything(connection)


@pytest.mark.parametrize(
    "request_bytes", [b"NONSENSE\r\n\r\n", b"GET /live HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"]
)
def test_requests_that_are_not_http_get_an_error_object(limited, request_bytes):
    gateway = limited()
    status, error = exchange(gateway, request_bytes)
    assert status == 400 and error["message"] == "Invalid HTTP request received."
    assert closed(gateway, "invalid") == 1


def test_errors_of_a_messages_request_have_anthropic_s_shape(limited):
    gateway = limited()
    with connected(gateway) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n")
        body = json.loads(everything(connection).partition(b"\r\n\r\n")[2])
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


# Time


def test_a_late_head_gets_408(limited):
    gateway = limited(head_timeout=0.1)
    status, error = exchange(gateway, b"GET /live HTTP/1.1\r\n")
    assert (status, error["type"]) == (408, "RequestTimeoutError")
    assert "endpoints.connections.head_timeout" in error["message"]


def test_a_head_that_trickles_does_not_get_more_time(limited):
    gateway = limited(head_timeout=0.3)
    with connected(gateway) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n")
        replied = threading.Event()

        def trickle() -> None:
            while not replied.wait(0.05):
                try:
                    connection.sendall(b"x: 1\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            reply = connection.recv(65536)
        finally:
            replied.set()
            thread.join()
    assert b" 408 " in reply.splitlines()[0]


def test_a_connection_that_sends_nothing_is_closed_without_a_reply(limited):
    gateway = limited(head_timeout=0.1)
    with connected(gateway) as connection:
        assert everything(connection) == b""
    assert closed(gateway, "head_timeout") >= 1


@pytest.mark.parametrize("body", [b"", b'{"prompt"'])
def test_a_late_body_gets_408(limited, body):
    gateway = limited(body_timeout=0.1)
    head = b"POST /test/generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    status, error = exchange(gateway, head + body)
    assert (status, error["type"]) == (408, "RequestTimeoutError")
    assert "endpoints.connections.body_timeout" in error["message"]
    until("the request is counted", lambda: gateway.metric("http_requests_total", status="4xx") == 1)


def test_a_body_after_the_reply_is_dropped_for_a_limited_time(limited):
    gateway = limited(body_timeout=0.2)
    with connected(gateway) as connection:
        connection.sendall(b"POST /live HTTP/1.1\r\nContent-Length: 1000\r\n\r\nx")
        assert b" 405 " in connection.recv(65536)
        with pytest.raises(ConnectionError):
            for _ in range(900):
                connection.sendall(b"x")
                time.sleep(0.01)


def test_an_idle_connection_is_closed_after_keep_alive(limited):
    gateway = limited({"endpoints.keep_alive": 0.2})
    with connected(gateway) as connection:
        connection.sendall(LIVE + b"\r\n")
        begun = time.monotonic()
        assert everything(connection).startswith(b"HTTP/1.1 200")
        # uvicorn's own default is 5 s
        assert time.monotonic() - begun < 4


def test_a_connection_may_be_idle_for_longer_than_a_head_may_take(limited):
    gateway = limited({"endpoints.keep_alive": 60.0}, head_timeout=0.2)
    with connected(gateway) as connection:
        for _ in range(2):
            connection.sendall(LIVE + b"\r\n")
            reply = b""
            while not reply.endswith(b"}"):
                assert (piece := connection.recv(65536)), "closed by the server"
                reply += piece
            time.sleep(0.5)


def test_without_keep_alive_each_reply_is_the_last(limited):
    gateway = limited({"endpoints.keep_alive": 0.0})
    assert gateway.client.get("/live").headers["connection"] == "close"


# Number


def test_idle_connections_beyond_the_limit_are_closed_oldest_first(limited):
    gateway = limited(max_idle=5)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(gateway)) for _ in range(300)]
        assert gateway.client.get("/live").status_code == 200
        for connection in silent[:290]:
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
    assert closed(gateway, "max_idle") >= 295


def test_silent_connections_do_not_keep_others_out(limited):
    gateway = limited(max=50, max_idle=50, max_per_address=50)
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(gateway))
        for _ in range(3):
            assert httpx.get(f"{gateway.url}/live").status_code == 200
        assert gateway.metric("slipway_connections", state="idle") <= 50


@pytest.mark.parametrize("limit", ["max", "max_per_address"])
def test_a_connection_beyond_busy_ones_gets_503(limited, limit):
    gateway = limited(**{limit: 3})
    gateway.client.close()  # its connection would be closed for a new one
    head = b"POST /test/generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(gateway)).sendall(head)  # busy: its body is awaited
        table = gateway.service.metrics.connections
        until("three are busy", lambda: table() == (3, 0))
        status, error = exchange(gateway, LIVE + b"\r\n")
        assert status == 503 and "endpoints.connections.max" in error["message"]
    until("they are gone", lambda: table() == (0, 0))
    assert httpx.get(f"{gateway.url}/live").status_code == 200


def test_connections_in_a_tls_handshake_count(limited, tmp_path: Path):
    write_certificate(tmp_path, "a")
    tls = Tls(certificate=str(tmp_path / "a.crt"), key=str(tmp_path / "a.key"))
    gateway = limited({"tls": tls}, max_idle=5)
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connected(gateway))
        assert gateway.client.get("/live").status_code == 200
        assert gateway.service.metrics.connections()[0] <= 6


def test_an_unfinished_tls_handshake_times_out(limited, tmp_path: Path):
    write_certificate(tmp_path, "a")
    tls = Tls(certificate=str(tmp_path / "a.crt"), key=str(tmp_path / "a.key"))
    gateway = limited({"tls": tls}, head_timeout=0.2)
    with connected(gateway) as connection, suppress(ConnectionError):
        connection.recv(1)
    until("it is forgotten", lambda: gateway.service.metrics.connections()[0] <= 1)


def test_a_tls_client_gets_408_and_a_proper_end(limited, tmp_path: Path):
    write_certificate(tmp_path, "a")
    tls = Tls(certificate=str(tmp_path / "a.crt"), key=str(tmp_path / "a.key"))
    gateway = limited({"tls": tls}, head_timeout=0.2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connected(gateway) as plain, context.wrap_socket(plain) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_client_is_counted_by_its_network(host, address):
    assert client_address(host) == address


# Pipelines


def test_pipelined_requests_are_all_answered_in_order(limited):
    gateway = limited()
    count = 3000
    paths = b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(count))
    with connected(gateway) as connection:
        sending = threading.Thread(target=connection.sendall, args=(paths + LIVE + b"Connection: close\r\n\r\n",))
        sending.start()
        reply = everything(connection)
        sending.join()
    assert reply.count(b"HTTP/1.1 404") == count
    assert reply.count(b"HTTP/1.1 200") == 1 and reply.rindex(b"HTTP/1.1 200") > reply.rindex(b"HTTP/1.1 404")


def test_a_bad_request_behind_a_good_one_is_refused_after_its_reply(limited):
    gateway = limited()
    with connected(gateway) as connection:
        connection.sendall(LIVE + b"\r\nGET /live HTTP/1.1\r\nbad header\r\n\r\n")
        reply = everything(connection)
    assert reply.startswith(b"HTTP/1.1 200") and reply.count(b"HTTP/1.1 400") == 1


def test_a_client_that_leaves_ends_its_request_though_it_has_sent_a_second_one(start_gateway, engine):
    gateway = start_gateway(engine)
    engine.holding = True
    body = json.dumps({"prompt": [1], "max_tokens": 50}).encode()
    head = b"POST /test/generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(gateway) as connection:
        connection.sendall(head + body + LIVE + b"\r\n")
        until("it runs", lambda: len(engine.open) == 1)
    until("it is aborted", lambda: len(engine.aborted) == 1)


def test_a_reply_that_closes_is_not_overtaken_by_a_reset(limited):
    """The client is still sending when it is refused."""
    gateway = limited({"limits.max_body": 1000})
    head = b"POST /test/generate HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with connected(gateway) as connection:
        connection.sendall(head + b"Content-Length: 3000000\r\n\r\n" + b"x" * 1_000_000)
        time.sleep(0.2)
        connection.sendall(b"x" * 1_000_000)
        assert everything(connection).startswith(b"HTTP/1.1 413")
