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
from appliance.runtime.inflight import OpenRequest, read_inflight
from appliance.supervisor.causes import Cause
from appliance.supervisor.monitor import Notice

SNAPSHOT_TIMEOUT_S = 0.3  # how long the gateway may take to write the list of open requests
_POLL_S = 0.02
_MAX_LINE = 2000  # characters
_CONFIGURATIONS = ("gateway.json",)
_CGROUP_FILES = ("memory.max", "memory.current", "memory.peak", "memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True)
class BundlePolicy:
    """Location and retention of crash bundles."""

    folders: tuple[Path, ...] = ()  # candidate folders; the first writable one is used
    keep: int = 10  # maximum number of bundles; 0 disables them
    size: int = 16 * 2**20  # maximum total size in bytes


class CrashBundleWriter:
    """Writes crash bundles. The values in `secrets` are masked everywhere. `facts` are added to each bundle. `memory`
    is the cgroup file with the kernel's memory events; the files with the limits are in the same folder."""

    def __init__(
        self,
        bundles: BundlePolicy,
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
        self.error = ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that may contain bundles; empty if bundles are disabled."""
        return self._bundles.folders if self._bundles.keep else ()

    async def write(self, notice: Notice, cause: Cause, lines: Sequence[str]) -> Path | None:
        """Write a crash bundle and return its path. Return None if bundles are disabled, or if writing fails: `error`
        then has the reason."""
        if not self._bundles.keep:
            return None
        requests = await self._open_requests(notice.program)
        summary = self._summary(notice, cause, requests)
        summary["device"] = await asyncio.to_thread(self._device)
        files = {
            "death.json": msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n",
            "log.txt": masked("".join(f"{line[:_MAX_LINE]}\n" for line in lines)),
        }
        for name in (f"{notice.program}.json", *_CONFIGURATIONS):
            with contextlib.suppress(OSError):
                files[name] = (self._directory / name).read_text()
        return self._write_files(notice.program, {name: self._mask_secrets(text) for name, text in files.items()})

    def _summary(self, notice: Notice, cause: Cause, requests: tuple[OpenRequest, ...] | None) -> dict[str, Any]:
        exit_status = msgspec.to_builtins(notice.exit_status) if notice.exit_status else None
        return {
            "program": notice.program,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "cause": cause.name,
            "how": notice.how,
            "meaning": cause.meaning,
            "cure": cause.cure,
            "follows": notice.kind if notice.kind == "restart" else "halt" if notice.halt else "exit",
            "restarts_in_window": notice.restart,
            "death": exit_status or "not recorded: the subreaper was killed",
            "open_requests": "not recorded" if requests is None else msgspec.to_builtins(requests),
            "memory_limits": self._limits(),
            **self._facts,
        }

    def _limits(self) -> dict[str, str]:
        found = {}
        for name in _CGROUP_FILES:
            with contextlib.suppress(OSError):
                found[name] = (Path(self._memory).parent / name).read_text().strip()
        return found

    async def _open_requests(self, program: str) -> tuple[OpenRequest, ...] | None:
        """Return the requests that were open, as reported by the gateway, which sees the crash when the engine's socket
        closes. Return None if it does not report in time."""
        for _ in range(round(SNAPSHOT_TIMEOUT_S / _POLL_S)):
            with contextlib.suppress(OSError):
                return read_inflight(self._directory, program)
            await asyncio.sleep(_POLL_S)
        return None

    def _mask_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _write_files(self, program: str, files: dict[str, str]) -> Path | None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        for folder in self._bundles.folders:
            try:
                _create_private(folder)
                new = folder / f".{stamp}-{program}"
                new.mkdir(mode=0o700)
                for name, text in files.items():
                    (new / name).write_text(text)
                bundle = folder / f"{stamp}-{program}"
                new.rename(bundle)
            except OSError as error:
                self.error = f"{folder}: {error.strerror}"
                continue
            self._prune(folder, bundle)
            return bundle
        return None

    def _prune(self, folder: Path, newest: Path) -> None:
        """Delete the oldest bundles; their names begin with the time. Folders that are not bundles are kept."""
        found = sorted(path for path in folder.iterdir() if path.is_dir() and (path / "death.json").is_file())
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in found}
        while len(found) > self._bundles.keep or sum(sizes[path] for path in found) > self._bundles.size:
            if found[0] == newest:
                return
            shutil.rmtree(found.pop(0), ignore_errors=True)


def _create_private(folder: Path) -> None:
    """Create the folder with access for its owner only. Raise OSError if it belongs to another user, who must not read
    the bundles."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(1, "belongs to another user")
