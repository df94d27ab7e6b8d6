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


async def transcript_events(pieces: AsyncIterator[str], usage: Callable[[], dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yield the events of a stream."""
    text = ""
    async for delta in text_deltas(pieces):
        text += delta
        yield record({"type": "transcript.text.delta", "delta": delta})
    yield record({"type": "transcript.text.done", "text": text, "usage": usage()})
