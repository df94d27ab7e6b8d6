"""Recording of the tested properties of each architecture, the cells of docs/tested-models.md.

A test with the fixture `shows` names columns for a checkpoint:

    shows(path, "chunked prefill", "prefix hit")

`pytest --record-cells FILE` runs these tests only, and writes their cells to FILE. Cells of architectures and columns
that do not run stay as they are, so that one family can be recorded again. In the same way `--record-formats FILE`
records the cells of docs/quantization-formats.md, from tests with the fixture `format_cells`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.quantization_page import read_formats, write_formats
from tools.tested_models_page import COLUMNS, read_not_run, read_recording, write_recording

Shows = Callable[..., None]
CELLS = pytest.StashKey[list[tuple[str, str]]]()  # architecture and column
FORMAT_CELLS = pytest.StashKey[tuple[str, dict[str, str]]]()  # format, and its cells by column


@pytest.fixture
def shows(request: pytest.FixtureRequest) -> Shows:
    """Return a function that notes columns for the architecture of a checkpoint folder.

    They count if the test passes.
    """
    found = request.node.stash.setdefault(CELLS, [])

    def note(path: Path, *columns: str) -> None:
        if unknown := set(columns) - set(COLUMNS):
            raise ValueError(f"{sorted(unknown)}: no such columns; they are {list(COLUMNS)}")
        (architecture,) = json.loads((Path(path) / "config.json").read_text())["architectures"]
        found.extend((architecture, column) for column in columns)

    return note


@pytest.fixture
def format_cells(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that notes the cells of a quantization format. They count if the test passes."""

    def note(name: str, **cells: str) -> None:
        request.node.stash[FORMAT_CELLS] = (name, {**cells, "test": request.node.nodeid})

    return note


class Recorder:
    """Plugin that selects the tests with `shows` and writes their cells."""

    fixture = "shows"

    def __init__(self, file: Path) -> None:
        self.file = file
        self.cells: dict[tuple[str, str], list[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if self.fixture in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        if report.when == "call" and report.passed:
            for cell in item.stash.get(CELLS, []):
                self.cells.setdefault(cell, []).append(item.nodeid)
        return report

    def pytest_sessionfinish(self) -> None:
        exists = self.file.exists()
        recorded, not_run = (read_recording(self.file), read_not_run(self.file)) if exists else ({}, {})
        for (architecture, column), tests in self.cells.items():
            recorded.setdefault(architecture, {})[column] = sorted(set(tests))
        write_recording(self.file, recorded, not_run)


class FormatRecorder(Recorder):
    """Plugin that selects the tests with `format_cells` and writes their cells."""

    fixture = "format_cells"

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.formats: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        if report.when == "call" and report.passed and FORMAT_CELLS in item.stash:
            name, cells = item.stash[FORMAT_CELLS]
            self.formats[name] = cells
        return report

    def pytest_sessionfinish(self) -> None:
        recorded = read_formats(self.file) if self.file.exists() else {}
        write_formats(self.file, recorded | self.formats)
