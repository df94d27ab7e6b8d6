"""Halted state of an appliance: restarts do not help its engines, and it keeps running so that it can be inspected. The
launcher writes the reason into a file of the run directory; gateway and restart monitor read it, also when they start
later."""

from pathlib import Path

import msgspec


class Parked(msgspec.Struct, frozen=True):
    """Reason for the halted state, as reported by /ready. `exit` and `code` are those with which the appliance ends
    when it is stopped."""

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
