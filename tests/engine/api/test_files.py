"""Bounded reading: only regular files, only up to a limit, and one error for JSON that is damaged in any way."""

import os
import socket
from pathlib import Path

import pytest

from engine.api.errors import CheckpointError
from engine.api.files import is_path, parse_json, read_file, read_json_object, real_path


def test_a_file_up_to_its_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 7)
    assert read_file(tmp_path / "a", 7) == b"x" * 7
    with pytest.raises(OSError, match="larger than the 0 KiB allowed"):
        read_file(tmp_path / "a", 6)


def test_a_symbolic_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").symlink_to("a")
    assert read_file(tmp_path / "b", 1) == b"x"


def test_special_files_are_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "socket"))
        for path, words in (
            (tmp_path / "pipe", "named pipe"),
            (tmp_path / "socket", "socket"),
            (tmp_path, "directory"),
            (tmp_path / "loop", "symbolic links"),
            (Path("/dev/zero"), "device"),
            (tmp_path / "a\0b", "not a valid path"),
        ):
            with pytest.raises(OSError, match=words):
                read_file(path, 10)
            with pytest.raises(CheckpointError, match=words):
                read_json_object(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff{}", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has 5000 digits"),
        (b'{"a": ', "Expecting value"),
        (b"", "Expecting value"),
    ],
)
def test_damaged_json_raises_one_error_type(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(data)
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"config\.json: is damaged: .*{words}"):
        read_json_object(tmp_path / "config.json")


def test_json_written_by_python_is_read(tmp_path: Path) -> None:
    assert parse_json(b'{"limit": [0.0, Infinity], "length": 1000000000000000019884624838656}') == {
        "limit": [0.0, float("inf")],
        "length": 1000000000000000019884624838656,
    }


def test_links_in_a_circle_have_a_real_path(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert real_path(tmp_path / "one").parent == tmp_path


def test_overlong_text_is_not_a_path(tmp_path: Path) -> None:
    assert is_path("a" * 255) and is_path("/" + "/".join(["a"] * 2047))
    assert not is_path("a" * 256) and not is_path("a/" * 2048) and not is_path("a\0b")
