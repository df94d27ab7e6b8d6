"""Service object in the app's state, shared by all routes."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from appliance.config.gateway import GatewayConfig
from appliance.observability.history import History
from appliance.observability.log import RequestLog
from appliance.observability.metrics import Metrics, now
from appliance.observability.tracing import Tracing
from appliance.observability.usage import UsageLedger
from appliance.runtime.halted import HaltedState
from appliance.security.allowance import Allowances
from appliance.security.certificate import Certificate
from appliance.security.keys import ApiKey
from appliance.server.errors.api import NotFound, Unavailable
from appliance.server.http.fields import UnknownFields
from appliance.server.http.sessions import Sessions
from appliance.server.reply_store.store import ReplyStore
from appliance.server.routing.grammars import Bounds, Grammars
from appliance.server.routing.router import Router
from engine.api.messages import Grammar

if TYPE_CHECKING:
    from appliance.chat_templates.template import ChatTemplate
    from appliance.media.loader import MediaLoader
    from appliance.server.chat.text import Text
    from engine.text import Tokenizer

DRAIN_RETRY_AFTER_S = 5
DRAINING = "The service is shutting down. Please retry on another instance."


class Service:
    """The served model: its configuration, tokenizer and template, router, metrics, log and reply stores.

    A reload changes some attributes (server/live.py), so each request reads them again.
    """

    def __init__(
        self,
        config: GatewayConfig,
        router: Router,
        metrics: Metrics,
        log: RequestLog,
        reply_store: ReplyStore | None = None,
        keys: Sequence[ApiKey] = (),
        allowances: Allowances | None = None,
        certificate: Certificate | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.router = router
        self.adapters = router.adapters
        self.metrics = metrics
        self.log = log
        self.tracing = tracing or Tracing(None, metrics)
        self.reply_store = reply_store  # store of durable replies, if enabled
        self.grammars = Grammars(metrics.grammar_checked)
        self.unknown_fields = UnknownFields(logging.getLogger(__name__).warning)
        self.tasks = config.tasks
        self.open_requests = 0  # requests in progress, including streams
        self.draining = False  # set by SIGTERM
        self.closed = False  # new requests are rejected
        self.shelved: ReplyStore | None = None  # a store that accepts no new replies
        self.allowances = allowances or Allowances()
        self.certificate = certificate
        self.stored_responses: ReplyStore | None = None  # store of responses, if enabled
        sessions = config.endpoints.sessions
        self.sessions = Sessions(
            sessions.keep, sessions.max_open, Path(config.run) / "sessions" if config.run else None
        )
        self.health_paths: frozenset[str] = frozenset(config.endpoints.routes.health)
        self.history = History()
        self.usage = UsageLedger()
        self.set_keys(keys)
        self.halted: HaltedState | None = None  # set once by the launcher, when the appliance halts
        self.started_s = time.time()
        self._text: Text | None = None
        self.media = _media_loader(config)

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Set the accepted API keys and their limits from the configuration. Without keys, every client is accepted."""
        self.keys = tuple(keys)
        config = self.config
        self.metrics.register_keys({key.shown for key in keys})
        self.allowances.allow(
            keys, config.limits.per_key.requests_per_minute, config.limits.per_key.tokens_per_minute, now()
        )

    def share(self, owner: str) -> float:
        """Return an owner's share of the engine, also for a key that may have been removed."""
        return next((key.share for key in self.keys if key.owner == owner), 1.0)

    def set_text(self, text: "Text") -> None:
        self._text = text

    @property
    def has_text(self) -> bool:
        return self._text is not None

    @property
    def text(self) -> "Text":
        """Tokenizer and template. Raises Unavailable while they are being loaded from the checkpoint."""
        if self._text is None:
            self.router.refuse_if_halted()
            raise Unavailable("The service is starting: the tokenizer is being loaded.", 1)
        return self._text

    async def check_grammar(self, grammar: Grammar, param: str) -> None:
        """Raise RequestError if a grammar cannot be compiled within the limits.

        `param` is the request field with the grammar.
        """
        config = self.config
        bounds = Bounds(config.limits.grammar_size, config.limits.grammar_time, config.limits.grammar_memory)
        await self.grammars.check(grammar, bounds, param)

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.text.tokenizer

    @property
    def template(self) -> "ChatTemplate | None":
        return self.text.template

    @property
    def serves(self) -> bool:
        """A request that arrives now can be answered."""
        return self.healthy and not self.draining

    @property
    def healthy(self) -> bool:
        """The model can answer requests, whether or not the service is draining."""
        return self.has_text and self.router.answers

    def model_name(self, requested: str | None) -> str:
        """Return the name of the requested adapter, or the canonical name of the served model, which is the default.

        Raise NotFound (ER-04, ER-05).
        """
        names = self.config.names
        if requested and requested not in names and requested not in self.adapters:
            aliases = ", ".join((*names, *self.adapters.names))
            raise NotFound(f"The model `{requested}` does not exist. Valid aliases: {aliases}.", "model")
        return self.reply_name(requested)

    def adapter_of(self, requested: str | None) -> str:
        """Return the LoRA adapter that a request names as its model, or "" for the model itself."""
        return requested if requested and requested in self.adapters else ""

    def reply_name(self, requested: str | None) -> str:
        """Return the name in replies to a request for this model, which may have been renamed since."""
        return self.adapter_of(requested) or self.config.names[0]


def _media_loader(config: GatewayConfig) -> "MediaLoader | None":
    """Return the loader of media, or None for a model that accepts only text."""
    if not config.modalities and not config.embedded_modalities and config.speech is None:
        return None
    from appliance.media.loader import MediaLoader  # needs httpx

    transcribes = config.speech is not None or config.transcriber is not None
    seconds = config.limits.max_audio_seconds if transcribes else 0.0
    return MediaLoader(config.model, config.limits.media, max_audio_seconds=seconds, width=config.media_width)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
