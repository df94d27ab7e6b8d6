"""Listening socket of the service: opened before anything starts, and open until the appliance ends."""

import asyncio
import contextlib
import errno
import select
import socket
import struct
import time
from pathlib import Path

LISTENER_SOCKET = "listener.sock"
_BACKLOG = 2048  # length of the accept queue
_TIMEOUT_S = 10.0
_REPLY_S = 0.5  # time for the replies to waiting connections when the appliance ends
_CREDENTIALS = struct.Struct("iII")  # process, user and group of the peer of a Unix socket
_LOCAL_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class AddressUnavailable(Exception):
    """Raised if the address cannot be used. The message says why and which key to change."""


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port` (0 for a free port); connections wait until a process accepts
    them. Raise AddressUnavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host or None, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressUnavailable(
            f"endpoints.host: {host!r} is not an address of this machine ({error}); 0.0.0.0 listens on all addresses"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Lingering connections of an earlier run do not block the port; another listener does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(found[0][4])
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressUnavailable(_bind_error(host, port, error)) from error
    return listener


class SharedListener:
    """Keeps the listener open in the launcher and passes it to gateways, through a Unix socket at `path`. A client that
    connects while no gateway runs waits for the next one."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self._listener = listener
        self._gateway_pid = 0  # process id of the gateway that has the listener
        self._loop = asyncio.get_running_loop()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._server.setblocking(False)
        self._loop.add_reader(self._server, self._pass_listener)

    def _pass_listener(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            with connection:
                pid, _, _ = _CREDENTIALS.unpack(
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                socket.send_fds(connection, [b"."], [self._listener.fileno()])
                self._gateway_pid = pid

    def close(self, reply: bytes = b"") -> None:
        """Stop accepting. A running gateway answers the connections that wait, and later ones are refused. If no
        gateway runs, the waiting connections get `reply`."""
        if self._server.fileno() >= 0:
            self._loop.remove_reader(self._server)
            self._server.close()
            if reply and not _is_running(self._gateway_pid):
                _answer_waiting(self._listener, reply)
            self._listener.close()


def _is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie does not count, because it has closed its files."""
    with contextlib.suppress(OSError, IndexError):
        return bool(pid) and Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return False


def _answer_waiting(listener: socket.socket, reply: bytes) -> None:
    """Accept the waiting connections and send each a reply. Data from clients is read, because closing a socket with
    unread data resets the connection."""
    listener.setblocking(False)
    deadline = time.monotonic() + _REPLY_S
    waiting: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            waiting.append(listener.accept()[0])
    for connection in waiting:
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.sendall(reply)
            connection.shutdown(socket.SHUT_WR)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for connection in select.select(waiting, [], [], left_s)[0]:
            with contextlib.suppress(BlockingIOError):
                if not _read(connection):
                    waiting.remove(connection)
                    connection.close()
    for connection in waiting:
        connection.close()


def _read(connection: socket.socket) -> bytes:
    """Read from a client. Return nothing after it has closed or reset the connection."""
    try:
        return connection.recv(2**16)
    except ConnectionError:
        return b""


def receive_listener(path: str) -> socket.socket:
    """Return the launcher's listener. Raise OSError if it is not available."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(path)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise OSError(f"{path}: the launcher sent no listener")
    return socket.socket(fileno=descriptors[0])


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use by another process; set endpoints.port or --port (0 selects a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not permitted for this user; set endpoints.port or --port to 1024 or above"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"endpoints.host: {host} is not an address of this machine; 0.0.0.0 listens on all addresses"
    return f"cannot listen on {host} port {port}: {error.strerror}; change endpoints.host or endpoints.port"


def local_host(host: str) -> str:
    """Return the host under which this machine itself reaches a listener on `host`."""
    return _LOCAL_HOSTS.get(host, host)


def url(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
