"""Workloads: sessions with their messages and reply lengths, drawn with a seed or read from a file.

Lengths are lognormal. The defaults are similar to ShareGPT conversations: prompts with a median of about 100 tokens and
a long tail, replies with a median of about 180. Prompts consist of invented words, so a tokenizer reads text and not
noise, and they differ from their first words on, so a prefix cache has no effect unless the workload shares prefixes.
"""

import base64
import hashlib
import json
import math
import random
import wave
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.bench.media import Audio, noise, png, read_wav

_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"
TOKENS_PER_WORD = 2.0
"""Estimated tokens of an invented word in a byte-pair vocabulary, for servers without /tokenize."""
_CHARACTERS_PER_TOKEN = 4.0  # of a reply in a file, which has no count of tokens

Message = dict[str, Any]


class WorkloadError(Exception):
    """Raised for options or a file that do not make a workload. The message names the option, or file and line."""


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens."""

    median: float
    spread: float
    """Standard deviation of the logarithm; 0 makes all lengths equal."""
    limit: int
    """Maximum length."""

    def draw(self, generator: random.Random) -> int:
        return max(1, min(self.limit, round(generator.lognormvariate(math.log(self.median), self.spread))))


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    messages: tuple[Message, ...]
    """Messages that are appended to the conversation."""
    max_tokens: int
    seed: int
    pause_s: float = 0.0
    """Interval between the previous reply and this request."""
    audio: Audio | None = None
    """Recording to transcribe, in place of messages."""


@dataclass(frozen=True)
class Session:
    """Turns that are sent one after another, each with all earlier messages and replies."""

    index: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class WorkloadOptions:
    """Options of the generated workloads."""

    sessions: int
    seed: int = 0
    input: Lengths = field(default=Lengths(100.0, 1.2, 1024))
    output: Lengths = field(default=Lengths(180.0, 0.9, 1024))
    prefixes: int = 4
    """Number of shared prefixes of the workload `prefix`."""
    prefix_tokens: int = 512
    """Length of a shared prefix, and of the system message in `conversations`."""
    turns: int = 4
    """Turns of a session of `conversations`."""
    pause_s: float = 0.0
    """Interval between a reply and the next turn."""
    tokens_per_word: float = TOKENS_PER_WORD
    images: int = 1
    """Images of a request of the workload `images`."""
    image_size: tuple[int, int] = (448, 448)
    """Width and height in pixels."""
    audio_s: Lengths = field(default=Lengths(8.0, 0.8, 30))
    """Durations of generated recordings, in seconds."""
    audio_range_s: tuple[float, float] = (0.0, math.inf)
    """Durations of recordings of a folder that are used."""


def make_workload(dataset: str, options: WorkloadOptions) -> list[Session]:
    """Return the sessions of a dataset, such as `random` or `sharegpt:FILE`. Raises WorkloadError."""
    name, _, file = dataset.partition(":")
    if name in _GENERATED and not file:
        return [_GENERATED[name](options, index) for index in range(options.sessions)]
    if name in _READ and file:
        return _chosen(_READ[name](Path(file), options), options, file)
    known = ", ".join((*_GENERATED, *(f"{each}:FILE" for each in _READ)))
    raise WorkloadError(f"--dataset {dataset}: use one of {known}")


def digest(sessions: Sequence[Session]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of all turns: equal workloads have equal digests."""
    values = [
        [
            (turn.messages, turn.max_tokens, turn.seed, turn.pause_s)
            + (() if turn.audio is None else (hashlib.sha256(turn.audio.data).hexdigest(),))
            for turn in each.turns
        ]
        for each in sessions
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def words(generator: random.Random, tokens: int, tokens_per_word: float = TOKENS_PER_WORD) -> str:
    """Return invented words of about this many tokens, at least one word."""
    return " ".join(_word(generator) for _ in range(max(1, round(tokens / tokens_per_word))))


def _word(generator: random.Random) -> str:
    pairs = range(generator.randint(1, 3))
    return "".join(generator.choice(_CONSONANTS) + generator.choice(_VOWELS) for _ in pairs)


def _generator(options: WorkloadOptions, name: str, index: int) -> random.Random:
    return random.Random(f"{options.seed}:{name}:{index}")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _random(options: WorkloadOptions, index: int) -> Session:
    generator = _generator(options, "request", index)
    text = words(generator, options.input.draw(generator), options.tokens_per_word)
    turn = Turn((_user(text),), options.output.draw(generator), generator.getrandbits(31))
    return Session(index, (turn,))


def _prefix(options: WorkloadOptions, index: int) -> Session:
    prefix = _generator(options, "prefix", index % options.prefixes)
    shared = words(prefix, options.prefix_tokens, options.tokens_per_word)
    (turn,) = _random(options, index).turns
    return Session(index, (Turn((_user(f"{shared} {turn.messages[0]['content']}"),), turn.max_tokens, turn.seed),))


def _conversation(options: WorkloadOptions, index: int) -> Session:
    shared = words(_generator(options, "prefix", 0), options.prefix_tokens, options.tokens_per_word)
    first: tuple[Message, ...] = ({"role": "system", "content": shared},) if options.prefix_tokens else ()
    generator, turns = _generator(options, "conversation", index), list[Turn]()
    for number in range(options.turns):
        text = words(generator, options.input.draw(generator), options.tokens_per_word)
        messages = (*(() if number else first), _user(text))
        pause_s = options.pause_s if number else 0.0
        turns.append(Turn(messages, options.output.draw(generator), generator.getrandbits(31), pause_s))
    return Session(index, tuple(turns))


def _images(options: WorkloadOptions, index: int) -> Session:
    """Build a request with a text and images that no other request has."""
    generator = _generator(options, "images", index)
    (turn,) = _random(options, index).turns
    parts: list[dict[str, Any]] = [{"type": "text", "text": turn.messages[0]["content"]}]
    for _ in range(options.images):
        data = base64.b64encode(png(generator, *options.image_size)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return Session(index, (Turn(({"role": "user", "content": parts},), turn.max_tokens, turn.seed),))


def _audio(options: WorkloadOptions, index: int) -> Session:
    generator = _generator(options, "audio", index)
    recording = noise(generator, options.audio_s.draw(generator), f"noise-{index}")
    return Session(index, (Turn((), options.output.draw(generator), index, audio=recording),))


def _recordings(folder: Path, options: WorkloadOptions) -> list[tuple[Turn, ...]]:
    """Read the WAV files of a folder whose duration is within `audio_range_s`."""
    low, high = options.audio_range_s
    if not folder.is_dir():
        raise WorkloadError(f"{folder}: not a folder with WAV files")
    found = list[tuple[Turn, ...]]()
    for number, file in enumerate(sorted(folder.glob("*.wav"))):
        try:
            recording = read_wav(file)
        except (OSError, EOFError, wave.Error) as error:
            raise WorkloadError(f"{file}: {error}") from error
        if low <= recording.seconds <= high:
            found.append((Turn((), options.output.limit, number, audio=recording),))
    if not found:
        raise WorkloadError(f"{folder}: no WAV file of {low:g} to {high:g} s")
    return found


def _chosen(sessions: list[tuple[Turn, ...]], options: WorkloadOptions, file: str) -> list[Session]:
    """Return `options.sessions` of the sessions, in an order drawn with the seed; all if there are fewer."""
    if not sessions:
        raise WorkloadError(f"{file}: no conversation with a message of the user and a reply")
    order = random.Random(options.seed).sample(range(len(sessions)), min(options.sessions, len(sessions)))
    return [Session(index, sessions[place]) for index, place in enumerate(order)]


def _share_gpt(file: Path, options: WorkloadOptions) -> list[tuple[Turn, ...]]:
    """Read the first exchange of each conversation of a ShareGPT file: a JSON list of objects with `conversations`,
    each a list of `from` and `value`. The length of a reply is estimated from its characters."""
    try:
        entries = json.loads(_text(file))
        exchanges = [entry["conversations"][:2] for entry in entries if len(entry["conversations"]) > 1]
        pairs = [(first["value"], second["value"]) for first, second in exchanges]
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{file}: not a ShareGPT file: {type(error).__name__}: {error}") from error
    return [
        (Turn((_user(prompt),), min(options.output.limit, _estimated(reply)), index),)
        for index, (prompt, reply) in enumerate(pairs)
        if prompt and reply
    ]


def _estimated(text: str) -> int:
    return max(1, round(len(text) / _CHARACTERS_PER_TOKEN))


def _json_lines(file: Path, options: WorkloadOptions) -> list[tuple[Turn, ...]]:
    """Read one request per line: an object with `prompt` or `messages`, and optionally `max_tokens`."""
    read = list[tuple[Turn, ...]]()
    for number, line in enumerate(_text(file).splitlines(), 1):
        if line.strip():
            try:
                read.append((_request(json.loads(line), options, number),))
            except (ValueError, KeyError, TypeError) as error:
                raise WorkloadError(f"{file}:{number}: {error}") from error
    return read


def _request(value: Any, options: WorkloadOptions, number: int) -> Turn:
    """Build a turn. Raises ValueError for an object that is not a request."""
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ValueError("use an object with either `prompt` or `messages`")
    messages = (_user(value["prompt"]),) if "prompt" in value else tuple(value["messages"])
    if not messages or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ValueError("`messages` is a list of objects with `role` and `content`")
    tokens = value.get("max_tokens", options.output.draw(_generator(options, "line", number)))
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"max_tokens: {tokens!r} is not a positive integer")
    return Turn(messages, tokens, number)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{file}: {error}") from error


_GENERATED: dict[str, Callable[[WorkloadOptions, int], Session]] = {
    "random": _random,
    "prefix": _prefix,
    "conversations": _conversation,
    "images": _images,
    "audio": _audio,
}
_READ: dict[str, Callable[[Path, WorkloadOptions], list[tuple[Turn, ...]]]] = {
    "sharegpt": _share_gpt,
    "jsonl": _json_lines,
    "audio": _recordings,
}


def count_requests(sessions: Iterable[Session]) -> int:
    return sum(len(session.turns) for session in sessions)
