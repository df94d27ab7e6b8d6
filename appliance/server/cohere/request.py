"""Parsing of Cohere's embed requests, and its vector formats."""

from collections.abc import Iterator, Sequence
from typing import Any

from appliance.media.part import MediaPart
from appliance.server.chat.parsed import Served
from appliance.server.pooling.contents import Content, content_of, reads_alone, with_media_parts
from appliance.server.pooling.instructions import lead
from appliance.server.pooling.plan import (
    PoolPlan,
    alone_prompt,
    check_count,
    cut_dimensions,
    facts,
    naming,
    pieces,
    planned,
    rendered_media,
    terms,
    text_ids,
)
from appliance.server.pooling.vectors import base64_text, floats
from appliance.server.schema.cohere import EmbeddingType, EmbedRequest
from appliance.server.schema.pooling import PoolingFields
from engine.api.errors import RequestError
from engine.api.messages import Pooled, Pooling

INPUT_TYPES = ("search_query", "search_document", "classification", "clustering")


def _contents(body: EmbedRequest, served: Served) -> tuple[str, list[Content]]:
    """Return the inputs and the name of their field. Raise RequestError for images that the model does not read."""
    given = [name for name in ("texts", "images", "inputs") if getattr(body, name)]
    if len(given) != 1:
        raise RequestError("Exactly one of texts, images and inputs must be given and must not be empty.", "texts")
    if body.images:
        if "image" not in served.text.known_media:
            raise RequestError("images are not supported; the model accepts only text.", "images")
        return "images", [MediaPart("image", url, f"images.{at}") for at, url in enumerate(body.images)]
    if body.texts:
        return "texts", list(body.texts)
    contents = enumerate(body.inputs or [])
    return "inputs", [content_of(one.content, f"inputs[{at}].content", "inputs", served) for at, one in contents]


def embed_media(body: EmbedRequest, served: Served) -> Iterator[MediaPart]:
    """Yield the images of a request, for a model that reads images."""
    if served.text.media is not None:
        yield from with_media_parts(_contents(body, served)[1])


def _prefix(body: EmbedRequest, served: Served) -> str:
    """Return the model's prefix for texts of the given type.

    Cohere's client cannot omit the type. Models without prompts therefore accept the types of its API and treat them
    all the same, except with the vllm profile.
    """
    model, asked = facts(served.config), body.input_type
    if asked in INPUT_TYPES and not model.prompts and served.config.endpoints.compat == "openai":
        asked = None
    return lead(model, asked, "input_type")


def plan_embed(body: EmbedRequest, served: Served) -> PoolPlan:
    """Return the parsed request. Raise RequestError if it cannot be served."""
    field, texts = _contents(body, served)
    check_count(len(texts), field, served.config)
    types = body.embedding_types or ()
    dimensions = cut_dimensions(body.output_dimension, served.config, "output_dimension")
    width = dimensions or facts(served.config).width
    if width % 8 and any(kind in ("binary", "ubinary") for kind in types):
        raise RequestError(
            f"binary and ubinary pack eight numbers into one, and vectors have {width}; "
            "ask for float or base64, or for an output_dimension that can be divided by 8.",
            "embedding_types",
        )
    cut = None if body.truncate == "NONE" else (-1 if body.max_tokens is None else body.max_tokens)
    fields = PoolingFields(
        truncate_prompt_tokens=cut,
        truncation_side="left" if body.truncate == "START" else "right",
        priority=body.priority,
        cache_salt=body.cache_salt,
        ttft_deadline_ms=body.ttft_deadline_ms,
        deadline_ms=body.deadline_ms,
    )
    conditions, prefix, prompts = terms(fields, served), _prefix(body, served), []
    for at, text in enumerate(texts):
        with naming(field, at, len(texts)):
            if reads_alone(facts(served.config)):
                prompts.append([alone_prompt(text, prefix, conditions, served, field)])
                continue
            if not isinstance(text, str):
                prompts.append([rendered_media(text, conditions, served)])
                continue
            ids = text_ids(prefix + text, conditions, served)
            if cut is None and body.max_tokens is not None and len(ids) > body.max_tokens:
                raise RequestError(
                    f"The text has {len(ids)} tokens, more than max_tokens={body.max_tokens}, and truncate is NONE; "
                    "END or START allow to cut it.",
                    "max_tokens",
                )
            prompts.append(pieces(ids, field, served))
    return planned(prompts, Pooling("embed", dimensions), conditions, served)


def typed(results: Sequence[Pooled], kind: EmbeddingType) -> list[Any]:
    """Return all vectors in one of Cohere's formats."""
    if kind == "float":
        return [floats(each) for each in results]
    if kind == "base64":
        return [base64_text(each) for each in results]
    return [_packed(floats(each), signed=kind == "binary") for each in results]


def _packed(values: list[float], *, signed: bool) -> list[int]:
    """Pack one bit per number, set if it is not negative, eight to a byte with the first as the highest bit.

    Signed bytes are 128 less.
    """
    packed = []
    for start in range(0, len(values), 8):
        byte = 0
        for value in values[start : start + 8]:
            byte = byte << 1 | (value >= 0)
        packed.append(byte - 128 * signed)
    return packed
