"""Reason why the appliance ended, as JSON: one line on standard error, and the termination log of Kubernetes."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from appliance.config import exits, variables
from appliance.config.environment import environment
from appliance.config.exits import Exit

TERMINATION_LOG = Path("/dev/termination-log")
MAX_BYTES = 4096  # limit of Kubernetes


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    message: str
    exit: str
    code: int
    cure: str
    program: str = ""
    cause: str = ""
    bundle: str = ""
    last_lines: tuple[str, ...] = ()


def termination_log(environment: Mapping[str, str]) -> Path:
    return Path(variables.value(environment, "SLIPWAY_TERMINATION_LOG") or TERMINATION_LOG)


def write_termination(reason: Reason, log: Path) -> None:
    """Write the reason into the termination log if there is one, shortened to the limit of Kubernetes."""
    text = msgspec.json.encode(reason)
    while len(text) > MAX_BYTES and reason.last_lines:
        reason = msgspec.structs.replace(reason, last_lines=reason.last_lines[1:])
        text = msgspec.json.encode(reason)
    while len(text) > MAX_BYTES and reason.message:
        cut = reason.message[: -max(1, (len(text) - MAX_BYTES) // 6)]  # a character takes at most 6 bytes in JSON
        reason = msgspec.structs.replace(reason, message=cut)
        text = msgspec.json.encode(reason)
    # Kubernetes creates the file. Elsewhere no file is created in /dev.
    with contextlib.suppress(OSError), log.open("r+b") as file:
        file.truncate()
        file.write(text)


def refused(message: str, exit: Exit) -> None:
    """Write into the termination log why nothing was started."""
    reason = Reason(message=message, exit=exit.name, code=exit.number, cure=exit.cure)
    write_termination(reason, termination_log(environment()))


@contextlib.contextmanager
def record_failure() -> Iterator[None]:
    """Write the reason of a failed start into the termination log, and let the exception propagate."""
    from appliance.config.problems import Refused

    try:
        yield
    except Refused as error:
        refused(str(error), error.cause)
        raise
    except Exception as error:
        refused(f"{type(error).__name__}: {error}", exits.INTERNAL)
        raise
