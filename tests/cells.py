"""Recording of the tested properties of each architecture, the cells of docs/tested-models.md.

A test with the fixture `shows` names columns for a checkpoint:

    shows(path, "chunked prefill", "prefix hit")

`pytest --record-cells FILE` runs these tests only, and writes their cells to FILE. Cells of architectures and columns
that do not run stay as they are, so that one family can be recorded again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.tested_models_page import COLUMNS, read_not_run, read_recording, write_recording

Shows = Callable[..., None]
CELLS = pytest.StashKey[list[tuple[str, str]]]()  # architecture and column


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


class Recorder:
    """Plugin that selects the tests with `shows` and writes their cells."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.cells: dict[tuple[str, str], list[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = [item for item in items if "shows" in getattr(item, "fixturenames", ())]
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
