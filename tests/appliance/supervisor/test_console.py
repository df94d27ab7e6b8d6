"""Output of the launcher in the foreground, read from a pipe."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from appliance.supervisor.console import Console

HOSTILE = "a\x1b[2Jb\x7fc\x9bd\u202ee\u2028f"
RECORD = {"ts": "2026-01-01T00:00:00.000Z", "level": "warning", "logger": "http.app", "message": HOSTILE}


def shown(form: Any, write: Callable[[Console], None]) -> list[str]:
    reading, writing = os.pipe()
    console = Console(writing, form)
    console.start()
    write(console)
    console.close(60.0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", newline="") as out:
        return out.read().splitlines()


def writes(console: Console) -> None:
    console.message("ready", HOSTILE)
    console.plain(HOSTILE)
    console.progress(HOSTILE)
    console.log("engine-0", HOSTILE.encode())
    console.log("engine-0", b"\xff\x1b[0m")
    console.log("gateway", json.dumps(RECORD, ensure_ascii=False).encode())


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_programs_and_of_the_launcher_are_printable(form: str) -> None:
    lines = shown(form, writes)
    assert len(lines) == 6
    assert all(line.isprintable() for line in lines)
    assert "\\x1b[2J" in lines[0]


def test_every_json_line_has_the_same_keys() -> None:
    def write(console: Console) -> None:
        writes(console)
        console.log("engine-0", b"slipway engine: warning: the disk is slow")
        console.log("supervisor", b"2026-01-01 00:00:00,000 CRIT Set uid to user 0")
        console.log("engine-0", b'{"not": "a log record"}')
        console.log("engine-0", b"{broken")

    found = [json.loads(line) for line in shown("json", write)]
    assert all(list(line)[:5] == ["ts", "level", "program", "logger", "message"] for line in found)
    assert all(isinstance(value, str) for line in found for value in line.values())
    assert [(line["program"], line["level"]) for line in found] == [
        ("ready", "info"),
        ("slipway", "info"),
        ("slipway", "info"),
        ("engine-0", "info"),
        ("engine-0", "info"),
        ("gateway", "warning"),
        ("engine-0", "warning"),
        ("supervisor", "critical"),
        ("engine-0", "info"),
        ("engine-0", "info"),
    ]
    assert found[5]["ts"] == RECORD["ts"] and found[5]["logger"] == "http.app"
    assert [line["message"] for line in found[-2:]] == ['{"not": "a log record"}', "{broken"]
