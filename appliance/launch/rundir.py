"""The run directory: configurations, scripts, sockets and pipes of one running appliance, for its owner only."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from appliance.declare import variables
from appliance.launch import listen

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
        return listen.url(self.host, self.port, tls=self.tls)


class NoRunDirectory(Exception):
    """No place is writable and short enough; the message names the places and the cure."""


def places(environment: Mapping[str, str]) -> list[Path]:
    """Where a run directory may lie, best first."""
    named = [variables.value(environment, "XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/dev/shm"]
    return [Path(name) for name in dict.fromkeys(named) if name and Path(name).is_absolute()]


@contextmanager
def run_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """A new directory of mode 0700, removed with all that is in it at the end. Raises NoRunDirectory."""
    directory = _create(places(environment))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


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
