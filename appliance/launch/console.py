"""What the foreground shows: the launcher's own lines, each program's log lines behind its name, one progress line.

One thread writes, so that a terminal that stopped or a log driver that hangs never holds up signals and restarts; what
it cannot take in time is dropped and counted. On a terminal the progress line is drawn over itself and stays last.
"""

import contextlib
import os
import queue
import threading
from datetime import UTC, datetime
from typing import Literal

import msgspec

_NAME_WIDTH = 10
_WAITING_LINES = 10_000
_CLEAR = b"\r\x1b[K"


class Console:
    """`form` is how lines look: `text` puts the program's name before each, `json` passes JSON lines on untouched and
    makes a record of any other."""

    def __init__(self, descriptor: int, form: Literal["text", "json"]) -> None:
        self._descriptor = descriptor
        self._json = form == "json"
        self._tty = form == "text" and os.isatty(descriptor)
        self._queue: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(_WAITING_LINES)
        self._dropped = 0
        self._progress = ""
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)

    def start(self) -> None:
        """Starts the writer; not before the last fork, for threads do not survive it."""
        self._thread.start()

    def say(self, program: str, text: str) -> None:
        """A line of the launcher itself."""
        self._put(self._own(program, text))

    def plain(self, text: str) -> None:
        """A line without a name before it, to be copied."""
        self._put(self._own("slipway", text) if self._json else f"{text}\n".encode())

    def log(self, program: str, line: bytes) -> None:
        """A line of a program's output, without its newline."""
        if self._json and not line.startswith(b"{"):
            self._put(self._own(program, line.decode(errors="replace")))
            return
        self._put(line + b"\n" if self._json else f"{program:<{_NAME_WIDTH}} | ".encode() + line + b"\n")

    @property
    def redraws(self) -> bool:
        """Whether a progress line replaces the one before it."""
        return self._tty

    def progress(self, text: str) -> None:
        """The state of a start; replaces the last one on a terminal, is a line of its own elsewhere."""
        if not self._tty:
            self.say("slipway", text)
            return
        self._progress = f"{'slipway':<{_NAME_WIDTH}} {text}"
        self._put(b"")

    def end_progress(self) -> None:
        self._progress = ""

    def close(self, timeout_s: float) -> None:
        """Writes what is left, if the other side takes it in time."""
        self.end_progress()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _own(self, program: str, text: str) -> bytes:
        if not self._json:
            return f"{program:<{_NAME_WIDTH}} {text}\n".encode()
        record = {"time": datetime.now(UTC).isoformat(), "level": "info", "program": program, "message": text}
        return msgspec.json.encode(record) + b"\n"

    def _put(self, line: bytes) -> None:
        if self._dropped:
            line = self._own("slipway", f"{self._dropped} lines were dropped here: the output was not read") + line
        try:
            self._queue.put_nowait((line, self._progress.encode()))
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            line, progress = item
            data = (_CLEAR if self._tty else b"") + line + progress
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # nobody reads any more: go on without
                continue
