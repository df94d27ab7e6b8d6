"""Rendering of conversations (Chat, Messages and Responses) to prompt text with the model's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from appliance.chat_templates.renderers import Renderers
from appliance.chat_templates.template import ChatTemplate, TemplateError
from appliance.config.gateway import GatewayConfig
from appliance.media.part import LoadedMedia
from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.formats import AUTO, PLAIN, chosen, recognise
from appliance.server.chat.encoder_input import NO_CONVERSATIONS
from appliance.server.chat.functions import function_tools, offered
from appliance.server.chat.media import MediaText, chat_media, expanded, media_options
from appliance.server.chat.messages import template_messages
from appliance.server.schema.chat import ChatRequest, Conversation
from engine.api.errors import RequestError
from engine.api.media import Modality
from engine.media.processed import Known
from engine.media.prompt import Expanded
from engine.text import Tokenizer


@dataclass(frozen=True)
class Text:
    """Tokenizer, chat template and output format of the served model, loaded once."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    format: str = AUTO  # name of the output format, or auto
    model_type: str = ""  # model type in config.json
    renderers: Renderers = field(default_factory=Renderers, compare=False, repr=False)
    media: MediaText | None = None
    """Set if the model accepts media."""

    @property
    def known_media(self) -> Mapping[Modality, Known]:
        """Tokens of the modalities that the model accepts."""
        return {} if self.media is None else self.media.known

    @cached_property
    def output_format(self) -> OutputFormat:
        found = recognise(self.template.text(), self.model_type) if self.template else PLAIN
        return chosen(self.format, found)

    def special_id(self, marker: str) -> int | None:
        """Return the ID of a marker that is a single special token, which ordinary decoding hides."""
        token = self.tokenizer.convert_tokens_to_ids(marker)
        return token if token in self.tokenizer.special_ids else None


@dataclass(frozen=True)
class Rendered:
    """A conversation as prompt text."""

    text: str
    continues: bool  # the reply continues the last message
    opens_turn: bool


def render(body: Conversation, text: Text, config: GatewayConfig, variables: dict[str, Any]) -> Rendered:
    """Render a conversation with the chat template. Raise RequestError if that is not possible."""
    if config.encoder is not None:
        raise RequestError(NO_CONVERSATIONS, "messages")
    is_own = text.template is not None and body.chat_template in text.template.names()
    if body.chat_template is not None and not is_own and not config.endpoints.trust_request_chat_template:
        raise RequestError(
            "chat_template in a request is disabled on this server; the manifest key "
            "endpoints.trust_request_chat_template enables it.",
            "chat_template",
        )
    _check_options(body, text)
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot be combined. Leave one out.",
            "continue_final_message",
        )
    template = text.template
    if template is None and body.chat_template is not None:
        template = ChatTemplate(body.chat_template, text.tokenizer.special_tokens, text.renderers)
    if template is None:
        raise RequestError(
            "The model has no chat template: neither the checkpoint nor the manifest has one. "
            "Set model.chat_template in the manifest, or use /v1/completions.",
            "messages",
        )
    opens = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    calls = text.output_format.calls
    messages = template_messages(body.messages, template.text(), calls.ids if calls else "", text.media)
    try:
        rendered = template.render(
            messages,
            tools=shown_tools(body),
            documents=body.documents,
            template=body.chat_template,
            add_generation_prompt=opens,
            continue_final_message=body.continue_final_message,
            variables={**variables, **(body.chat_template_kwargs or {})},
        )
    except TemplateError as error:
        if (param := _unusual(body)) is not None:
            raise RequestError(f"{error} (The request has {param[1]}.)", param[0]) from error
        raise
    return Rendered(rendered, body.continue_final_message, opens)


def _check_options(body: Conversation, text: Text) -> None:
    """Raise RequestError for options of media that have no effect."""
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if getattr(body, name) is not None and text.media is None:
            raise RequestError(f"{name} is not supported; the model accepts only text.", name)
    media_options(body.media_io_kwargs)


def _unusual(body: Conversation) -> tuple[str, str] | None:
    """Return a request field that can make a correct template fail, and its description, or None."""
    if body.chat_template_kwargs:
        return "chat_template_kwargs", "chat_template_kwargs"
    if body.documents:
        return "documents", "documents"
    bare = (at for at, message in enumerate(body.messages) if _is_bare(message))
    at = next(bare, None)
    return None if at is None else ("messages", f"no content in messages[{at}]")


def _is_bare(message: dict[str, Any]) -> bool:
    return message.get("content") is None and not message.get("tool_calls") and not message.get("function_call")


def shown_tools(body: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools that the template shows, or None if the reply must not call any."""
    if isinstance(body, ChatRequest):
        given = offered(body)
        tools = None if given.choice == "none" else given.tools
    else:
        tools = function_tools(body.tools)
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None


def tokenize(body: Conversation, rendered: Rendered, text: Text, media: LoadedMedia | None) -> Expanded:
    """Return the prompt ids of a rendered conversation and its media, as in `Served.media`."""
    if text.media is None or media is None:
        return Expanded(text.tokenizer.encode(rendered.text, add_special_tokens=body.add_special_tokens), ())
    options = body.mm_processor_kwargs, "messages", body.media_io_kwargs
    parts = list(chat_media(body.messages, text.known_media, *options))
    return expanded(rendered.text, parts, media, text.known_media, text.tokenizer, body.add_special_tokens)
