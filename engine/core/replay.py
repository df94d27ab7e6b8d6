"""Replays a flight recording: `slipway replay FILE [--explain REQUEST_ID]`.

Without more, runs the scheduler again on the recorded events and compares every plan: exit 0 if all are equal, 1 with
the first step that differs. `--explain` prints what happened to one request and why.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import ConfigError, RequestError
from engine.core.config import PooledTasks, SchedulerConfig, Sources
from engine.core.plan import StepPlan, StepResult
from engine.core.recorder import (
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
    older,
    thawed,
)
from engine.core.scheduler import Scheduler, Tell
from engine.kv.layout import Layout
from engine.models import parts
from engine.models.parts import Rope

Note = Callable[[str, str], None]  # request id, what happened


class Difference(msgspec.Struct, frozen=True):
    """The first plan that came out otherwise."""

    recorded: StepPlan | None
    replayed: StepPlan | None


class Replay(msgspec.Struct):
    """`steps` were equal before the end or the difference; `runs` are the processes that wrote to the file. `dropped`
    steps of the first one are no longer in it."""

    runs: int = 0
    dropped: int = 0
    steps: int = 0
    difference: Difference | None = None


def read_records(path: Path) -> Iterator[Record]:
    """The records of the older file, if there is one, and of this; a last one that was cut off by a crash is left
    out."""
    files = [file for file in (older(path), path) if file.exists()]
    for file in files or [path]:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Record]:
    decode = msgspec.msgpack.Decoder(Record).decode
    data = path.read_bytes()
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + length > len(data):
            return
        yield decode(data[at : at + length])
        at += length


def replay(records: Iterator[Record], note: Note | None = None) -> Replay:
    """Runs the events; `note` is told of everything that happens to a request, by its id."""
    result = Replay()
    scheduler: Scheduler | None = None
    for record in records:
        if isinstance(record, Started):
            if record.state and scheduler is not None and not record.gap:
                continue  # the run goes on in the next file, and so does this scheduler
            scheduler = Scheduler(config_of(record), _noted(note))
            result.runs += 1
            if record.state:
                scheduler, result.dropped = thawed(scheduler, record.state), record.step
            continue
        assert scheduler is not None, "a recording begins with Started"
        if isinstance(record, PlanMade):
            difference = _plan_again(scheduler, record, note)
            if difference is not None:
                result.difference = difference
                return result
            result.steps += record.plan is not None
        else:
            _do(scheduler, record, note)
    return result


def _noted(note: Note | None) -> Tell | None:
    if note is None:
        return None
    arrived: dict[str, float] = {}
    return lambda id, now, event: note(id, f"{1000 * (now - arrived.setdefault(id, now)):,.1f} ms: {event}")


def _do(scheduler: Scheduler, record: Record, note: Note | None) -> None:
    match record:
        case Submitted(submit, now):
            with suppress(RequestError):  # it was refused then, too
                scheduler.submit(submit, now)
        case Ended(id, finish):
            scheduler.end(id, finish)
        case DeadlinesPassed(now):
            scheduler.expire(now)
        case AllEnded():
            scheduler.end_all()
        case CacheReset():
            scheduler.reset_prefix_cache()
        case Applied(now, step, sampled, failed):
            settled = scheduler.apply(StepResult(step, sampled, failed=failed), now)
            for failure in settled.failed:
                if note is not None and failure.id is not None:
                    note(failure.id, f"failed in step {step}: {failure.message}")


def _plan_again(scheduler: Scheduler, record: PlanMade, note: Note | None) -> Difference | None:
    planned = scheduler.plan(record.now)
    plan = None if planned is None else planned.plan
    if note is not None and planned is not None:
        for sequence, row in zip(planned.sequences, planned.plan.rows, strict=True):
            if row.count > 1 or not row.sample:
                last = row.first + row.count - 1
                note(sequence.id, f"step {planned.plan.step}: computes positions {row.first} to {last}")
    return None if plan == record.plan else Difference(record.plan, plan)


def config_of(started: Started) -> SchedulerConfig:
    """Scalings are a union of dataclasses, which MessagePack does not tell apart: their types stand beside them."""
    config = dict(started.config)
    ropes = []
    for fields, scaling in zip(config.pop("ropes"), started.scalings, strict=True):
        kind: Any = getattr(parts, scaling) if scaling else None
        made = msgspec.convert(fields["scaling"], kind, strict=False) if scaling else None
        ropes.append(Rope(dim=fields["dim"], theta=fields["theta"], interleaved=fields["interleaved"], scaling=made))
    config["layout"] = msgspec.convert(config["layout"], Layout)
    config["sources"] = msgspec.convert(config.get("sources"), Sources | None)
    config["pooled"] = msgspec.convert(config.get("pooled"), PooledTasks | None)
    return SchedulerConfig(**config, ropes=tuple(ropes))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="slipway replay", description="Replays a flight recording.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--explain", metavar="REQUEST_ID", help="print what happened to this request")
    options = parser.parse_args(arguments)
    found = False

    def note(id: str, what: str) -> None:
        nonlocal found
        if id == options.explain:
            found = True
            print(what)

    try:
        outcome = replay(read_records(options.file), note if options.explain else None)
    except (OSError, ConfigError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 1
    if outcome.dropped:
        print(f"the recording begins after step {outcome.dropped}; what was before is no longer kept", file=sys.stderr)
    if outcome.difference is not None:
        print(f"step {outcome.dropped + outcome.steps + 1} differs")
        print(f"recorded: {outcome.difference.recorded}\nreplayed: {outcome.difference.replayed}")
        return 1
    if options.explain is None:
        print(f"{outcome.steps} steps of {outcome.runs} runs: all plans equal")
    elif not found:
        print(f"no request {options.explain!r} in {options.file}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
