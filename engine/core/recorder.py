"""The flight recorder: a scheduler that records every event and every plan.

The format is defined in `engine.core.records`. A file that has reached half of the size limit is renamed with the
suffix
.1, which replaces the previous one. The next file begins with the complete state of the scheduler, so that the records
on disk can always be replayed from the first one.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.api.errors import ConfigError
from engine.api.messages import Delta, Finish, Submit
from engine.core.config import SchedulerConfig
from engine.core.media import plan_without_tensors, without_tensors
from engine.core.plan import StepResult
from engine.core.records import (
    FORMAT,
    LENGTH,
    AdapterFailed,
    AdapterLoaded,
    AdapterPrepared,
    AdapterUnloaded,
    AllEnded,
    Applied,
    CacheReset,
    DeadlinesPassed,
    Ended,
    PlanMade,
    Proposed,
    Record,
    Started,
    Submitted,
    encode_config,
    older,
)
from engine.core.scheduler import AppliedStep, Notify, Planned, Scheduler
from engine.core.snapshot import snapshot

FLUSH_BYTES = 1 << 16  # maximum loss in a crash, in addition to the records of the last FLUSH_S
FLUSH_S = 1.0


class Recorder(Scheduler):
    """Scheduler with recording. `most_bytes` limits both files together; they exceed it only if the state alone takes a
    quarter of it or more. Raises ConfigError if the file cannot be written."""

    def __init__(self, config: SchedulerConfig, path: str, most_bytes: int, notify: Notify | None = None) -> None:
        super().__init__(config, notify)
        self._path, self._half = Path(path), most_bytes // 2
        self._flush_bytes = min(FLUSH_BYTES, most_bytes // 16)
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self._state_bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending = bytearray()
        self._flushed_at = 0.0
        self._started = Started(FORMAT, encode_config(config))
        self._write(self._started)
        self._lost = False  # a write of records to the current file failed
        try:
            self._append()
        except OSError as error:
            raise ConfigError(f"record={path}: {error.strerror}; set it to a writable file, or remove it") from error

    def submit(self, submit: Submit, now: float) -> Delta | None:
        self._write(Submitted(without_tensors(submit), now))
        return super().submit(submit, now)

    def propose(self, id: str, tokens: tuple[int, ...]) -> None:
        self._write(Proposed(id, tokens))
        super().propose(id, tokens)

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

    def load_adapter(self, name: str) -> int:
        self._write(AdapterLoaded(name))
        return super().load_adapter(name)

    def unload_adapter(self, name: str) -> None:
        self._write(AdapterUnloaded(name))
        super().unload_adapter(name)

    def adapter_prepared(self, version: int) -> None:
        self._write(AdapterPrepared(version))
        super().adapter_prepared(version)

    def adapter_failed(self, version: int) -> list[Delta]:
        self._write(AdapterFailed(version))
        return super().adapter_failed(version)

    def plan(self, now: float) -> Planned | None:
        planned = super().plan(now)
        self._write(PlanMade(now, None if planned is None else plan_without_tensors(planned.plan)))
        return planned

    def apply(self, result: StepResult, now: float) -> AppliedStep:
        self._write(Applied(now, result.step, result.sampled, result.failed, result.further, result.drafts))
        flushing = len(self._pending) >= self._flush_bytes or now - self._flushed_at >= FLUSH_S
        if flushing:
            self._flushed_at = now
            self.flush()
        settled = super().apply(result, now)
        if flushing:
            self._turn_over()
        return settled

    def on_idle(self) -> None:
        """Write pending records before an idle period."""
        self.flush()
        self._turn_over()

    def flush(self) -> None:
        """Write pending records to the file, so that they survive a crash. If the disk is full or fails, recording
        pauses and steps continue."""
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
        """Stop writing until a new file with the complete state can be started."""
        with suppress(OSError):
            os.truncate(self._path, self._size)  # removes a partial record
        if self._lost:
            return
        self._lost = True
        print(f"slipway engine: record={self._path}: {error.strerror}; recording pauses", file=sys.stderr, flush=True)

    def _turn_over(self) -> None:
        """Start a new file if the current one is full or lost records. Its state includes all pending records."""
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
