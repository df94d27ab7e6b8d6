"""Client connections: accept them, count them, and close idle ones when there are too many.

A connection is idle while no request on it is being processed: after the accept, during the TLS handshake, while a
request head arrives, and between two requests. Beyond a limit the connection that has been idle longest is closed, so
connections that send nothing cannot keep others out. Connections with a request in progress are never closed here.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Literal

from appliance.config.sections.endpoints import Connections as ConnectionLimits

log = logging.getLogger(__name__)

RESERVED_FILES = 256  # descriptors reserved for engines, journals, the checkpoint and libraries
ACCEPT_BATCH = 64  # connections accepted before the event loop does other work
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
RETRY_ACCEPT_S = 0.1
TLS_SHUTDOWN_S = 5.0
IPV6_NETWORK = 64  # bits; one customer usually has a whole /64

CloseReason = Literal["max", "max_idle", "max_per_address", "max_head", "max_headers", "head_timeout", "invalid"]


@dataclass(eq=False)
class Connection:
    """One accepted connection."""

    sock: socket.socket
    address: str
    transport: asyncio.BaseTransport | None = None
    """None until the TLS handshake is complete."""

    def abort(self) -> None:
        """Close without waiting for anything."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
            return
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


Idle = OrderedDict[Connection, None]  # the longest idle one is first; finding it in a dict would take linear time


@dataclass
class _Address:
    open: int = 0
    idle: Idle = field(default_factory=OrderedDict)


@lru_cache(maxsize=4096)
def client_address(host: str) -> str:
    """Return the unit that `max_per_address` counts: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))


def file_capacity() -> int:
    """Return the maximum number of connections for which this process has file descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - RESERVED_FILES)


class ConnectionTable:
    """All open connections and the set of idle ones."""

    def __init__(self, limits: Callable[[], ConnectionLimits], report: Callable[[CloseReason], None]) -> None:
        """`limits` is read for each connection.

        `report` is called for each connection that a limit closes or rejects.
        """
        self._limits = limits
        self.report = report
        self._capacity = file_capacity()
        self._open: set[Connection] = set()
        self._idle: Idle = OrderedDict()
        self._addresses: dict[str, _Address] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection, which is idle.

        Return False if a limit is reached and no idle connection can be closed.
        """
        limits = self._limits()
        address = self._addresses.get(connection.address)
        if (
            address
            and address.open >= limits.max_per_address
            and not self._close_oldest(address.idle, "max_per_address")
        ):
            self.report("max_per_address")
            return False
        if len(self._open) >= min(limits.max, self._capacity) and not self._close_oldest(self._idle, "max"):
            self.report("max")
            return False
        self._open.add(connection)
        self._addresses.setdefault(connection.address, _Address()).open += 1
        self.set_idle(connection)
        return True

    def set_idle(self, connection: Connection) -> None:
        """Mark a connection as having no request in progress."""
        if connection not in self._open:
            return
        for idle in (self._idle, self._addresses[connection.address].idle):
            idle[connection] = None
            idle.move_to_end(connection)
        while len(self._idle) > self._limits().max_idle:
            self._close_oldest(self._idle, "max_idle")

    def set_busy(self, connection: Connection) -> None:
        """Mark a connection as having a request in progress."""
        self._idle.pop(connection, None)
        if address := self._addresses.get(connection.address):
            address.idle.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. A second call has no effect."""
        if connection not in self._open:
            return
        self.set_busy(connection)
        self._open.discard(connection)
        address = self._addresses[connection.address]
        address.open -= 1
        if not address.open:
            del self._addresses[connection.address]

    def close_oldest(self) -> bool:
        """Close the connection that has been idle longest, if there is an idle one."""
        return self._close_oldest(self._idle, "max")

    def _close_oldest(self, idle: Idle, reason: CloseReason) -> bool:
        oldest = next(iter(idle), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        self.report(reason)
        return True


class Acceptor:
    """Accepts the connections of one listening socket. Takes the place of uvicorn's asyncio server.

    An asyncio server would show a connection only after its TLS handshake, so silent connections could not be counted.
    """

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        *,
        context: ssl.SSLContext | None,
        handshake_s: Callable[[], float],
        refusal: Callable[[], bytes],
    ) -> None:
        """`refusal` returns the reply to a rejected connection. It cannot be sent on a TLS socket."""
        self._listener = listener
        self._table = table
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_s = handshake_s
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._accepting = False

    def start(self) -> None:
        self._listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._accepting = True
        self._loop.add_reader(self._listener.fileno(), self.accept)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    def accept(self) -> int:
        """Accept connections from the kernel's queue, at most one batch. Return the number of connections."""
        for count in range(ACCEPT_BATCH):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return count
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    self._out_of_files(error)
                    return count
                continue  # the client disconnected while it was queued
            self._admit(sock, peer)
        return ACCEPT_BATCH

    def _out_of_files(self, error: OSError) -> None:
        log.warning("cannot accept a connection: %s; raise the limit of open files (ulimit -n)", error.strerror)
        self._table.close_oldest()
        if self._accepting:
            self._pause()
            self._retry = self._loop.call_later(RETRY_ACCEPT_S, self._resume)

    def _admit(self, sock: socket.socket, peer: tuple[str, int] | str) -> None:
        sock.setblocking(False)
        host = peer[0] if isinstance(peer, tuple) else ""
        connection = Connection(sock, client_address(host))
        if not self._table.admit(connection):
            self._turn_away(sock)
            return
        task = self._loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _turn_away(self, sock: socket.socket) -> None:
        """Send a refusal without reading a request, as far as that is possible without blocking."""
        with contextlib.suppress(OSError), sock:
            if self._context is None:
                with contextlib.suppress(BlockingIOError):
                    sock.recv(2**16)  # unread data would turn the close into a reset, which overtakes the reply
                sock.send(self._refusal())
                sock.shutdown(socket.SHUT_WR)

    async def _connect(self, connection: Connection) -> None:
        timeouts = {}
        if self._context is not None:
            timeouts = {"ssl_handshake_timeout": self._handshake_s(), "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
        factory = partial(self._make_protocol, connection)
        try:
            await self._loop.connect_accepted_socket(factory, connection.sock, ssl=self._context, **timeouts)
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            self._table.remove(connection)
            connection.sock.close()
            if isinstance(error, asyncio.CancelledError):
                raise

    @property
    def handshakes(self) -> int:
        """Number of connections whose transport is not set up yet."""
        return len(self._tasks)

    def close(self) -> None:
        """Stop accepting. Connections that are still in the kernel's queue get the refusal."""
        if self._retry is not None:
            self._retry.cancel()
        self._pause()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                self._turn_away(sock)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
