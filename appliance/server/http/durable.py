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
from appliance.server.http.reply import Race, Source, placement
from appliance.server.http.service import Service
from appliance.server.reply_store.entry import Entry, Suspended
from appliance.server.reply_store.records import Identity
from appliance.server.reply_store.store import JournalFull, Ledger
from appliance.server.routing.generation import Past
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
        raise BadRequest(f"{LAST} {text[:40]!r} is not the id of an event of this API, such as 12 or 3e.4.", LAST)
    parts = text.removesuffix("u").split(".")
    if len(parts) != choices:
        raise BadRequest(f"{LAST} {text[:40]!r} is of a reply with {len(parts)} choices, this one has {choices}.", LAST)
    return Position(
        tuple(int(part.removesuffix("e")) for part in parts),
        tuple(part.endswith("e") for part in parts),
        text.endswith("u"),
    )


@dataclass(frozen=True)
class Wish:
    """Idempotency options of a request. `key` and `body` are digests, so that no log contains the client's data."""

    key: bytes
    body: bytes
    after: str


def read_wish(request: Request, body: Streamed, kind: str) -> Wish | None:
    """Return the idempotency options, or None without an Idempotency-Key.

    Keys are scoped: the same key with another API key, or on another route, is a different key. Streamed and
    non-streamed requests with the same content are the same request.
    """
    key, after = request.headers.get(KEY), request.headers.get(LAST, "")
    if key is None:
        if after:
            raise BadRequest(f"{LAST} goes on with the request of an {KEY}: send the same one with it.", LAST)
        return None
    if not VALID_KEY.fullmatch(key):
        raise BadRequest(f"{KEY} must have 1 to 255 visible ASCII characters.", KEY)
    if after and not body.stream:
        raise BadRequest(f"{LAST} goes on with a stream: send it with stream=true.", LAST)
    owner = [request.headers.get(name, "") for name in ("authorization", "x-api-key")]
    # independent of the header that carried the API key
    owner = [request.state.owner] if request.state.owner else owner
    asked = body.model_dump(mode="json", exclude={"stream", "stream_options"}, exclude_unset=True)
    return Wish(digest(kind, *owner, key), digest(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS).decode()), after)


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
    ledger = service.ledger
    wish = read_wish(request, body, kind) if ledger is not None else None
    entry = _find(ledger, wish) if ledger is not None and wish is not None else None
    identity = entry.opened.identity if entry is not None else _identity(request)
    planned = await asyncio.to_thread(plan, identity.request_id)
    if planned.grammar is not None and entry is None:
        await until_disconnect(request, service.check_grammar(planned.grammar, planned.bound_by))
    submits = tuple(submit for prompt in planned.prompts for submit in prompt.submits)
    where = placement(request)
    if ledger is None or wish is None:
        return build(planned, identity, Race(service.router.generate_all(submits, where))), {}

    entry, race = _find(ledger, wish), None  # another request with this key may have arrived in the meantime
    after = read_position(wish.after, len(submits)) if wish.after else None
    joined = REPLAYED if entry is not None else {}
    if entry is None:
        if after is not None:
            raise NotFound(f"Nothing is kept of a request with this {KEY}; repeat it without {LAST}.", LAST)
        race = Race(service.router.generate_all(submits, where))
        entry = await _open(ledger, wish, identity, submits, race)
    else:
        service.metrics.add("requests_joined", 1)
    if entry.state == "paused":
        if race is None:
            service.router.admit()
        recorder = Recorder(entry, race, partial(_go_on, service, entry, submits, where))
        entry.run(_drained(build(planned, entry.opened.identity, recorder)), partial(_over, ledger))
        await asyncio.wait([asyncio.ensure_future(ledger.flushed())], timeout=DISK_S)
    follower = Follower(entry, after, service.config.linger_s)
    return build(planned, entry.opened.identity, follower), joined


def _identity(request: Request) -> Identity:
    return Identity(request.state.request_id, int(time.time()), uuid.uuid4().hex)


def _find(ledger: Ledger, wish: Wish) -> Entry | None:
    """Return the generation for a key, if there is one. Raise Unprocessable if the key was used for another request."""
    entry = ledger.find(wish.key)
    if entry is not None and entry.opened.body != wish.body:
        raise Unprocessable(f"{KEY}: this key was used for another request; take a new key for a new request.", KEY)
    return entry


async def _open(ledger: Ledger, wish: Wish, identity: Identity, submits: tuple[Submit, ...], race: Race) -> Entry:
    try:
        # deadlines are on this boot's clock
        kept = tuple(replace(submit, ttft_deadline=None, deadline=None) for submit in submits)
        return ledger.open(wish.key, wish.body, identity, kept)
    except JournalFull:
        await race.__aexit__(None, None, None)
        raise Unavailable(f"Too many requests with an {KEY} are under way; repeat it later.", RETRY_AFTER_S) from None


def _go_on(service: Service, entry: Entry, asked: Sequence[Submit], where: Placement, past: Mapping[int, Past]) -> Race:
    """Resume the unfinished choices after their last tokens, with the deadlines of the current request."""
    submits = [
        replace(entry.opened.submits[index], ttft_deadline=asked[index].ttft_deadline, deadline=asked[index].deadline)
        for index in past
    ]
    return Race(service.router.generate_all(submits, where, list(past.values())), list(past))


def _over(ledger: Ledger, entry: Entry) -> None:
    """Drop a failed generation. Keep it if engines are only unavailable, since the client has received a part of it."""
    if not isinstance(entry.failure, Unavailable):
        ledger.over(entry)


async def _drained(reply: Reply) -> None:
    async for _ in reply.pieces():
        pass


class Recorder:
    """The only reader that generates: replays the log, then reads from engines and writes their deltas to the log.

    `begin` starts the remaining choices after their last tokens.
    """

    seen = skips_opening = skips_usage = False

    def __init__(
        self,
        entry: Entry,
        race: Race | None,
        begin: Callable[[Mapping[int, Past]], Race],
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
        self._race = race
        self._begin = begin
        self._open = set(range(entry.choices))

    async def __aenter__(self) -> "Recorder":
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    def event_id(self, *, usage: bool = False) -> str:
        return ""

    def stop(self, index: int) -> None:
        self._open.discard(index)
        if self._race is not None:
            self._race.stop(index)

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
        race = self._race or self._begin({index: Past(tuple(ids[index]), times[index]) for index in sorted(self._open)})
        self._race = race
        if not self.counts:
            race.suspend()
        async with race:
            try:
                async for index, delta in race.deltas():
                    if delta.finish == "abort":  # the gateway is releasing all running generations
                        raise Suspended
                    if delta.finish is not None:
                        self._open.discard(index)
                    self._entry.gain(index, delta)
                    yield index, delta
            except (Suspended, asyncio.CancelledError):
                if self._counts_pause:
                    self._entry.counted = True
                elif not self._entry.abandoned:
                    self.counts = False
                    race.suspend()
                raise


class Follower:
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

    async def __aenter__(self) -> "Follower":
        self._entry.followers += 1
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._entry.followers -= 1
        if not self._entry.followers and self._entry.state == "running" and self._linger_s is not None:
            asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    def _leave(self) -> None:
        if not self._entry.followers:
            self._entry.let_go()

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
                message = f"The service lets go of this request; repeat it with its {KEY} and {LAST} to get the rest."
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
