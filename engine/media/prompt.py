"""Expansion of the placeholders of images, videos and audio in a prompt text to token ids."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.api.media import MediaItem, Modality
from engine.media.processed import Known, Processed


class MediaPromptError(Exception):
    """Placeholders and media do not match. The message is meant for the client."""


@dataclass(frozen=True)
class Expanded:
    """A prompt with its media."""

    ids: list[int]
    media: tuple[MediaItem, ...]


def expand(
    text: str, items: Sequence[Processed], known: Mapping[Modality, Known], encode: Callable[[str], list[int]]
) -> Expanded:
    """Replace each placeholder in a rendered prompt by the tokens of one item, in order.

    known: tokens of each modality that the model reads. encode: tokenizes a text. The text is expanded first and then
    tokenized, as in transformers, because texts around a media token can form tokens with their neighbours. Only the
    repetitions of media tokens are added afterwards. Raises MediaPromptError if the placeholders are not those of the
    items, in the same order.
    """
    placeholders = {one.tokens.placeholder: kind for kind, one in known.items()}
    found = re.split("(" + "|".join(map(re.escape, placeholders)) + ")", text)
    pieces, kinds = found[::2], [placeholders[each] for each in found[1::2]]
    for kind, one in known.items():
        _check_count(one.tokens.placeholder, kinds.count(kind), kind, sum(item.kind == kind for item in items))
        if one.tokens.image not in placeholders and one.tokens.image in text:
            raise MediaPromptError(f"A text of the prompt contains the model's {kind} token {one.tokens.image!r}.")
    if kinds != [item.kind for item in items]:
        raise MediaPromptError("The chat template changes the order of images, videos and audio in a message.")
    parts = [pieces[0]]
    for item, piece in zip(items, pieces[1:], strict=True):
        parts += (item.text, piece)
    return _with_runs(encode("".join(parts)), items, known)


def _check_count(placeholder: str, count: int, kind: Modality, expected: int) -> None:
    if count != expected:
        raise MediaPromptError(
            f"The prompt has {count} placeholders {placeholder!r} for {expected} items of type {kind}. The chat "
            f"template may not accept {kind} in this message, or a text contains the placeholder."
        )


def _with_runs(ids: list[int], items: Sequence[Processed], known: Mapping[Modality, Known]) -> Expanded:
    for one in known.values():
        own = [item for item in items if known[item.kind].token_id == one.token_id]
        expected = sum(len(item.runs) for item in own)
        if ids.count(one.token_id) != expected:
            raise MediaPromptError(
                f"The prompt has {ids.count(one.token_id)} media tokens {one.tokens.image!r} where {expected} are "
                "expected: a text of the prompt contains the token, or the tokenizer does not know it."
            )
    found: list[int] = []
    media, begin = [], 0
    for item in items:
        spans: list[tuple[int, int]] = []
        token = known[item.kind].token_id
        for count in item.runs:
            at = ids.index(token, begin)
            found += ids[begin:at]
            if spans and sum(spans[-1]) == len(found):
                spans[-1] = (spans[-1][0], spans[-1][1] + count)
            else:
                spans.append((len(found), count))
            found += [token] * count
            begin = at + 1
        media.append(MediaItem(item.modality, item.digest, tuple(spans), item.tensors))
    return Expanded(found + ids[begin:], tuple(media))
