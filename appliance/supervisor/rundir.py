"""The run directory: configurations, scripts, sockets and pipes of one running appliance, for its owner only.

The launcher and its Supervisor hold a lock on a file in it (flock(2)), which the kernel releases when both have ended,
however they end; it also holds for containers that share the folder. A directory whose lock is free is left behind.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from appliance.config import variables
from appliance.runtime import listener

LOCK = "lock"
_PREFIX = "slipway-"
# A Unix socket's path has at most 107 bytes; the longest name below the directory is "supervisor.sock.<pid>".
_LONGEST = 107 - len("/supervisor.sock.4194304")


class Address(msgspec.Struct, frozen=True):
    """Where the gateway of a running appliance is reached from this host, the launcher's process, and the manifest that
    it serves. `crashes`: where its crash bundles may lie."""

    pid: int
    host: str
    port: int
    manifest: str = ""
    tls: bool = False
    crashes: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return listener.url(self.host, self.port, tls=self.tls)


class NoRunDirectory(Exception):
    """No place is writable and short enough; the message names the places and the cure."""


def places(environment: Mapping[str, str]) -> list[Path]:
    """Where a run directory may lie, best first."""
    named = [variables.value(environment, "XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/dev/shm"]
    return [Path(name) for name in dict.fromkeys(named) if name and Path(name).is_absolute()]


@contextmanager
def run_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """Make a directory of mode 0700 and remove it with its contents at the end; remove those that killed services left
    behind. Raises NoRunDirectory."""
    found = places(environment)
    directory = _create(found)
    try:
        new = directory / f"{LOCK}.new"
        with new.open("wb") as lock:
            _lock(lock.fileno())
            new.rename(directory / LOCK)  # locked before another start can see it
            for place in found:
                _remove_left(place)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def lock_to_pass(directory: Path) -> Iterator[int]:
    """Open the lock for a program that shares it: it is released when no process has it open any more."""
    descriptor = os.open(directory / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock the run directory as in use. Where the file system has no locks, nothing is ever removed."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _remove_left(place: Path) -> None:
    """Remove our run directories in `place` whose lock is free. One without a lock is just being made."""
    for path in place.glob(f"{_PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), path.open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid != os.geteuid():
                continue
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _create(candidates: list[Path]) -> Path:
    refused = []
    for place in candidates:
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
            continue
        if len(os.fsencode(directory)) <= _LONGEST:
            return directory
        directory.rmdir()
        refused.append(f"{place}: path too long for Unix sockets")
    raise NoRunDirectory(
        f"no place for the run directory ({'; '.join(refused)}); set XDG_RUNTIME_DIR to a short writable directory, "
        "or mount a writable /tmp"
    )


def write_address(directory: Path, address: Address) -> None:
    (directory / "address.json").write_bytes(msgspec.json.encode(address))


def running(environment: Mapping[str, str]) -> list[Address]:
    """Appliances of this user that run on this host."""
    return [address for _, address in directories(environment)]


def directories(environment: Mapping[str, str]) -> list[tuple[Path, Address]]:
    """The same with their run directories."""
    found = []
    for place in places(environment):
        for path in sorted(place.glob(f"{_PREFIX}*/address.json")):
            try:
                address = msgspec.json.decode(path.read_bytes(), type=Address)
                os.kill(address.pid, 0)
            except (OSError, msgspec.DecodeError):  # another user's, or left behind by a launcher that was killed
                continue
            found.append((path.parent, address))
    return found
