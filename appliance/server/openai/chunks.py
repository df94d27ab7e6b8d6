"""Formatter of the replies whose streams are chunks of one object: chat completions and text completions."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from appliance.observability.log import Subject
from appliance.server.chat.stream import Choice
from appliance.server.http.reply import Reply, Usage
from appliance.server.http.service import Service
from appliance.server.http.sse import DONE, ChunkEncoder, record
from appliance.server.reply_store.records import Identity
from appliance.server.schema.common import GenerationRequest


@dataclass(frozen=True)
class Header:
    """Fields that are equal in all chunks of a reply."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}

    def chunk_encoder(self) -> ChunkEncoder:
        """Return an envelope for chunks with one choice each."""
        return ChunkEncoder(self.fields(), "choices")


def header(service: Service, identity: Identity, prefix: str, kind: str, model: str) -> Header:
    fingerprint = service.config.system_fingerprint
    return Header(f"{prefix}-{identity.request_id}", kind, identity.created, model, fingerprint)


@dataclass(frozen=True)
class UsageOptions:
    """Selects the chunks of a stream that carry usage."""

    final: bool
    every: bool
    nulls: bool = False
    """Chunks before the final one have `usage: null`, as in the OpenAI service."""


def usage_options(body: GenerationRequest, compat: str) -> UsageOptions:
    options = body.stream_options
    final = bool(options and options.include_usage)
    every = final and bool(options and options.continuous_usage_stats)
    return UsageOptions(final, every, nulls=final and not every and compat == "openai")


class ChunkReply(Reply[dict[str, Any]]):
    """Formatter of one reply. A piece is one choice with the fields that a delta adds."""

    terminator: ClassVar[bytes] = DONE

    def __init__(
        self,
        service: Service,
        subject: Subject,
        body: GenerationRequest,
        head: Header,
        prompt_tokens: int,
        choices: Sequence[Choice],
    ) -> None:
        super().__init__(service, subject, body, prompt_tokens, choices)
        self.head = head
        self.options = usage_options(body, service.config.endpoints.compat)
        self.usage = Usage(prompt_tokens, service.config.endpoints.compat == "openai")
        self.speculates = service.config.speculation != "off"
        self._chunk_encoder = head.chunk_encoder()

    @abstractmethod
    def final_usage(self) -> dict[str, Any]:
        """Return the usage of the complete reply."""

    def count_tokens(self) -> Usage:
        self.usage.completion = sum(choice.tokens for choice in self.choices)
        if self.speculates:
            timings = [choice.timing for choice in self.choices if choice.timing]
            accepted = sum(timing.accepted_tokens for timing in timings)
            self.usage.drafts = accepted, sum(timing.rejected_tokens for timing in timings)
        return self.usage

    def chunk(self, choice: Mapping[str, Any], more: dict[str, Any], event_id: str) -> bytes:
        """Return the record of a choice. `more` are further fields of the chunk."""
        if self.options.every or self.options.nulls:
            more["usage"] = self.count_tokens().plain() if self.options.every else None
        return self._chunk_encoder.record(choice, more, event_id)

    def closing(self, event_id: str) -> Iterable[bytes]:
        if not self.options.final:
            return ()
        fields = {**self.head.fields(), "choices": [], "usage": self.final_usage()}
        return (record(fields | {"system_fingerprint": self.head.fingerprint}, event_id),)
