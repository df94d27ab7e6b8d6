"""Usage of the service by day, API key and model: sequences and tokens, for billing and chargeback.

The ledger is kept in a file of the run directory, so that it survives restarts of the gateway. It has no text and no
part of a key.
"""

import asyncio
import csv
import io
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

FILE = "usage.json"
MAX_DAYS = 400
"""Days that are kept; older ones are dropped when the ledger is saved."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one API key and model on one day (UTC)."""

    date: str
    key: str  # name of the key; "": the service has no keys
    model: str
    sequences: int = 0  # choices of requests; each counts its prompt
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, from the prefix cache
    completion_tokens: int = 0


COLUMNS = Row.__struct_fields__


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence."""

    prompt: int
    cached: int
    completion: int


class UsageLedger:
    """Rows by day, key and model."""

    def __init__(self, folder: Path | None = None) -> None:
        """Read the rows of `folder`, or keep them in memory only without one. A damaged file is an error, because bills
        need its rows."""
        self._file = None if folder is None else folder / FILE
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._is_saved = True
        self._is_failing = False
        if self._file is not None and self._file.exists():
            rows = msgspec.json.decode(self._file.read_bytes(), type=list[Row])
            self._rows = {(row.date, row.key, row.model): row for row in rows}

    def add(self, key: str, model: str, tokens: Tokens, today: date | None = None) -> None:
        """Count one sequence that has ended."""
        day = (today or datetime.now(UTC).date()).isoformat()
        old = self._rows.get((day, key, model)) or Row(date=day, key=key, model=model)
        self._rows[day, key, model] = msgspec.structs.replace(
            old,
            sequences=old.sequences + 1,
            prompt_tokens=old.prompt_tokens + tokens.prompt,
            cached_tokens=old.cached_tokens + tokens.cached,
            completion_tokens=old.completion_tokens + tokens.completion,
        )
        self._is_saved = False

    def rows(self, first: date | None = None, last: date | None = None, key: str | None = None) -> list[Row]:
        """Return the rows from the day `first` to `last`, both included, in order; only those of `key`, unless it is
        None."""
        low, high = (first or date.min).isoformat(), (last or date.max).isoformat()
        found = [row for row in self._rows.values() if low <= row.date <= high and key in (None, row.key)]
        return sorted(found, key=lambda row: (row.date, row.key, row.model))

    def save(self) -> None:
        """Write the file if there are new rows. Log an error if that is impossible; the next call tries again."""
        if self._file is not None and not self._is_saved:
            self._written(_write_error(self._file, self._taken()))

    async def save_apart(self) -> None:
        """Write the file like `save`, in another thread. Rows may be added meanwhile."""
        if self._file is not None and not self._is_saved:
            self._written(await asyncio.to_thread(_write_error, self._file, self._taken()))

    def _taken(self) -> list[Row]:
        """Return the rows to write. Later changes are new."""
        days = sorted({row.date for row in self._rows.values()})[-MAX_DAYS:]
        self._rows = {key: row for key, row in self._rows.items() if row.date >= days[0]}
        self._is_saved = True
        return self.rows()

    def _written(self, error: OSError | None) -> None:
        if error is not None:
            self._is_saved = False
            if not self._is_failing:
                log.error("the usage of API keys cannot be saved in %s: %s", self._file, error.strerror)
        self._is_failing = error is not None


def _write_error(file: Path, rows: list[Row]) -> OSError | None:
    """Write rows to a file. Return the error, if there was one."""
    new = file.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(rows))
        new.replace(file)
    except OSError as error:
        return error
    return None


def as_csv(rows: Iterable[Row]) -> str:
    """Return rows as CSV with a header line (RFC 4180)."""
    out = io.StringIO()
    table = csv.writer(out)
    table.writerow(COLUMNS)
    table.writerows(msgspec.structs.astuple(row) for row in rows)
    return out.getvalue()


def total(rows: Sequence[Row]) -> dict[str, int]:
    """Return the sums of all counts."""
    return {name: sum(getattr(row, name) for row in rows) for name in COLUMNS[3:]}
