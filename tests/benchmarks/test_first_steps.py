"""Tests of benchmarks/first_steps.py."""

import json

import pytest

from benchmarks.first_steps import LAUNCH, main, phases


def test_lines_of_make_and_of_the_launcher_are_phases():
    lines = [
        (2.0, "setting up .venv with python3.11 (once; downloads 300 MB)"),
        (5.0, "installing the pinned dependencies"),
        (65.0, "building the package and its kernels"),
        (70.0, "WARNING: no C++ compiler found"),
        (165.0, "slipway  checks the manifest"),
        (166.0, "gateway  up on http://127.0.0.1:1 after 0.7 s"),
        (168.0, "ready    http://127.0.0.1:1 after 2.4 s; try:"),
    ]
    assert [(one.name.partition(":")[0], one.seconds) for one in phases(lines, 1.0)] == [
        ("make", 4.0),
        ("pip", 60.0),
        ("make", 100.0),
        (LAUNCH, 3.0),
    ]
    assert [(one.name, one.seconds) for one in phases(lines[4:], 164.0)] == [(LAUNCH, 4.0)]


@pytest.mark.slow
@pytest.mark.nightly("tests/benchmarks/test_first_steps.py::test_lines_of_make_and_of_the_launcher_are_phases")
def test_a_command_line_is_converted_and_a_crash_is_explained(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "steps.json")]) == 0
    steps = {(one["path"], one["name"]): one for one in json.loads((tmp_path / "steps.json").read_text())["steps"]}
    assert steps["convert", "together"]["commands"] == 4
    assert steps["crash", "slipway explain signal has printed the cure"]["commands"] == 1
    assert all(0 < one["seconds"] < 100 for one in steps.values()) and "crash" in capsys.readouterr().out
