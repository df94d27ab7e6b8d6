"""Media of a request as the scheduler sees them: positions and digests. The tensors are only for the worker.

The keys and values of a token depend on the embeddings of all items up to it, and with bidirectional attention on its
whole span. Blocks that overlap a span therefore have the item's digest in their hash. The tower computes an item
completely when a step first needs one of its embeddings; a step has a limit for these.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

import msgspec

from engine.api.errors import RequestError
from engine.api.hashes import root_hash
from engine.api.media import MediaItem, Modality
from engine.api.messages import Submit
from engine.core.plan import StepPlan

ITEM_BYTES = {"float32": 4, "int64": 8}
Span = tuple[int, int]  # first position, and the position after the last one


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Media that a model reads, and the limits of a step."""

    modalities: tuple[Modality, ...]
    step_tokens: int  # embeddings that the tower computes in one step; a single item may have more
    attention: Literal["causal", "item", "prefix"] = "causal"
    """item: the tokens of a span also attend to those after them in the span. prefix: so do all tokens of a prompt."""
    window: int | None = None  # smallest attention window of the model
    is_vector: bool = False  # an item is a prompt of its own, with one token
    encoder_only: bool = False  # an item is a prompt of its own, with all of its tokens

    def whole_spans(self, submit: Submit) -> tuple[Span, ...]:
        """Return the spans whose last positions a single step computes, because attention in them is bidirectional."""
        match self.attention:
            case "item":
                return tuple(
                    (first, first + count)
                    for item in submit.media
                    if item.modality != "audio"
                    for first, count in item.spans
                )
            case "prefix":
                return ((0, len(submit.prompt)),)
        return ()

    def root(self, submit: Submit) -> tuple[bytes, ...]:
        """Return the inputs of the hashes of all blocks of a prompt: its tokens and media, if they attend in both
        directions."""
        if self.attention != "prefix":
            return ()
        ids = b"".join(token.to_bytes(4, "little") for token in submit.prompt)
        return (root_hash(ids, *(item.digest for item in submit.media)),)

    def check(self, submit: Submit, room: int) -> None:
        """Raise RequestError for invalid media. room: the longest bidirectional span that fits into a step."""
        for item in submit.media:
            if item.modality not in self.modalities:
                known = ", ".join(self.modalities)
                raise RequestError(f"media: the model has no input of {item.modality}; it reads {known}", "media")
        check_items(submit)
        if self.is_vector and submit.media:
            self._check_vector(submit)
        if self.encoder_only and [item.spans for item in submit.media] != [((0, len(submit.prompt)),)]:
            raise RequestError("media: the model reads one item alone, whose tokens are the prompt", "media")
        for start, end in self.whole_spans(submit):
            if end - start > room:
                raise RequestError(
                    f"{end - start} tokens attend to one another and are computed in one step, which has room for "
                    f"{room}; raise engine.scheduling.max_step_tokens",
                    "media" if self.attention == "item" else "prompt",
                )
            if self.window is not None and end - start > self.window:
                raise RequestError(
                    f"{end - start} tokens attend to one another; the model's attention window has {self.window}",
                    "media" if self.attention == "item" else "prompt",
                )

    def _check_vector(self, submit: Submit) -> None:
        if len(submit.prompt) != 1 or len(submit.media) != 1 or submit.media[0].spans != ((0, 1),):
            raise RequestError("media: the model reads an image alone, as a prompt of one token", "media")
        if submit.pooling is not None and submit.pooling.task != "embed":
            raise RequestError(f"task {submit.pooling.task}: an image has only one vector; use the task embed", "task")


def check_items(submit: Submit) -> None:
    """Check the places and tensors of the items. They index tables of the worker. Raises RequestError."""
    at, length = 0, len(submit.prompt)
    for number, item in enumerate(submit.media):
        if not item.spans or not item.digest:
            raise RequestError(f"media[{number}]: has no {'digest' if item.spans else 'spans'}", "media")
        for first, count in item.spans:
            if first < at or count < 1 or first + count > length:
                raise RequestError(
                    f"media[{number}]: the span ({first}, {count}) must have at least one position, all of them after "
                    f"those of earlier spans and before the end of the prompt, which has {length} tokens",
                    "media",
                )
            at = first + count
        for name, tensor in item.tensors.items():
            expected = prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
            if min(tensor.shape, default=1) < 0 or len(tensor.data) != expected:
                raise RequestError(
                    f"media[{number}]: {name} of shape {list(tensor.shape)} has {len(tensor.data)} bytes, not "
                    f"{expected}",
                    "media",
                )


def without_tensors(submit: Submit) -> Submit:
    """Return the part of a request that plans depend on."""
    return msgspec.structs.replace(submit, media=stripped(submit.media)) if submit.media else submit


def stripped(items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    return tuple(msgspec.structs.replace(item, tensors={}) for item in items)


def plan_without_tensors(plan: StepPlan) -> StepPlan:
    if not any(new.media for new in plan.new):
        return plan
    new = tuple(msgspec.structs.replace(one, media=stripped(one.media)) for one in plan.new)
    return msgspec.structs.replace(plan, new=new)


def block_marks(submit: Submit, block_tokens: int) -> dict[int, bytes]:
    """Return the digests and places of the spans that overlap each block, by its number. The token before a video or
    audio clip counts too: its position differs if the item is a piece of a video with its sound."""
    marks: dict[int, bytes] = {}
    for item in submit.media:
        done = 0
        for first, count in item.spans:
            begin = first if item.modality == "image" or done else max(0, first - 1)
            for block in range(begin // block_tokens, (first + count - 1) // block_tokens + 1):
                place = (first - block * block_tokens, count, done)
                packed = b"".join(number.to_bytes(8, "little", signed=True) for number in place)
                marks[block] = marks.get(block, b"") + item.digest + packed
            done += count
    return marks


@dataclass(frozen=True, slots=True)
class StepPart:
    """Positions of a request that a step may compute."""

    end: int
    embeddings: int  # that the tower computes for it


def step_part(limits: MediaLimits, submit: Submit, positions: Span, room: int, *, enters: bool) -> StepPart:
    """Return the part of `positions` that a step may compute; its end equals their start if it is empty.

    room: embeddings that the tower may still compute in the step. enters: the request enters the worker's table, so
    items that begin before these positions have no embeddings yet."""
    first, spans = positions[0], limits.whole_spans(submit)
    end = whole_end(spans, *positions)
    total = 0
    for item in submit.media:
        place = first_place(item, first)
        if place is None or (item.spans[0][0] < first and not enters):
            continue
        if place >= end:
            break
        size = num_embeddings(item)
        if total + size > room and (total or room < limits.step_tokens) and limits.attention != "prefix":
            return StepPart(place, total)
        total += size
    return StepPart(end, total)


def whole_end(spans: tuple[Span, ...], first: int, end: int) -> int:
    """Return the largest position of first … end at which a step from `first` may end."""
    return next((max(first, start) for start, stop in spans if start < end < stop), end)


def first_place(item: MediaItem, first: int) -> int | None:
    """Return the item's first position that is not before `first`."""
    return next((max(first, start) for start, count in item.spans if start + count > first), None)


def num_embeddings(item: MediaItem) -> int:
    return sum(count for _, count in item.spans)
