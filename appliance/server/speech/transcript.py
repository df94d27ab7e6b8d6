"""From the tokens of a window to segments with times, and the decision to decode a window again.

Source: Whisper's reference implementation, transcribe.py (segments, seek, thresholds) and decoding.py (average
logprob), and transformers generation_whisper.py (`_retrieve_segment`).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

POSITION_S = 0.02  # of a timestamp, and of an encoder position

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures at which a window is decoded in turn until its text is plausible."""
MOST_COMPRESSION = 2.4  # a text that compresses better repeats itself
LEAST_LOGPROB = -1.0  # average of a token in a plausible text
NO_SPEECH = 0.6  # probability above which a window with an implausible text is silence


@dataclass(frozen=True)
class Decoded:
    """A transcript of one pass over a window."""

    tokens: tuple[int, ...]  # text and timestamps, without the first tokens and without the end token
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float
    language: str

    @property
    def compression_ratio(self) -> float:
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))

    @property
    def is_silence(self) -> bool:
        return self.no_speech_prob > NO_SPEECH and self.avg_logprob < LEAST_LOGPROB

    @property
    def is_implausible(self) -> bool:
        """Return whether to decode the window again at a higher temperature."""
        if self.is_silence:
            return False
        return self.compression_ratio > MOST_COMPRESSION or self.avg_logprob < LEAST_LOGPROB


@dataclass(frozen=True)
class TokenSegment:
    """Tokens of a segment, with its start and end in positions from the beginning of the pass."""

    start: int
    end: int
    tokens: tuple[int, ...]


def average_logprob(logprobs: Sequence[float], tokens: int) -> float:
    """Return the average logprob of `tokens` tokens and the end token. `logprobs` includes the end token if it was
    sampled."""
    return sum(logprobs) / (tokens + 1)


def cut_segments(tokens: Sequence[int], zero: int, positions: int) -> tuple[list[TokenSegment], int]:
    """Return the segments of a pass, and how many positions of audio they cover.

    zero: id of the timestamp 0. positions: length of the audio. Two consecutive timestamps separate segments. If the
    tokens end with them, the audio after the last one has not been transcribed yet."""
    times = [token >= zero for token in tokens]
    cuts = [at + 1 for at in range(len(tokens) - 1) if times[at] and times[at + 1]]
    if not cuts:
        given = [token - zero for token in tokens if token >= zero]
        end = given[-1] if given and given[-1] else positions
        return [TokenSegment(0, min(end, positions), tuple(tokens))], positions
    complete = times[-2:] == [False, True]
    if complete:
        cuts.append(len(tokens))
    found, first = [], 0
    for cut in cuts:
        piece = tokens[first:cut]
        found.append(TokenSegment(min(piece[0] - zero, positions), min(piece[-1] - zero, positions), tuple(piece)))
        first = cut
    covered = positions if complete else tokens[first - 1] - zero
    # A pass that covers nothing would be repeated for ever.
    return found, covered if 0 < covered < positions else positions
