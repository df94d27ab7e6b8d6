"""Halted state of an appliance: restarts do not help its engines, and it keeps running so that it can be inspected. The
launcher writes the reason into a file of the run directory; gateway and restart monitor read it, also when they start
later."""

from pathlib import Path

import msgspec


class HaltedState(msgspec.Struct, frozen=True):
    """Reason for the halted state, as reported by /ready. `exit` and `code` are those with which the appliance ends
    when it is stopped."""

    message: str
    exit: str
    code: int
    cause: str
    cure: str


def write_halted(directory: Path, state: HaltedState) -> None:
    new = directory / "halted.new"
    new.write_bytes(msgspec.json.encode(state))
    new.rename(directory / "halted")


def is_halted(directory: Path) -> bool:
    return (directory / "halted").exists()


def read_halted(directory: Path) -> HaltedState | None:
    try:
        return msgspec.json.decode((directory / "halted").read_bytes(), type=HaltedState)
    except FileNotFoundError:
        return None
