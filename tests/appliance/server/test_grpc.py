"""The port of gRPC: its certificate, its limits, and an address that is in use."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from appliance.config.gateway import Tls
from appliance.security.certificate import read_certificate
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


def test_a_port_in_use_is_a_configuration_error(new_config: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = new_config(**{"endpoints.grpc_port": other.getsockname()[1]})

        async def serve() -> None:
            async with grpc_served(config, live):
                pass

        with pytest.raises(GrpcPortTaken, match="grpc_port"):
            asyncio.run(serve())


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
        async with grpc_served(config, live, certificate):
            assert await answers()
            write_certificate(tmp_path, "a")
            assert not await answers(), "the new certificate was not accepted yet"
            certificate.replace_with(read_certificate(tls))
            assert await answers()

    asyncio.run(serve())


def test_names_of_models_are_no_paths(new_config: Callable[..., Any]) -> None:
    port = free_port()
    config = new_config(**{"endpoints.grpc_port": port})

    async def serve() -> str:
        async with (
            grpc_served(config, live),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\x0a\x06a%20?\x01", timeout=5)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            return str(caught.value.details())

    assert asyncio.run(serve()) == "/v2/models/a%20?/x01/ready"
