"""Files that no client should send: damaged ones, files of two formats, of another kind than their field says, noise,
and small files that expand to large ones."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tests.appliance.media.test_loader import FORMATS, HEARD, MOVING, bomb, file_of, mutated

KINDS = ("cut", "changed", "polyglot", "of another kind", "noise", "bomb")


@dataclass(frozen=True)
class Hostile:
    """A file in a field of a content part."""

    field: str  # image_url | video_url | audio_url
    kind: str
    data: bytes


def hostile(count: int, seed: int, fields: Sequence[str]) -> Iterator[Hostile]:
    """Yield files of all kinds, in turn, each for one of these fields."""
    source = random.Random(seed)
    images = {form: file_of(form) for form in FORMATS}
    own = {"image_url": list(images.values()), "video_url": list(MOVING.values()), "audio_url": list(HEARD.values())}
    for number in range(count):
        kind, field = KINDS[number % len(KINDS)], source.choice(fields)
        others = [data for name, files in own.items() for data in files if name != field]
        yield Hostile(field, kind, _file(kind, source.choice(own[field]), others, source))


def _file(kind: str, data: bytes, others: list[bytes], source: random.Random) -> bytes:
    match kind:
        case "cut":
            return data[: source.randrange(len(data))]
        case "changed":
            return mutated(data, source)
        case "polyglot":  # the head of one file, and another one
            return data[: source.randrange(4, len(data))] + source.choice(others)
        case "of another kind":
            return source.choice(others)
        case "noise":
            return data[: source.choice((0, 4, 12, 40))] + source.randbytes(source.randrange(2000))
    return _bomb(source.choice((3000, 7500)))


@lru_cache
def _bomb(edge: int) -> bytes:
    """Return an image of 9 or 56 million pixels in a few kilobytes."""
    return bomb(edge, edge)
