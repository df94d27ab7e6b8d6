"""Record types in the log of durable replies: requests and every delta generated for them.

The text of a reply is a function of its tokens, so it is not stored. Missing deltas are generated again, with the same
tokens, from the prompt and the stored ones.
"""

import msgspec

from engine.api.messages import Delta, Submit


class Identity(msgspec.Struct, frozen=True):
    """Values of a request that are random or depend on the clock."""

    request_id: str  # ID of the reply
    created: int  # Unix time
    salt: str  # seed from which tool call IDs are derived


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Start of an entry: the request."""

    entry: int
    key: bytes  # digest of the client's Idempotency-Key and of its scope
    body: bytes  # digest of the request
    identity: Identity
    submits: tuple[Submit, ...]  # with their seeds
    outputs: str  # GatewayConfig.outputs_sha256 at that time
    at: float  # Unix time
    about: bytes = b""  # data that the route needs to resume without the client's request, if it can


class Gained(msgspec.Struct, frozen=True, tag="gained"):
    """One generated delta."""

    entry: int
    number: int  # counted from 0 over all choices of the entry
    choice: int
    delta: Delta


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """End of an entry."""

    entry: int
    deltas: int  # total number of deltas
    at: float
    document: bytes = b""  # final object of the route, if it stores one


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The entry is void because its request failed. The next request with its key starts again from the beginning."""

    entry: int


Record = Opened | Gained | Ended | Dropped

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode
decode_gained = msgspec.msgpack.Decoder(Gained).decode
