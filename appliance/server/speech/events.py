"""Deltas and events of transcripts that are streamed."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from appliance.server.http.sse import record


async def text_deltas(pieces: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """Yield deltas, which together are the text without the spaces around it: the spaces at the end of a delta are sent
    with the next one."""
    begun, held = False, ""
    async for piece in pieces:
        text = held + piece if begun else piece.lstrip()
        delta = text.rstrip()
        held = text[len(delta) :] if delta or begun else ""
        if delta:
            begun = True
            yield delta


def no_words() -> list[dict[str, Any]]:
    return []


async def transcript_events(
    pieces: AsyncIterator[str],
    usage: Callable[[], dict[str, Any]],
    words: Callable[[], list[dict[str, Any]]] = no_words,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. words: returns the words of the pieces so far; a delta has those that are new."""
    text, sent = "", 0
    async for delta in text_deltas(pieces):
        text += delta
        timed = words()
        new = {"words": timed[sent:]} if timed[sent:] else {}
        sent = len(timed)
        yield record({"type": "transcript.text.delta", "delta": delta, **new})
    every = {"words": timed} if (timed := words()) else {}
    yield record({"type": "transcript.text.done", "text": text, **every, "usage": usage()})
