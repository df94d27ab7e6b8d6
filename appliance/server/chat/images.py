"""Images in conversations: content parts, and placeholders in the rendered prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.chat_templates.template import ChatTemplate, TemplateError
from appliance.images.part import ImagePart, Images
from engine.api.errors import CheckpointError, RequestError
from engine.media.processed import Tokens
from engine.media.prompt import Expanded, MediaPromptError, expand
from engine.text import Tokenizer

IMAGE_PARTS = ("image_url", "input_image")
_PROBE = "Wq7"
"""Text that no template contains."""


@dataclass(frozen=True)
class ImageText:
    """How images appear in prompts of a model."""

    tokens: Tokens
    image_id: int
    """ID of the image token."""
    takes_text: bool = True
    """The chat template accepts text as the content of a message."""
    takes_parts: bool = True
    """The chat template accepts a list of parts as the content of a message."""


def image_text(tokens: Tokens, tokenizer: Tokenizer, template: ChatTemplate | None) -> ImageText:
    """Return how images appear in prompts. Raise CheckpointError if the tokenizer lacks the image token.

    Templates of some models accept only lists of parts, those of others only text: each is rendered once.
    """
    image_id = tokenizer.convert_tokens_to_ids(tokens.image)
    if image_id is None:
        raise CheckpointError(f"the tokenizer has no token {tokens.image!r}, which the image processor names")
    if template is None:
        return ImageText(tokens, image_id)
    takes_text, takes_parts = _takes(template, _PROBE), _takes(template, [{"type": "text", "text": _PROBE}])
    return ImageText(tokens, image_id, takes_text or not takes_parts, takes_parts)


def _takes(template: ChatTemplate, content: Any) -> bool:
    try:
        rendered = template.render([{"role": "user", "content": content}])
    except (RequestError, TemplateError):
        return False
    return _PROBE in rendered and "'type'" not in rendered  # a list may be written as text


def chat_images(messages: Sequence[dict[str, Any]]) -> Iterator[ImagePart]:
    """Yield the images of chat messages in order. Raise RequestError for an invalid part."""
    for at, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                yield image_part(part, f"messages.{at}.content.{index}")


def image_part(part: dict[str, Any], where: str) -> ImagePart:
    """Return the image of a part of type image_url or input_image. Raise RequestError."""
    given, where = part.get("image_url"), f"{where}.image_url"
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise RequestError(f"{where} must have the URL of an image, such as data:image/png;base64,…", where)
    return ImagePart(url, where)


def expanded(
    text: str, messages: Sequence[dict[str, Any]], images: Images, known: ImageText, tokenizer: Tokenizer, special: bool
) -> Expanded:
    """Return the prompt ids of a rendered conversation, with the tokens of its images. `images` are those of
    `messages`. Raise RequestError if the prompt has other placeholders."""
    found = [images[image.url] for image in chat_images(messages)]
    try:
        return expand(
            text, found, known.tokens, lambda part: tokenizer.encode(part, add_special_tokens=special), known.image_id
        )
    except MediaPromptError as error:
        raise RequestError(str(error), "messages") from None
