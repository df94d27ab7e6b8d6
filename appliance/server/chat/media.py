"""Images, videos and audio in conversations: content parts, and placeholders in the rendered prompt."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from appliance.chat_templates.template import ChatTemplate, TemplateError
from appliance.media.part import LoadedMedia, MediaPart
from engine.api.errors import CheckpointError, RequestError
from engine.api.media import Modality
from engine.media.processed import Known, Tokens
from engine.media.prompt import Expanded, MediaPromptError, expand
from engine.media.settings import given_options
from engine.text import Tokenizer

PARTS: dict[str, tuple[Modality, str]] = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "video_url": ("video", "video_url"),
    "audio_url": ("audio", "audio_url"),
    "input_audio": ("audio", "input_audio"),
    "image_embeds": ("image", "image_embeds"),
    "video_embeds": ("video", "video_embeds"),
    "audio_embeds": ("audio", "audio_embeds"),
}
"""Modality and field of a content part, by its type."""
IO_OPTIONS: dict[str, frozenset[str]] = {
    "image": frozenset(("image_mode",)),
    "video": frozenset(("num_frames", "fps", "max_frames")),
    "audio": frozenset(),
}
"""Settings of media_io_kwargs by modality."""
EMBEDS: dict[Modality, str] = {"image": "image_embeds", "video": "video_embeds", "audio": "audio_embeds"}
"""Type, and field, of a part with the embeddings of an item."""
MAX_UUID = 256
_PROBE = "Wq7"
"""Text that no template contains."""


@dataclass(frozen=True)
class MediaText:
    """How media appear in prompts of a model."""

    known: Mapping[Modality, Known]
    takes_text: bool = True
    """The chat template accepts text as the content of a message."""
    takes_parts: bool = True
    """The chat template accepts a list of parts as the content of a message."""

    def modality(self, part: Any) -> Modality | None:
        """Return the modality of a content part that the model reads, or None."""
        kind = part_modality(part)
        return kind if kind in self.known else None

    @property
    def reads(self) -> str:
        """Text with the modalities that the model reads, for error messages."""
        return only(self.known)


def only(kinds: Iterable[Modality]) -> str:
    """Return a text with the modalities that a model reads, for error messages: "only text, image and video"."""
    *most, last = "text", *kinds
    return f"only {', '.join(most)} and {last}"


def media_text(tokens: Mapping[Modality, Tokens], tokenizer: Tokenizer, template: ChatTemplate | None) -> MediaText:
    """Return how media appear in prompts. Raise CheckpointError if the tokenizer lacks a media token.

    Templates of some models accept only lists of parts, those of others only text: each is rendered once.
    """
    known: dict[Modality, Known] = {}
    for kind, one in tokens.items():
        # An image of a model with an encoder of its own has no token.
        token_id = tokenizer.convert_tokens_to_ids(one.image) if one.image else 0
        if token_id is None:
            raise CheckpointError(f"the tokenizer has no token {one.image!r}, which the {kind} processor names")
        known[kind] = Known(one, token_id)
    if template is None:
        return MediaText(known)
    takes_text, takes_parts = _takes(template, _PROBE), _takes(template, [{"type": "text", "text": _PROBE}])
    return MediaText(known, takes_text or not takes_parts, takes_parts)


def _takes(template: ChatTemplate, content: Any) -> bool:
    try:
        rendered = template.render([{"role": "user", "content": content}])
    except (RequestError, TemplateError):
        return False
    return _PROBE in rendered and "'type'" not in rendered  # a list may be written as text


def part_modality(part: Any) -> Modality | None:
    """Return the modality of a content part, or None for text."""
    kind = part.get("type") if isinstance(part, dict) else None
    return PARTS[kind][0] if isinstance(kind, str) and kind in PARTS else None


def chat_media(
    messages: Sequence[dict[str, Any]],
    known: Mapping[Modality, Known],
    options: Mapping[str, Any] | None = None,
    where: str = "messages",
    io: Mapping[str, Any] | None = None,
) -> Iterator[MediaPart]:
    """Yield the media of chat messages that the model reads, in order. options: settings of the processor that the
    request replaces. where: path of the messages. io: media_io_kwargs of the
    request. Raise RequestError for an invalid part."""
    chosen = options_by_kind(options, io)
    for at, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part_modality(part)
            if kind is not None and kind in known:
                yield media_part(part, f"{where}.{at}.content.{index}", chosen(kind))


def options_by_kind(options: Mapping[str, Any] | None, io: Mapping[str, Any] | None) -> Callable[[Modality], str]:
    """Return a function from a modality to the settings of its processor, as a text. options: mm_processor_kwargs of
    the request. io: its media_io_kwargs. Raise RequestError for unknown ones."""
    chosen = "" if options is None else options_text(options)
    of_kind = {kind: options_text({**own, **(options or {})}) for kind, own in media_options(io).items()}
    return lambda kind: of_kind.get(kind, chosen)


def media_options(given: Mapping[str, Any] | None) -> dict[Modality, dict[str, Any]]:
    """Return the settings of processors in media_io_kwargs, by modality. Raise RequestError for others.

    A video's `num_frames` -1 stands for all frames."""
    found: dict[Modality, dict[str, Any]] = {}
    for kind, options in (given or {}).items():
        if kind not in IO_OPTIONS or not isinstance(options, dict):
            raise RequestError(
                f"media_io_kwargs: {kind[:100]!r} must be {' or '.join(map(repr, IO_OPTIONS))}, with an object.",
                "media_io_kwargs",
            )
        if unknown := sorted(options.keys() - IO_OPTIONS[kind]):
            allowed = ", ".join(sorted(IO_OPTIONS[kind])) or "none"
            raise RequestError(
                f"media_io_kwargs: {kind}.{unknown[0][:100]} is not supported; known: {allowed}.", "media_io_kwargs"
            )
        if kind == "image" and options.get("image_mode", "RGB") != "RGB":
            raise RequestError("media_io_kwargs: image.image_mode must be RGB.", "media_io_kwargs")
        if kind == "video":
            every = options.get("num_frames") == -1
            kept = {key: value for key, value in options.items() if key != "num_frames" or not every}
            found["video"] = {**kept, **({"do_sample_frames": False} if every else {})}
    return found


def options_text(options: Mapping[str, Any]) -> str:
    """Return mm_processor_kwargs as JSON with sorted keys, or an empty text for none. Raise RequestError."""
    try:
        given = given_options(options)
    except ValueError as error:
        raise RequestError(f"mm_processor_kwargs: {error}.", "mm_processor_kwargs") from None
    return orjson.dumps(given, option=orjson.OPT_SORT_KEYS).decode() if given else ""


def media_part(part: dict[str, Any], where: str, options: str = "") -> MediaPart:
    """Return the item of a part with one of the types in PARTS. Raise RequestError."""
    kind, name = PARTS[part["type"]]
    given, where = part.get(name), f"{where}.{name}"
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID):
        raise RequestError(f"{where}: uuid must be a string of 1 to {MAX_UUID} characters.", where)
    embeddings = name == EMBEDS[kind]
    if given is None and uuid:
        return MediaPart(kind, "", where, uuid, options, embeddings=embeddings)
    if embeddings:
        if not isinstance(given, str) or not given:
            raise RequestError(f"{where} must have a file in the format safetensors, in base64.", where)
        return MediaPart(kind, f"data:;base64,{given}", where, uuid or "", options, embeddings=True)
    url = _audio_url(given) if name == "input_audio" else given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        wanted = "data in base64 and their format" if name == "input_audio" else f"the URL of the {kind}"
        raise RequestError(f"{where} must have {wanted}.", where)
    form = given["format"] if name == "input_audio" and isinstance(given, dict) else ""
    return MediaPart(kind, url, where, uuid or "", options, form)


def content_part(part: MediaPart) -> dict[str, Any]:
    """Return a content part from which `media_part` makes this item."""
    given: Any = {"url": part.url}
    name = f"{part.kind}_url"
    if part.embeddings:
        name, given = EMBEDS[part.kind], part.url.partition(",")[2]
    elif part.format:
        name, given = "input_audio", {"data": part.url.partition(",")[2], "format": part.format}
    return {"type": name, name: given if part.url else None, "uuid": part.uuid or None}


def _audio_url(given: Any) -> str | None:
    """Return the data URL of a part of type input_audio, or None if it is invalid."""
    if not isinstance(given, dict) or not all(isinstance(given.get(name), str) for name in ("data", "format")):
        return None
    return f"data:audio/{given['format']};base64,{given['data']}" if given["data"] else None


def expanded(
    text: str,
    parts: Sequence[MediaPart],
    media: LoadedMedia,
    known: Mapping[Modality, Known],
    tokenizer: Tokenizer,
    special: bool,
) -> Expanded:
    """Return the prompt ids of a rendered conversation, with the tokens of its media. `parts` are those of the
    messages. Raise RequestError if the prompt has other placeholders."""
    found = [media[part] for part in parts]
    try:
        return expand(text, found, known, lambda piece: tokenizer.encode(piece, add_special_tokens=special))
    except MediaPromptError as error:
        raise RequestError(str(error), "messages") from None
