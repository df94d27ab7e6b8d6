"""The benchmark of loading, at its smallest size."""

import json
from pathlib import Path

import pytest

from benchmarks import load, shapes
from benchmarks.load import Load


def test_times_of_two_cases_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = shapes.SHAPES["small"] | {"num_hidden_layers": 1, "vocab_size": 512}
    monkeypatch.setitem(shapes.SHAPES, "small", small)
    out = tmp_path / "out.json"
    cases = ["--case", "int8", "--case", "converted-int4"]
    assert load.main(["--shape", "small", "--rounds", "1", *cases, "--folder", str(tmp_path), "--out", str(out)]) == 0
    found = [Load(**one) for one in json.loads(out.read_text())["loads"]]
    assert [one.case for one in found] == ["int8", "converted-int4"]
    assert found[0].bytes > 2 * found[1].bytes and all(one.ratio > 0 for one in found)
    assert all(one.cpu_s[0] > 0 and one.touched_bytes[0] > 0 for one in found)
    assert "converted-int4" in capsys.readouterr().out
