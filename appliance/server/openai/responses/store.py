"""Stored responses: found by ID and API key, resumed on request, cancelled and deleted, also after a gateway restart.

Background responses are generated without a client. One store entry is one response: its request
(`ParsedResponse`), its deltas and its final object.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from appliance.observability.log import Subject
from appliance.server.chat.parsed import ChatPlan, Served
from appliance.server.errors.api import BadRequest, EngineFailed, NotFound, Unavailable, is_unexpected
from appliance.server.http.choices import ChoiceStream
from appliance.server.http.durable import Subscriber, Writer
from appliance.server.http.generate import drain
from appliance.server.http.idempotency import digest
from appliance.server.http.service import Service
from appliance.server.openai.responses.events import Fields
from appliance.server.openai.responses.reply import PREFIX, ParsedResponse, ResponseReply, with_prompt
from appliance.server.openai.responses.request import plan_response
from appliance.server.openai.responses.stream import StoredResponse
from appliance.server.reply_store.entry import Entry, Suspended
from appliance.server.reply_store.log import DISK_S
from appliance.server.reply_store.store import JournalFull, ReplyStore
from appliance.server.routing.placement import ANYWHERE, Placement
from appliance.server.schema.responses import ResponsesRequest

log = logging.getLogger(__name__)

POLL_S = 0.5  # interval between two searches for responses that have to be resumed


class InvalidRequest(BadRequest):
    """Error of the Responses API itself."""

    type = "invalid_request_error"


@dataclass(frozen=True)
class Stored:
    """A stored response."""

    entry: Entry
    parsed: ParsedResponse

    def document(self) -> Fields | None:
        """Return the final object, or None while the response is unfinished."""
        return orjson.loads(self.entry.document) if self.entry.state == "ended" else None


def _encoded(parsed: ParsedResponse) -> bytes:
    request = parsed.body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    about = {
        "request": request,
        "items": parsed.items,
        "own": parsed.own,
        "owner": parsed.owner,
        "stored": parsed.stored,
    }
    return orjson.dumps(about)


def _read(entry: Entry) -> ParsedResponse:
    about = orjson.loads(entry.opened.about)
    body = ResponsesRequest.model_validate(about["request"])
    items = tuple(about["items"])
    return ParsedResponse(body, entry.opened.identity, items, about["own"], about["owner"], about["stored"])


class ResponseStore:
    """The stored responses of a gateway."""

    def __init__(self, service: Service, reply_store: ReplyStore) -> None:
        self.reply_store = reply_store
        self._service = service
        self._parsed: dict[int, ParsedResponse] = {}
        self._live: dict[int, ResponseReply] = {}  # replies that are being generated, by entry
        self._plans: dict[int, ChatPlan] = {}
        self._items: dict[tuple[str, str], bytes] = {}  # owner and id of an item → key of a response that has it
        for entry in reply_store.entries():
            if entry.state == "ended":
                self._index(Stored(entry, self._parsed_of(entry)), orjson.loads(entry.document))

    # Finding

    def find(self, owner: str, id: str) -> Stored | None:
        """Return a response, or None if it does not exist or has another owner."""
        stored = self.find_any(owner, id)
        return stored if stored is not None and stored.parsed.stored else None

    def find_any(self, owner: str, id: str) -> Stored | None:
        """Return a response, also if it is only kept for an Idempotency-Key."""
        entry = self.reply_store.find(digest("responses", owner, id.removeprefix(PREFIX)))
        return None if entry is None else Stored(entry, self._parsed_of(entry))

    def get(self, owner: str, id: str) -> Stored:
        """Return a response. Raise NotFound."""
        found = self.find(owner, id)
        if found is None:
            raise NotFound(f"Response with id '{id[:200]}' not found.", "response_id")
        return found

    def item(self, owner: str, id: str) -> Fields | None:
        """Return an input or output item of a stored response."""
        key = self._items.get((owner, id))
        entry = None if key is None else self.reply_store.find(key)
        if entry is None:
            self._items.pop((owner, id), None)
            return None
        stored = Stored(entry, self._parsed_of(entry))
        made = (stored.document() or {}).get("output", ())
        return next((item for item in (*stored.parsed.items, *made) if item["id"] == id), None)

    def _parsed_of(self, entry: Entry) -> ParsedResponse:
        number = entry.opened.entry
        if number not in self._parsed:
            self._parsed[number] = _read(entry)
        return self._parsed[number]

    def _index(self, stored: Stored, document: Fields) -> None:
        if stored.parsed.stored:
            for item in (*stored.parsed.items[stored.parsed.own :], *document["output"]):
                self._items[stored.parsed.owner, item["id"]] = stored.entry.opened.key

    # Generating

    async def open(
        self, parsed: ParsedResponse, body: bytes, plan: ChatPlan, subject: Subject, where: Placement, *, safe: bool
    ) -> Stored:
        """Start a response. Raise JournalFull, and the router's admission errors.

        With `safe`, wait until the entry is on disk, because the client was promised that it is durable.
        """
        submit = plan.prompts[0].submits[0]
        stream = ChoiceStream(self._service.router.generate_all([submit], where))
        kept = msgspec.structs.replace(submit, ttft_deadline=None, deadline=None)  # deadlines are on this boot's clock
        key = digest("responses", parsed.owner, parsed.identity.request_id)
        try:
            entry = self.reply_store.open(key, body, parsed.identity, (kept,), _encoded(parsed))
        except JournalFull:
            await stream.__aexit__(None, None, None)
            raise
        self._parsed[entry.opened.entry] = parsed
        self._run(Stored(entry, parsed), plan, stream, subject, where)
        if safe:
            await asyncio.wait([asyncio.ensure_future(self.reply_store.flushed())], timeout=DISK_S)
        return Stored(entry, parsed)

    def _run(
        self, stored: Stored, plan: ChatPlan, stream: ChoiceStream | None, subject: Subject, where: Placement = ANYWHERE
    ) -> None:
        entry, number = stored.entry, stored.entry.opened.entry

        counts_pause = not stored.parsed.background and not entry.opened.body
        writer = Writer(self._service.router, entry, stream, target=where, counts_pause=counts_pause)
        reply = ResponseReply(self._service, subject, stored.parsed, plan)
        self._live[number], self._plans[number] = reply, plan
        entry.run(self._generate(stored, writer, reply), self.reply_store.record_end)

    async def _generate(self, stored: Stored, writer: Writer, reply: ResponseReply) -> None:
        """Generate the reply to its end and store the result.

        An interrupted or unavailable reply can be resumed later.
        """
        entry = stored.entry
        try:
            await drain(writer, reply)
            document = reply.end()
        except (Suspended, Unavailable):
            raise
        except Exception as error:  # becomes the end of the response, which is reported to every subscriber
            if is_unexpected(error):
                self._service.log.unexpected(reply.subject, error)
            entry.failure, document = error, reply.fail(error)
        finally:
            self._live.pop(entry.opened.entry, None)
            self._plans.pop(entry.opened.entry, None)
        self._store_document(stored, document)

    def _store_document(self, stored: Stored, document: Fields) -> None:
        stored.entry.set_document(orjson.dumps(document))
        self._index(stored, document)

    async def resume(self, stored: Stored) -> None:
        """Resume an unfinished response that is not being generated. Raise the router's admission errors."""
        if stored.entry.state != "paused":
            return
        if not self.reply_store.is_resumable(stored.entry):
            plan = await self._planned(stored)
            error = EngineFailed(
                "The model's configuration changed while this response was generated. Repeat the request."
            )
            self._end(stored, self._reply(stored, plan).fail(error))
            return
        self._service.router.admit()
        plan = await self._planned(stored)
        if stored.entry.state == "paused":  # check again, because building the plan took time
            self._run(stored, plan, None, Subject(stored.parsed.identity.request_id))

    async def _planned(self, stored: Stored) -> ChatPlan:
        """Return the parsed request of a stored response, with its original prompt."""
        known = self._plans.get(stored.entry.opened.entry)
        if known is not None:
            return known
        parsed, service = stored.parsed, self._service
        served = Served(
            service.text,
            service.config,
            parsed.identity.request_id,
            owner=parsed.owner,
            share=service.share(parsed.owner),
            adapter=service.adapter_of(parsed.body.model),
            media=None,
        )
        plan = await asyncio.to_thread(plan_response, parsed.body, parsed.items, served)
        return with_prompt(plan, stored.entry.opened.submits[0].prompt)

    async def resume_in_background(self) -> None:
        """Resume paused background responses, for example after a restart. Runs forever."""
        while True:
            service = self._service
            if service.has_text and service.router.accepts and not service.draining:
                await self._resume_all()
            self._forget()
            await asyncio.sleep(POLL_S)

    def _forget(self) -> None:
        """Drop the state of entries that the store no longer has."""
        entries = self.reply_store.entries()
        if len(self._parsed) > len(entries):
            numbers = {entry.opened.entry for entry in entries}
            keys = {entry.opened.key for entry in entries}
            self._parsed = {number: parsed for number, parsed in self._parsed.items() if number in numbers}
            self._items = {name: key for name, key in self._items.items() if key in keys}

    async def _resume_all(self) -> None:
        for entry in self.reply_store.entries():
            if entry.state != "paused" or entry.abandoned:
                continue
            stored = Stored(entry, self._parsed_of(entry))
            if not stored.parsed.background:
                continue
            try:
                await self.resume(stored)
            except Unavailable:
                return  # later
            except Exception as error:  # it can never be resumed: store the error as its end
                log.warning("response %s cannot be resumed: %s", stored.parsed.id, error)
                self._end(stored, (await self._replayed(stored)).fail(error))

    # Reading

    async def subscribe(self, stored: Stored, linger_s: float | None) -> StoredResponse:
        """Return the response from its start. It is paused `linger_s` after its last reader has left."""
        plan = await self._planned(stored)
        source = Subscriber(stored.entry, None, linger_s)
        return StoredResponse(self._reply(stored, plan), source, stored.entry)

    async def snapshot(self, stored: Stored) -> Fields:
        """Return the current response object."""
        document = stored.document()
        if document is not None:
            return document
        live = self._live.get(stored.entry.opened.entry)
        return (await self._replayed(stored) if live is None else live).document()

    async def _replayed(self, stored: Stored) -> ResponseReply:
        """Return a reply that has read all stored deltas."""
        return await self._read(stored, await self._planned(stored))

    async def _read(self, stored: Stored, plan: ChatPlan) -> ResponseReply:
        reply = self._reply(stored, plan)
        await drain(_StoredDeltas(stored.entry), reply)
        return reply

    def _reply(self, stored: Stored, plan: ChatPlan) -> ResponseReply:
        """Return a formatter for a reader that has no request of its own in the log."""
        return ResponseReply(self._service, Subject(stored.parsed.identity.request_id), stored.parsed, plan)

    # Ending

    async def cancel(self, stored: Stored) -> Fields:
        """Cancel a response. A finished one does not change."""
        entry = stored.entry
        if entry.state != "ended":
            plan = await self._planned(stored)
            await entry.abandon()
            reply = await self._read(stored, plan)
            if stored.document() is None:  # it did not end in the meantime and no other request cancelled it
                self._end(stored, reply.cancel())
        return await self.snapshot(stored)

    async def delete(self, stored: Stored) -> None:
        entry = stored.entry
        if entry.state != "ended":
            entry.failure = NotFound(f"Response with id '{stored.parsed.id}' was deleted.", "response_id")
            await entry.abandon()
        self.reply_store.drop(entry)
        for item in stored.parsed.items[stored.parsed.own :]:
            self._items.pop((stored.parsed.owner, item["id"]), None)

    def _end(self, stored: Stored, document: Fields) -> None:
        self._store_document(stored, document)
        stored.entry.end(self.reply_store.record_end)


class _StoredDeltas:
    """Source of only those deltas of a response that are already stored."""

    seen = counts = skips_opening = skips_usage = False

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def __aenter__(self) -> "_StoredDeltas":
        return self

    async def __aexit__(self, *error: Any) -> None:
        pass

    def event_id(self, *, usage: bool = False) -> str:
        return ""

    def stop(self, index: int) -> None:
        pass

    async def deltas(self) -> Any:
        for number in range(len(self._entry.gained)):
            yield self._entry.delta(number)
