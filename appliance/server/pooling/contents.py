"""Inputs of pooling routes with images: their items, and prompts of models that read an image by itself.

A model reads media in one of three ways. The chat template of a vision-language model has their places. A
late-interaction model has a prompt of its own for a document, which is an image, and for a query, which is a text. A
model with separate encoders reads a text or an image.
"""

import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from appliance.config.gateway import LateReading, PooledModel
from appliance.media.part import MediaPart
from appliance.server.chat.media import expanded, media_part, options_text, part_modality
from appliance.server.chat.messages import part_text
from appliance.server.chat.parsed import Served
from engine.api.errors import RequestError
from engine.api.media import MediaItem
from engine.media.prompt import Expanded

Content = str | MediaPart
"""A text, or an image, video or audio clip."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def reads_alone(model: PooledModel) -> bool:
    """Return whether an input is one text or one image, without a chat template."""
    return model.is_dual or (model.late is not None and model.late.reads_images)


def content_of(given: Any, where: str, param: str, served: Served, options: str = "") -> Content:
    """Return an input of text parts, which are joined, or of one image. Raise RequestError."""
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else [given]
    known = served.text.known_media
    media = [at for at, part in enumerate(parts) if part_modality(part) in known]
    if not media:
        reads = "only text" if served.text.media is None else served.text.media.reads
        return "\n".join(part_text(part, f"{where}[{at}]", param, reads) for at, part in enumerate(parts))
    others = [part for at, part in enumerate(parts) if at not in media]
    if len(media) > 1 or not all(_is_blank(one) for one in others):
        raise RequestError(
            f"{where}: one input is either a text or one image. Send others as inputs of their own.", param
        )
    return media_part(parts[media[0]], f"{where}.{media[0]}", options)


def _is_blank(part: Any) -> bool:
    """Return whether a part is a text without content."""
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and not text.strip()


def message_content(messages: Sequence[dict[str, Any]], where: str, served: Served, options: str = "") -> Content:
    """Return the content of a conversation with a model that reads one text or one image. Raise RequestError."""
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise RequestError(f"{where}: the model has no chat template; send one message of the role user.", "messages")
    content = messages[0].get("content")
    if not isinstance(content, str | list) or not content:
        raise RequestError(f"{where}: content must be a text or a list of parts, and not empty.", "messages")
    return content_of(content, f"{where}.0.content", "messages", served, options)


def request_options(options: Any) -> str:
    """Return mm_processor_kwargs as a text. Raise RequestError for unknown ones."""
    return "" if options is None else options_text(options)


def side_of_content(content: Content, input_type: str | None) -> Literal["query", "document"]:
    """Return the side of an input of a late-interaction model that reads images. Raise RequestError if `input_type` is
    the other one."""
    side: Literal["query", "document"] = "query" if isinstance(content, str) else "document"
    accepted = {"query": (None, "query", "search_query"), "document": (None, "document", "search_document", "passage")}
    if input_type not in accepted[side]:
        raise RequestError(
            f"input_type is {input_type!r}, but the input is {'a text' if side == 'query' else 'an image'}: documents "
            "of this model are images, and queries are texts.",
            "input_type",
        )
    return side


def late_prompt(content: Content, late: LateReading, served: Served, *, keep: int | None) -> Expanded:
    """Return the prompt of a query or of an image. Texts are cut to `keep` tokens. Raise RequestError."""
    tokenizer = served.text.tokenizer
    special = tokenizer.special_tokens
    bos, padding = special.get("bos_token", ""), special.get("pad_token", "") * late.padding
    query, document = (prompt.replace("{bos}", bos).replace("{2}", padding) for prompt in late.prompts)
    if isinstance(content, MediaPart):
        image = served.text.known_media[content.kind].tokens.placeholder
        return _expanded(document.replace("{image}", image), [content], served)
    before, after = query.split("{1}")

    def made(text: str) -> Expanded:
        return _expanded(before + text + after, [], served)

    whole = made(content)
    return whole if keep is None or len(whole.ids) <= keep else made(_cut(content, keep, made, served))


def _cut(text: str, keep: int, made: Callable[[str], Expanded], served: Served) -> str:
    """Return the largest start of a text whose prompt has at most `keep` tokens."""
    tokenizer = served.text.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = max(0, min(len(ids), keep - len(made("").ids)))
    while count and len(made(tokenizer.decode(ids[:count])).ids) > keep:
        count -= 1
    return tokenizer.decode(ids[:count]) if count else ""


def _expanded(text: str, parts: Sequence[MediaPart], served: Served) -> Expanded:
    found = served.text
    return expanded(text, parts, served.media or {}, found.known_media, found.tokenizer, False)


def image_prompt(part: MediaPart, served: Served) -> Expanded:
    """Return the prompt of an image for a model with an image encoder of its own: one token, which no model reads."""
    processed = (served.media or {})[part]
    return Expanded([0], (MediaItem(processed.modality, processed.digest, ((0, 1),), processed.tensors),))


def dual_text(text: str, model: PooledModel) -> str:
    """Return the text that the tokenizer of a dual encoder reads, as SigLIP's tokenizers change texts."""
    match model.canonical:
        case "lower":
            return text.lower()
        case "words":
            return re.sub(r"\s+", " ", text.lower().translate(_PUNCTUATION)).strip()
    return text


def padded(ids: list[int], model: PooledModel, length: int) -> list[int]:
    """Return a text's tokens with the padding of the model, if it has any."""
    return ids if model.padding is None else [*ids, *[model.padding] * (length - len(ids))]


def with_media_parts(contents: Sequence[Content]) -> Iterator[MediaPart]:
    """Yield the media of inputs."""
    yield from (one for one in contents if isinstance(one, MediaPart))
