"""What the log of durable replies says: who asked for what, and every delta that came of it.

A reply's text is a function of these, so it is nowhere written. Nor need a delta be: tokens that are missing are
generated again, the same ones, from the prompt and what there is.
"""

import msgspec

from engine.api.messages import Delta, Submit


class Identity(msgspec.Struct, frozen=True):
    """What is drawn or read from a clock once a request: the id of the reply, its Unix time, and what names of tool
    calls are made from."""

    request_id: str
    created: int
    salt: str


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """`key` and `body` are digests: of the client's Idempotency-Key with all that it is unique within, and of what was
    asked. `submits` have their seeds. `outputs`: GatewayConfig.outputs_sha256 then. `at`: Unix time. `about`: what its
    route needs to go on with it without the client's request, if it can."""

    entry: int
    key: bytes
    body: bytes
    identity: Identity
    submits: tuple[Submit, ...]
    outputs: str
    at: float
    about: bytes = b""


class Gained(msgspec.Struct, frozen=True, tag="gained"):
    """The delta `number`, counted from 0 over all choices of its entry."""

    entry: int
    number: int
    choice: int
    delta: Delta


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It is over with so many deltas. `document`: what came of it in the words of its route, if that keeps it."""

    entry: int
    deltas: int
    at: float
    document: bytes = b""


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The entry is void: its request failed, so that the next one with its key starts anew."""

    entry: int


Record = Opened | Gained | Ended | Dropped

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Record).decode
decode_gained = msgspec.msgpack.Decoder(Gained).decode
