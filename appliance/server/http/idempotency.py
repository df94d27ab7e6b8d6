"""Headers Idempotency-Key and Last-Event-ID (docs/http.md).

An event ID gives the number of tokens of each choice up to the end of the event: `12.7e` means 12 tokens of the first
choice, and all 7 of the second, which has ended. A trailing `u` means that the usage was sent. A stream therefore
resumes at a token, whether the following deltas are in the log or have to be generated again.
"""

import hashlib
import re
from dataclasses import dataclass

import orjson
from starlette.requests import Request

from appliance.server.errors.api import BadRequest
from appliance.server.schema.common import Streamed

KEY, LAST = "Idempotency-Key", "Last-Event-ID"
REPLAYED = {"Idempotent-Replayed": "true"}

_VALID_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_POSITION = re.compile(r"\d{1,9}e?(\.\d{1,9}e?)*u?", re.ASCII)


@dataclass(frozen=True)
class Position:
    """Part of a reply that the client has received."""

    tokens: tuple[int, ...]  # number of tokens of each choice
    ended: tuple[bool, ...]  # per choice: its end was received
    usage: bool = False  # the final usage record was received


def read_position(text: str, choices: int) -> Position:
    """Parse an event ID. Raise BadRequest if it cannot be an event ID of a request with `choices` choices."""
    if not _POSITION.fullmatch(text):
        raise BadRequest(f"{LAST} {text[:40]!r} is not an event ID of this API, such as 12 or 3e.4.", LAST)
    parts = text.removesuffix("u").split(".")
    if len(parts) != choices:
        raise BadRequest(
            f"{LAST} {text[:40]!r} belongs to a reply with {len(parts)} choices, but this one has {choices}.", LAST
        )
    return Position(
        tuple(int(part.removesuffix("e")) for part in parts),
        tuple(part.endswith("e") for part in parts),
        text.endswith("u"),
    )


@dataclass(frozen=True)
class IdempotencyOptions:
    """Idempotency options of a request. `key` and `body` are digests, so that no log contains the client's data."""

    key: bytes
    body: bytes
    after: str


def read_key(request: Request) -> tuple[str | None, str]:
    """Return the Idempotency-Key or None, and the Last-Event-ID or "". Raise BadRequest for an invalid combination."""
    key, after = request.headers.get(KEY), request.headers.get(LAST, "")
    if key is None and after:
        raise BadRequest(f"{LAST} requires the {KEY} of the request that is resumed.", LAST)
    if key is not None and not _VALID_KEY.fullmatch(key):
        raise BadRequest(f"{KEY} must have 1 to 255 visible ASCII characters.", KEY)
    return key, after


def read_idempotency_options(request: Request, body: Streamed, kind: str) -> IdempotencyOptions | None:
    """Return the idempotency options, or None without an Idempotency-Key.

    Keys are scoped: the same key with another API key, or on another route, is a different key. Streamed and
    non-streamed requests with the same content are the same request.
    """
    key, after = read_key(request)
    if key is None:
        return None
    if after and not body.stream:
        raise BadRequest(f"{LAST} resumes a stream and requires stream=true.", LAST)
    owner = [request.headers.get(name, "") for name in ("authorization", "x-api-key")]
    # independent of the header that carried the API key
    owner = [request.state.owner] if request.state.owner else owner
    return IdempotencyOptions(digest(kind, *owner, key), content_digest(body), after)


def content_digest(body: Streamed) -> bytes:
    """Return a digest of the fields that a request sets, except those that only choose how the reply is sent."""
    requested = body.model_dump(mode="json", exclude={"stream", "stream_options"}, exclude_unset=True)
    return digest(orjson.dumps(requested, option=orjson.OPT_SORT_KEYS).decode())


def digest(*parts: str) -> bytes:
    """Return a 16-byte digest of a sequence of texts."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part.encode("utf-8", "surrogatepass"))
    return state.digest()
