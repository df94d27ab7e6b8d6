"""The recording of docs/tested-models.json: its file, and the plugin of tests/cells.py that writes it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cells import CELLS, FORMAT_CELLS, FormatRecorder, Recorder, Shows
from tools.quantization_page import read_formats, write_formats
from tools.tested_models_page import read_not_run, read_recording, write_recording


def run(recorder: Recorder, nodeid: str, cells: list[tuple[str, str]], *, when: str = "call", passed: bool) -> None:
    """Let the plugin see the report of a test."""
    item: Any = SimpleNamespace(nodeid=nodeid, stash=pytest.Stash())
    item.stash[CELLS] = cells
    wrapper = recorder.pytest_runtest_makereport(item, None)  # type: ignore[arg-type]
    next(wrapper)
    with pytest.raises(StopIteration):
        wrapper.send(SimpleNamespace(when=when, passed=passed))


def test_cells_of_passed_tests_are_recorded_and_others_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    before = {"Old": {"loads": ["t.py::test_a"], "preempted": ["t.py::test_b"]}}
    write_recording(file, before, {"Old": ["2 ranks", "prefix hit"], "New": ["loads"]})
    recorder = Recorder(file)
    run(recorder, "t.py::test_c", [("Old", "loads"), ("New", "loads")], passed=True)
    run(recorder, "t.py::test_c", [("New", "2 ranks")], when="teardown", passed=True)
    run(recorder, "t.py::test_d", [("Old", "2 ranks")], passed=False)
    recorder.pytest_sessionfinish()
    found = read_recording(file)
    assert found["Old"] == {"loads": ["t.py::test_c"], "preempted": ["t.py::test_b"]}
    assert found["New"] == {"loads": ["t.py::test_c"]}
    assert read_not_run(file) == {"Old": ["2 ranks", "prefix hit"]}


def test_fixture_notes_the_architecture_of_the_checkpoint(shows: Shows, request: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    shows(tmp_path, "loads", "2 ranks")
    noted = request.node.stash[CELLS]
    assert noted == [("LlamaForCausalLM", "loads"), ("LlamaForCausalLM", "2 ranks")]
    with pytest.raises(ValueError, match="no such columns"):
        shows(tmp_path, "load")
    noted.clear()  # this test is no evidence


def test_cells_of_formats_are_recorded_and_others_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "formats.json"
    write_formats(file, {"old": {"GPU": "int4"}, "new": {"GPU": "dequantized"}})
    recorder = FormatRecorder(file)
    for name, passed in (("new", True), ("failed", False)):
        item: Any = SimpleNamespace(nodeid=name, stash=pytest.Stash())
        item.stash[FORMAT_CELLS] = (name, {"GPU": "q4_k", "test": name})
        wrapper = recorder.pytest_runtest_makereport(item, None)  # type: ignore[arg-type]
        next(wrapper)
        with pytest.raises(StopIteration):
            wrapper.send(SimpleNamespace(when="call", passed=passed))
    recorder.pytest_sessionfinish()
    assert read_formats(file) == {"old": {"GPU": "int4"}, "new": {"GPU": "q4_k", "test": "new"}}
