"""Expansion of the placeholders of images, videos and audio in a prompt text to token ids."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from engine.api.media import BESIDE_IMAGES, EMBEDDINGS, MediaItem, MediaTensor, Modality
from engine.media.processed import Known, Processed

_YES = MediaTensor("int64", (1,), (1).to_bytes(8, "little"))


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
    parts, counts = [pieces[0]], dict.fromkeys(known, 0)
    for item, piece in zip(items, pieces[1:], strict=True):
        if (around := known[item.kind].tokens.number) is not None:
            parts.append(f"{around[0]}{counts[item.kind]}{around[1]}")
        counts[item.kind] += 1
        parts += (item.text, piece)
    whole = "".join(parts)
    for pattern, replacement in (rewrite for one in known.values() for rewrite in one.tokens.rewrites):
        whole = re.sub(pattern, replacement, whole)
    return _with_runs(encode(whole), items, known)


def _check_count(placeholder: str, count: int, kind: Modality, expected: int) -> None:
    if count != expected:
        raise MediaPromptError(
            f"The prompt has {count} placeholders {placeholder!r} for {expected} items of type {kind}. The chat "
            f"template may not accept {kind} in this message, or a text contains the placeholder."
        )


def _with_runs(ids: list[int], items: Sequence[Processed], known: Mapping[Modality, Known]) -> Expanded:
    if missing := {kind for item in items for kind in item.run_kinds} - known.keys():
        raise MediaPromptError(f"The service reads no {missing.pop()}, which is part of a video with sound.")
    for one in known.values():
        kinds = (kind for item in items for kind in item.run_kinds)
        expected = sum(known[kind].token_id == one.token_id for kind in kinds)
        if ids.count(one.token_id) != expected:
            raise MediaPromptError(
                f"The prompt has {ids.count(one.token_id)} media tokens {one.tokens.image!r} where {expected} are "
                "expected: a text of the prompt contains the token, or the tokenizer does not know it."
            )
    found: list[int] = []
    media, begin = [], 0
    has_images = any(item.kind == "image" for item in items)
    for item in items:
        spans: list[tuple[int, int]] = []
        for count, kind in zip(item.runs, item.run_kinds, strict=True):
            token = known[kind].token_id
            at = ids.index(token, begin)
            found += ids[begin:at]
            if spans and sum(spans[-1]) == len(found) and not item.parts:
                spans[-1] = (spans[-1][0], spans[-1][1] + count)
            else:
                spans.append((len(found), count))
            found += [token] * count
            begin = at + 1
        if item.parts:
            pieces = zip(item.parts, spans, strict=True)
            media += [MediaItem(part.modality, part.digest, (span,), part.tensors) for part, span in pieces]
            continue
        beside = has_images and known[item.kind].tokens.beside_images and EMBEDDINGS not in item.tensors
        tensors = {**item.tensors, BESIDE_IMAGES: _YES} if beside else item.tensors
        digest = sha256(item.digest + BESIDE_IMAGES.encode()).digest() if beside else item.digest
        media.append(MediaItem(item.modality, digest, tuple(spans), tensors))
    return Expanded(found + ids[begin:], tuple(media))
