"""The flight recorder: a scheduler that writes every event it gets and every plan it makes.

The file is a sequence of records, each a little-endian u32 length and that many bytes of MessagePack. `Started` begins
the records of one process; a file that is appended to holds several. `engine.core.replay` reads it.
"""

import struct
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import ConfigError
from engine.api.messages import Delta, Finish, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepPlan, StepResult
from engine.core.scheduler import Planned, Scheduler, Settled

LENGTH = struct.Struct("<I")
FLUSH_BYTES = 1 << 16  # what a crash may lose at most, beside what came in within FLUSH_S
FLUSH_S = 1.0


class Started(msgspec.Struct, frozen=True, tag="started"):
    """`config` is a SchedulerConfig; `scalings` name the types of its ropes' scalings, "" where there is none."""

    config: dict[str, Any]
    scalings: tuple[str, ...]


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    submit: Submit
    now: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    id: str
    finish: Finish


class AllEnded(msgspec.Struct, frozen=True, tag="all_ended"):
    pass


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    pass


class PlanMade(msgspec.Struct, frozen=True, tag="plan"):
    """`plan` is None where there was nothing to do."""

    now: float
    plan: StepPlan | None


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """What of a result matters to plans."""

    now: float
    step: int
    sampled: tuple[int, ...]
    failed: dict[int, str]


Record = Started | Submitted | Ended | AllEnded | CacheReset | PlanMade | Applied


class Recorder(Scheduler):
    """Raises ConfigError if the file cannot be written."""

    def __init__(self, config: SchedulerConfig, path: str) -> None:
        super().__init__(config)
        self._path = Path(path)
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending = bytearray()
        self._flushed_at = 0.0
        scalings = tuple("" if rope.scaling is None else type(rope.scaling).__name__ for rope in config.ropes)
        self._write(Started(msgspec.to_builtins(config), scalings))
        try:
            self.flush()
        except OSError as error:
            raise ConfigError(f"record={path}: {error.strerror}; name a file that can be written, or none") from error

    def submit(self, submit: Submit, now: float) -> Delta | None:
        self._write(Submitted(submit, now))
        return super().submit(submit, now)

    def end(self, id: str, finish: Finish) -> Delta | None:
        self._write(Ended(id, finish))
        return super().end(id, finish)

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

    def apply(self, result: StepResult, now: float) -> Settled:
        self._write(Applied(now, result.step, result.sampled, result.failed))
        if len(self._pending) >= FLUSH_BYTES or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            self.flush()
        return super().apply(result, now)

    def flush(self) -> None:
        """Hands what is pending to the operating system: it survives the end of the process."""
        if self._pending:
            with self._path.open("ab") as file:
                file.write(self._pending)
            self._pending.clear()

    def _write(self, record: Record) -> None:
        body = self._encode(record)
        self._pending += LENGTH.pack(len(body)) + body
