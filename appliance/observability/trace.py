"""The caller's trace, as W3C Trace Context hands it over (https://www.w3.org/TR/trace-context/): `traceparent` is
version-trace-parent-flags, `tracestate` up to 32 vendors' key=value pairs.

A trace that is not well formed is ignored, as the standard wants: it may never fail a request.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MEMBERS = 32
MAX_STATE = 512  # characters; what the standard asks everybody to carry at least

_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<rest>-.*)?"
)
_KEY = r"[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}"
_MEMBER = re.compile(rf"(?P<key>{_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


@dataclass(frozen=True)
class Trace:
    """Ids in lower-case hexadecimal; `parent_id` is the caller's span. `state` is None where there is none."""

    trace_id: str
    parent_id: str
    state: str | None = None


def read_trace(parents: Sequence[str], states: Sequence[str]) -> Trace | None:
    """The trace of all `traceparent` and `tracestate` headers of a request; None if there is none to go on with."""
    found = _PARENT.fullmatch(parents[0].strip(" \t")) if len(parents) == 1 else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["rest"] is not None):
        return None
    if set(found["trace"]) == {"0"} or set(found["parent"]) == {"0"}:
        return None
    return Trace(found["trace"], found["parent"], _state(states))


def _state(headers: Sequence[str]) -> str | None:
    """The members of all headers as one; None if one of them is damaged, or there are none."""
    members = [member for text in ",".join(headers).split(",") if (member := text.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match["key"] for match in matches if match is not None}
    joined = ",".join(members)
    if not members or len(keys) < len(members) or len(members) > MAX_MEMBERS or len(joined) > MAX_STATE:
        return None
    return joined
