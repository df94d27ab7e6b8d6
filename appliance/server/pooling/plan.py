"""Conversion of a validated body to pooling `Submit`s, without I/O."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from appliance.config.gateway import GatewayConfig, LateReading, PooledModel
from appliance.media.part import MediaPart
from appliance.server.chat.conversation import render, tokenize
from appliance.server.chat.media import chat_media, content_part
from appliance.server.chat.parsed import Served
from appliance.server.chat.sequences import cache_salt, check_media
from appliance.server.chat.window import check_ids, check_length, check_text, kept_tokens
from appliance.server.pooling.chunks import weighted
from appliance.server.pooling.contents import (
    Content,
    dual_text,
    image_prompt,
    late_prompt,
    message_content,
    padded,
    reads_alone,
    request_options,
    side_of_content,
)
from appliance.server.pooling.instructions import lead
from appliance.server.pooling.late import Side, compared, late_ids, side_of
from appliance.server.schema.chat import Conversation, TemplateOptions
from appliance.server.schema.pooling import PoolingFields, PromptRequest
from engine.api.errors import RequestError
from engine.api.media import MediaItem
from engine.api.messages import Pooled as Numbers
from engine.api.messages import Pooling, Sampling, Submit
from engine.media.prompt import Expanded

CutSide = Literal["left", "right"]


@dataclass(frozen=True)
class Pooled:
    """One prompt for the engine. `segments` are the token counts of each token type."""

    ids: tuple[int, ...]
    segments: tuple[int, ...] = ()
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True)
class Terms:
    """Options of all sequences of a request, independent of the field names of its route."""

    keep: int | None  # maximum tokens of a prompt; None: no limit
    side: CutSide
    priority: int
    salt: str
    deadlines: tuple[float | None, float | None]
    name: str  # of the request: part of the sequence IDs


@dataclass(frozen=True)
class PoolPlan:
    """A parsed pooling request."""

    submits: tuple[Submit, ...]
    tokens: int  # total tokens of all prompts, reported as usage
    # number of sequences per input, if an input can have several
    parts: tuple[int, ...] = field(default=(), kw_only=True)
    unit: bool = field(default=False, kw_only=True)  # normalise the mean of an input's vectors
    # drops vectors of skipped tokens, given the token IDs of the prompt
    keeps: Callable[[Numbers, Sequence[int]], Numbers] | None = field(default=None, kw_only=True)

    def joined(self, results: Sequence[Numbers]) -> tuple[Numbers, ...]:
        """Return one result per input."""
        if self.keeps is not None:
            return tuple(self.keeps(each, one.prompt) for each, one in zip(results, self.submits, strict=True))
        starts = accumulate(self.parts, initial=0)
        spans = [slice(start, start + count) for start, count in zip(starts, self.parts, strict=False)]
        if all(count == 1 for count in self.parts):
            return tuple(results)
        sizes = [len(submit.prompt) for submit in self.submits]
        return tuple(weighted(results[span], sizes[span], unit=self.unit) for span in spans)


@contextmanager
def naming(field: str, index: int, count: int) -> Iterator[None]:
    """Prefix errors with the index of the input, if there are several inputs."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{field}[{index}]: {error}", error.param) from error


def facts(config: GatewayConfig) -> PooledModel:
    return config.pooled or PooledModel()


def terms(body: PoolingFields, served: Served) -> Terms:
    """Return the options of a request. Raise RequestError for unsupported ones."""
    if body.mm_processor_kwargs is not None and served.text.media is None:
        raise RequestError("mm_processor_kwargs is not supported; the model accepts only text.", "mm_processor_kwargs")
    if body.padding == "max_length":
        raise RequestError(
            "padding=max_length is not supported and not necessary. Leave it out.",
            "padding",
        )
    keep = kept_tokens(body.truncate_prompt_tokens, served.config)
    return Terms(
        keep=served.config.max_context if keep == -1 else keep,
        side=body.truncation_side or _side(served),
        priority=served.resolved_priority(body.priority),
        salt=cache_salt(body.cache_salt, served.salt),
        deadlines=served.deadlines.resolve(body, served.arrived_s),
        name=_name(body.request_id, served),
    )


def _side(served: Served) -> CutSide:
    return "left" if served.text.tokenizer.truncation_side == "left" else "right"


def _name(given: str | None, served: Served) -> str:
    if given is None:
        return served.request_id
    if not 1 <= len(given) <= 128 or not all("!" <= character <= "~" for character in given):
        raise RequestError("request_id must have 1 to 128 visible ASCII characters.", "request_id")
    return given


def submits(prompts: Sequence[Pooled], pooling: Pooling, conditions: Terms, served: Served) -> tuple[Submit, ...]:
    check_media((item for prompt in prompts for item in prompt.media), param="input")
    ttft_deadline, deadline = conditions.deadlines
    return tuple(
        Submit(
            id=f"{conditions.name}-{index}",
            prompt=prompt.ids,
            sampling=Sampling(),
            max_tokens=0,
            priority=conditions.priority,
            salt=conditions.salt,
            owner=served.owner,
            ttft_deadline=ttft_deadline,
            deadline=deadline,
            pooling=pooling,
            segments=prompt.segments,
            adapter=served.adapter,
            media=prompt.media,
        )
        for index, prompt in enumerate(prompts)
    )


def check_count(count: int, field: str, config: GatewayConfig) -> None:
    if count > config.limits.max_prompts:
        message = f"{field} has {count} entries; the server's limits.max_prompts allows {config.limits.max_prompts}."
        raise RequestError(message, field)


def text_ids(text: str, conditions: Terms, served: Served, *, special: bool = True) -> list[int]:
    """Return the token IDs of a text, truncated as requested."""
    tokenizer = served.text.tokenizer
    if conditions.keep is not None:
        return tokenizer.encode_within(text, conditions.keep, side=conditions.side, add_special_tokens=special)
    check_text(text, tokenizer, served.config, max(served.config.max_context, facts(served.config).max_input))
    return tokenizer.encode(text, add_special_tokens=special)


def whole(ids: list[int], field: str, served: Served) -> Pooled:
    """Return a prompt with all of these token IDs. Raise RequestError if they do not fit the window."""
    check_ids(ids, served.config, param=field)
    check_length(len(ids), served.config.max_context, param=field)
    return Pooled(tuple(ids))


def pieces(ids: list[int], field: str, served: Served) -> list[Pooled]:
    """Return the prompts of a text to embed. A text longer than the window is split, if the model allows that."""
    window = served.config.max_context
    check_ids(ids, served.config, param=field)
    check_length(len(ids), max(window, facts(served.config).max_input), param=field)
    return [Pooled(tuple(ids[start : start + window])) for start in range(0, len(ids), window)]


def read_prompts(body: PromptRequest, conditions: Terms, served: Served, *, cuts: bool = False) -> list[list[Pooled]]:
    """Return the prompts of a body in order: one per input, or several if `cuts`."""
    field = "messages" if body.input is None else "input"
    inputs = _each(body)
    check_count(len(inputs), field, served.config)
    model = facts(served.config)
    late = None if model.late is not None and model.late.reads_images else model.late
    side = None if late is None else side_of(body.input_type)
    prefix = lead(model, body.input_type, "input_type") if model.late is None else ""
    prompts = []
    for at, given in enumerate(inputs):
        with naming(field, at, len(inputs)):
            if (found := _with_contents(given, at, len(inputs), prefix, body, conditions, served)) is not None:
                prompts.append([found])
                continue
            if late is not None and side is not None:
                ids = _late(given, side, late, conditions, served)
            else:
                ids = _ids(given, prefix, body, conditions, served)
            prompts.append(pieces(ids, field, served) if cuts else [whole(ids, field, served)])
    return prompts


def _with_contents(
    given: Any, at: int, count: int, prefix: str, body: PromptRequest, conditions: Terms, served: Served
) -> Pooled | None:
    """Return the prompt of an input that has media, or of a model that reads an image by itself; None for others."""
    model, options = facts(served.config), request_options(body.mm_processor_kwargs)
    place, messages = _place(body, at, count), _messages(given)
    if not reads_alone(model):
        return None if messages is None or served.text.media is None else _rendered(messages, body, conditions, served)
    if messages is not None:
        content = message_content(messages, place, served, options)
    elif isinstance(given, str):
        content = given
    elif model.late is not None:
        raise RequestError("input must be texts or images. Token IDs are not supported.", "input")
    else:
        return None
    if model.late is not None:
        side_of_content(content, body.input_type)
    return alone_prompt(content, prefix, conditions, served, "messages" if body.input is None else "input")


def alone_prompt(content: Content, prefix: str, conditions: Terms, served: Served, field: str) -> Pooled:
    """Return the prompt of one text or one image."""
    model = facts(served.config)
    if model.late is not None:
        found = late_prompt(content, model.late, served, keep=conditions.keep)
        return _of_expanded(found, field, served)
    if not isinstance(content, str):
        return _of_expanded(image_prompt(content, served), field, served)
    ids = text_ids(dual_text(prefix + content, model), conditions, served)
    return whole(padded(ids, model, served.config.max_context), field, served)


def _of_expanded(found: Expanded, field: str, served: Served) -> Pooled:
    return replace(whole(found.ids, field, served), media=found.media)


def _rendered(messages: list[dict[str, Any]], body: PromptRequest, conditions: Terms, served: Served) -> Pooled:
    """Return the prompt of a conversation with media, which the chat template renders."""
    conversation = _conversation(messages, body)
    found = tokenize(conversation, render(conversation, served.text, served.config, {}), served.text, served.media)
    if conditions.keep is not None and len(found.ids) > conditions.keep and found.media:
        raise RequestError("A prompt with media cannot be truncated.", "truncate_prompt_tokens")
    cut = found.ids if conditions.keep is None else _cut(found.ids, conditions)
    return replace(whole(cut, "messages", served), media=found.media)


def rendered_media(part: MediaPart, conditions: Terms, served: Served) -> Pooled:
    """Return the prompt of one image of a model with a chat template: a message of the user."""
    content = [content_part(part)]
    options = None if not part.options else json.loads(part.options)
    body = PromptRequest(messages=[{"role": "user", "content": content}], mm_processor_kwargs=options)
    return _rendered(body.messages, body, conditions, served)


def _messages(given: Any) -> list[dict[str, Any]] | None:
    """Return the conversation that an input is, or None for a text or token ids. A part is a message of its own."""
    if isinstance(given, dict):
        return [{"role": "user", "content": [given]}]
    return given if isinstance(given, list) and isinstance(given[0], dict) else None


def _place(body: PromptRequest, at: int, count: int) -> str:
    field = "messages" if body.input is None else "input"
    return field if count == 1 and body.input is None else f"{field}.{at}"


def input_media(body: PromptRequest, served: Served) -> Iterator[MediaPart]:
    """Yield the media of a request, for a model that reads them. Raise RequestError for an invalid part."""
    inputs, options = _each(body), request_options(body.mm_processor_kwargs)
    for at, given in enumerate(inputs):
        place, messages = _place(body, at, len(inputs)), _messages(given)
        if messages is None:
            continue
        if reads_alone(facts(served.config)):
            content = message_content(messages, place, served, options)
            yield from (content,) if isinstance(content, MediaPart) else ()
        else:
            given = body.mm_processor_kwargs, place, body.media_io_kwargs
            yield from chat_media(messages, served.text.known_media, *given)


def _late(given: Any, side: Side, late: LateReading, conditions: Terms, served: Served) -> list[int]:
    if not isinstance(given, str):
        raise RequestError(
            "input must be texts, because this model adds a marker to each of them. Token IDs are not supported.",
            "input",
        )
    return late_ids(given, side, late, served, keep=conditions.keep, cut=conditions.side)


def _each(body: PromptRequest) -> list[Any]:
    """Return the inputs one by one: texts, lists of token IDs or conversations."""
    given = body.messages if body.input is None else body.input
    several = given[0] if isinstance(given, list) and given else None
    if body.input is None:
        return list(given) if isinstance(several, list) else [given]
    return list(given) if isinstance(several, str | list | dict) else [given]


def _ids(given: Any, prefix: str, body: PromptRequest, conditions: Terms, served: Served) -> list[int]:
    if isinstance(given, str):
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return text_ids(prefix + given, conditions, served, special=special)
    messages = _messages(given)
    if messages is not None:
        rendered = render(_conversation(messages, body), served.text, served.config, {})
        return text_ids(rendered.text, conditions, served, special=bool(body.add_special_tokens))
    return _cut(list(given), conditions)


def _conversation(messages: list[dict[str, Any]], body: PromptRequest) -> Conversation:
    options = {name: getattr(body, name) for name in TemplateOptions.model_fields}
    options["add_generation_prompt"] = bool(body.add_generation_prompt)
    return Conversation(messages=messages, add_special_tokens=bool(body.add_special_tokens), **options)


def _cut(ids: list[int], conditions: Terms) -> list[int]:
    if conditions.keep is None or len(ids) <= conditions.keep:
        return ids
    return ids[len(ids) - conditions.keep :] if conditions.side == "left" else ids[: conditions.keep]


def plan_prompts(body: PromptRequest, pooling: Pooling, served: Served) -> PoolPlan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    conditions, late = terms(body, served), facts(served.config).late
    plan = planned(read_prompts(body, conditions, served, cuts=pooling.task == "embed"), pooling, conditions, served)
    if late is None or late.reads_images or side_of(body.input_type) == "query":
        return plan
    return replace(plan, keeps=partial(compared, late=late, tokenizer=served.text.tokenizer))


def planned(inputs: list[list[Pooled]], pooling: Pooling, conditions: Terms, served: Served) -> PoolPlan:
    """Return the parsed request for inputs that consist of one prompt or several pieces each."""
    prompts = [prompt for parts in inputs for prompt in parts]
    unit = pooling.activate is not False and facts(served.config).activation == "normalize"
    tokens = sum(len(prompt.ids) for prompt in prompts)
    parts = tuple(map(len, inputs))
    return PoolPlan(submits(prompts, pooling, conditions, served), tokens, parts=parts, unit=unit)


def cut_dimensions(asked: int | None, config: GatewayConfig, field: str = "dimensions") -> int | None:
    """Return the vector length for a request, or None for the model's.

    Raise RequestError that lists the possible lengths.
    """
    if asked is None:
        return None
    model = facts(config)
    if asked < 1:
        raise RequestError(f"{field} must be at least 1, got {asked}.", field)
    if asked == model.width:
        return None
    if not model.any_dimensions and not model.dimensions:
        raise RequestError(
            f"{field}={asked} is not supported: the vectors have {model.width} numbers and cannot be "
            f"shortened. Leave {field} out.",
            field,
        )
    if model.dimensions and asked not in model.dimensions:
        possible = ", ".join(map(str, model.dimensions))
        raise RequestError(f"{field}={asked} is not supported. The model was trained for {possible}.", field)
    if asked > model.width:
        raise RequestError(f"{field}={asked} is more than the {model.width} numbers of the model's vectors.", field)
    return asked
