"""`slipway reload`: asks the launcher of a running appliance to follow its manifest, and prints what it says."""

import socket
import sys
from pathlib import Path

import msgspec

from appliance.cli.running import find
from appliance.config import exits
from appliance.supervisor.control_protocol import SOCKET, Line, Order


def reload(which: str | None, *, restart: bool) -> int:
    try:
        directory, address = find(which)
    except LookupError as error:
        print(f"slipway reload: {error}", file=sys.stderr)
        return exits.MANIFEST.number
    try:
        return _ask(directory / SOCKET, Order(restart))
    except OSError as error:
        print(f"slipway reload: the launcher, process {address.pid}, does not answer: {error}", file=sys.stderr)
        return exits.INTERNAL.number


def _ask(path: Path, order: Order) -> int:
    """Raises OSError, also where the launcher ends before it has said everything."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.sendall(msgspec.json.encode(order) + b"\n")
        for text in line.makefile("rb"):
            said = msgspec.json.decode(text, type=Line)
            if said.exit is not None:
                return said.exit
            print(said.text, flush=True)
    raise ConnectionResetError("it ended")
