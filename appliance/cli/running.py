"""Lookup of an appliance that runs on this host."""

from pathlib import Path
from urllib.parse import urlsplit

from appliance.config.environment import environment
from appliance.supervisor import rundir

Running = tuple[Path, rundir.Address]


def find(which: str | None) -> Running:
    """Return run directory and address of the appliance with this manifest or URL, or of the only one if `which` is
    None. Raise LookupError, with the running ones in the message."""
    found = rundir.directories(environment())
    meant = [one for one in found if which is None or _is(one[1], which)]
    if len(meant) == 1:
        return meant[0]
    raise LookupError(_none_or_many(found, meant, which))


def _is(address: rundir.Address, which: str) -> bool:
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
        return "no service of this user runs on this host"
    lines = [f"  {one.manifest}  {one.url}" for _, one in (meant or found)]
    said = (
        f"no service for {which} runs here. Running services:"
        if not meant
        else "several services run here. Select one:"
    )
    return "\n".join([f"{said}:", *lines])
