"""Trace of the caller in the W3C Trace Context format (https://www.w3.org/TR/trace-context/): `traceparent` is
version-trace-parent-flags, `tracestate` up to 32 key=value pairs of vendors.

A malformed trace is ignored, as the standard requires: it must never fail a request.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MEMBERS = 32
SAMPLED = 0x01  # bit of the flags
MAX_STATE = 512  # characters; the minimum that the standard requires everyone to propagate

_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_KEY = r"[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}"
_MEMBER = re.compile(rf"(?P<key>{_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


@dataclass(frozen=True)
class Trace:
    """Ids in lower-case hexadecimal."""

    trace_id: str
    parent_id: str | None  # the caller's span; None: the trace begins here
    state: str | None = None  # None: there is no `tracestate`
    sampled: bool = True  # the caller records its spans


def read_trace(parents: Sequence[str], states: Sequence[str]) -> Trace | None:
    """Return the trace from all `traceparent` and `tracestate` headers of a request; None without a valid one."""
    found = _PARENT.fullmatch(parents[0].strip(" \t")) if len(parents) == 1 else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"] is not None):
        return None
    if set(found["trace"]) == {"0"} or set(found["parent"]) == {"0"}:
        return None
    sampled = bool(int(found["flags"], 16) & SAMPLED)
    return Trace(found["trace"], found["parent"], _state(states), sampled)


def _state(headers: Sequence[str]) -> str | None:
    """Return the members of all headers, joined. Return None if one of them is invalid, or if there are no members."""
    members = [member for text in ",".join(headers).split(",") if (member := text.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match["key"] for match in matches if match is not None}
    joined = ",".join(members)
    if not members or len(keys) < len(members) or len(members) > MAX_MEMBERS or len(joined) > MAX_STATE:
        return None
    return joined
