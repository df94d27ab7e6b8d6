"""Seeded mistakes (seeded.py, seeded_layers.py): all are refused at their position, with the suggestion, and the edit
makes the manifest valid."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.config.document import document
from appliance.config.findings import Finding, findings
from appliance.config.fix_edits import apply
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.machine import Machine
from appliance.planning.validate import validate
from tests.appliance.cli.test_cli import CONFIG, SHAPES, write_safetensors
from tests.appliance.config.seeded import MARK, Seeded
from tests.appliance.config.seeded import SEEDED as PLAIN
from tests.appliance.config.seeded_layers import SEEDED as LAYERED

MACHINE = Machine(cores=4, cores_from="affinity", memory_free=2**34, memory_from="MemAvailable", no_gpu="no driver")
MOST_S = 0.3
SEEDED = (*PLAIN, *LAYERED)
BY_NAME = {seeded.name: seeded for seeded in SEEDED}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare the manifest's folder: a checkpoint, one in a sub-folder, a file for keys, a template, logs; and
    another checkpoint that is only visible from the current folder."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tiny" / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    write_safetensors(tmp_path / "tiny" / "model.safetensors", SHAPES)
    for copy in ("hub/tiny", "elsewhere/there/tiny"):
        shutil.copytree(tmp_path / "tiny", tmp_path / copy)
    (tmp_path / "logs").mkdir()
    (tmp_path / "keys.txt").write_text("k\n")
    (tmp_path / "chat.jinja").write_text("x")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def given(folder: Path, seeded: Seeded, texts: dict[str, str]) -> Given:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    options = tuple(Option(f"--set {key}", key, value) for key, value in seeded.options)
    overlays = tuple(str(folder / name) if "." in name else name for name in seeded.overlays)
    return Given(folder / "m.yaml", options, seeded.variables, overlays)


def refused(folder: Path, seeded: Seeded, texts: dict[str, str]) -> list[Finding]:
    try:
        validate(given(folder, seeded, texts), MACHINE)
    except Refused as refusal:
        return findings(refusal.problems)
    return []


def place(folder: Path, seeded: Seeded) -> tuple[str, int, int]:
    """Source, line and column that are marked in a text; an option or variable has neither."""
    if seeded.source:
        return seeded.source, 0, 0
    name, text = next((name, text) for name, text in seeded.marked.items() if MARK in text)
    before = text.partition(MARK)[0]
    return str(folder / name), before.count("\n") + 1, len(before) - before.rfind("\n")


def found_at(folder: Path, findings: list[Finding], seeded: Seeded) -> list[Finding]:
    where = place(folder, seeded)
    return [f for f in findings if (f.problem.place.source, f.problem.place.line, f.problem.place.column) == where]


def test_there_are_more_than_sixty_with_names_of_their_own() -> None:
    assert len(BY_NAME) == len(SEEDED) >= 60


@pytest.mark.parametrize("name", BY_NAME)
def test_a_mistake_is_refused_once_at_its_place_with_the_suggestion(folder: Path, name: str) -> None:
    seeded = BY_NAME[name]
    found = refused(folder, seeded, seeded.texts)
    said = [str(finding.problem) for finding in found]
    assert len(found_at(folder, found, seeded)) == 1, said
    assert len(found) == (2 if name == "tabs two deep" else 1), said
    problem = found_at(folder, found, seeded)[0].problem
    assert problem.key == seeded.key and seeded.words in problem.message, said
    assert "hunter2" not in str(said) and "abcdefgh" not in str(said)


@pytest.mark.parametrize("name", [seeded.name for seeded in SEEDED if seeded.becomes])
def test_the_edit_makes_it_valid(folder: Path, name: str) -> None:
    seeded = BY_NAME[name]
    (finding,) = found_at(folder, refused(folder, seeded, seeded.texts), seeded)
    assert finding.fixable == seeded.certain
    text = seeded.texts[seeded.edited]
    assert {edit.file for edit in finding.edits} == {str(folder / seeded.edited)}
    after = apply(document(text), finding.edits)
    assert not refused(folder, seeded, {**seeded.texts, seeded.edited: after}), after
    if seeded.becomes != "\0":
        assert seeded.becomes in after and after != text
    # No other line was changed.
    kept = [line for number, line in enumerate(text.splitlines(), 1) if number not in {n for n, _ in finding.removed}]
    added = [n for n, _ in finding.added]
    assert kept == [line for number, line in enumerate(after.splitlines(), 1) if number not in added]


@pytest.mark.parametrize("name", [seeded.name for seeded in SEEDED if not seeded.becomes and not seeded.source])
def test_where_no_edit_is_expected_none_leaves_another_mistake_behind(folder: Path, name: str) -> None:
    seeded = BY_NAME[name]
    (finding,) = found_at(folder, refused(folder, seeded, seeded.texts), seeded)
    assert not finding.fixable or finding.problem.key == "hardware.device"
    assert finding.outside == seeded.outside


@pytest.mark.parametrize("name", [seeded.name for seeded in SEEDED if seeded.outside and not seeded.options])
def test_following_the_advice_fixes_values_outside_of_files(folder: Path, name: str) -> None:
    seeded = BY_NAME[name]
    word, _, assignment = seeded.outside.partition(" ")
    variable, _, value = assignment.partition("=")
    assert word == "set" and variable in seeded.variables
    assert not refused(folder, replace(seeded, variables=seeded.variables | {variable: value}), seeded.texts)


def test_at_least_nine_of_ten_have_the_edit_or_the_words(folder: Path) -> None:
    """The shares that the table itself claims: a mistake without words counts as one without a suggestion."""
    assert sum(bool(seeded.words) for seeded in SEEDED) / len(SEEDED) >= 0.9
    assert sum(bool(seeded.becomes) for seeded in SEEDED) / len(SEEDED) >= 0.7


def test_no_check_takes_longer_than_a_third_of_a_second(folder: Path) -> None:
    """CPU time of this process, for refusal and edits together, so that other processes do not matter."""
    times = {}
    for seeded in SEEDED:
        start = time.process_time()
        refused(folder, seeded, seeded.texts)
        times[seeded.name] = time.process_time() - start
    slowest = max(times, key=lambda name: times[name])
    assert times[slowest] < MOST_S, f"{slowest}: {times[slowest]:.3f} s"
    if os.environ.get("SHOW_TIMES"):
        print(f"median {sorted(times.values())[len(times) // 2] * 1e3:.1f} ms, most {times[slowest] * 1e3:.1f} ms")
