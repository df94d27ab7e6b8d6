"""The listener outlives the gateway: connections opened during a restart wait for the next gateway."""

import http.client
import json
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable
from contextlib import closing

import pytest

from appliance.runtime import listener as listen
from tests.appliance.supervisor.conftest import Appliance

PATIENCE_S = 100.0  # against hangs only


def live(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=PATIENCE_S) as reply:
        return int(reply.status)


def test_connections_are_refused_after_sigterm_but_not_between_two_gateways(launched: Callable[..., Appliance]) -> None:
    appliance = launched(backoff_s=1.0)
    first = appliance.started("gateway")
    assert live(appliance.port) == 200  # earlier connections were not refused either
    os.kill(first, signal.SIGSTOP)  # it no longer accepts connections
    found: list[int] = []
    clients = [threading.Thread(target=lambda: found.append(live(appliance.port))) for _ in range(20)]
    for client in clients[:10]:
        client.start()
    os.kill(first, signal.SIGKILL)
    for client in clients[10:]:
        client.start()
    appliance.started("gateway", 2)
    for client in clients:
        client.join(PATIENCE_S)
    assert found == [200] * 20
    # A fake gateway keeps its listener until it exits; the launcher closes its own at once and no connection is lost.
    assert appliance.terminate() == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", appliance.port)):
        pass


def test_waiting_connections_get_503_at_shutdown(
    launched: Callable[..., Appliance],
) -> None:
    appliance = launched(backoff_s=600.0)
    for times in (1, 2):  # the second end has to wait for its restart
        gateway = appliance.started("gateway", times)
        appliance.until(lambda: live(appliance.port) == 200)
        with socket.create_connection(("127.0.0.1", appliance.port)):
            os.kill(gateway, signal.SIGKILL)
    appliance.until(lambda: b"restart 2 of" in appliance.out())
    clients = [socket.create_connection(("127.0.0.1", appliance.port), timeout=PATIENCE_S) for _ in range(20)]
    for client in clients[:15]:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + bytes(50_000))
    appliance.process.send_signal(signal.SIGTERM)
    for client in clients:
        with client:
            reply = http.client.HTTPResponse(client)
            reply.begin()
            assert reply.status == 503 and reply.headers["Retry-After"]
            assert "shutting down" in json.loads(reply.read())["error"]["message"]
    assert appliance.end() == 0


def test_port_in_use_is_refused_and_port_0_selects_a_free_port() -> None:
    with listen.open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(listen.AddressUnavailable, match=f"port {port} on 127.0.0.1 is in use"):
            listen.open_listener("127.0.0.1", port)
    with closing(listen.open_listener("::1", 0)) as other:
        assert other.family == socket.AF_INET6


def test_missing_listener_socket_raises_os_error(tmp_path: object) -> None:
    with pytest.raises(OSError):
        listen.receive_listener(f"{tmp_path}/nobody.sock")
