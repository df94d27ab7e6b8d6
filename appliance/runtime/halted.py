"""A parked appliance: no restart helps its engines, and it stays for somebody to look at it. The launcher writes the
reason into a file of the run directory; gateway and sentinel read it, also those that start later."""

from pathlib import Path

import msgspec


class Parked(msgspec.Struct, frozen=True):
    """What /ready says of it: `exit` and `code` are those with which the appliance ends when it is told to."""

    message: str
    exit: str
    code: int
    cause: str
    cure: str


def park(directory: Path, parked: Parked) -> None:
    new = directory / "parked.new"
    new.write_bytes(msgspec.json.encode(parked))
    new.rename(directory / "parked")


def is_parked(directory: Path) -> bool:
    return (directory / "parked").exists()


def read_parked(directory: Path) -> Parked | None:
    try:
        return msgspec.json.decode((directory / "parked").read_bytes(), type=Parked)
    except FileNotFoundError:
        return None
