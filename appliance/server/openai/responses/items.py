"""Input items of a response: the items of the previous response, and the items of the request."""

from collections.abc import Sequence

from appliance.server.errors.api import NotFound
from appliance.server.http.idempotency import digest
from appliance.server.openai.responses.events import Fields
from appliance.server.openai.responses.request_items import kind_of
from appliance.server.openai.responses.store import InvalidRequest, ResponseStore
from appliance.server.schema.responses import PromptRequest

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_PREFIXES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco"}
NO_STORE = "This server does not store responses (endpoints.responses.keep is 0s)"


def context(store: ResponseStore | None, owner: str, previous: str | None) -> tuple[Fields, ...]:
    """Return all items of the previous response. Raise NotFound or InvalidRequest."""
    if previous is None:
        return ()
    found = None if store is None else store.find(owner, previous)
    if found is None:
        why = "" if store is not None else f" {NO_STORE}."
        raise NotFound(f"Response with id '{previous[:200]}' not found.{why}", "previous_response_id")
    document = found.document()
    if document is None:
        message = f"Response '{previous[:200]}' is not finished. Wait for it or cancel it."
        raise InvalidRequest(message, "previous_response_id")
    return (*found.parsed.items, *document["output"])


def own_items(
    store: ResponseStore | None, owner: str, body: PromptRequest, salt: str, before: Sequence[Fields]
) -> tuple[Fields, ...]:
    """Return the items of a request, each with a unique ID, because lists are paged by ID. Raise InvalidRequest."""
    given = body.input if body.input is not None else []
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    taken = {item["id"] for item in before}
    items = []
    for at, item in enumerate(given):
        item = _resolved(store, owner, item, at)
        if not isinstance(item.get("id"), str | None):
            raise InvalidRequest(f"input[{at}].id must be a string.", "input")
        if item.get("id") in taken:
            item = {name: value for name, value in item.items() if name != "id"}
        items.append(_named(item, f"{salt}/input/{at}"))
        taken.add(items[-1]["id"])
    return tuple(items)


def _resolved(store: ResponseStore | None, owner: str, item: Fields, at: int) -> Fields:
    if item.get("type") != "item_reference" and set(item) != {"id"}:
        return item
    found = store.item(owner, str(item.get("id"))) if store is not None else None
    if found is None:
        raise InvalidRequest(f"input[{at}]: no item with id {str(item.get('id'))[:200]!r} is stored.", "input")
    return found


def _named(item: Fields, seed: str) -> Fields:
    kind = kind_of(item)
    own = item.get("id")
    name = own if isinstance(own, str) and own else f"{_PREFIXES.get(kind, 'item')}_{digest(seed).hex()}"
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        assistant = item.get("role") == "assistant"
        part: Fields = {"type": "output_text" if assistant else "input_text", "text": content}
        content = [part | ({"annotations": []} if assistant else {})]
        item = {**item, "content": content}
    status = {} if kind == "reasoning" and "status" not in item else {"status": item.get("status") or "completed"}
    return {**item, "id": name, "type": kind or item.get("type"), **status}
