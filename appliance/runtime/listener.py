"""The address that is served: listened on before anything starts, and for as long as the appliance lives."""

import asyncio
import contextlib
import errno
import select
import socket
import struct
import time
from pathlib import Path

DOOR = "listener.sock"
_WAITING = 2048  # connections that nobody has accepted yet
_PATIENCE_S = 10.0
_LAST_S = 0.5  # for the replies to connections that wait when the appliance ends
_CREDENTIALS = struct.Struct("iII")  # process, user and group of the other end of a Unix socket
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class AddressTaken(Exception):
    """Nothing can listen there; the message says why and which key to change."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, on a free port for 0: whoever connects waits until somebody accepts. Raises
    AddressTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host or None, port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressTaken(
            f"endpoints.host: {host!r} is no address of this machine ({error}); 0.0.0.0 listens on all"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Connections that linger from a former run do not count, a listener does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(found[0][4])
        listener.listen(_WAITING)
    except OSError as error:
        listener.close()
        raise AddressTaken(_explain(host, port, error)) from error
    return listener


class Door:
    """The launcher's hold on the listener, which outlives the gateways that it lends it to: a client that comes while
    none runs waits for the next one. It lends through a Unix socket at `path`."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self._listener = listener
        self._borrower = 0  # the gateway that has it
        self._loop = asyncio.get_running_loop()
        self._desk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._desk.bind(str(path))
        self._desk.listen()
        self._desk.setblocking(False)
        self._loop.add_reader(self._desk, self._lend)

    def _lend(self) -> None:
        with contextlib.suppress(OSError):
            asking, _ = self._desk.accept()
            with asking:
                pid, _, _ = _CREDENTIALS.unpack(
                    asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                socket.send_fds(asking, [b"."], [self._listener.fileno()])
                self._borrower = pid

    def close(self, reply: bytes = b"") -> None:
        """Accept no further connections: the gateway answers those that wait, and what comes after it is refused. If no
        gateway runs, they get `reply`."""
        if self._desk.fileno() >= 0:
            self._loop.remove_reader(self._desk)
            self._desk.close()
            if reply and not _runs(self._borrower):
                _answer_waiting(self._listener, reply)
            self._listener.close()


def _runs(pid: int) -> bool:
    """Return whether a process runs; a zombie does not, because it has closed its files."""
    with contextlib.suppress(OSError, IndexError):
        return bool(pid) and Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return False


def _answer_waiting(listener: socket.socket, reply: bytes) -> None:
    """Accept the connections that wait and send each a reply. What clients sent is read, else closing resets them."""
    listener.setblocking(False)
    deadline = time.monotonic() + _LAST_S
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
    """Read from a client; return nothing after it has closed or reset the connection."""
    try:
        return connection.recv(2**16)
    except ConnectionError:
        return b""


def lent(path: str) -> socket.socket:
    """The launcher's listener. Raises OSError where nobody lends one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_PATIENCE_S)
        asking.connect(path)
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
        if not descriptors:
            raise OSError(f"{path}: the launcher gave no listener")
    return socket.socket(fileno=descriptors[0])


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another process; set endpoints.port or --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not allowed to this user; set endpoints.port or --port to 1024 or above"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"endpoints.host: {host} is no address of this machine; 0.0.0.0 listens on all of them"
    return f"cannot listen on {host} port {port}: {error.strerror}; see endpoints.host and endpoints.port"


def local_host(host: str) -> str:
    """The host under which this machine itself reaches a listener on `host`."""
    return _ANY.get(host, host)


def url(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
