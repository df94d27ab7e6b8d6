"""Formats of a transcript."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Word:
    """A word of a transcript. Times are seconds of the recording."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """Part of a transcript. Times are seconds of the recording."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    seek: int  # first frame of the pass that the segment is from
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()  # empty unless the request has times of words


def joined(segments: Sequence[Segment]) -> str:
    return "".join(one.text for one in segments).strip()


def verbose_segment(index: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": segment.seek,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def verbose_words(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    return [
        {"word": word.text, "start": round(word.start, 2), "end": round(word.end, 2)}
        for segment in segments
        for word in segment.words
    ]


def srt(segments: Sequence[Segment]) -> str:
    """SubRip."""
    return "".join(
        f"{number}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{_line(one.text, '-->')}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT."""
    cues = (f"{clock(one.start, '.')} --> {clock(one.end, '.')}\n{_line(one.text, '-->')}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str, arrow: str) -> str:
    """Return a text without what would end a cue: empty lines and the arrow."""
    return " ".join(text.split()).replace(arrow, "->")


def clock(seconds: float, separator: str) -> str:
    """Return hours, minutes, seconds and milliseconds."""
    whole = round(seconds * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{separator}{milliseconds % 1000:03}"
