"""The engine's end of the socket: one gateway at a time; a new connection replaces the one before.

Threads: one accepts, each connection has one that reads and one that writes, so that neither a slow gateway nor a
silent one holds up the engine.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import msgspec

from engine.api.errors import ConfigError
from engine.api.frames import FrameReader, encode, to_engine
from engine.api.messages import FromEngine, ToEngine

READ_BYTES = 1 << 18
MAX_BACKLOG_BYTES = 1 << 28  # a gateway that reads so little is given up


class Connection:
    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._received = memoryview(bytearray(READ_BYTES))
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._lock = threading.Lock()
        self._backlog = 0
        self._written = threading.Event()
        self._written.set()
        threading.Thread(target=self._write, name="gateway-writer", daemon=True).start()

    def send(self, messages: list[FromEngine]) -> None:
        """Queues one frame; never waits. To a connection that ended it does nothing."""
        frame = encode(messages)
        with self._lock:
            self._backlog += len(frame)
            self._written.clear()
            full = self._backlog > MAX_BACKLOG_BYTES
        if full:
            self.close()
        else:
            self._queue.put(frame)

    def flush(self, timeout_s: float) -> None:
        """Waits until all frames are with the operating system."""
        self._written.wait(timeout_s)

    def close(self) -> None:
        """Ends both directions: the reader sees the end, the writer is released."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._queue.put(b"")

    def read(self) -> memoryview:
        """Some bytes, none at the end; they hold until the next call. The same memory serves every time: so much of
        it for each frame, given back except for the few bytes that came, would leave holes between what lasts."""
        try:
            count = self._stream.recv_into(self._received)
        except OSError:
            count = 0
        return self._received[:count]

    def _write(self) -> None:
        with suppress(OSError):  # the reader sees the end, too, and reports it
            while frame := self._queue.get():
                self._stream.sendall(frame)
                with self._lock:
                    self._backlog -= len(frame)
                    if not self._backlog:
                        self._written.set()
        self._written.set()
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


class Server:
    """Listens from its making on; `start` begins to accept. The callbacks come from its threads: `opened(connection)`,
    then `received(connection, messages)` for each frame, then `closed(connection)`. Raises ConfigError."""

    def __init__(
        self,
        path: str,
        *,
        opened: Callable[[Connection], None],
        received: Callable[[Connection, list[ToEngine]], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self._path = Path(path)
        self._opened, self._received, self._closed = opened, received, closed
        self._current: Connection | None = None
        self._listener = _listen(self._path)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="gateway-accept", daemon=True).start()

    def close(self) -> None:
        """Takes the socket away, so that nobody connects to a dead engine."""
        with suppress(OSError):
            self._path.unlink()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                stream, _ = self._listener.accept()
                if self._current is not None:
                    self._current.close()
                self._current = connection = Connection(stream)
                self._opened(connection)
                threading.Thread(target=self._read, args=(connection,), name="gateway-reader", daemon=True).start()

    def _read(self, connection: Connection) -> None:
        frames = FrameReader()
        try:
            while data := connection.read():
                for body in frames.feed(data):
                    self._received(connection, to_engine(body))
        except (msgspec.DecodeError, ValueError):
            pass  # damaged or of another version: the connection ends, and its gateway may open another
        finally:
            connection.close()
            self._closed(connection)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()  # of an engine that was killed
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"socket={path}: {error.strerror or error}; name a path of at most 107 bytes that can be made"
        ) from error
    return listener
