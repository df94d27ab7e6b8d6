"""Idempotency-Key and Last-Event-ID: one generation for all requests with a key, and resumable streams (docs/http.md).

An event ID gives the number of tokens of each choice up to the end of the event: `12.7e` means 12 tokens of the first
choice, and all 7 of the second, which has ended. A trailing `u` means that the usage was sent. A stream therefore
resumes at a token, whether the following deltas are in the log or have to be generated again.
"""

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from msgspec.structs import replace
from starlette.requests import Request

from appliance.server.chat.prompt import Plan
from appliance.server.errors.api import BadRequest, NotFound, Unavailable, Unprocessable
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.reply import ChoiceStream, Source, placement
from appliance.server.http.service import Service
from appliance.server.reply_store.entry import Entry, Suspended
from appliance.server.reply_store.records import Identity
from appliance.server.reply_store.store import JournalFull, ReplyStore
from appliance.server.routing.generation import EarlierOutput
from appliance.server.routing.router import Placement
from appliance.server.schema.common import Streamed
from engine.api.messages import Delta, Submit, Timing

KEY, LAST = "Idempotency-Key", "Last-Event-ID"
REPLAYED = {"Idempotent-Replayed": "true"}
# Maximum time that the first byte waits for the disk. With a slower disk, tokens may have to be generated again.
DISK_S = 1.0
RETRY_AFTER_S = 2

VALID_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_POSITION = re.compile(r"\d{1,9}e?(\.\d{1,9}e?)*u?", re.ASCII)


class Reply(Protocol):
    """A route's reply, generated from a source of deltas."""

    def pieces(self) -> AsyncIterator[Any]: ...


PlanT = TypeVar("PlanT", bound=Plan)
ReplyT = TypeVar("ReplyT", bound=Reply)


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


def read_idempotency_options(request: Request, body: Streamed, kind: str) -> IdempotencyOptions | None:
    """Return the idempotency options, or None without an Idempotency-Key.

    Keys are scoped: the same key with another API key, or on another route, is a different key. Streamed and
    non-streamed requests with the same content are the same request.
    """
    key, after = request.headers.get(KEY), request.headers.get(LAST, "")
    if key is None:
        if after:
            raise BadRequest(f"{LAST} requires the {KEY} of the request that is resumed.", LAST)
        return None
    if not VALID_KEY.fullmatch(key):
        raise BadRequest(f"{KEY} must have 1 to 255 visible ASCII characters.", KEY)
    if after and not body.stream:
        raise BadRequest(f"{LAST} resumes a stream and requires stream=true.", LAST)
    owner = [request.headers.get(name, "") for name in ("authorization", "x-api-key")]
    # independent of the header that carried the API key
    owner = [request.state.owner] if request.state.owner else owner
    requested = body.model_dump(mode="json", exclude={"stream", "stream_options"}, exclude_unset=True)
    return IdempotencyOptions(
        digest(kind, *owner, key), digest(orjson.dumps(requested, option=orjson.OPT_SORT_KEYS).decode()), after
    )


def digest(*parts: str) -> bytes:
    """Return a 16-byte digest of a sequence of texts."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part.encode("utf-8", "surrogatepass"))
    return state.digest()


async def start(
    service: Service,
    request: Request,
    body: Streamed,
    kind: str,
    plan: Callable[[str], PlanT],
    build: Callable[[PlanT, Identity, Source], ReplyT],
) -> tuple[ReplyT, dict[str, str]]:
    """Start a route's reply. Return the reply and its extra headers.

    `plan` parses the request for a request ID, in a thread. `build` creates the reply that reads a source. A request
    with an Idempotency-Key subscribes to the generation of that key, which is started, or resumed if it is paused.
    """
    reply_store = service.reply_store
    options = read_idempotency_options(request, body, kind) if reply_store is not None else None
    entry = _find(reply_store, options) if reply_store is not None and options is not None else None
    identity = entry.opened.identity if entry is not None else _identity(request)
    parsed = await asyncio.to_thread(plan, identity.request_id)
    if parsed.grammar is not None and entry is None:
        await until_disconnect(request, service.check_grammar(parsed.grammar, parsed.bound_by))
    submits = tuple(submit for prompt in parsed.prompts for submit in prompt.submits)
    target = placement(request)
    if reply_store is None or options is None:
        return build(parsed, identity, ChoiceStream(service.router.generate_all(submits, target))), {}

    entry, stream = _find(reply_store, options), None  # another request with this key may have arrived in the meantime
    after = read_position(options.after, len(submits)) if options.after else None
    joined = REPLAYED if entry is not None else {}
    if entry is None:
        if after is not None:
            raise NotFound(f"No reply is stored for this {KEY}. Repeat the request without {LAST}.", LAST)
        stream = ChoiceStream(service.router.generate_all(submits, target))
        entry = await _open(reply_store, options, identity, submits, stream)
    else:
        service.metrics.add("requests_joined", 1)
    if entry.state == "paused":
        if stream is None:
            service.router.admit()
        writer = Writer(entry, stream, partial(_resume, service, entry, submits, target))
        entry.run(_drained(build(parsed, entry.opened.identity, writer)), partial(_drop_failed, reply_store))
        await asyncio.wait([asyncio.ensure_future(reply_store.flushed())], timeout=DISK_S)
    subscriber = Subscriber(entry, after, service.config.linger_s)
    return build(parsed, entry.opened.identity, subscriber), joined


def _identity(request: Request) -> Identity:
    return Identity(request.state.request_id, int(time.time()), uuid.uuid4().hex)


def _find(reply_store: ReplyStore, options: IdempotencyOptions) -> Entry | None:
    """Return the generation for a key, if there is one. Raise Unprocessable if the key was used for another request."""
    entry = reply_store.find(options.key)
    if entry is not None and entry.opened.body != options.body:
        raise Unprocessable(f"{KEY}: this key was already used for a different request. Use a new key.", KEY)
    return entry


async def _open(
    reply_store: ReplyStore,
    options: IdempotencyOptions,
    identity: Identity,
    submits: tuple[Submit, ...],
    stream: ChoiceStream,
) -> Entry:
    try:
        # deadlines are on this boot's clock
        kept = tuple(replace(submit, ttft_deadline=None, deadline=None) for submit in submits)
        return reply_store.open(options.key, options.body, identity, kept)
    except JournalFull:
        await stream.__aexit__(None, None, None)
        raise Unavailable(
            f"Too many requests with an {KEY} are in progress. Repeat the request later.", RETRY_AFTER_S
        ) from None


def _resume(
    service: Service, entry: Entry, requested: Sequence[Submit], target: Placement, earlier: Mapping[int, EarlierOutput]
) -> ChoiceStream:
    """Resume the unfinished choices after their last tokens, with the deadlines of the current request."""
    submits = [
        replace(
            entry.opened.submits[index],
            ttft_deadline=requested[index].ttft_deadline,
            deadline=requested[index].deadline,
        )
        for index in earlier
    ]
    return ChoiceStream(service.router.generate_all(submits, target, list(earlier.values())), list(earlier))


def _drop_failed(reply_store: ReplyStore, entry: Entry) -> None:
    """Drop a failed generation. Keep it if engines are only unavailable, since the client has received a part of it."""
    if not isinstance(entry.failure, Unavailable):
        reply_store.record_end(entry)


async def _drained(reply: Reply) -> None:
    async for _ in reply.pieces():
        pass


class Writer:
    """The only reader that generates: replays the log, then reads from engines and writes their deltas to the log.

    `begin` starts the remaining choices after their last tokens.
    """

    seen = skips_opening = skips_usage = False

    def __init__(
        self,
        entry: Entry,
        stream: ChoiceStream | None,
        begin: Callable[[Mapping[int, EarlierOutput]], ChoiceStream],
        *,
        counts_pause: bool = False,
    ) -> None:
        """Initialise the writer.

        With `counts_pause`, count a generation as ended when it is paused because its client left. It is not counted
        again when it resumes.
        """
        self.counts = not entry.counted
        self._entry = entry
        self._counts_pause = counts_pause
        self._stream = stream
        self._begin = begin
        self._open = set(range(entry.choices))

    async def __aenter__(self) -> "Writer":
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    def event_id(self, *, usage: bool = False) -> str:
        return ""

    def stop(self, index: int) -> None:
        self._open.discard(index)
        if self._stream is not None:
            self._stream.stop(index)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        ids: dict[int, list[int]] = {index: [] for index in self._open}
        times: dict[int, Timing | None] = dict.fromkeys(ids)
        for number in range(len(self._entry.gained)):
            index, delta = self._entry.delta(number)
            if index not in self._open:
                continue  # it follows a stop string
            ids[index] += delta.ids
            times[index] = delta.timing or times[index]
            if delta.finish is not None:
                self._open.discard(index)
            yield index, delta
        if not self._open:
            return
        stream = self._stream or self._begin(
            {index: EarlierOutput(tuple(ids[index]), times[index]) for index in sorted(self._open)}
        )
        self._stream = stream
        if not self.counts:
            stream.suspend()
        async with stream:
            try:
                async for index, delta in stream.deltas():
                    if delta.finish == "abort":  # the gateway is releasing all running generations
                        raise Suspended
                    if delta.finish is not None:
                        self._open.discard(index)
                    self._entry.append(index, delta)
                    yield index, delta
            except (Suspended, asyncio.CancelledError):
                if self._counts_pause:
                    self._entry.counted = True
                elif not self._entry.abandoned:
                    self.counts = False
                    stream.suspend()
                raise


class Subscriber:
    """Subscriber that reads a generation from its start.

    `linger_s` seconds after the last subscriber has left, the generation is paused until the next request for it. None:
    it runs without subscribers.
    """

    counts = False

    def __init__(self, entry: Entry, after: Position | None, linger_s: float | None) -> None:
        self.seen = False
        self._entry = entry
        self.skips_opening = after is not None
        self.skips_usage = after is not None and after.usage
        self._after = after
        self._linger_s = linger_s
        self._tokens = [0] * entry.choices
        self._open = set(range(entry.choices))

    async def __aenter__(self) -> "Subscriber":
        self._entry.subscribers += 1
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._entry.subscribers -= 1
        if not self._entry.subscribers and self._entry.state == "running" and self._linger_s is not None:
            asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    def _leave(self) -> None:
        if not self._entry.subscribers:
            self._entry.pause_soon()

    def event_id(self, *, usage: bool = False) -> str:
        counts = (f"{count}{'' if index in self._open else 'e'}" for index, count in enumerate(self._tokens))
        return ".".join(counts) + ("u" if usage else "")

    def stop(self, index: int) -> None:
        self._open.discard(index)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        number = 0
        while self._open:
            if number < len(self._entry.gained):
                index, delta = self._entry.delta(number)
                number += 1
                if index not in self._open:
                    continue
                for part, seen in self._parts(index, delta):
                    self.seen = seen
                    self._tokens[index] += len(part.ids)
                    if part.finish is not None:
                        self._open.discard(index)
                    yield index, part
                    if index not in self._open:
                        break
            elif self._entry.failure is not None:
                raise self._entry.failure
            elif self._entry.state == "ended":
                return  # it was cancelled
            elif self._entry.state != "running" and not self._entry.abandoned:
                message = (
                    f"The service is shutting down. Repeat the request with its {KEY} and {LAST} to get the rest of "
                    "the reply."
                )
                raise Unavailable(message, RETRY_AFTER_S)
            else:
                await self._entry.change()

    def _parts(self, index: int, delta: Delta) -> list[tuple[Delta, bool]]:
        """Split a delta where the client's received part ends.

        Return the parts, each with True if the client has it.
        """
        if self._after is None:
            return [(delta, False)]
        if self._after.ended[index]:
            return [(delta, True)]
        had = self._after.tokens[index] - self._tokens[index]
        if had <= 0:
            # Only the first delta may be empty, and it adds nothing to the opening event.
            return [(delta, not delta.ids and delta.finish is None)]
        if had >= len(delta.ids) and delta.finish is None:
            return [(delta, True)]
        head = replace(delta, ids=delta.ids[:had], logprobs=delta.logprobs[:had], finish=None, stop_reason=None)
        rest = replace(delta, ids=delta.ids[had:], logprobs=delta.logprobs[had:], prompt_logprobs=None)
        return [(head, True), (rest, False)]
