"""Transcription of a recording: its windows are decoded side by side, each in one or more passes.

A pass decodes the audio of a window from some position to the window's end. If its tokens end with a pair of
timestamps, another pass begins at the last one. A pass whose text is implausible is decoded again at a higher
temperature.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import numpy as np

from appliance.server.speech.formats import Segment, Word
from appliance.server.speech.plan import SpeechPlan
from appliance.server.speech.transcript import POSITION_S, Decoded, average_logprob, cut_segments
from appliance.server.speech.words import timed_words, token_starts, words_of
from engine.api.media import MediaItem
from engine.api.messages import Delta, Submit
from engine.media.audio import Window, windows
from engine.media.spectrogram import HOP, SAMPLE_RATE, Samples, log_mel, spectrogram_item

AHEAD = 4  # windows that are decoded at the same time

Run = Callable[[Submit], Coroutine[Any, Any, list[Delta]]]
"""Runs one sequence to its end and returns its deltas."""


class Recognizer:
    """Transcribes one recording. `tokens` and `fallbacks` count sampled tokens, and passes that were repeated."""

    def __init__(self, plan: SpeechPlan, samples: Samples, run: Run) -> None:
        self.plan, self._samples, self._run = plan, samples, run
        self.language = plan.language
        self.tokens = self.fallbacks = 0
        self._numbers = count()

    @property
    def seconds(self) -> float:
        return len(self._samples) / SAMPLE_RATE

    async def segments(self) -> AsyncGenerator[list[Segment], None]:
        """Yield the segments of each window in order. The first window determines the language."""
        first, *rest = windows(self._samples, self.plan.model.positions * POSITION_S)
        yield await self._window(first)
        waiting, running = deque(rest), deque[asyncio.Task[list[Segment]]]()
        try:
            while waiting or running:
                while waiting and len(running) < AHEAD:
                    running.append(asyncio.create_task(self._window(waiting.popleft())))
                yield await running[0]
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _window(self, window: Window) -> list[Segment]:
        frames = self.plan.model.positions * 2
        part = self._samples[window.start : window.end]
        whole = await asyncio.to_thread(log_mel, part, mels=self.plan.model.mels, frames=frames)
        content = max(1, len(part) // HOP)
        found: list[Segment] = []
        seek = 0
        while seek < content:
            spectrogram = np.zeros_like(whole)
            spectrogram[:, : frames - seek] = whole[:, seek:]
            item = await asyncio.to_thread(spectrogram_item, spectrogram)
            decoded = await self._decoded(item)
            positions = max(1, math.ceil((content - seek) / 2))
            cut, covered = cut_segments(decoded.tokens, self.plan.tokens.zero, positions)
            if decoded.is_silence:
                break
            offset_s = window.seconds + seek * HOP / SAMPLE_RATE
            starts = await self._token_starts(decoded, item, min(positions, self.plan.model.positions))
            at = 0  # number of the piece's first token of text
            for piece in cut:
                text, own = self._text(piece.tokens), self._text_tokens(piece.tokens)
                at += len(own)
                if piece.start == piece.end or not text.strip():
                    continue
                found.append(
                    Segment(
                        start=min(offset_s + piece.start * POSITION_S, window.end / SAMPLE_RATE),
                        end=min(offset_s + piece.end * POSITION_S, window.end / SAMPLE_RATE),
                        text=text,
                        tokens=piece.tokens,
                        seek=window.start // HOP + seek,
                        temperature=decoded.temperature,
                        avg_logprob=decoded.avg_logprob,
                        compression_ratio=decoded.compression_ratio,
                        no_speech_prob=decoded.no_speech_prob,
                        words=self._words(own, starts[at - len(own) :], decoded.language, offset_s),
                    )
                )
            seek += 2 * covered
        return found

    async def _token_starts(self, decoded: Decoded, item: MediaItem, positions: int) -> list[int]:
        """Return the positions at which the tokens of the text of a pass begin, and the end of the last one; nothing
        unless the request has times of words."""
        text = self._text_tokens(decoded.tokens)
        if not self.plan.words or not text:
            return []
        submit = self.plan.alignment(next(self._numbers), item, decoded.language, text, positions)
        found = (await self._run(submit))[-1].alignment
        assert found is not None, "a sequence that is aligned returns its alignment"
        alignment = np.frombuffer(found.values, "<f4").reshape(found.shape)
        starts: list[int] = (await asyncio.to_thread(token_starts, alignment)).tolist()
        return starts

    def _words(self, tokens: list[int], starts: Sequence[int], language: str, offset_s: float) -> tuple[Word, ...]:
        if not starts:
            return ()
        times = [min(offset_s + start * POSITION_S, self.seconds) for start in starts]
        return tuple(timed_words(words_of(tokens, self.plan.tokens.tokenizer.decode, language), times))

    async def _decoded(self, item: MediaItem) -> Decoded:
        """Decode a pass, at rising temperatures until the text is plausible."""
        for attempt in range(len(self.plan.temperatures)):
            submit = self.plan.submit(next(self._numbers), item, self.language, attempt)
            decoded = self._read(submit, await self._run(submit), attempt)
            if not decoded.is_implausible or attempt + 1 == len(self.plan.temperatures):
                break
            self.fallbacks += 1
        self.language = self.language or decoded.language
        return decoded

    def _read(self, submit: Submit, deltas: list[Delta], attempt: int) -> Decoded:
        ids = [token for delta in deltas for token in delta.ids]
        scores = [score for delta in deltas for score in delta.logprobs]
        self.tokens += len(ids)
        rules, end = submit.sampling.speech, self.plan.tokens.end
        assert rules is not None, "sequences of speech have rules"
        skipped = len(rules.begin)
        codes = {token: code for code, token in self.plan.tokens.languages.items()}
        tokens = tuple(token for token in ids[skipped:] if token != end)
        no_speech = scores[0].top_logprobs if skipped and scores else ()
        return Decoded(
            tokens=tokens,
            text=self._text(tokens).strip(),
            avg_logprob=average_logprob([score.logprob for score in scores[skipped:]], len(tokens)),
            no_speech_prob=math.exp(no_speech[0]) if no_speech else 0.0,
            temperature=self.plan.temperatures[attempt],
            language=codes.get(ids[0], "en") if skipped and ids else "en",
        )

    def _text(self, tokens: tuple[int, ...]) -> str:
        return self.plan.tokens.tokenizer.decode(self._text_tokens(tokens))

    def _text_tokens(self, tokens: tuple[int, ...]) -> list[int]:
        return [token for token in tokens if self.plan.tokens.is_text(token)]
