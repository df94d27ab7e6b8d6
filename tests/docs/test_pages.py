"""Generated pages match the code that they are generated from, and the links of all pages have existing targets."""

import re
import runpy
from pathlib import Path

import pytest

from appliance.config.keys import keys
from appliance.server.admin.docs import router as docs_router
from appliance.server.app import ROUTES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_page_of_models_is_what_the_families_declare():
    page = runpy.run_path(str(ROOT / "tools" / "models_page.py"))["models_page"]()
    assert (ROOT / "docs" / "models.md").read_text() == page, "run python tools/models_page.py"


def test_page_of_tested_models_is_what_was_recorded():
    tool = runpy.run_path(str(ROOT / "tools" / "tested_models_page.py"))
    page = tool["tested_models_page"]()
    assert (ROOT / "docs" / "tested-models.md").read_text() == page, "run python -m tools.tested_models_page"


def test_every_cell_of_tested_models_is_recorded_or_has_one_reason():
    tool = runpy.run_path(str(ROOT / "tools" / "tested_models_page.py"))
    assert tool["problems"](tool["read_recording"](), tool["read_not_run"]()) == []


def test_tested_models_name_tests_that_exist():
    tool = runpy.run_path(str(ROOT / "tools" / "tested_models_page.py"))
    nodes = {test for columns in tool["read_recording"]().values() for found in columns.values() for test in found}
    names = {tuple(node.partition("[")[0].split("::")) for node in nodes}
    assert names and not [one for one in names if f"def {one[1]}(" not in (ROOT / one[0]).read_text()]


def test_page_of_quantization_formats_is_what_was_recorded():
    tool = runpy.run_path(str(ROOT / "tools" / "quantization_page.py"))
    page = tool["quantization_page"]()
    assert (ROOT / "docs" / "quantization-formats.md").read_text() == page, "run python -m tools.quantization_page"


def test_every_format_of_the_tests_is_recorded():
    from tests.engine.layers.test_format_cells import ROWS

    recorded = runpy.run_path(str(ROOT / "tools" / "quantization_page.py"))["read_formats"]()
    assert {*recorded} == {*ROWS}
    test = "tests/engine/layers/test_format_cells.py::test_format_is_served_by_every_executor"
    assert {cells["test"] for cells in recorded.values()} == {f"{test}[{name}]" for name in ROWS}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda cells: cells["AfmoeForCausalLM"].pop("loads"), "AfmoeForCausalLM, loads: is not recorded"),
        (lambda cells: cells.update(Gone={"loads": []}), "Gone is recorded, but not served"),
        (
            lambda cells: cells.setdefault("BertModel", {}).update(preempted=[]),
            "BertModel, preempted: is recorded, but EMPTY",
        ),
    ],
)
def test_disagreements_of_recording_and_families_are_reported(change, found):
    tool = runpy.run_path(str(ROOT / "tools" / "tested_models_page.py"))
    cells = tool["read_recording"]()
    change(cells)
    (problem,) = tool["problems"](cells, tool["read_not_run"]())
    assert problem.startswith(found)


def test_the_page_of_formats_is_what_they_declare():
    page = runpy.run_path(str(ROOT / "tools" / "formats_page.py"))["formats_page"]()
    assert (ROOT / "docs" / "formats.md").read_text() == page, "run python tools/formats_page.py"


def test_the_page_of_what_goes_together_is_what_the_rules_declare():
    page = runpy.run_path(str(ROOT / "tools" / "compatibility_page.py"))["compatibility_page"]()
    assert (ROOT / "docs" / "compatibility.md").read_text() == page, "run python tools/compatibility_page.py"


def test_the_page_of_metrics_is_what_the_families_declare():
    page = runpy.run_path(str(ROOT / "tools" / "metrics_page.py"))["metrics_page"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == page, "run python tools/metrics_page.py"


def test_the_page_of_alerts_is_what_they_declare():
    page = runpy.run_path(str(ROOT / "tools" / "alerts_page.py"))["alerts_page"]()
    assert (ROOT / "docs" / "alerts.md").read_text() == page, "run python tools/alerts_page.py"


def test_the_page_of_migration_is_what_the_tables_declare():
    page = runpy.run_path(str(ROOT / "tools" / "migration_page.py"))["migration_page"]()
    assert (ROOT / "docs" / "migration.md").read_text() == page, "run python tools/migration_page.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


SOURCES = [path for name in ("appliance", "engine", "tests", "tools") for path in sorted((ROOT / name).rglob("*.py"))]


def test_sources_cite_pages_that_exist():
    cited = {(path, page) for path in SOURCES for page in re.findall(r"[\w./-]+\.md\b", path.read_text())}
    assert len(cited) > 10
    assert not [
        f"{path.relative_to(ROOT)} cites {page}"
        for path, page in cited
        if not any((folder / page).is_file() for folder in (ROOT, ROOT / "docs"))
    ]


def _ids(text: str) -> list[str]:
    return [found for found in re.findall(r"\b(?:[A-Z]{2,3}-\d\d|H-\d+)\b", text) if not found.startswith("UTF")]


def test_the_page_of_http_lists_exactly_the_checks_that_tests_name():
    page = (ROOT / "docs" / "http.md").read_text()
    listed = re.findall(r"^\| ([A-Z]+-\d+) \|", page, re.MULTILINE)
    folders = [ROOT / "tests" / name for name in ("appliance", "engine", "e2e")]
    named = {found for path in SOURCES if set(path.parents) & set(folders) for found in _ids(path.read_text())}
    assert len(named) > 100, "the ids in the tests were not found"
    assert len(listed) == len(set(listed)), "an id is on the page twice"
    assert sorted(listed) == sorted(named)


def test_the_page_of_http_lists_exactly_the_routes():
    page = (ROOT / "docs" / "http.md").read_text()
    table = page[page.index("## Routes") : page.index("## Headers")]
    listed = re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", table)
    served = [
        f"{method} {route.path}"
        for router in (*(router for _, router in ROUTES), docs_router)
        for route in router.routes
        for method in getattr(route, "methods", ("GET",))  # a WebSocket begins with a GET
    ]
    assert len(served) > 15
    assert sorted({line for line in listed if "`HEAD`" not in line}) == sorted(served)


def test_manifest_keys_on_the_page_of_http_exist():
    page = (ROOT / "docs" / "http.md").read_text()
    known = {".".join(key.path) for key in keys().values()}
    sections = "|".join(sorted({name.partition(".")[0] for name in known}))
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)", page)
    assert len(named) > 10
    assert not set(named) - known


def test_every_top_level_folder_is_on_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in ("appliance", "engine", "kernels", "manifests", "docker", "benchmarks", "tools", "tests"):
        assert (ROOT / name).is_dir() and f"{name}/" in page
