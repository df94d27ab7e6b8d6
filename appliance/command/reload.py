"""`slipway reload`: asks the launcher of a running appliance to follow its manifest, and prints what it says."""

import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from appliance import exits
from appliance.declare.settings import environment
from appliance.launch import rundir
from appliance.launch.line import SOCKET, Line, Order

Running = tuple[Path, rundir.Address]


def reload(which: str | None, *, restart: bool) -> int:
    found = rundir.directories(environment())
    meant = [one for one in found if which is None or _is(one[1], which)]
    if len(meant) != 1:
        print(_none_or_many(found, meant, which), file=sys.stderr)
        return exits.MANIFEST.number
    try:
        return _ask(meant[0][0] / SOCKET, Order(restart))
    except OSError as error:
        print(f"slipway reload: the launcher, process {meant[0][1].pid}, does not answer: {error}", file=sys.stderr)
        return exits.INTERNAL.number


def _is(address: rundir.Address, which: str) -> bool:
    """Whether this one is meant, by its manifest or by its URL."""
    if address.manifest and Path(which).resolve() == Path(address.manifest).resolve():
        return True
    try:
        parts = urlsplit(which if "//" in which else f"//{which}")
        port = parts.port
    except ValueError:
        return False
    return port == address.port and parts.hostname in (address.host, "localhost", "127.0.0.1", "::1")


def _none_or_many(found: list[Running], meant: list[Running], which: str | None) -> str:
    if not found:
        return "slipway reload: no service of this user runs on this host"
    lines = [f"  {one.manifest}  {one.url}" for _, one in (meant or found)]
    said = f"none of {which} runs here; running are" if not meant else "several run here; name one"
    return "\n".join([f"slipway reload: {said}:", *lines])


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
