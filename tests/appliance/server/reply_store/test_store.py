"""Durable replies by key: kept within a time and space limit, restored after a restart whatever the file contains."""

import asyncio
import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.config.gateway import GatewayConfig
from appliance.observability.metrics import Metrics
from appliance.server.reply_store.entry import Entry
from appliance.server.reply_store.log import unframed
from appliance.server.reply_store.records import Gained, Identity, decode
from appliance.server.reply_store.store import JournalFull, ReplyStore
from engine.api.messages import Delta, Sampling, Submit

IDENTITY = Identity("r1", 1_700_000_000, "ab")
SUBMITS = (Submit("r1-0", (1, 2, 3), Sampling(seed=7), 8), Submit("r1-1", (1, 2, 3), Sampling(seed=8), 8))


class World:
    """A clock and a file; every `reply_store()` is the store of a restarted gateway."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = 1_700_000_000.0
        self.metrics = Metrics(GatewayConfig(names=("m",), model="m", engines=("e",), max_context=64, vocab_size=9))
        self.open: list[ReplyStore] = []

    def reply_store(self, **more: Any) -> ReplyStore:
        self.close()
        values: dict[str, Any] = {"outputs": "o", "keep_s": 60.0, "size": 10**6} | more
        self.open.append(ReplyStore(self.path, self.metrics, **values, clock=lambda: self.time))
        return self.open[-1]

    def close(self) -> None:
        for reply_store in self.open:
            asyncio.run(reply_store.stop())
        self.open.clear()

    def skipped(self) -> float:
        return self.metrics.numbers["journal_skipped_records"][()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "j")
    yield made
    made.close()


def fill(reply_store: ReplyStore, key: bytes, deltas: int, *, ends: bool) -> Entry:
    entry = reply_store.open(key, b"body" + key, IDENTITY, SUBMITS)
    for number in range(deltas):
        entry.append(number % 2, Delta(f"r1-{number % 2}", (number,)))
    if ends:
        entry.end(reply_store.record_end)
    return entry


def contents(entry: Entry | None) -> Any:
    if entry is None:
        return None
    deltas = [entry.delta(number) for number in range(len(entry.gained))]
    return entry.opened.key, entry.opened.submits, entry.opened.identity, entry.state, deltas


def test_replies_survive_a_restart_and_running_ones_can_resume(world: World) -> None:
    one = world.reply_store()
    made = [contents(fill(one, b"a", 6, ends=True)), contents(fill(one, b"b", 5, ends=False))]
    two = world.reply_store()
    assert [contents(two.find(key)) for key in (b"a", b"b")] == made
    assert [entry and entry.state for entry in map(two.find, (b"a", b"b"))] == ["ended", "paused"]
    assert two.find(b"c") is None
    fill(two, b"c", 2, ends=True)
    three = world.reply_store()
    assert [contents(three.find(key)) is not None for key in (b"a", b"b", b"c")] == [True] * 3
    numbers = [record.entry for record in map(decode, unframed(world.path.read_bytes()).records)]
    assert set(numbers) == {0, 1, 2}


def test_replies_of_another_configuration_are_not_resumed(world: World) -> None:
    fill(world.reply_store(), b"a", 3, ends=True)
    assert world.reply_store(outputs="other").find(b"a") is None
    assert world.reply_store().find(b"a") is None  # it was forgotten for good


def test_replies_are_kept_for_their_time_after_their_end(world: World) -> None:
    reply_store = world.reply_store()
    ended, running, read = (fill(reply_store, key, 2, ends=key != b"r") for key in (b"e", b"r", b"f"))
    running.state, read.subscribers = "running", 1
    world.time += 59
    assert reply_store.find(b"e") is ended
    world.time += 2
    assert reply_store.find(b"e") is None
    assert reply_store.find(b"r") is running and reply_store.find(b"f") is read
    assert world.reply_store().find(b"e") is None


def test_failed_replies_are_dropped(world: World) -> None:
    reply_store = world.reply_store()
    entry = fill(reply_store, b"a", 2, ends=False)
    entry.failure = RuntimeError("x")
    reply_store.record_end(entry)
    assert reply_store.find(b"a") is None
    assert world.reply_store().find(b"a") is None


def test_space_is_bounded_and_the_oldest_ended_ones_go_first(world: World) -> None:
    reply_store = world.reply_store(size=4_000)
    kept = fill(reply_store, b"kept", 10, ends=False)  # older, but not ended: its client may come back for the rest
    for number in range(60):
        world.time += 1
        fill(reply_store, f"k{number}".encode(), 8, ends=True)
    held = [number for number in range(60) if reply_store.find(f"k{number}".encode())]
    assert held and held == list(range(held[0], 60)) and reply_store.find(b"kept") is kept
    assert sum(entry.size for entry in reply_store._entries.values()) <= 4_000 + 1_000
    world.close()
    assert world.path.stat().st_size < 2 * 4_000 + 2**20


def test_more_than_fits_is_refused_while_it_all_runs(world: World) -> None:
    reply_store = world.reply_store(size=2_000)
    entries = []
    with pytest.raises(JournalFull):
        for number in range(100):
            entries.append(fill(reply_store, str(number).encode(), 4, ends=False))
            entries[-1].state = "running"
    assert 3 < len(entries) < 30
    assert [reply_store.find(str(number).encode()) for number in range(len(entries))] == entries
    for entry in entries:
        entry.state = "paused"
    fill(reply_store, b"more", 1, ends=True)


def test_the_file_is_rewritten_when_most_entries_are_deleted(world: World) -> None:
    reply_store = world.reply_store(keep_s=5)
    entry = reply_store.open(b"long", b"", IDENTITY, SUBMITS)
    entry.state = "running"
    for number in range(6000):
        world.time += 1
        entry.append(0, Delta("r1-0", (number,)))
        fill(reply_store, str(number).encode(), 3, ends=True)
    world.close()
    assert world.path.stat().st_size < 2 * entry.size + 2**20 + 5_000
    again = world.reply_store(keep_s=10**6).find(b"long")
    assert again is not None and len(again.gained) == 6000


def test_a_broken_file_costs_computation_and_nothing_else(world: World) -> None:
    """After flipped, cut or zeroed bytes, an entry yields a prefix of its contents, and it counts as complete only if
    all of them are there."""
    one = world.reply_store()
    made = {key: contents(fill(one, key, 12, ends=key != b"b")) for key in (b"a", b"b", b"c", b"d")}
    world.close()
    data, rng = world.path.read_bytes(), random.Random(11)
    skipped = 0
    for _ in range(100):
        broken = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at, length = rng.randrange(len(data)), rng.choice((1, 1, 3, 60))
            match rng.randrange(3):
                case 0:
                    broken[at : at + length] = bytes(byte ^ rng.randrange(1, 256) for byte in broken[at : at + length])
                case 1:
                    del broken[at : at + length]
                case 2:
                    broken[at : at + length] = bytes(length)
        world.path.write_bytes(broken)
        reply_store = world.reply_store()
        for key, (_, submits, identity, _, deltas) in made.items():
            entry = reply_store.find(key)
            if entry is None:
                continue
            found = contents(entry)
            assert found[1:3] == (submits, identity)
            assert found[4] == deltas[: len(found[4])]
            assert found[3] == "paused" or (len(found[4]) == 12 and key != b"b")
        skipped += world.skipped() > 0
    assert skipped > 30


def test_deltas_after_a_lost_record_are_ignored(world: World) -> None:
    one = world.reply_store()
    fill(one, b"a", 9, ends=True)
    world.close()
    payloads = unframed(world.path.read_bytes()).records
    data = world.path.read_bytes()
    hole = next(payload for payload in payloads if isinstance(record := decode(payload), Gained) and record.number == 4)
    at = data.index(hole)
    world.path.write_bytes(data[:at] + bytes(len(hole)) + data[at + len(hole) :])
    entry = world.reply_store().find(b"a")
    assert entry is not None and entry.state == "paused" and len(entry.gained) == 4


def test_after_a_full_disk_all_that_is_known_is_on_it_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, real, full = world.reply_store(), os.write, [False]
    fill(one, b"a", 2, ends=True)

    def write(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr("appliance.server.reply_store.log.os.write", write)
    monkeypatch.setattr("appliance.server.reply_store.store.FILL_S", 0.0)
    asyncio.run(one.flushed())
    full[0] = True
    running = fill(one, b"b", 3, ends=False)
    for number in range(3, 6):
        asyncio.run(one.flushed())
        running.append(0, Delta("r1-0", (number,)))
    asyncio.run(one.flushed())
    assert world.metrics.numbers["journal_errors"][()] >= 1
    full[0] = False
    running.append(0, Delta("r1-0", (6,)))
    asyncio.run(one.flushed())
    running.append(0, Delta("r1-0", (7,)))
    asyncio.run(one.flushed())
    assert [path.name for path in world.path.parent.iterdir()] == ["j"]
    entry = world.reply_store().find(b"b")
    assert entry is not None and len(entry.gained) == len(running.gained)


def test_a_slow_disk_delays_only_callers_of_flushed(world: World) -> None:
    one = world.reply_store()
    one.throttle(30.0, 60.0)
    began = time.monotonic()
    fill(one, b"a", 5, ends=True)
    assert time.monotonic() - began < 15.0
    one.throttle(0.0, 0.0)
