"""Crash bundles: one folder for each crash of an engine, with the data needed to diagnose it later.

`death.json` has the cause, the exit status and the suggested remedy, `log.txt` the last log lines, `engine.json` and
`gateway.json` the active configurations. Values of secrets and texts that look like tokens are masked. Old bundles are
deleted, so that the number and the total size stay below the limits.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from appliance.config.document import HIDDEN, masked
from appliance.runtime.inflight import OpenRequest, read_open
from appliance.supervisor.causes import Cause
from appliance.supervisor.monitor import Notice

OPEN_S = 0.3  # how long the gateway may take to write the list of open requests
_POLL_S = 0.02
_LONGEST_LINE = 2000  # characters
_CONFIGURATIONS = ("gateway.json",)
_GROUP_FILES = ("memory.max", "memory.current", "memory.peak", "memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True)
class Bundles:
    """Location and retention of crash bundles."""

    places: tuple[Path, ...] = ()  # candidate folders; the first writable one is used
    keep: int = 10  # maximum number of bundles; 0 disables them
    size: int = 16 * 2**20  # maximum total size in bytes


class Crashes:
    """Writes crash bundles. The values in `secrets` are masked everywhere. `facts` are added to each bundle. `memory`
    is the cgroup file with the kernel's memory events; the files with the limits are in the same folder."""

    def __init__(
        self,
        bundles: Bundles,
        directory: Path,
        *,
        secrets: Iterable[str] = (),
        facts: dict[str, Any] | None = None,
        memory: str = "",
        device: Callable[[], Any] = lambda: None,
    ) -> None:
        self._bundles = bundles
        self._directory = directory
        self._secrets = [secret for secret in secrets if secret.strip()]
        self._facts = facts or {}
        self._memory = memory
        self._device = device
        self.trouble = ""

    @property
    def places(self) -> tuple[Path, ...]:
        """Return the folders that may contain bundles; empty if bundles are disabled."""
        return self._bundles.places if self._bundles.keep else ()

    async def write(self, notice: Notice, cause: Cause, lines: Sequence[str]) -> Path | None:
        """Write a crash bundle and return its path. Return None if bundles are disabled, or if writing fails: `trouble`
        then has the reason."""
        if not self._bundles.keep:
            return None
        requests = await self._open(notice.program)
        told = self._told(notice, cause, requests)
        told["device"] = await asyncio.to_thread(self._device)
        files = {
            "death.json": msgspec.json.format(msgspec.json.encode(told), indent=1).decode() + "\n",
            "log.txt": masked("".join(f"{line[:_LONGEST_LINE]}\n" for line in lines)),
        }
        for name in (f"{notice.program}.json", *_CONFIGURATIONS):
            with contextlib.suppress(OSError):
                files[name] = (self._directory / name).read_text()
        return self._put(notice.program, {name: self._clean(text) for name, text in files.items()})

    def _told(self, notice: Notice, cause: Cause, requests: tuple[OpenRequest, ...] | None) -> dict[str, Any]:
        death = msgspec.to_builtins(notice.death) if notice.death else None
        return {
            "program": notice.program,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "cause": cause.name,
            "how": notice.how,
            "meaning": cause.meaning,
            "cure": cause.cure,
            "follows": notice.kind if notice.kind == "restart" else "park" if notice.park else "exit",
            "restarts_in_window": notice.restart,
            "death": death or "its keeper was killed and could not say",
            "open_requests": "the gateway did not say" if requests is None else msgspec.to_builtins(requests),
            "memory_limits": self._limits(),
            **self._facts,
        }

    def _limits(self) -> dict[str, str]:
        found = {}
        for name in _GROUP_FILES:
            with contextlib.suppress(OSError):
                found[name] = (Path(self._memory).parent / name).read_text().strip()
        return found

    async def _open(self, program: str) -> tuple[OpenRequest, ...] | None:
        """Return the requests that were open, as reported by the gateway, which sees the crash when the engine's socket
        closes. Return None if it does not report in time."""
        for _ in range(round(OPEN_S / _POLL_S)):
            with contextlib.suppress(OSError):
                return read_open(self._directory, program)
            await asyncio.sleep(_POLL_S)
        return None

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _put(self, program: str, files: dict[str, str]) -> Path | None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        for place in self._bundles.places:
            try:
                _own(place)
                new = place / f".{stamp}-{program}"
                new.mkdir(mode=0o700)
                for name, text in files.items():
                    (new / name).write_text(text)
                bundle = place / f"{stamp}-{program}"
                new.rename(bundle)
            except OSError as error:
                self.trouble = f"{place}: {error.strerror}"
                continue
            self._prune(place, bundle)
            return bundle
        return None

    def _prune(self, place: Path, newest: Path) -> None:
        """Delete the oldest bundles; their names begin with the time. Folders that are not bundles are kept."""
        found = sorted(path for path in place.iterdir() if path.is_dir() and (path / "death.json").is_file())
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in found}
        while len(found) > self._bundles.keep or sum(sizes[path] for path in found) > self._bundles.size:
            if found[0] == newest:
                return
            shutil.rmtree(found.pop(0), ignore_errors=True)


def _own(folder: Path) -> None:
    """Create the folder with access for its owner only. Raise OSError if it belongs to another user, who must not read
    the bundles."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(1, "belongs to another user")
