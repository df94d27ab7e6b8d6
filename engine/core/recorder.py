"""The flight recorder: a scheduler that writes every event it gets and every plan it makes.

`engine.core.records` has the format. A file that has reached half of the bytes allowed is renamed to end in .1, in
place of the one before, and the next one begins with the scheduler's whole state, so that the records that are kept can
be replayed from the first one.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.api.errors import ConfigError
from engine.api.messages import Delta, Finish, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepResult
from engine.core.records import (
    FORMAT,
    LENGTH,
    AllEnded,
    Applied,
    CacheReset,
    DeadlinesPassed,
    Ended,
    PlanMade,
    Record,
    Started,
    Submitted,
    encode_config,
    older,
)
from engine.core.scheduler import AppliedStep, Planned, Scheduler, Tell
from engine.core.snapshot import snapshot

FLUSH_BYTES = 1 << 16  # what a crash may lose at most, beside what came in within FLUSH_S
FLUSH_S = 1.0


class Recorder(Scheduler):
    """`most_bytes` is for both files together; they get larger only where the state alone takes a quarter of it or
    more. Raises ConfigError if the file cannot be written."""

    def __init__(self, config: SchedulerConfig, path: str, most_bytes: int, tell: Tell | None = None) -> None:
        super().__init__(config, tell)
        self._path, self._half = Path(path), most_bytes // 2
        self._flush_bytes = min(FLUSH_BYTES, most_bytes // 16)
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self._state_bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending = bytearray()
        self._flushed_at = 0.0
        self._started = Started(FORMAT, encode_config(config))
        self._write(self._started)
        self._lost = False  # the disk refused records since the present file began
        try:
            self._append()
        except OSError as error:
            raise ConfigError(f"record={path}: {error.strerror}; name a file that can be written, or none") from error

    def submit(self, submit: Submit, now: float) -> Delta | None:
        self._write(Submitted(submit, now))
        return super().submit(submit, now)

    def end(self, id: str, finish: Finish) -> Delta | None:
        self._write(Ended(id, finish))
        return super().end(id, finish)

    def expire(self, now: float) -> list[Delta]:
        self._write(DeadlinesPassed(now))
        return super().expire(now)

    def end_all(self) -> None:
        self._write(AllEnded())
        super().end_all()

    def reset_prefix_cache(self) -> None:
        self._write(CacheReset())
        super().reset_prefix_cache()

    def plan(self, now: float) -> Planned | None:
        planned = super().plan(now)
        self._write(PlanMade(now, None if planned is None else planned.plan))
        return planned

    def apply(self, result: StepResult, now: float) -> AppliedStep:
        self._write(Applied(now, result.step, result.sampled, result.failed))
        flushing = len(self._pending) >= self._flush_bytes or now - self._flushed_at >= FLUSH_S
        if flushing:
            self._flushed_at = now
            self.flush()
        settled = super().apply(result, now)
        if flushing:
            self._turn_over()
        return settled

    def on_idle(self) -> None:
        """To be called before nothing happens for a while."""
        self.flush()
        self._turn_over()

    def flush(self) -> None:
        """Hands what is pending to the operating system: it survives the end of the process. Where the disk refuses it,
        as a full one does, the recording pauses and steps go on."""
        if self._pending and not self._lost:
            try:
                self._append()
            except OSError as error:
                self._lose(error)
        if self._lost:
            self._pending.clear()

    def _append(self) -> None:
        with self._path.open("ab") as file:
            file.write(self._pending)
        self._size += len(self._pending)
        self._pending.clear()

    def _lose(self, error: OSError) -> None:
        """Nothing more is written until a new file can be begun with the whole state."""
        with suppress(OSError):
            os.truncate(self._path, self._size)  # so that the last record is whole
        if self._lost:
            return
        self._lost = True
        print(f"slipway engine: record={self._path}: {error.strerror}; recording pauses", file=sys.stderr, flush=True)

    def _turn_over(self) -> None:
        """Begins a new file if this one is full, or lacks records. Nothing is pending that the state does not have."""
        if not self._lost and self._size < max(self._half - self._flush_bytes, 2 * self._state_bytes):
            return
        self.flush()
        self._write(msgspec.structs.replace(self._started, step=self.step, state=snapshot(self), gap=self._lost))
        self._state_bytes = len(self._pending)
        try:
            if self._size:
                self._path.replace(older(self._path))
            self._size = 0
            self._append()
            self._lost = False
        except OSError as error:
            self._pending.clear()
            self._lose(error)

    def _write(self, record: Record) -> None:
        body = self._encode(record)
        self._pending += LENGTH.pack(len(body)) + body
