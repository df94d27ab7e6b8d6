"""Expansion of image placeholders in a prompt text to token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api.media import MediaItem
from engine.media.processed import Processed, Tokens


class MediaPromptError(Exception):
    """Placeholders and images do not match. The message is meant for the client."""


@dataclass(frozen=True)
class Expanded:
    """A prompt with its images."""

    ids: list[int]
    media: tuple[MediaItem, ...]


def expand(
    text: str,
    images: Sequence[Processed],
    tokens: Tokens,
    encode: Callable[[str], list[int]],
    image_id: int,
) -> Expanded:
    """Replace each placeholder in a rendered prompt by the tokens of one image, in order.

    encode: tokenizes a text. image_id: id of `tokens.image`. The text is expanded before it is tokenized, as in
    transformers, because texts around an image token can form tokens with their neighbours. Only the repetitions of
    image tokens are added afterwards. Raises MediaPromptError if there are more or fewer placeholders than images.
    """
    pieces = text.split(tokens.placeholder)
    if len(pieces) - 1 != len(images):
        raise MediaPromptError(
            f"The prompt has {len(pieces) - 1} placeholders {tokens.placeholder!r} for {len(images)} images. The chat "
            "template may not accept images in this message, or a text contains the placeholder."
        )
    if tokens.image != tokens.placeholder and tokens.image in text:
        raise MediaPromptError(f"A text of the prompt contains the model's image token {tokens.image!r}.")
    parts = [pieces[0]]
    for image, piece in zip(images, pieces[1:], strict=True):
        parts += (image.text, piece)
    return _with_runs(encode("".join(parts)), images, image_id, tokens)


def _with_runs(ids: list[int], images: Sequence[Processed], image_id: int, tokens: Tokens) -> Expanded:
    expected = sum(len(image.runs) for image in images)
    if ids.count(image_id) != expected:
        raise MediaPromptError(
            f"The prompt has {ids.count(image_id)} image tokens {tokens.image!r} where {expected} are expected: a text "
            "of the prompt contains the token, or the tokenizer does not know it."
        )
    found: list[int] = []
    media, begin = [], 0
    for image in images:
        spans: list[tuple[int, int]] = []
        for count in image.runs:
            at = ids.index(image_id, begin)
            found += ids[begin:at]
            if spans and sum(spans[-1]) == len(found):
                spans[-1] = (spans[-1][0], spans[-1][1] + count)
            else:
                spans.append((len(found), count))
            found += [image_id] * count
            begin = at + 1
        media.append(MediaItem("image", image.digest, tuple(spans), image.tensors))
    return Expanded(found + ids[begin:], tuple(media))
