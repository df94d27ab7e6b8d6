"""Pairs of texts: selection of the pairs to compare, and prompts for models that read a pair at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.chat_templates.template import ChatTemplate
from appliance.media.part import MediaPart
from appliance.server.chat.messages import part_text
from appliance.server.chat.parsed import Served
from appliance.server.pooling.contents import Content, content_of, request_options, with_media_parts
from appliance.server.pooling.plan import Pooled, Terms, check_count, facts, naming, whole
from appliance.server.schema.scoring import Parts, RerankRequest, ScoreRequest, ScoringFields, Side
from engine.api.errors import RequestError

# Prompt text with which Qwen's rerankers were trained (see their model card). The logits of the answer are pooled.
RERANKER_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANKER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANKER_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Names:
    """The client's field names of the two sides."""

    first: str
    second: str


@dataclass(frozen=True)
class Comparison:
    """The texts and images of both sides, and the pairs to compare as (index on the first side, on the second)."""

    names: Names
    first: tuple[Content, ...]
    second: tuple[Content, ...]
    pairs: tuple[tuple[int, int], ...]


def comparison(body: ScoreRequest | RerankRequest, served: Served) -> Comparison:
    """Return the 1:1, 1:N or N:N pairs of a request. Raise RequestError for other counts and for non-text input."""
    if isinstance(body, RerankRequest):
        names, left, right = Names("query", "documents"), body.query, list(body.documents)
    else:
        ((first, second),) = body.given()
        names, left, right = Names(first, second), getattr(body, first), getattr(body, second)
    options = request_options(body.mm_processor_kwargs)
    sides = [_contents(left, names.first, served, options), _contents(right, names.second, served, options)]
    counts = [len(side) for side in sides]
    for name, count in zip((names.first, names.second), counts, strict=True):
        if not count:
            raise RequestError(f"{name} must not be empty.", name)
        check_count(count, name, served.config)
    if counts[0] not in (1, counts[1]):
        raise RequestError(
            f"Input lengths must be either 1:1, 1:N or N:N; {names.first} has {counts[0]} and {names.second} "
            f"{counts[1]}.",
            names.second,
        )
    pairs = tuple((0 if counts[0] == 1 else at, at) for at in range(counts[1]))
    return Comparison(names, tuple(sides[0]), tuple(sides[1]), pairs)


def compared_media(body: ScoreRequest | RerankRequest, served: Served) -> Iterator[MediaPart]:
    """Yield the images of both sides, for a model that reads images. Raise RequestError for an invalid part."""
    if served.text.media is not None:
        found = comparison(body, served)
        yield from with_media_parts((*found.first, *found.second))


def _contents(side: Any, name: str, served: Served, options: str) -> list[Content]:
    if not isinstance(side, list):
        return [_content(side, name, name, served, options)]
    contents = []
    for at, each in enumerate(side):
        with naming(name, at, len(side)):
            contents.append(_content(each, f"{name}.{at}", name, served, options))
    return contents


def _content(side: Side, where: str, name: str, served: Served, options: str) -> Content:
    if isinstance(side, str):
        return side
    assert isinstance(side, Parts)
    if isinstance(side.content, list) and served.text.media is None:
        return "\n".join(part_text(part, f"content[{at}]", name) for at, part in enumerate(side.content))
    return content_of(side.content, f"{where}.content", name, served, options)


def most_tokens(body: ScoringFields, served: Served) -> tuple[int | None, int | None]:
    """Return the token limits of both sides. None means no limit."""
    window, limits = served.config.max_context, []
    for field in ("max_tokens_per_query", "max_tokens_per_doc"):
        given = getattr(body, field)
        if given < 0:
            raise RequestError(f"{field} must be at least 0 (0: no limit), got {given}.", field)
        if given >= window:
            raise RequestError(f"{field} ({given}) must be less than max_model_len ({window}).", field)
        limits.append(given or None)
    return limits[0], limits[1]


def joined(compared: Comparison, body: ScoringFields, conditions: Terms, served: Served) -> list[Pooled]:
    """Return one prompt per pair, in the format with which the model was trained."""
    form = {"tokenizer": _by_tokenizer, "template": _by_template, "reranker": _by_reranker}[facts(served.config).pairs]
    most = most_tokens(body, served)
    prompts = []
    for left, right in compared.pairs:
        with naming(compared.names.second, right, len(compared.pairs)):
            texts = _text(compared.first[left]), _text(compared.second[right])
            prompts.append(form(texts, most, body, conditions, served))
    return prompts


def _text(content: Content) -> str:
    if not isinstance(content, str):
        raise RequestError(f"{content.where}: the model reads pairs of texts.", content.where)
    return content


Limits = tuple[int | None, int | None]


def _by_tokenizer(
    texts: tuple[str, str], most: Limits, body: ScoringFields, conditions: Terms, served: Served
) -> Pooled:
    """Build the prompt with the tokenizer's own pair format and its token types."""
    tokenizer = served.text.tokenizer
    ids, types = tokenizer.encode_pair(*texts, limit=conditions.keep, most=most, side=conditions.side)
    return Pooled(whole(ids, "documents", served).ids, _segments(types))


def _segments(types: Sequence[int]) -> tuple[int, ...]:
    """Return the number of tokens of each type in order, or () if there is only one type."""
    counts = [types.count(kind) for kind in range(max(types, default=0) + 1)]
    return tuple(counts) if len(counts) > 1 else ()


def _by_template(
    texts: tuple[str, str], most: Limits, body: ScoringFields, conditions: Terms, served: Served
) -> Pooled:
    """Build the prompt with the checkpoint's template.

    The template gets messages of the roles query and document, and both texts as variables.
    """
    template = _pair_template(served)
    query, document = (shortened(text, count, conditions, served) for text, count in zip(texts, most, strict=True))
    variables = {"query": query, "document": document, **(body.chat_template_kwargs or {})}
    if body.instruction is not None:
        variables["instruction"] = body.instruction
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    text = template.render(messages, add_generation_prompt=True, variables=variables)
    tokenizer = served.text.tokenizer
    if conditions.keep is None:
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode_within(text, conditions.keep, side=conditions.side, add_special_tokens=False)
    return whole(ids, "documents", served)


def _pair_template(served: Served) -> ChatTemplate:
    template = served.text.template
    if template is None:
        raise RequestError(
            "The model needs a chat template for pairs, but neither the checkpoint nor the manifest has one. "
            "Set model.chat_template in the manifest.",
            "documents",
        )
    return template


def shortened(text: str, most: int | None, conditions: Terms, served: Served) -> str:
    """Return the text of the first (or last) `most` tokens."""
    tokenizer = served.text.tokenizer
    if most is None:
        return text
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= most:
        return text
    return tokenizer.decode(ids[-most:] if conditions.side == "left" else ids[:most])


def _by_reranker(
    texts: tuple[str, str], most: Limits, body: ScoringFields, conditions: Terms, served: Served
) -> Pooled:
    """Build the prompt from instruction, query and document, between a fixed prefix and suffix that are never cut."""
    tokenizer = served.text.tokenizer
    query, document = (shortened(text, count, conditions, served) for text, count in zip(texts, most, strict=True))
    instruction = RERANKER_TASK if body.instruction is None else body.instruction
    begin, end = (tokenizer.encode(text, add_special_tokens=False) for text in (RERANKER_BEGIN, RERANKER_END))
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    if conditions.keep is None:
        middle = tokenizer.encode(text, add_special_tokens=False)
    else:
        room = conditions.keep - len(begin) - len(end)
        middle = tokenizer.encode_within(text, max(0, room), side=conditions.side, add_special_tokens=False)
    return whole([*begin, *middle, *end], "documents", served)
