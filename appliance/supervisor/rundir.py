"""Run directory: configurations, scripts, sockets and pipes of one running appliance, accessible to its owner only.

The launcher and its Supervisor hold a lock on a file in it (flock(2)), which the kernel releases when both have ended,
however they end. The lock also works between containers that share the folder. A directory whose lock is free is stale.
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
# The path of a Unix socket has at most 107 bytes; the longest name in the directory is "supervisor.sock.<pid>".
_MAX_PATH = 107 - len("/supervisor.sock.4194304")


class Address(msgspec.Struct, frozen=True):
    """How a running appliance is reached from this host."""

    pid: int  # process id of the launcher
    host: str  # address of the gateway
    port: int
    manifest: str = ""  # the manifest that it serves
    tls: bool = False
    crashes: tuple[str, ...] = ()  # folders that may contain its crash bundles

    @property
    def url(self) -> str:
        return listener.url(self.host, self.port, tls=self.tls)


class NoRunDirectory(Exception):
    """Raised if no folder is writable and short enough. The message lists the folders and the remedy."""


def folders(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders in which a run directory may be created, best first."""
    named = [variables.value(environment, "XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/dev/shm"]
    return [Path(name) for name in dict.fromkeys(named) if name and Path(name).is_absolute()]


@contextmanager
def run_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """Create a directory of mode 0700 and remove it with its contents at the end. Also remove stale ones of killed
    services. Raise NoRunDirectory."""
    found = folders(environment)
    directory = _create(found)
    try:
        new = directory / f"{LOCK}.new"
        with new.open("wb") as lock:
            _lock(lock.fileno())
            new.rename(directory / LOCK)  # locked before another start can see it
            for folder in found:
                _remove_stale(folder)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def lock_to_pass(directory: Path) -> Iterator[int]:
    """Open the lock for a program that shares it. The lock is released when the last process closes it."""
    descriptor = os.open(directory / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock the run directory as in use. If the file system has no locks, no directory is ever removed as stale."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _remove_stale(folder: Path) -> None:
    """Remove our run directories in `folder` whose lock is free. A directory without a lock file is still being
    created."""
    for path in folder.glob(f"{_PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), path.open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid != os.geteuid():
                continue
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def _create(candidates: list[Path]) -> Path:
    unusable = []
    for folder in candidates:
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        except OSError as error:
            unusable.append(f"{folder}: {error.strerror}")
            continue
        if len(os.fsencode(directory)) <= _MAX_PATH:
            return directory
        directory.rmdir()
        unusable.append(f"{folder}: path too long for Unix sockets")
    raise NoRunDirectory(
        f"no folder is usable for the run directory ({'; '.join(unusable)}); "
        "set XDG_RUNTIME_DIR to a short writable directory, or mount a writable /tmp"
    )


def write_address(directory: Path, address: Address) -> None:
    (directory / "address.json").write_bytes(msgspec.json.encode(address))


def running(environment: Mapping[str, str]) -> list[Address]:
    """Return the appliances of this user that run on this host."""
    return [address for _, address in directories(environment)]


def directories(environment: Mapping[str, str]) -> list[tuple[Path, Address]]:
    """Return the run directories and addresses of the appliances of this user that run on this host."""
    found = []
    for folder in folders(environment):
        for path in sorted(folder.glob(f"{_PREFIX}*/address.json")):
            try:
                address = msgspec.json.decode(path.read_bytes(), type=Address)
                os.kill(address.pid, 0)
            except (OSError, msgspec.DecodeError):  # of another user, or stale because its launcher was killed
                continue
            found.append((path.parent, address))
    return found
