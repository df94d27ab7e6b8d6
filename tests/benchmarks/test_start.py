"""Tests of benchmarks/start.py."""

import json
from pathlib import Path

import pytest

from benchmarks import start
from benchmarks.start import Start


def test_cold_and_warm_starts_are_lists_in_the_file(tmp_path, monkeypatch):
    caches: list[bool] = []

    def measure(manifest: Path, cache: Path | None = None) -> Start:
        caches.append(any(cache.iterdir()) if cache else False)
        if cache:
            (cache / "weights").touch()
        return Start(0.5, 1.0 + len(caches), 0.25, {"gateway": 1.0, "engine-0": 2.0}, 4.0)

    monkeypatch.setattr(start, "measure", measure)
    assert start.main(["--rounds", "3", "--cold", "--out", str(tmp_path / "start.json")]) == 0
    assert caches == [False, True] * 3, "a warm start has the cache of the cold one"
    found = json.loads((tmp_path / "start.json").read_text())
    assert found["cold"]["ready"] == [2.0, 4.0, 6.0] and found["warm"]["ready"] == [3.0, 5.0, 7.0]
    assert found["medians"]["cold"]["ready"] == 4.0 and found["medians"]["warm"]["cpu until ready"] == 3.0
    assert all(isinstance(value, list) for kind in ("cold", "warm") for value in found[kind].values())


def test_a_value_that_is_not_a_list_is_named():
    with pytest.raises(TypeError, match="ready: must be a list with a value for each start"):
        start.medians({"stop": [1.0], "ready": 2.0})  # type: ignore[dict-item]
