"""Stateful sessions of Amazon SageMaker: requests of a session run on the same engine, which has their prefixes cached.

A client opens a session, sends its id with each request, and closes it (dg/stateful-sessions.html of Amazon SageMaker's
developer guide). Each open session is an empty file whose modification time is the end of the session, so sessions
survive a restart of the gateway.
"""

import os
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

from appliance.server.errors.api import BadRequest

HEADER = "X-Amzn-SageMaker-Session-Id"
NEW = "NEW_SESSION"


class Sessions:
    """Open sessions. `keep_s` is their lifetime in seconds, 0 disables them; without a folder they are in memory."""

    def __init__(self, keep_s: float, most: int, folder: Path | None = None) -> None:
        self.keep_s, self._most, self._folder = keep_s, most, folder
        self._ends: dict[str, float] = {}  # time of the end by id, the oldest session first
        if keep_s and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            found = {path.name: path.stat().st_mtime for path in folder.iterdir()}
            self._ends = dict(sorted(found.items(), key=lambda one: one[1]))

    def open(self) -> tuple[str, datetime]:
        """Open a session and return its id and its end. The oldest session is closed if there are too many."""
        now = time.time()
        while self._ends and (len(self._ends) >= self._most or next(iter(self._ends.values())) <= now):
            self._forget(next(iter(self._ends)))
        name, end = str(uuid.uuid4()), now + self.keep_s
        self._ends[name] = end
        if self._folder is not None:
            path = self._folder / name
            path.touch()
            os.utime(path, (end, end))
        return name, datetime.fromtimestamp(end, UTC)

    def check(self, name: str) -> None:
        """Raise BadRequest unless the session is open."""
        if not self.keep_s:
            raise BadRequest(
                f"{HEADER} is not supported: this server does not store sessions (endpoints.sessions.keep); send the "
                "whole conversation in each request.",
                HEADER,
            )
        end = self._ends.get(name)
        if end is not None and end <= time.time():
            self._forget(name)
            end = None
        if end is None:
            raise BadRequest("The session was not found: it does not exist, was closed or has expired.", HEADER)

    def close(self, name: str) -> None:
        """Close a session. Raise BadRequest unless it is open."""
        self.check(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self._ends[name]
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)
