"""The ledger of usage, and its route and command."""

import asyncio
import csv
import io
from datetime import date
from pathlib import Path

import pytest

from appliance.cli.usage import usage
from appliance.observability import usage as usage_module
from appliance.observability.usage import COLUMNS, MAX_DAYS, Tokens, UsageLedger, total
from appliance.security.keys import parse_keys
from appliance.server.first_requests import REQUEST_ID

MONDAY, TUESDAY = date(2026, 11, 23), date(2026, 11, 24)


def test_rows_are_sums_by_day_key_and_model(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path)
    for key, model, day in (("b", "m", MONDAY), ("a", "m", TUESDAY), ("a", "lora", TUESDAY), ("a", "m", TUESDAY)):
        ledger.add(key, model, Tokens(10, 4, 3), day)
    ledger.save()
    for each in (ledger, UsageLedger(tmp_path)):
        rows = each.rows()
        assert [(row.date, row.key, row.model) for row in rows] == [
            ("2026-11-23", "b", "m"),
            ("2026-11-24", "a", "lora"),
            ("2026-11-24", "a", "m"),
        ]
        assert (rows[2].sequences, rows[2].prompt_tokens, rows[2].cached_tokens, rows[2].completion_tokens) == (
            *(2, 20, 8, 6),
        )
    assert [row.key for row in ledger.rows(last=MONDAY)] == ["b"] == [row.key for row in ledger.rows(key="b")]
    assert [row.key for row in ledger.rows(first=TUESDAY)] == ["a", "a"]
    assert total(ledger.rows())["completion_tokens"] == 12


def test_old_days_are_dropped(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path)
    for day in range(MAX_DAYS + 2):
        ledger.add("a", "m", Tokens(1, 0, 1), date.fromordinal(MONDAY.toordinal() + day))
    ledger.save()
    assert len(UsageLedger(tmp_path).rows()) == MAX_DAYS and ledger.rows()[0].date == "2026-11-25"


def test_a_key_sees_its_own_usage_unless_it_may_see_all(start_gateway, engine) -> None:
    keys = parse_keys(["sk-a name=alice", "sk-b name=bob", "sk-c name=chief usage=yes"], "keys")
    gateway = start_gateway(engine, keys=keys)

    def get(key: str, **asked: str):
        return gateway.client.get("/v1/usage", params=asked, headers={"authorization": f"Bearer {key}"})

    for key, count in (("sk-a", 2), ("sk-b", 1)):
        headers = {"authorization": f"Bearer {key}"}
        for _ in range(count):
            body = {"max_tokens": 4, "n": 2}
            assert gateway.client.post("/test/generate", json=body, headers=headers).status_code == 200
    (row,) = get("sk-a").json()["data"]
    assert (row["key"], row["model"], row["sequences"]) == ("alice", "tiny", 4)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (12, 16)
    found = get("sk-c").json()
    assert [row["key"] for row in found["data"]] == ["alice", "bob"] and found["total"]["sequences"] == 6
    reply = get("sk-c", format="csv")
    table = list(csv.reader(io.StringIO(reply.text)))
    assert reply.headers["content-type"].startswith("text/csv") and tuple(table[0]) == COLUMNS and len(table) == 3
    assert get("sk-c", end="2020-01-01").json()["data"] == []
    assert get("sk-c", start="soon").status_code == 400
    lines = list(usage(gateway.url, "text", api_key="sk-c"))
    assert lines[0].split() == list(COLUMNS) and lines[-1].split() == ["total", "6", "18", "0", "24"]
    assert list(usage(gateway.url, "csv", api_key="sk-c")) == reply.text.splitlines()


def test_rows_that_are_added_during_a_save_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written in another thread, while the event loop adds rows."""
    ledger = UsageLedger(tmp_path)
    write = usage_module._write_error

    def slow(file: Path, rows: list) -> OSError | None:
        ledger.add("late", "m", Tokens(1, 0, 1), MONDAY)
        return write(file, rows)

    monkeypatch.setattr(usage_module, "_write_error", slow)
    ledger.add("early", "m", Tokens(1, 0, 1), MONDAY)
    asyncio.run(ledger.save_apart())
    assert [row.key for row in UsageLedger(tmp_path).rows()] == ["early"]
    monkeypatch.setattr(usage_module, "_write_error", write)
    ledger.save()
    assert [row.key for row in UsageLedger(tmp_path).rows()] == ["early", "late"]


def test_a_failed_save_is_logged_once_and_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    ledger = UsageLedger(folder)  # does not exist yet
    ledger.add("a", "m", Tokens(1, 0, 1), MONDAY)
    ledger.save()
    asyncio.run(ledger.save_apart())
    assert caplog.text.count("cannot be saved") == 1
    folder.mkdir()
    asyncio.run(ledger.save_apart())
    assert [row.key for row in UsageLedger(folder).rows()] == ["a"]


def test_requests_of_the_service_itself_are_no_usage(start_gateway, engine) -> None:
    gateway = start_gateway(engine)
    headers = {"x-request-id": f"{REQUEST_ID}1"}
    assert gateway.client.post("/test/generate", json={}, headers=headers).status_code == 200
    assert gateway.client.get("/v1/usage").json()["data"] == []
