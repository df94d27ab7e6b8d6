"""Console output of the launcher: its own messages, the log lines of each program prefixed with its name, and one
progress line.

One thread writes, so that a stopped terminal or a hanging log driver never delays signals and restarts. Lines that
cannot be written in time are dropped and counted. On a terminal the progress line is redrawn in place and stays last.
"""

import contextlib
import json
import os
import queue
import re
import threading
from datetime import UTC, datetime
from typing import Any, Literal

from engine.api.printable import printable, printable_json

_NAME_WIDTH = 10
_KEYS = ("ts", "level", "logger", "message")
_ALIASES = {"crit": "critical", "warn": "warning", "erro": "error", "trac": "debug", "blat": "debug", "debg": "debug"}
_LEVEL = re.compile(r"slipway [\w-]+: (warning|error):|[\d-]+ [\d:,]+ (CRIT|ERRO|WARN|INFO|DEBG|TRAC|BLAT) ")
"""Matches the first words of a line with a level, as Slipway's own programs and Supervisor print it."""
_MAX_QUEUED_LINES = 10_000
_CLEAR_LINE = b"\r\x1b[K"


class Console:
    """Writes lines to a descriptor and escapes unprintable characters. With `form` "text" each line is prefixed with
    the program's name; with "json" each line is a record with `ts`, `level`, `program`, `logger`, `message` and the
    other fields of the program's own record."""

    def __init__(self, descriptor: int, form: Literal["text", "json"]) -> None:
        self._descriptor = descriptor
        self._json = form == "json"
        self._tty = form == "text" and os.isatty(descriptor)
        self._queue: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(_MAX_QUEUED_LINES)
        self._dropped = 0
        self._progress = ""
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)

    def start(self) -> None:
        """Start the writer thread. Call it after the last fork, because threads do not survive a fork."""
        self._thread.start()

    def message(self, program: str, text: str) -> None:
        """Print a message of the launcher itself."""
        self._put(self._message_line(program, text))

    def plain(self, text: str) -> None:
        """Print a line without a name prefix, so that it can be copied."""
        self._put(self._message_line("slipway", text) if self._json else f"{_printable(text)}\n".encode())

    def log(self, program: str, line: bytes) -> None:
        """Print one line of a program's output. `line` has no newline."""
        text = line.decode(errors="backslashreplace")
        if self._json:
            self._put(_json_line(_log_record(line) or _plain_record(program, text), program))
        else:
            self._put(f"{program:<{_NAME_WIDTH}} | {_printable(text)}\n".encode())

    @property
    def redraws(self) -> bool:
        """Return whether a progress line replaces the previous one."""
        return self._tty

    def progress(self, text: str) -> None:
        """Show the state of a start. On a terminal it replaces the previous progress line; elsewhere it is a new
        line."""
        if not self._tty:
            self.message("slipway", text)
            return
        self._progress = f"{'slipway':<{_NAME_WIDTH}} {_printable(text)}"
        self._put(b"")

    def end_progress(self) -> None:
        self._progress = ""

    def close(self, timeout_s: float) -> None:
        """Write the remaining lines, for at most `timeout_s`."""
        self.end_progress()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _message_line(self, program: str, text: str) -> bytes:
        if not self._json:
            return f"{program:<{_NAME_WIDTH}} {_printable(text)}\n".encode()
        return _json_line(_plain_record(program, text), program)

    def _put(self, line: bytes) -> None:
        if self._dropped:
            line = (
                self._message_line("slipway", f"{self._dropped} lines were dropped: the output was not read in time")
                + line
            )
        try:
            self._queue.put_nowait((line, self._progress.encode()))
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            line, progress = item
            data = (_CLEAR_LINE if self._tty else b"") + line + progress
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:  # the reader has closed the output: continue without it
                continue


def _printable(text: str) -> str:
    """Escape unprintable characters. Line breaks are kept."""
    return printable(text, keep="\n\t")


def _log_record(line: bytes) -> dict[str, Any] | None:
    """Parse a JSON log record. Return None for any other line."""
    if not line.startswith(b"{"):
        return None
    try:
        found = printable_json(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return found if all(isinstance(found.get(key), str) for key in _KEYS) else None


def _plain_record(program: str, text: str) -> dict[str, Any]:
    """Return the record of a line of text."""
    found = _LEVEL.match(text)
    level = (found[1] or found[2]).lower() if found else "info"
    ts = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"ts": ts, "level": _ALIASES.get(level, level), "logger": program, "message": _printable(text)}


def _json_line(record: dict[str, Any], program: str) -> bytes:
    ordered = {"ts": record["ts"], "level": record["level"], "program": program, **record}
    return json.dumps(ordered).encode() + b"\n"
