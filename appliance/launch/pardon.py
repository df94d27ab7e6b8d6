"""What the gateway tells the sentinel: deaths of an engine whose cause was a request, which no restart policy needs to
count. One JSON line each, through a pipe in the run directory."""

import os

import msgspec


class Pardon(msgspec.Struct, frozen=True):
    """So many of the last deaths of `program` are explained."""

    program: str
    deaths: int


def send_pardon(pipe: str, program: str, deaths: int) -> None:
    """Never waits, and loses the pardon where nobody reads: then the deaths count. An empty `pipe` is nobody."""
    if not pipe:
        return
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no sentinel at the moment
        return
    try:
        os.write(descriptor, msgspec.json.encode(Pardon(program, deaths)) + b"\n")
    except OSError:  # a full pipe
        return
    finally:
        os.close(descriptor)


def read_pardons(data: bytes) -> list[Pardon]:
    """The whole lines in what was read; a line is shorter than PIPE_BUF and arrives in one piece."""
    return [msgspec.json.decode(line, type=Pardon) for line in data.splitlines() if line]
