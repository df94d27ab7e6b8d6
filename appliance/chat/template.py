"""Chat templates, rendered as transformers renders them: a sandboxed Jinja with trimmed blocks and a few extra
functions.

The environment's rules (trim_blocks, lstrip_blocks, tojson without HTML escapes, raise_exception, strftime_now, loop
controls, the generation tag) are the convention of Hugging Face checkpoints; templates are written against them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from appliance.chat.meter import MeteredEnvironment, TooMuch, collected, metered
from engine.api.errors import CheckpointError, RequestError
from engine.api.files import read_text
from engine.text import Tokenizer

# Where the last message's text ends in the rendered conversation; the trailing space shows whether the template trims.
_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks replies for training; serving renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _compile(source: str) -> jinja2.Template:
    try:
        return _compiled(source)
    except jinja2.TemplateError as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise RequestError(f"The chat template is not valid Jinja{line}: {error}", "chat_template") from error


def _named(sources: str | Mapping[str, str], name: str | None, has_tools: bool) -> str:
    """One of several templates: by name, else `tool_use` where tools are given, else `default`."""
    if isinstance(sources, str):
        return sources
    wanted = name or ("tool_use" if has_tools and "tool_use" in sources else "default")
    if wanted not in sources:
        raise RequestError(
            f"The model has no chat template {wanted!r}; it has {', '.join(sorted(sources))}", "chat_template"
        )
    return sources[wanted]


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Puts the end tag behind the last message's text, which is returned."""
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
    """A model's template, or its templates by name. `special_tokens` are visible in it (bos_token, eos_token, …)."""

    sources: str | Mapping[str, str]
    special_tokens: Mapping[str, str]

    def names(self) -> tuple[str, ...]:
        """Of several templates; a request may choose one."""
        return () if isinstance(self.sources, str) else tuple(self.sources)

    def text(self) -> str:
        """All of the template's text: what an output format is recognised by."""
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
        """The conversation as the model's prompt text. `template` is a name or a source that replaces the model's own.
        Messages must be the caller's own copies. Raises RequestError where the template refuses the conversation."""
        named = not isinstance(self.sources, str) and template in self.sources
        own = template is None or named
        source = _named(self.sources, template, bool(tools)) if own else str(template)
        compiled = _compile(source)
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
            with metered():
                rendered = collected(compiled.generate(scope))
        except (TooMuch, RecursionError, MemoryError) as error:
            why = f": {error}" if isinstance(error, TooMuch) else ""
            raise RequestError(f"The chat template does not end on this conversation{why}", "messages") from error
        except Exception as error:  # whatever a template's code comes to
            raise RequestError(f"The chat template refuses the conversation: {error}", "messages") from error
        return _cut_at_end(rendered, last_text) if continue_final_message else rendered


def check_template(template: ChatTemplate) -> None:
    """Render a conversation of one message with the template, or with each of several.

    A template may refuse the conversation by `raise_exception`; content may be a text or a list of parts. Raises
    RequestError if a template is no valid Jinja or fails on both."""
    for name in template.names() or (None,):
        _compile(_named(template.sources, name, False))
        faults = [
            fault
            for content in ("Hello", [{"type": "text", "text": "Hello"}])
            for fault in _faults(template, name, content)
        ]
        if len(faults) == 2:
            raise faults[0]


def _faults(template: ChatTemplate, name: str | None, content: Any) -> list[RequestError]:
    try:
        template.render([{"role": "user", "content": content}], template=name)
    except RequestError as error:
        cause = error.__cause__
        refused = type(cause) is jinja2.TemplateError  # what raise_exception raises; faults are of its subclasses
        return [] if refused else [error]
    return []


def load_template(tokenizer: Tokenizer, override: str | None) -> ChatTemplate | None:
    """The checkpoint's template, or the file that replaces it; None if there is neither. Raises CheckpointError."""
    if override is None:
        sources = tokenizer.chat_template
        return None if sources is None else ChatTemplate(sources, tokenizer.special_tokens)
    try:
        source = read_text(Path(override))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model.chat_template: {override}: {error}") from error
    return ChatTemplate(source, tokenizer.special_tokens)
