"""Values of a parsed request: the context that it is parsed in, its prompts, and how its reply is decoded."""

from dataclasses import dataclass, field

from appliance.config.gateway import GatewayConfig
from appliance.media.part import LoadedMedia
from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.formats import PLAIN
from appliance.server.chat.conversation import Text
from appliance.server.chat.deadlines import Deadlines
from appliance.server.chat.encoder_input import DecoderStart
from appliance.server.chat.tools import ToolUse
from engine.api.errors import RequestError
from engine.api.messages import Grammar, Submit


@dataclass(frozen=True)
class Served:
    """Context in which one request is parsed."""

    text: Text
    config: GatewayConfig
    request_id: str
    salt: str | None = None  # from a header, for gateways that cannot change bodies
    priority: int | None = None  # from a header
    owner: str = ""  # name for its API key
    share: float = 1.0
    deadlines: Deadlines = Deadlines()  # from headers
    arrived_s: float = 0.0  # monotonic time from which deadlines count
    may_hurry: bool = True
    """The API key may use a priority below 0."""
    adapter: str = ""  # LoRA adapter that the request names as its model
    media: LoadedMedia | None = field(default_factory=dict)
    """Media of the request. None: placeholders of media are not expanded, because the prompt is replaced."""

    def resolved_priority(self, given: int) -> int:
        """Return the priority of the body or of the headers. Raise RequestError if the API key may not use it."""
        priority = given or self.priority or 0
        if priority < 0 and not self.may_hurry:
            raise RequestError(
                f"priority {priority} is below 0, which this API key is not allowed to use. Use 0 or "
                "more, or ask the operator to set priority=yes for the key.",
                "priority",
            )
        return priority


@dataclass(frozen=True)
class Reading:
    """Options for decoding the tokens of one reply."""

    stops: tuple[str, ...]
    include_stop: bool
    min_tokens: int
    skip_special_tokens: bool
    end_ids: frozenset[int] = frozenset()  # tokens that end the reply and are not part of its text
    shown_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Prompt:
    """One prompt and its choices."""

    ids: tuple[int, ...]
    submits: tuple[Submit, ...]
    drops_reply: bool = False  # only the prompt is scored; the one token that this requires is hidden
    decoder_start: DecoderStart | None = None  # first decoder tokens of an encoder-decoder model

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens before the reply."""
        return self.ids if self.decoder_start is None else self.decoder_start.ids

    @property
    def tokens(self) -> int:
        """Number of tokens that the request provided."""
        return len(self.ids) + (0 if self.decoder_start is None else self.decoder_start.given)


@dataclass(frozen=True)
class Plan:
    """A parsed request: its prompts in order, each with n choices."""

    prompts: tuple[Prompt, ...]
    reading: Reading
    bound_by: str = ""  # request field that the grammar of all choices comes from, or ""

    @property
    def submits(self) -> tuple[Submit, ...]:
        return tuple(submit for prompt in self.prompts for submit in prompt.submits)

    @property
    def grammar(self) -> Grammar | None:
        return self.prompts[0].submits[0].grammar


@dataclass(frozen=True)
class ChatPlan(Plan):
    """A parsed chat request and how its reply is decoded."""

    output_format: OutputFormat = PLAIN
    tools: ToolUse = ToolUse("none")
    reasons: bool = False  # the prompt has already opened the reasoning
    role: str = "assistant"
    echo: str = ""  # text that is repeated before the reply
