"""The port of gRPC: its certificate, its limits, and an address that is in use."""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import uvloop

from appliance.config.gateway import Tls
from appliance.security.certificate import Certificate, read_certificate
from appliance.server.http.connections import Connection, ConnectionTable
from appliance.server.platforms.grpc_messages import MESSAGES
from appliance.server.platforms.grpc_relay import END_STREAM, HEADERS, PREFACE, Frames, Relay
from appliance.server.platforms.grpc_server import GrpcPortTaken, grpc_served
from tests.appliance.certificates import write_certificate


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


async def live(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with its path."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]})
    body = b'{"error": {"message": "%s"}}' % scope["path"].encode("unicode_escape").replace(b"\\", b"/")
    await send({"type": "http.response.body", "body": body})


def served(config: Any, certificate: Certificate | None = None, app: Any = live) -> AbstractAsyncContextManager[None]:
    return grpc_served(lambda: config, app, table_of(config, []), certificate)


def table_of(config: Any, closed: list[str]) -> ConnectionTable:
    return ConnectionTable(lambda: config.endpoints.connections, closed.append)


def test_a_port_in_use_is_a_configuration_error(new_config: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = new_config(**{"endpoints.grpc_port": other.getsockname()[1]})

        async def serve() -> None:
            async with served(config):
                pass

        with pytest.raises(GrpcPortTaken, match="grpc_port"):
            uvloop.run(serve())


def test_a_renewed_certificate_is_used_for_new_connections(new_config: Callable[..., Any], tmp_path: Path) -> None:
    write_certificate(tmp_path, "a")
    tls = Tls(certificate=str(tmp_path / "a.crt"), key=str(tmp_path / "a.key"))
    certificate = read_certificate(tls)
    port = free_port()
    config = new_config(**{"endpoints.grpc_port": port, "tls": tls})

    async def answers() -> bool:
        """Return whether a client that trusts the present file is answered."""
        trusted = grpc.ssl_channel_credentials((tmp_path / "a.crt").read_bytes())
        # Channels with equal arguments share connections.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(f"localhost:{port}", trusted, options) as channel:
            call = channel.unary_unary("/grpc.health.v1.Health/Check")
            try:
                return await call(b"", timeout=5) == b"\x08\x02"
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return False

    async def serve() -> None:
        async with served(config, certificate):
            assert await answers()
            write_certificate(tmp_path, "a")
            assert not await answers(), "the new certificate was not accepted yet"
            certificate.replace_with(read_certificate(tls))
            assert await answers()

    uvloop.run(serve())


@pytest.mark.parametrize(
    ("name", "code", "details"),
    [
        (b"a%20?\x01", grpc.StatusCode.NOT_FOUND, "/v2/models/a%20?/x01/ready"),
        (b"../../metrics", grpc.StatusCode.NOT_FOUND, "/v2/models/../../metrics/ready"),
        (b"a" * 70_000, grpc.StatusCode.NOT_FOUND, "No model has a name of this length."),
    ],
)
def test_names_of_models_are_no_paths(
    new_config: Callable[..., Any], name: bytes, code: grpc.StatusCode, details: str
) -> None:
    request = MESSAGES["ModelReadyRequest"](name=name.decode())
    assert failed(new_config, "ModelReady", request) == (code, details)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_parameters_that_json_lacks_are_refused(new_config: Callable[..., Any], value: float) -> None:
    request = MESSAGES["ModelInferRequest"](model_name="a")
    request.parameters["temperature"].double_param = value
    expected = grpc.StatusCode.INVALID_ARGUMENT, "A parameter is not a finite number."
    assert failed(new_config, "ModelInfer", request) == expected


def failed(new_config: Callable[..., Any], method: str, request: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that fails, with its details."""
    port = free_port()
    config = new_config(**{"endpoints.grpc_port": port})

    async def serve() -> tuple[grpc.StatusCode, str]:
        async with served(config), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request.SerializeToString(), timeout=20)
            return caught.value.code(), str(caught.value.details())

    return uvloop.run(serve())


def frame(kind: int, flags: int, stream: int, size: int) -> bytes:
    return size.to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + bytes(size)


def test_frames_are_found_however_the_bytes_are_cut() -> None:
    data = bytes(PREFACE) + frame(4, 0, 0, 18) + frame(1, 4, 1, 33) + frame(0, 1, 1, 0) + frame(3, 0, 2**31 + 5, 4)
    for size in (1, 2, 7, 9, 24, 1000):
        frames = Frames(PREFACE)
        found = [each for at in range(0, len(data), size) for each in frames.feed(data[at : at + size])]
        assert found == [(4, 0, 0), (1, 4, 1), (0, 1, 1), (3, 0, 5)], size


class Written:
    """Takes the place of a transport."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


def relay_of(table: ConnectionTable) -> Relay:
    with socket.socket() as sock:
        connection = Connection(sock, "192.0.2.1")
    assert table.admit(connection)
    relay = Relay(connection, table, "absent", set())
    relay.transport = cast(asyncio.Transport, Written())
    relay.data_received(bytes(PREFACE))
    return relay


def test_only_streams_that_grpc_answers_make_a_connection_busy(new_config: Callable[..., Any]) -> None:
    table = table_of(new_config(), [])
    relay = relay_of(table)
    for stream in (0, 2):
        relay.data_received(frame(HEADERS, 4, stream, 5))
        assert table.idle == 1
    relay.data_received(frame(HEADERS, 4, 3, 5))
    assert table.idle == 0
    relay.answer(frame(HEADERS, END_STREAM, 3, 5))
    assert table.idle == 1
    for stream in (3, 1):
        relay.data_received(frame(HEADERS, 5, stream, 5))
        assert table.idle == 1, "the call has ended, and no call may begin before it"


def test_pings_do_not_make_a_connection_the_newest_idle_one(new_config: Callable[..., Any]) -> None:
    closed: list[str] = []
    table = table_of(new_config(), closed)
    relays = [relay_of(table) for _ in range(2)]
    relays[0].data_received(frame(6, 0, 0, 8))
    assert table.close_oldest() and closed == ["max"]
    relays[0].data_received(frame(HEADERS, 4, 1, 5))
    assert table.idle == 1, "the other one is open and idle"


def test_a_connection_that_grpc_has_closed_is_idle(new_config: Callable[..., Any]) -> None:
    """Its client may never read the bytes that remain."""
    table = table_of(new_config(), [])
    relay = relay_of(table)
    relay.data_received(frame(HEADERS, 4, 1, 5))
    assert table.idle == 0
    relay.close()
    assert table.idle == 1


def test_connections_of_one_address_are_limited(new_config: Callable[..., Any]) -> None:
    """Idle connections make room for new ones, and connections with an open call do not."""
    port, closed = free_port(), []
    config = new_config(**{"endpoints.grpc_port": port, "endpoints.connections.max_per_address": 2})
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]

    async def serve() -> None:
        let_go = asyncio.Event()

        async def wait(scope: Any, receive: Any, send: Any) -> None:
            await let_go.wait()
            await live(scope, receive, send)

        table = table_of(config, closed)
        async with grpc_served(lambda: config, wait, table):
            channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(3)]
            calls = [one.unary_unary("/inference.GRPCInferenceService/ServerLive") for one in channels]
            silent = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
            open_calls = [asyncio.ensure_future(call(b"", timeout=20)) for call in calls[:2]]
            while table.idle or len(table) != 2:
                await asyncio.sleep(0.01)
            assert closed == ["max_per_address"], "the silent connection"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls[2](b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            silent.close()
            let_go.set()
            assert await asyncio.gather(*open_calls) == [b"", b""]
            while table.idle != 2:
                await asyncio.sleep(0.01)
            for channel in channels:
                await channel.close()

    uvloop.run(asyncio.wait_for(serve(), 60))


@pytest.mark.parametrize(("least", "accepted"), [("TLSv1.2", True), ("TLSv1.3", False)])
def test_the_least_version_of_tls_applies(
    new_config: Callable[..., Any], tmp_path: Path, least: Any, accepted: bool
) -> None:
    write_certificate(tmp_path, "a")
    tls = Tls(certificate=str(tmp_path / "a.crt"), key=str(tmp_path / "a.key"), least_version=least)
    port = free_port()
    config = new_config(**{"endpoints.grpc_port": port, "tls": tls})

    def handshake() -> str | None:
        context = ssl.create_default_context(cafile=str(tmp_path / "a.crt"))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        raw = socket.create_connection(("127.0.0.1", port), 10)
        with raw, context.wrap_socket(raw, server_hostname="localhost") as wrapped:
            return wrapped.selected_alpn_protocol()

    async def serve() -> str | None:
        async with served(config, read_certificate(tls)):
            return await asyncio.to_thread(handshake)

    if accepted:
        assert uvloop.run(serve()) == "h2"
    else:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            uvloop.run(serve())
