"""Chat templates of a checkpoint or of a request, and the errors of templates that fail.

rendering.py defines the environment of the templates, renderers.py the processes that render them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.chat_templates.renderers import Renderers
from appliance.chat_templates.rendering import Outcome
from engine.api.errors import CheckpointError, RequestError
from engine.api.files import read_text
from engine.text import Tokenizer

LARGE = 1 << 20
"""Size of a conversation as JSON, in bytes, above which a template that exceeds a limit is not considered faulty."""

# Marks the end of the last message in the rendered conversation; the trailing space shows whether the template trims.
_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateError(CheckpointError):
    """Raised if the model's own template fails, which the operator has to fix. `place` describes the failure without
    text of the conversation."""

    code = "template"

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def _named(sources: str | Mapping[str, str], name: str | None, has_tools: bool) -> str:
    """Return one of several templates: by name, else `tool_use` if tools are given, else `default`."""
    if isinstance(sources, str):
        return sources
    wanted = name or ("tool_use" if has_tools and "tool_use" in sources else "default")
    if wanted not in sources:
        raise RequestError(
            f"The model has no chat template {wanted!r}; it has {', '.join(sorted(sources))}", "chat_template"
        )
    return sources[wanted]


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Append the end tag to the text of the last message, and return the original text."""
    content = message.get("content")
    if isinstance(content, list):
        for part in reversed(content):
            if "text" in part:
                text = str(part["text"])
                part["text"] = text + _END_TAG
                return text
    if not isinstance(content, str) or "content" not in source:
        raise RequestError("continue_final_message: the last message has no text to continue", "continue_final_message")
    message["content"] = content + _END_TAG
    return content


def _cut_at_end(rendered: str, text: str) -> str:
    at = rendered.rfind(_END_TAG.strip())
    if at < 0 or text.strip() not in rendered:
        raise RequestError(
            "continue_final_message: the chat template changes the last message, so it cannot be continued",
            "continue_final_message",
        )
    kept = rendered[:at]
    return kept if rendered[at:].startswith(_END_TAG) else kept.rstrip()


@dataclass(frozen=True)
class ChatTemplate:
    """A model's template, or its templates by name. `special_tokens` are available in it (bos_token, eos_token, …)."""

    sources: str | Mapping[str, str]
    special_tokens: Mapping[str, str]
    renderers: Renderers = field(default_factory=Renderers, compare=False, repr=False)

    def names(self) -> tuple[str, ...]:
        """Return the names if there are several templates; a request may choose one."""
        return () if isinstance(self.sources, str) else tuple(self.sources)

    def text(self) -> str:
        """Return the text of all templates, from which the output format is recognised."""
        return self.sources if isinstance(self.sources, str) else "\n".join(self.sources.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as the model's prompt text. `template` is a name or a source that replaces the
        model's own. Messages must be the caller's own copies. Raise RequestError if the template refuses the
        conversation, or came with the request and fails; TemplateError if the model's own fails."""
        named = not isinstance(self.sources, str) and template in self.sources
        own = template is None or named
        source = _named(self.sources, template, bool(tools)) if own else str(template)
        last_text = _mark_end(messages[-1], source) if continue_final_message else ""
        scope: dict[str, Any] = {
            **self.special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            found = self.renderers.render(source, scope)
        except ValueError as error:
            raise RequestError(f"The conversation has a value that no template can take: {error}", "messages") from None
        if found.kind != "text":
            raise _failure(found, scope, own=own)
        return _cut_at_end(found.text, last_text) if continue_final_message else found.text


def _failure(found: Outcome, scope: Mapping[str, Any], *, own: bool) -> RequestError | TemplateError:
    """Return the exception for an outcome without text: RequestError for the client, TemplateError for the operator."""
    if found.kind == "refused":
        return RequestError(f"The chat template refuses the conversation: {found.text}", "messages")
    where = f" ({found.place})" if found.place else ""
    told = {
        "syntax": f"is not valid Jinja{where}: {found.text}",
        "failed": f"fails on this conversation{where}: {found.text}",
        "limit": f"exceeds a limit on this conversation: {found.text}",
    }[found.kind]
    if not own:
        return RequestError(f"The chat template of the request {told}", "chat_template")
    if found.kind == "limit" and len(json.dumps(scope)) > LARGE:
        return RequestError(f"The conversation is too large for the model's chat template: {found.text}", "messages")
    place = f"its chat template fails ({found.place or found.kind}); correct it or set model.chat_template"
    return TemplateError(f"The model's chat template {told}", place)


def check_template(template: ChatTemplate) -> None:
    """Render a conversation of one message with the template, or with each of several.

    A template may refuse the conversation with `raise_exception`; content may be a text or a list of parts. Raise
    TemplateError if a template is invalid Jinja or fails for both.
    """
    for name in template.names() or (None,):
        faults = [
            fault
            for content in ("Hello", [{"type": "text", "text": "Hello"}])
            for fault in _faults(template, name, content)
        ]
        if len(faults) == 2:
            raise faults[0]


def _faults(template: ChatTemplate, name: str | None, content: Any) -> list[TemplateError]:
    try:
        template.render([{"role": "user", "content": content}], template=name)
    except TemplateError as error:
        return [error]
    except RequestError:  # raise_exception
        pass
    return []


def load_template(
    tokenizer: Tokenizer, override: str | None, renderers: Renderers | None = None
) -> ChatTemplate | None:
    """Return the checkpoint's template, or the file that replaces it. Return None if the checkpoint has no template.
    Raise CheckpointError."""
    renderers = renderers or Renderers()
    if override is None:
        sources = tokenizer.chat_template
        return None if sources is None else ChatTemplate(sources, tokenizer.special_tokens, renderers)
    try:
        source = read_text(Path(override))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model.chat_template: {override}: {error}") from error
    return ChatTemplate(source, tokenizer.special_tokens, renderers)
