"""What an engine was computing when it died, as the gateway knows it: a file of the run directory for each engine, for
the crash bundle."""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class OpenRequest(msgspec.Struct, frozen=True):
    """`prompt` and `emitted` are tokens."""

    id: str
    prompt: int
    emitted: int


def open_file(directory: Path, program: str) -> Path:
    return directory / f"{program}.open"


def write_open(directory: str, program: str, requests: Sequence[OpenRequest]) -> None:
    """To be called whenever a connection to an engine ends, with what ended with it; a keeper removes the file when the
    next life begins. Where the first word of a life was that nothing was open, there is none after it. A directory of
    "" is nobody who wants to know. What cannot be written, as on a full disk, is only logged: requests go on."""
    path = open_file(Path(directory), program)
    if directory and (requests or not path.exists()):
        new = path.with_suffix(".open-new")  # the keeper writes beside it, at the same moment
        try:
            new.write_bytes(msgspec.json.encode(requests))
            new.rename(path)
        except OSError as error:
            log.error("%s: %s; the crash bundle will not say what was open", path, error.strerror)


def read_open(directory: Path, program: str) -> tuple[OpenRequest, ...]:
    """Raises FileNotFoundError where the gateway has not said it yet."""
    return msgspec.json.decode(open_file(directory, program).read_bytes(), type=tuple[OpenRequest, ...])
