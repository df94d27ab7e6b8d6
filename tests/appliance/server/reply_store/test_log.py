"""Log of durable replies: intact entries are read, broken entries are skipped."""

import errno
import os
import random
from pathlib import Path

import pytest

from appliance.server.reply_store.log import HEAD, MAGIC, JournalTaken, Log, framed, unframed

RECORDS = [bytes([number]) * (number * 7 % 40) + MAGIC * (number % 3) for number in range(40)]
FILE = b"".join(map(framed, RECORDS))


def starts() -> list[int]:
    found = [0]
    for record in RECORDS:
        found.append(found[-1] + HEAD.size + len(record))
    return found


def test_written_records_are_read() -> None:
    read = unframed(FILE)
    assert (read.records, read.skipped, read.torn) == (RECORDS, 0, False)


def test_a_file_that_ends_anywhere_loses_its_last_record_alone() -> None:
    edges = starts()
    for end in range(len(FILE)):
        read = unframed(FILE[:end])
        whole = sum(edge <= end for edge in edges) - 1
        assert read.records == RECORDS[:whole], end
        assert read.skipped == 0 and read.torn == (end not in edges), end


def test_one_flipped_bit_costs_one_record() -> None:
    rng, edges = random.Random(4), starts()
    for at in range(len(FILE)):
        data = bytearray(FILE)
        data[at] ^= 1 << rng.randrange(8)
        hit = sum(edge <= at for edge in edges) - 1
        read = unframed(bytes(data))
        assert read.records == RECORDS[:hit] + RECORDS[hit + 1 :], at
        assert (read.skipped, read.torn) == ((0, True) if hit == len(RECORDS) - 1 else (1, False)), at


def test_a_damaged_range_is_skipped_once() -> None:
    edges = starts()
    data = FILE[: edges[10] + 3] + b"\0" * 5000 + MAGIC * 9 + FILE[edges[20] :]
    read = unframed(data)
    assert read.records == RECORDS[:10] + RECORDS[20:] and read.skipped == 1


class Written:
    """A log, and the errors that it reported."""

    def __init__(self, path: Path) -> None:
        self.errors: list[OSError] = []
        self.log = Log(path, self.errors.append)
        self.found = self.log.read()
        self.log.start()

    def records(self) -> list[bytes]:
        self.log.flushed().result(100)
        return unframed(self.log.path.read_bytes()).records


def test_flushed_records_survive_a_reopen(tmp_path: Path) -> None:
    one = Written(tmp_path / "deep" / "j")
    for record in RECORDS:
        one.log.append(framed(record))
    assert one.records() == RECORDS and not one.errors
    assert (tmp_path / "deep" / "j").stat().st_mode & 0o777 == 0o600
    one.log.stop()
    two = Written(tmp_path / "deep" / "j")
    assert two.found.records == RECORDS and two.log.size == len(FILE)
    two.log.append(framed(b"more"))
    assert two.records() == [*RECORDS, b"more"]
    two.log.stop()


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    one = Written(tmp_path / "j")
    with pytest.raises(JournalTaken, match="another process"):
        Log(tmp_path / "j", lambda error: None)
    one.log.replace([framed(b"a")])
    assert one.records() == [b"a"]
    with pytest.raises(JournalTaken):  # the new file is locked as the old one was
        Log(tmp_path / "j", lambda error: None)
    one.log.stop()


def test_a_rewritten_file_contains_later_records(tmp_path: Path) -> None:
    one = Written(tmp_path / "j")
    for record in RECORDS:
        one.log.append(framed(record))
    one.log.replace(map(framed, RECORDS[30:]))
    one.log.append(framed(b"behind"))
    assert one.records() == [*RECORDS[30:], b"behind"]
    assert one.log.size == (tmp_path / "j").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
    one.log.stop()


def test_a_full_disk_is_reported_and_records_after_the_torn_one_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real, full = Written(tmp_path / "j"), os.write, [True]
    one.log.append(framed(b"before"))
    one.records()

    def write(file: int, data: bytes) -> int:
        if full[0] and file == one.log._file:
            if len(data) <= 7:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(file, bytes(data)[:-7])
        return real(file, data)

    monkeypatch.setattr("appliance.server.reply_store.log.os.write", write)
    one.log.append(framed(b"lost" * 9))
    assert one.records() == [b"before"] and [error.errno for error in one.errors] == [errno.ENOSPC]
    full[0] = False
    one.log.append(framed(b"after"))
    assert one.records() == [b"before", b"after"]
    one.log.stop()
