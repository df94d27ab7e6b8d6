"""Detection of turns: where speech begins and ends in audio that arrives in pieces.

A frame of 20 ms is loud if the root mean square of its samples reaches a level. Speech begins with three loud frames in
a row, and ends after a duration without a loud frame.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

FRAME_S = 0.02
LOUD_FRAMES = 3
SAMPLE_BYTES = 2
QUIETEST_DB, LOUDEST_DB = -60.0, -20.0
"""Levels of the thresholds 0 and 1, relative to the loudest sample."""


@dataclass(frozen=True)
class TurnDetection:
    """Settings of a session."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    """Audio before the speech that belongs to its item."""
    silence_duration_ms: int = 500
    """Silence that ends the speech."""

    @property
    def level(self) -> float:
        """Root mean square of a loud frame."""
        return float(10.0 ** ((QUIETEST_DB + (LOUDEST_DB - QUIETEST_DB) * self.threshold) / 20))


@dataclass(frozen=True)
class Turn:
    """Begin or end of speech at a sample of the connection's audio."""

    kind: Literal["started", "stopped"]
    sample: int


@dataclass
class TurnDetector:
    """Follows the audio of a connection."""

    settings: TurnDetection
    rate: int
    longest: int
    """Samples after which speech is cut."""
    speaking: bool = False
    position: int = 0
    """Samples of the complete frames so far."""
    _rest: bytearray = field(default_factory=bytearray)
    _loud: int = 0
    _quiet: int = 0
    _began: int = 0

    @property
    def frame(self) -> int:
        """Samples of a frame."""
        return int(self.rate * FRAME_S)

    @property
    def kept(self) -> int:
        """Samples before the position that an item may begin with while there is no speech."""
        return self.rate * self.settings.prefix_padding_ms // 1000 + LOUD_FRAMES * self.frame

    def feed(self, audio: bytes) -> Iterator[Turn]:
        """Add 16-bit samples. Yield the turns in them."""
        self._rest += audio
        size = self.frame * SAMPLE_BYTES
        count = len(self._rest) // size
        levels = _levels(bytes(self._rest[: count * size]), self.frame)
        del self._rest[: count * size]
        for level in levels:
            self.position += self.frame
            yield from self._next(level >= self.settings.level)

    def reset(self) -> None:
        """Forget the speech so far, as its audio has been committed or cleared."""
        self.speaking, self._loud, self._quiet = False, 0, 0

    def restart(self, position: int) -> None:
        """Drop the incomplete frame, and continue at this sample."""
        self.reset()
        self._rest.clear()
        self.position = position

    def _next(self, is_loud: bool) -> Iterator[Turn]:
        self._loud = self._loud + 1 if is_loud else 0
        self._quiet = 0 if is_loud else self._quiet + 1
        if not self.speaking and self._loud >= LOUD_FRAMES:
            self.speaking, self._began = True, self.position - self._loud * self.frame
            yield Turn("started", self._began)
        elif self.speaking:
            patience = math.ceil(self.settings.silence_duration_ms / 1000 / FRAME_S)
            if self._quiet >= max(1, patience) or self.position - self._began >= self.longest:
                self.reset()
                yield Turn("stopped", self.position)


def _levels(audio: bytes, frame: int) -> list[float]:
    """Return the root mean square of each frame."""
    import numpy as np

    samples = np.frombuffer(audio, "<i2").astype(np.float32).reshape(-1, frame) / 32_768
    return np.sqrt((samples**2).mean(1)).tolist() if len(samples) else []
