"""Replay of a flight recording: `slipway replay FILE [--explain REQUEST_ID]`.

Runs the scheduler on the recorded events and compares every plan. The exit code is 0 if all are equal, else 1 with the
first step that differs. `--explain` prints the timeline of one request.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from engine.api.errors import ConfigError, RequestError
from engine.api.printable import printable
from engine.core.plan import StepPlan, StepResult
from engine.core.records import (
    AdapterRecord,
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
    decode_config,
    do_adapter,
    read_records,
)
from engine.core.scheduler import Notify, Scheduler
from engine.core.snapshot import restore

Note = Callable[[str, str], None]  # (request id, event text)


class Difference(msgspec.Struct, frozen=True):
    """The first plan that differs."""

    recorded: StepPlan | None
    replayed: StepPlan | None


class Replay(msgspec.Struct):
    """Result of a replay."""

    runs: int = 0  # processes that wrote to the file
    dropped: int = 0  # steps of the first process that are no longer in the file
    steps: int = 0  # equal steps before the end or the difference
    difference: Difference | None = None


def replay(records: Iterator[Record], note: Note | None = None) -> Replay:
    """Run the recorded events. `note` is called for every event of a request. Raises ConfigError if they cannot have
    happened in this order, for example because records are missing."""
    with recorded_faults():
        return _replay(records, note)


def _replay(records: Iterator[Record], note: Note | None) -> Replay:
    result = Replay()
    scheduler: Scheduler | None = None
    for record in records:
        if isinstance(record, Started):
            if record.state is not None and scheduler is not None and not record.gap:
                continue  # the same process continues in the next file, so the scheduler is kept
            scheduler = started_scheduler(record, _noted(note))
            result.runs += 1
            if record.state is not None:
                result.dropped = record.step
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


def started_scheduler(started: Started, notify: Notify | None = None) -> Scheduler:
    """Return a scheduler in its recorded state. Raises ConfigError if the record has none of this version's."""
    config = decode_config(started)
    with recorded_faults():
        scheduler = Scheduler(config, notify)
        if started.state is not None:
            restore(scheduler, started.state)
    return scheduler


@contextmanager
def recorded_faults() -> Iterator[None]:
    """Raise ConfigError for any error that events of a damaged or malicious recording cause in the scheduler."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the recording is damaged, or of another version of Slipway: {type(error).__name__}: {error}"
        ) from error


def _noted(note: Note | None) -> Notify | None:
    if note is None:
        return None
    arrived: dict[str, float] = {}
    return lambda id, now, event: note(id, f"{1000 * (now - arrived.setdefault(id, now)):,.1f} ms: {event}")


def _do(scheduler: Scheduler, record: Record, note: Note | None) -> None:
    match record:
        case Submitted(submit, now):
            with suppress(RequestError):  # it was refused when it was recorded, too
                scheduler.submit(submit, now)
        case Proposed(id, tokens):
            scheduler.propose(id, tokens)
        case Ended(id, finish):
            scheduler.end(id, finish)
        case DeadlinesPassed(now):
            scheduler.expire(now)
        case AllEnded():
            scheduler.end_all()
        case CacheReset():
            scheduler.reset_prefix_cache()
        case AdapterRecord():
            do_adapter(scheduler, record)
        case Applied(now, step, sampled, failed, further, drafts):
            settled = scheduler.apply(StepResult(step, sampled, further, failed=failed, drafts=drafts), now)
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="slipway replay", description="Replay a flight recording.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--explain", metavar="REQUEST_ID", help="print the timeline of this request")
    options = parser.parse_args(arguments)
    found = False

    def note(id: str, what: str) -> None:
        nonlocal found
        if id == options.explain:
            found = True
            print(printable(what))

    try:
        outcome = replay(read_records(options.file), note if options.explain else None)
    except (OSError, ConfigError) as error:
        print(f"{options.file}: {printable(reason(error))}", file=sys.stderr)
        return 1
    if outcome.dropped:
        print(f"the recording begins after step {outcome.dropped}; earlier steps were deleted", file=sys.stderr)
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


def reason(error: OSError | ConfigError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
