"""Server side of the engine's Unix socket. It has one connection at a time; a new one replaces the previous one.

One thread accepts; each connection has a reader and a writer thread, so that a slow or silent gateway never blocks the
engine.
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
MAX_BACKLOG_BYTES = 1 << 28  # a gateway that leaves this much unread is disconnected


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
        """Queue one frame without waiting. Does nothing if the connection has ended."""
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
        """Wait until all frames have been passed to the operating system."""
        self._written.wait(timeout_s)

    def close(self) -> None:
        """Shut down both directions: the reader sees the end of the stream and the writer stops."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._queue.put(b"")

    def read(self) -> memoryview:
        """Return some bytes, valid until the next call; empty at the end of the stream.

        All calls share one buffer. A new buffer for each call, trimmed to the few bytes that came, would fragment the
        heap."""
        try:
            count = self._stream.recv_into(self._received)
        except OSError:
            count = 0
        return self._received[:count]

    def _write(self) -> None:
        with suppress(OSError):  # the reader sees the error, too, and reports it
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
    """Binds the socket when constructed; `start` begins to accept. Callbacks run in its threads: `opened(connection)`,
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
        """Remove the socket, so that no client connects to an engine that has ended."""
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
            pass  # damaged, or another version: close the connection; the gateway may open another one
        finally:
            connection.close()
            self._closed(connection)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()  # left by an engine that was killed
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"socket={path}: {error.strerror or error}; use a path of at most 107 bytes in a folder that is writable"
        ) from error
    return listener
