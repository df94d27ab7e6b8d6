"""Messages from the gateway to the restart monitor about which crashes of an engine count towards the restart limit.
Each is one line of JSON, written to a pipe in the run directory."""

import os
from typing import Literal

import msgspec

CrashKind = Literal["attributed", "expected", "cancelled", "restored"]
"""attributed: the last crashes that counted were caused by a request and no longer count.
expected: the next crash belongs to a test of requests and does not count. The gateway sends this before the test, so
that a crash cannot exceed the limit before the gateway has noticed it.
cancelled: the test ended without a crash.
restored: the last crashes of tests count again because the tests found no request.
"""


class CrashExemption(msgspec.Struct, frozen=True):
    program: str
    crashes: int
    kind: CrashKind = "attributed"


def send_exemption(pipe: str, program: str, crashes: int, kind: CrashKind = "attributed") -> None:
    """Write a message without waiting. It is lost if no monitor reads the pipe: then the crashes count. An empty `pipe`
    means that there is no monitor."""
    if not pipe:
        return
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no monitor at the moment
        return
    try:
        os.write(descriptor, msgspec.json.encode(CrashExemption(program, crashes, kind)) + b"\n")
    except OSError:  # a full pipe
        return
    finally:
        os.close(descriptor)


def read_exemptions(data: bytes) -> list[CrashExemption]:
    """Decode the lines that were read; a line is shorter than PIPE_BUF and arrives in one piece."""
    return [msgspec.json.decode(line, type=CrashExemption) for line in data.splitlines() if line]
