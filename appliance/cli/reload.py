"""`slipway reload`: request a reload from the launcher of a running appliance, and print its output."""

import socket
import sys
from pathlib import Path

import msgspec

from appliance.cli.running import find
from appliance.config import exits
from appliance.supervisor.control_protocol import SOCKET, ReloadOutput, ReloadRequest


def reload(which: str | None, *, restart: bool) -> int:
    try:
        directory, address = find(which)
    except LookupError as error:
        print(f"slipway reload: {error}", file=sys.stderr)
        return exits.MANIFEST.number
    try:
        return _ask(directory / SOCKET, ReloadRequest(restart))
    except OSError as error:
        print(f"slipway reload: the launcher, process {address.pid}, does not answer: {error}", file=sys.stderr)
        return exits.INTERNAL.number


def _ask(path: Path, order: ReloadRequest) -> int:
    """Send the request, print the reply and return its exit code. Raise OSError, also if the launcher ends before it
    has sent everything."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.sendall(msgspec.json.encode(order) + b"\n")
        for text in line.makefile("rb"):
            said = msgspec.json.decode(text, type=ReloadOutput)
            if said.exit is not None:
                return said.exit
            print(said.text, flush=True)
    raise ConnectionResetError("it exited")
