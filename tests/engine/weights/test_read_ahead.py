"""The thread that reads tensors ahead: its reads and their time."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.models.headers import read_headers
from engine.weights import read_ahead
from engine.weights.files import Weights
from engine.weights.read_ahead import ReadAhead, Span, spans

HERE = Path("a")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Places and sizes of the reads of the thread. Nothing is cached."""
    found: list[tuple[int, int]] = []

    def preadv(file: int, buffers: list[memoryview], at: int) -> int:
        found.append((at, len(buffers[0])))
        return len(buffers[0])

    monkeypatch.setattr(read_ahead, "_is_cached", lambda file, start, size: False)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(read_ahead, "PART", 100)
    monkeypatch.setattr(read_ahead, "AHEAD", 250)
    return found


def settled(reads: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Wait for `count` reads and return all of them."""
    deadline = threading.Event()
    for _ in range(200):
        if len(reads) >= count:
            break
        deadline.wait(0.01)
    deadline.wait(0.05)
    return reads


def test_adjacent_tensors_are_read_together() -> None:
    other = Path("b")
    listed = [Span(other, 0, 8), Span(HERE, 9000, 9100), Span(HERE, 100, 200), Span(HERE, 0, 100), Span(HERE, 208, 300)]
    assert spans(listed) == [Span(HERE, 0, 300), Span(HERE, 9000, 9100), Span(other, 0, 8)]


def test_thread_stays_near_the_tensor_that_is_used(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    file = tmp_path / "m"
    file.write_bytes(bytes(100_000))
    tensors = [Span(file, 0, 350), Span(file, 50_000, 50_350)]
    ahead = ReadAhead(tensors)
    assert settled(reads, 3) == [(0, 100), (100, 100), (200, 100)]
    ahead.used(tensors[0])
    assert settled(reads, 7)[3:] == [(300, 50), (50_000, 100), (50_100, 100), (50_200, 100)]
    ahead.used(tensors[0])
    assert len(settled(reads, 8)) == 7
    ahead.used(tensors[1])
    assert settled(reads, 8)[7:] == [(50_300, 50)]
    ahead.close()
    assert not ahead._thread.is_alive()


def test_thread_ends_before_it_has_read_everything(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    (tmp_path / "m").write_bytes(bytes(1000))
    ahead = ReadAhead([Span(tmp_path / "m", 0, 1000), Span(tmp_path / "lacks", 0, 1000)])
    ahead.close()
    assert not ahead._thread.is_alive()


def test_parts_in_the_page_cache_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot be asked has none."""
    asked: list[int] = []

    def preadv(file: int, buffers: list[bytearray], at: int, flags: int) -> int:
        asked.append(at)
        if at > 900:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_ahead._is_cached(0, 100, 200) and asked == [100, 299]
    assert not read_ahead._is_cached(0, 800, 200)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert not read_ahead._is_cached(0, 100, 200)


def test_weights_ask_for_the_tensors_that_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.arange(4.0)}
    save_file(tensors, tmp_path / "m.safetensors")
    weights = Weights(read_headers(tmp_path / "m.safetensors"), lambda fraction: None)
    asked: list[Span] = []
    monkeypatch.setattr(ReadAhead, "used", lambda self, span: asked.append(span))
    with weights.reading_ahead():
        assert torch.equal(weights.read("b"), tensors["b"])
    info = weights.tensors["b"]
    assert asked == [Span(info.file, info.offset, info.offset + 16)]
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())
