"""Responses that are kept: found by id and API key, generated on without a client where they are in the background,
gone on with by whoever asks, cancelled, deleted, and told from across gateways.

An entry of the ledger is one response: what it is about (`Asked`), its deltas, and the object that it came to.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from appliance.observability.log import Subject
from appliance.server.chat.prompt import ChatPlan, Served
from appliance.server.errors.api import BadRequest, EngineFailed, NotFound, Unavailable, is_unexpected
from appliance.server.http.durable import DISK_S, Follower, Recorder, digest
from appliance.server.http.reply import Race
from appliance.server.http.service import Service
from appliance.server.openai.responses.events import Fields
from appliance.server.openai.responses.reply import PREFIX, Asked, ResponseReply, with_prompt
from appliance.server.openai.responses.request import plan_response
from appliance.server.openai.responses.stream import Kept
from appliance.server.reply_store.entry import Entry, Suspended
from appliance.server.reply_store.store import JournalFull, Ledger
from appliance.server.routing.generation import Past
from appliance.server.routing.router import ANYWHERE, Placement
from appliance.server.schema.responses import ResponsesRequest
from engine.api.messages import Submit

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at what nobody generates


class InvalidRequest(BadRequest):
    """What the Responses API itself refuses."""

    type = "invalid_request_error"


@dataclass(frozen=True)
class Stored:
    """A response that is kept."""

    entry: Entry
    asked: Asked

    def document(self) -> Fields | None:
        """What it came to, once it is over."""
        return orjson.loads(self.entry.document) if self.entry.state == "ended" else None


def _written(asked: Asked) -> bytes:
    request = asked.body.model_dump(mode="json", by_alias=True, exclude_unset=True)
    about = {"request": request, "items": asked.items, "own": asked.own, "owner": asked.owner, "stored": asked.stored}
    return orjson.dumps(about)


def _read(entry: Entry) -> Asked:
    about = orjson.loads(entry.opened.about)
    body = ResponsesRequest.model_validate(about["request"])
    items = tuple(about["items"])
    return Asked(body, entry.opened.identity, items, about["own"], about["owner"], about["stored"])


class ResponseStore:
    """The kept responses of a gateway. `live` are the replies of those that are being generated, by entry."""

    def __init__(self, service: Service, ledger: Ledger) -> None:
        self.ledger = ledger
        self._service = service
        self._asked: dict[int, Asked] = {}
        self._live: dict[int, ResponseReply] = {}
        self._plans: dict[int, ChatPlan] = {}
        self._items: dict[tuple[str, str], bytes] = {}  # owner and id of an item → key of a response that has it
        for entry in ledger.entries():
            if entry.state == "ended":
                self._index(Stored(entry, self._about(entry)), orjson.loads(entry.document))

    # Finding

    def find(self, owner: str, id: str) -> Stored | None:
        """Of another owner there is nothing."""
        stored = self.find_any(owner, id)
        return stored if stored is not None and stored.asked.stored else None

    def find_any(self, owner: str, id: str) -> Stored | None:
        """Those too that are only kept for an Idempotency-Key."""
        entry = self.ledger.find(digest("responses", owner, id.removeprefix(PREFIX)))
        return None if entry is None else Stored(entry, self._about(entry))

    def get(self, owner: str, id: str) -> Stored:
        """Raises NotFound."""
        found = self.find(owner, id)
        if found is None:
            raise NotFound(f"Response with id '{id[:200]}' not found.", "response_id")
        return found

    def item(self, owner: str, id: str) -> Fields | None:
        """An item of a response that is kept, one that was sent or one that was made."""
        key = self._items.get((owner, id))
        entry = None if key is None else self.ledger.find(key)
        if entry is None:
            self._items.pop((owner, id), None)
            return None
        stored = Stored(entry, self._about(entry))
        made = (stored.document() or {}).get("output", ())
        return next((item for item in (*stored.asked.items, *made) if item["id"] == id), None)

    def _about(self, entry: Entry) -> Asked:
        number = entry.opened.entry
        if number not in self._asked:
            self._asked[number] = _read(entry)
        return self._asked[number]

    def _index(self, stored: Stored, document: Fields) -> None:
        if stored.asked.stored:
            for item in (*stored.asked.items[stored.asked.own :], *document["output"]):
                self._items[stored.asked.owner, item["id"]] = stored.entry.opened.key

    # Generating

    async def open(
        self, asked: Asked, body: bytes, plan: ChatPlan, subject: Subject, where: Placement, *, safe: bool
    ) -> Stored:
        """Begins it. `safe`: waits until it is on the disk, as it is promised. Raises JournalFull, and what the router
        refuses."""
        submit = plan.prompts[0].submits[0]
        race = Race(self._service.router.generate_all([submit], where))
        kept = msgspec.structs.replace(submit, ttft_deadline=None, deadline=None)  # times of this boot
        key = digest("responses", asked.owner, asked.identity.request_id)
        try:
            entry = self.ledger.open(key, body, asked.identity, (kept,), _written(asked))
        except JournalFull:
            await race.__aexit__(None, None, None)
            raise
        self._asked[entry.opened.entry] = asked
        self._run(Stored(entry, asked), plan, race, subject, where)
        if safe:
            await asyncio.wait([asyncio.ensure_future(self.ledger.flushed())], timeout=DISK_S)
        return Stored(entry, asked)

    def _run(
        self, stored: Stored, plan: ChatPlan, race: Race | None, subject: Subject, where: Placement = ANYWHERE
    ) -> None:
        entry, number = stored.entry, stored.entry.opened.entry

        def begin(past: dict[int, Past]) -> Race:
            submits: list[Submit] = list(entry.opened.submits)
            return Race(self._service.router.generate_all(submits, where, list(past.values())), list(past))

        recorder = Recorder(entry, race, begin, counts_pause=not stored.asked.background and not entry.opened.body)  # type: ignore[arg-type]
        reply = ResponseReply(self._service, subject, stored.asked, plan, recorder)
        self._live[number], self._plans[number] = reply, plan
        entry.run(self._generate(stored, reply), self.ledger.over)

    async def _generate(self, stored: Stored, reply: ResponseReply) -> None:
        """Reads the reply to its end and writes down what it came to. What engines cannot take now can go on later."""
        entry = stored.entry
        try:
            async for _ in reply.pieces():
                pass
            document = reply.end()
        except (Suspended, Unavailable):
            raise
        except Exception as error:  # how the response ended; every follower is told
            if is_unexpected(error):
                self._service.log.unexpected(reply.subject, error)
            entry.failure, document = error, reply.fail(error)
        finally:
            self._live.pop(entry.opened.entry, None)
            self._plans.pop(entry.opened.entry, None)
        self._settle(stored, document)

    def _settle(self, stored: Stored, document: Fields) -> None:
        stored.entry.settle(orjson.dumps(document))
        self._index(stored, document)

    async def resume(self, stored: Stored) -> None:
        """Sees to it that one which is not over is generated. Raises what the router refuses."""
        if stored.entry.state != "paused":
            return
        if not self.ledger.goes_on(stored.entry):
            plan = await self._planned(stored)
            document = ResponseReply(self._service, _nobody(stored), stored.asked, plan, Race([])).fail(
                EngineFailed("The configuration of the model was changed under this response; repeat the request.")
            )
            self._end(stored, document)
            return
        self._service.router.admit()
        plan = await self._planned(stored)
        if stored.entry.state == "paused":  # still, after the time that the plan took
            self._run(stored, plan, None, _nobody(stored))

    async def _planned(self, stored: Stored) -> ChatPlan:
        """The plan of one that is kept, over the prompt that it had."""
        known = self._plans.get(stored.entry.opened.entry)
        if known is not None:
            return known
        asked, service = stored.asked, self._service
        served = Served(
            service.text, service.config, asked.identity.request_id, owner=asked.owner, share=service.share(asked.owner)
        )
        plan = await asyncio.to_thread(plan_response, asked.body, asked.items, served)
        return with_prompt(plan, stored.entry.opened.submits[0].prompt)

    async def keep_going(self) -> None:
        """For ever: what is in the background and nobody generates, be it for a restart, is gone on with."""
        while True:
            service = self._service
            if service.has_text and service.router.accepts and not service.draining:
                await self._resume_all()
            self._forget()
            await asyncio.sleep(LOOK_S)

    def _forget(self) -> None:
        """What is known of entries that the ledger has forgotten."""
        entries = self.ledger.entries()
        if len(self._asked) > len(entries):
            numbers = {entry.opened.entry for entry in entries}
            keys = {entry.opened.key for entry in entries}
            self._asked = {number: asked for number, asked in self._asked.items() if number in numbers}
            self._items = {name: key for name, key in self._items.items() if key in keys}

    async def _resume_all(self) -> None:
        for entry in self.ledger.entries():
            if entry.state != "paused" or entry.abandoned:
                continue
            stored = Stored(entry, self._about(entry))
            if not stored.asked.background:
                continue
            try:
                await self.resume(stored)
            except Unavailable:
                return  # later
            except Exception as error:  # it can never go on: that is its end
                log.warning("response %s cannot go on: %s", stored.asked.id, error)
                self._end(stored, (await self._at(stored)).fail(error))

    # Telling

    async def follow(self, stored: Stored, linger_s: float | None) -> Kept:
        """Reads it along, from its start; whoever is the last to leave lets go of it after so long."""
        plan = await self._planned(stored)
        source = Follower(stored.entry, None, linger_s)
        return Kept(ResponseReply(self._service, _nobody(stored), stored.asked, plan, source), stored.entry)

    async def snapshot(self, stored: Stored) -> Fields:
        """The object as it stands."""
        document = stored.document()
        if document is not None:
            return document
        live = self._live.get(stored.entry.opened.entry)
        return (await self._at(stored) if live is None else live).document()

    async def _at(self, stored: Stored) -> ResponseReply:
        """A reply that has read what there is."""
        return await self._read(stored, await self._planned(stored))

    async def _read(self, stored: Stored, plan: ChatPlan) -> ResponseReply:
        reply = ResponseReply(self._service, _nobody(stored), stored.asked, plan, _Written(stored.entry))
        async for _ in reply.pieces():
            pass
        return reply

    # Ending

    async def cancel(self, stored: Stored) -> Fields:
        """Stops it; one that is over stays what it is."""
        entry = stored.entry
        if entry.state != "ended":
            plan = await self._planned(stored)
            await entry.abandon()
            reply = await self._read(stored, plan)
            if stored.document() is None:  # it did not end meanwhile, and nobody else cancelled it
                self._end(stored, reply.cancel())
        return await self.snapshot(stored)

    async def delete(self, stored: Stored) -> None:
        entry = stored.entry
        if entry.state != "ended":
            entry.failure = NotFound(f"Response with id '{stored.asked.id}' was deleted.", "response_id")
            await entry.abandon()
        self.ledger.drop(entry)
        for item in stored.asked.items[stored.asked.own :]:
            self._items.pop((stored.asked.owner, item["id"]), None)

    def _end(self, stored: Stored, document: Fields) -> None:
        self._settle(stored, document)
        stored.entry.end(self.ledger.over)


class _Written:
    """What is written down of a response, and no more."""

    seen = counts = skips_opening = skips_usage = False

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    async def __aenter__(self) -> "_Written":
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


def _nobody(stored: Stored) -> Subject:
    """For log lines of a response without a request of its own."""
    return Subject(stored.asked.identity.request_id)
