"""docs/platforms.md has each line of the platforms' contracts once, with tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/platforms.md").read_text()
ROWS = re.findall(r"^\| ((?:SM|MH|VX|AZ|KS|K8|DK|SV)-[^|]*) \| ([^|]*) \| (.*) \|$", PAGE, re.MULTILINE)
LINES = {
    "SM": (*range(1, 8), *range(10, 15), *range(20, 36), *range(40, 47)),
    "MH": (*range(1, 10), *range(20, 25), *range(30, 36), *range(40, 44)),
    "VX": range(1, 10),
    "AZ": range(1, 7),
    "KS": (1, 2, *range(10, 19), *range(20, 23)),
    "K8": range(1, 12),
    "DK": range(1, 10),
    "SV": range(1, 13),
}


def named(text: str) -> list[str]:
    """Return the lines that a first cell names, such as `SM-01, SM-05 to SM-07`."""
    found = []
    for first, last in re.findall(r"([A-Z][A-Z0-9]-\d\d)(?: to [A-Z][A-Z0-9]-(\d\d))?", text):
        group, number = first.split("-")
        found += [f"{group}-{each:02}" for each in range(int(number), int(last or number) + 1)]
    return found


def test_each_line_of_the_contracts_has_one_state() -> None:
    found = [line for cell, _, _ in ROWS for line in named(cell)]
    wanted = {f"{group}-{number:02}" for group, numbers in LINES.items() for number in numbers}
    assert sorted(found) == sorted(set(found)), "a line is listed twice"
    assert sorted(wanted - set(found)) == [] and sorted(set(found) - wanted) == []


def test_each_line_that_holds_names_what_shows_it() -> None:
    contracts = "".join(path.read_text() for path in (ROOT / "tests/contracts").glob("*.py"))
    for cell, state, shown in ROWS:
        files: list[str] = []
        for name in re.findall(r"[\w/]+\.(?:py|sh)\b", shown):  # without a folder: in the folder of the name before
            files.append(name if "/" in name else f"{files[-1].rpartition('/')[0]}/{name}" if files else name)
        tests = re.findall(r"\btest_(?:sm|mh|vx|az|ks|k8|dk|sv)_\d\d", shown)
        assert all((ROOT / file).is_file() for file in files), cell
        assert all(re.search(rf"def {test}|def test_\w*{test.removeprefix('test')}", contracts) for test in tests), cell
        assert state == "platform" or files or tests or "`" in shown, cell
        assert state in ("platform", "holds", "holds for adapters"), cell
