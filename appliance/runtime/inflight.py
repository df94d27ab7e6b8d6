"""Snapshot of the requests that an engine was computing when it ended, as known to the gateway: one file per engine in
the run directory, for the crash bundle."""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class OpenRequest(msgspec.Struct, frozen=True):
    """A request that was open."""

    id: str
    prompt: int  # number of tokens
    emitted: int  # number of tokens


def inflight_path(directory: Path, program: str) -> Path:
    return directory / f"{program}.open"


def write_inflight(directory: str, program: str, requests: Sequence[OpenRequest]) -> None:
    """Record the requests that ended with a connection to an engine. Call it whenever such a connection ends; the
    reaper deletes the file when the next run begins. An empty list does not replace a file that exists. Do nothing if
    `directory` is empty. Errors, for example on a full disk, are only logged, so that requests continue."""
    path = inflight_path(Path(directory), program)
    if directory and (requests or not path.exists()):
        new = path.with_suffix(".open-new")  # the reaper writes its file in the same folder at the same time
        try:
            new.write_bytes(msgspec.json.encode(requests))
            new.rename(path)
        except OSError as error:
            log.error("cannot write %s: %s; the crash bundle will not list the open requests", path, error.strerror)


def read_inflight(directory: Path, program: str) -> tuple[OpenRequest, ...]:
    """Return the recorded requests. Raise FileNotFoundError if the gateway has not written them yet."""
    return msgspec.json.decode(inflight_path(directory, program).read_bytes(), type=tuple[OpenRequest, ...])
