"""Reading lines from a pipe, for any split of the bytes."""

import os

import pytest

from appliance.supervisor.init import LineReader


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def test_lines_are_complete_for_any_split_and_the_last_needs_no_newline(pipe):
    taken = []
    lines = LineReader(pipe[0], taken.append)
    for data in (b"on", b"e\ntwo\n\nth", b"ree"):
        os.write(pipe[1], data)
        assert lines.read()
    assert taken == [b"one", b"two", b""]
    os.close(pipe[1])
    assert not lines.read()
    assert taken == [b"one", b"two", b"", b"three"]


def test_line_without_newline_is_delivered_in_pieces(pipe):
    """The buffered part of a line is bounded."""
    taken = []
    lines = LineReader(pipe[0], taken.append)
    for _ in range(10):
        os.write(pipe[1], b"x" * 30_000)
        assert lines.read()
    assert len(taken) == 3 and all(65_536 < len(piece) <= 65_536 + 30_000 for piece in taken)
    os.close(pipe[1])
    assert not lines.read()
    assert b"".join(taken) == b"x" * 300_000


def test_the_last_five_lines_are_kept(pipe):
    lines = LineReader(pipe[0], lambda line: None)
    os.write(pipe[1], b"".join(b"%d\n" % number for number in range(7)))
    os.close(pipe[1])
    lines.read()
    assert list(lines.last) == [b"2", b"3", b"4", b"5", b"6"]
