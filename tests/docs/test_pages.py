"""Pages that are made from code say what the code says, and links of all pages lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_page_of_models_is_what_the_families_declare():
    page = runpy.run_path(str(ROOT / "tools" / "models_page.py"))["models_page"]()
    assert (ROOT / "docs" / "models.md").read_text() == page, "run python tools/models_page.py"


def test_the_page_of_metrics_is_what_the_families_declare():
    page = runpy.run_path(str(ROOT / "tools" / "metrics_page.py"))["metrics_page"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == page, "run python tools/metrics_page.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_top_level_folder_is_on_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in ("appliance", "engine", "kernels", "manifests", "docker", "benchmarks", "tools", "tests"):
        assert (ROOT / name).is_dir() and f"{name}/" in page
