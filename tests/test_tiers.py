"""Tests of the tiers: every nightly test is covered by a test that `make test` runs."""

import ast
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests import same_examples, tiers
from tests.tiers import NIGHTLY, mark_tiers, paired, thinned

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def nightly_calls(source: str) -> Iterator[ast.Call]:
    """Yield the calls of pytest.mark.nightly(…)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "nightly":
            yield node


def covering(source: str) -> Iterator[str]:
    """Yield the tests that the nightly markers of a file name, as PATH::TEST."""
    for call in nightly_calls(source):
        assert len(call.args) == 1 and isinstance(call.args[0], ast.Constant), ast.unparse(call)
        yield call.args[0].value


def always_nightly(source: str, name: str) -> bool:
    """Return whether a decorator marks all cases of a test. Raise LookupError if there is no such test."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return any(ast.unparse(one).startswith("pytest.mark.nightly") for one in node.decorator_list)
    raise LookupError(name)


# Tests that start processes, compute models or kernels, or need the whole tree.
NOT_UNIT = (
    *(
        "appliance/bench",
        "appliance/bundle",
        "appliance/chat_templates",
        "appliance/checkpoints",
        "appliance/constraints",
        "appliance/evaluation",
        "appliance/media",
        "appliance/lockfile",
        "appliance/planned_engines",
    ),
    *("appliance/runtime", "appliance/server", "appliance/server/http", "appliance/server/reply_store"),
    *(
        "appliance/supervisor",
        "benchmarks",
        "benchmarks/kernels",
        "contracts",
        "docker",
        "docs",
        "e2e",
        "engine",
        "engine/core",
    ),
    *(
        "engine/distributed",
        "engine/layers",
        "engine/media",
        "engine/sampling",
        "engine/weights",
        "engine/worker",
        "kernels",
    ),
    *("manifests", "packaging", "tools", "test_hangs.py", "test_repeat.py", "test_rewrite.py"),
)

USES = {
    path: names
    for path in sorted(TESTS.rglob("test_*.py"))
    if path != Path(__file__) and "mark.nightly(" in (text := path.read_text()) and (names := list(covering(text)))
}


def test_there_are_nightly_tests():
    assert USES


@pytest.mark.parametrize("path", USES, ids=lambda path: str(path.relative_to(TESTS)))
def test_nightly_marker_names_a_test_that_make_test_runs(path):
    for name in USES[path]:
        file, _, test = name.partition("::")
        assert file.startswith("tests/") and test, f"{name}: write tests/PATH.py::test_name"
        assert not always_nightly((ROOT / file).read_text(), test), f"{name} is nightly itself"


def test_reading_finds_the_markers_of_a_file():
    source = "@pytest.mark.nightly('tests/a.py::test_b')\ndef test_c(): pass\n\ndef test_d(): pass\n"
    assert list(covering(source)) == ["tests/a.py::test_b"]
    assert always_nightly(source, "test_c") and not always_nightly(source, "test_d")
    with pytest.raises(LookupError):
        always_nightly(source, "test_e")


def test_thinned_marks_the_cases_that_are_not_kept():
    found = thinned([1, 2, 3], kept=[2])
    assert [one.values for one in found] == [(1,), (2,), (3,)]
    assert [list(one.marks) for one in found] == [[NIGHTLY], [], [NIGHTLY]]


@pytest.mark.parametrize("kept", [[4], [], [1, 2, 3]])
def test_thinned_rejects_unknown_cases_and_none_and_all(kept):
    with pytest.raises(ValueError, match="cases"):
        thinned([1, 2, 3], kept)


def test_paired_keeps_each_case_with_one_of_the_others_in_turn():
    found = paired("abc", [1, 2])
    assert [one.values for one in found] == [(case, other) for case in "abc" for other in (1, 2)]
    assert [one.values for one in found if not one.marks] == [("a", 1), ("b", 2), ("c", 1)]
    assert [list(one.marks) for one in found if one.marks] == [[NIGHTLY]] * 3


def test_paired_rejects_parameters_with_marks():
    for cases, others in (([pytest.param("a")], [1]), (["a"], [pytest.param(1)])):
        with pytest.raises(ValueError, match="no marks"):
            paired(cases, others)


class Item:
    """The attributes of a pytest.Item that `mark_tiers` uses."""

    path = Path(__file__)

    def __init__(self, nodeid: str, every: int = 0) -> None:
        self.nodeid, self.marks = nodeid, [pytest.mark.sampled(every).mark] if every else []
        self.added: list[object] = []
        self.add_marker = self.added.append

    def get_closest_marker(self, name: str) -> object:
        return next((mark for mark in self.marks if mark.name == name), None)


def test_of_sampled_cases_every_nth_one_is_kept_and_always_the_first():
    items = [Item(f"t.py::test_{name}[{case}]", 3) for name in "ab" for case in range(4)]
    mark_tiers([*items, plain := Item("t.py::test_c")])  # type: ignore[list-item]
    assert [item.added for item in items] == [[], [NIGHTLY], [NIGHTLY], []] * 2 and plain.added == []


def test_of_models_with_the_portable_instruction_set_every_fifth_is_kept(monkeypatch):
    monkeypatch.setattr(tiers, "LAST", frozenset(["base"]))
    items = []
    for folder in (tiers.MODELS, ROOT / "tests" / "kernels"):
        for case in range(6):
            for kernels in ("avx2", "base"):
                items.append(item := Item(f"t.py::test_{folder.name}[{case}-{kernels}]"))
                item.path, item.callspec = folder / "test_a.py", SimpleNamespace(id=f"{case}-{kernels}")
    mark_tiers(items)
    nightly = [item.nodeid for item in items if item.added]
    assert nightly == [f"t.py::test_engine[{case}-base]" for case in range(1, 5)]


def test_examples_contain_constants_of_modules_only_with_a_profile_that_searches(monkeypatch):
    found = providers.Constants(integers={8_675_309})
    monkeypatch.setattr(same_examples, "collected", lambda: found)
    assert settings.get_current_profile_name() == "same" and not providers._get_local_constants()
    settings.load_profile("default")
    try:
        assert providers._get_local_constants() is found
    finally:
        settings.load_profile("same")


def units() -> list[str]:
    command = ["make", "--silent", "--eval", "units:; @echo $(UNIT)", "units"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def home(path: Path, places: Collection[str]) -> str:
    """Return the place nearest to a file: itself or the innermost folder."""
    return next((name for part in (path, *path.parents) if (name := str(part)) in places), "")


def test_every_test_file_is_a_unit_test_or_known_not_to_be_one():
    given = {one.removeprefix("tests/"): "unit" for one in units()}
    assert not given.keys() & set(NOT_UNIT)
    used = set()
    for path in TESTS.rglob("test_*.py"):
        inside = path.relative_to(TESTS)
        if inside.parts[0] != "clients":
            used.add(home(inside, given.keys() | set(NOT_UNIT)))
    assert used == given.keys() | set(NOT_UNIT)


def test_make_test_omits_variants_and_nightly_tests_and_make_test_all_nothing():
    rules = (ROOT / "Makefile").read_text()
    body = {name: rules.partition(f"\n{name}: ")[2].partition("\n\n")[0] for name in ("test", "pytest", "test-all")}
    assert body["test"].endswith("types pytest") and "$(VENV)/.test lint\n" in body["test"]
    assert body["pytest"].count('-m "not variants and not nightly"') == 1
    assert "-m" not in body["test-all"].partition("\n")[2]
