"""Replies that outlive their connection: one generation for all requests with a key, written to the log as it runs.

A `Writer` generates, and any number of `Subscriber`s read what it has written, each from where its client left off.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from appliance.server.errors.api import NotFound, Unavailable, Unprocessable
from appliance.server.http.choices import ChoiceStream, Source
from appliance.server.http.generate import drain
from appliance.server.http.idempotency import KEY, LAST, REPLAYED, IdempotencyOptions, Position, read_position
from appliance.server.http.reply import Formatter
from appliance.server.http.service import Service
from appliance.server.reply_store.entry import Entry, Suspended
from appliance.server.reply_store.log import DISK_S
from appliance.server.reply_store.records import Identity
from appliance.server.reply_store.store import JournalFull, ReplyStore
from appliance.server.routing.account import EarlierOutput
from appliance.server.routing.placement import ANYWHERE, Placement
from appliance.server.routing.router import Router
from engine.api.messages import Delta, Submit, Timing

RETRY_AFTER_S = 2


@dataclass(frozen=True)
class Routed:
    """A request that has been routed: where its deltas come from."""

    source: Source
    identity: Identity
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the reply."""
    writer: "Writer | None" = None
    """Set if this request has to start the generation that `source` subscribes to."""


def find_entry(reply_store: ReplyStore, options: IdempotencyOptions) -> Entry | None:
    """Return the generation for a key, if there is one. Raise Unprocessable if the key was used for another request."""
    entry = reply_store.find(options.key)
    if entry is not None and entry.opened.body != options.body:
        raise Unprocessable(f"{KEY}: this key was already used for a different request. Use a new key.", KEY)
    return entry


async def subscribe(
    service: Service,
    reply_store: ReplyStore,
    options: IdempotencyOptions,
    identity: Identity,
    submits: tuple[Submit, ...],
    target: Placement,
) -> Routed:
    """Subscribe to the generation of a key, which is opened, or resumed if it is paused.

    The caller has to start `Routed.writer` before it yields to the event loop: the entry counts as paused until then.
    """
    entry, stream = find_entry(reply_store, options), None
    after = read_position(options.after, len(submits)) if options.after else None
    headers = REPLAYED if entry is not None else {}
    if entry is None:
        if after is not None:
            raise NotFound(f"No reply is stored for this {KEY}. Repeat the request without {LAST}.", LAST)
        stream = ChoiceStream(service.router.generate_all(submits, target))
        entry = await _open(reply_store, options, identity, submits, stream)
    else:
        service.metrics.add("requests_joined", 1)
    writer = None
    if entry.state == "paused":
        if stream is None:
            service.router.admit()
        writer = Writer(service.router, entry, stream, submits, target)
    return Routed(
        Subscriber(entry, after, service.config.lifecycle.journal.linger), entry.opened.identity, headers, writer
    )


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


async def generate_apart(reply_store: ReplyStore, writer: "Writer", reply: Formatter[Any]) -> None:
    """Start a generation that does not depend on any connection, and wait until its request is on disk."""
    writer.entry.run(drain(writer, reply), partial(_drop_failed, reply_store))
    await asyncio.wait([asyncio.ensure_future(reply_store.flushed())], timeout=DISK_S)


def _drop_failed(reply_store: ReplyStore, entry: Entry) -> None:
    """Drop a failed generation. Keep it if engines are only unavailable, since the client has received a part of it."""
    if not isinstance(entry.failure, Unavailable):
        reply_store.record_end(entry)


class Writer:
    """The only reader that generates: replays the log, then reads from engines and writes their deltas to the log.

    Without a `stream` that already runs, it resumes the unfinished choices after their last tokens, with the deadlines
    of `submits`. None: without deadlines.
    """

    seen = skips_opening = skips_usage = False

    def __init__(
        self,
        router: Router,
        entry: Entry,
        stream: ChoiceStream | None,
        submits: Sequence[Submit] | None = None,
        target: Placement = ANYWHERE,
        *,
        counts_pause: bool = False,
    ) -> None:
        """Initialise the writer.

        With `counts_pause`, count a generation as ended when it is paused because its client left. It is not counted
        again when it resumes.
        """
        self.counts = not entry.counted
        self.entry = entry
        self._router = router
        self._submits, self._target = entry.opened.submits if submits is None else submits, target
        self._counts_pause = counts_pause
        self._stream = stream
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

    def _resume(self, earlier: Mapping[int, EarlierOutput]) -> ChoiceStream:
        """Resume the unfinished choices after their last tokens."""
        submits = [
            replace(
                self.entry.opened.submits[index],
                ttft_deadline=self._submits[index].ttft_deadline,
                deadline=self._submits[index].deadline,
            )
            for index in earlier
        ]
        return ChoiceStream(self._router.generate_all(submits, self._target, list(earlier.values())), list(earlier))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        ids: dict[int, list[int]] = {index: [] for index in self._open}
        times: dict[int, Timing | None] = dict.fromkeys(ids)
        for number in range(len(self.entry.gained)):
            index, delta = self.entry.delta(number)
            if index not in self._open:
                continue  # it follows a stop string
            ids[index] += delta.ids
            times[index] = delta.timing or times[index]
            if delta.finish is not None:
                self._open.discard(index)
            yield index, delta
        if not self._open:
            return
        stream = self._stream or self._resume(
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
                    self.entry.append(index, delta)
                    yield index, delta
            except (Suspended, asyncio.CancelledError):
                if self._counts_pause:
                    self.entry.counted = True
                elif not self.entry.abandoned:
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
        if delta.routes:
            at = len(delta.routes) - len(rest.ids)
            head, rest = replace(head, routes=delta.routes[:at]), replace(rest, routes=delta.routes[at:])
        return [(head, True), (rest, False)]
