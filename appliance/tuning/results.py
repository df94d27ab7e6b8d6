"""The file of results: one JSON object per line, so that a run that was interrupted continues where it ended."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.tuning.space import Settings


class ResultsError(ValueError):
    """Raised for a file that is not one of results, or one of other options. The message names the file."""


def identity(values: Mapping[str, Any]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of everything that the results depend on."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass
class Results:
    """Results by kind (`refused`, `predicted`, `measured`, `steps`), candidate and round."""

    path: Path | None
    """Path of the file, or None to keep no results."""
    found: dict[tuple[str, Settings, int], Any] = field(default_factory=dict)
    earlier: frozenset[tuple[str, Settings, int]] = frozenset()
    """Results of an earlier run."""
    reused: int = 0
    """Number of results of an earlier run that were used."""

    def get(self, kind: str, settings: Settings, round_number: int = 0) -> Any | None:
        self.reused += (kind, settings, round_number) in self.earlier
        return self.found.get((kind, settings, round_number))

    def put(self, kind: str, settings: Settings, value: Any, round_number: int = 0) -> None:
        """Add a result and append it to the file. Raises OSError."""
        self.found[kind, settings, round_number] = value
        line = {"kind": kind, "settings": dict(settings), "round": round_number, "value": value}
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def open_results(path: Path | None, about: Mapping[str, Any]) -> Results:
    """Read the results of an earlier run with the same options, or begin a file. Raises ResultsError and OSError."""
    if path is None:
        return Results(None)
    mark = identity(about)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"kind": "options", "identity": mark, **about}
        path.write_text(json.dumps(head, default=str) + "\n", encoding="utf-8")
        return Results(path)
    results, text = Results(path), path.read_text(encoding="utf-8")
    *lines, last = text.split("\n")
    if last:  # a line that was cut off when the run was killed
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    try:
        head, *values = map(json.loads, lines)
        if head["kind"] != "options":
            raise ValueError("the first line has no options")
        for value in values:
            key = value["kind"], tuple(value["settings"].items()), value["round"]
            results.found[key] = value["value"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"--results {path}: not a file of `slipway tune`: {error}") from error
    if head["identity"] != mark:
        raise ResultsError(
            f"--results {path}: has results of another manifest, machine or workload; delete it or name another file"
        )
    results.earlier = frozenset(results.found)
    return results
