"""The documentation site: its navigation has every page, links and anchors exist, and messages on pages are in the
code. `make docs` builds it strictly."""

import re
from pathlib import Path

import pytest
import yaml

from tools.choose_page import choose_page
from tools.pictures import ALL
from tools.site_hooks import TOP, outside, pages, rewritten

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Loader that reads tags of mkdocs as text."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def navigated(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in navigated(value)]


def test_the_navigation_has_every_page_once():
    found = navigated(SETTINGS["nav"])
    assert sorted(found) == sorted({*(path.name for path in DOCS.glob("*.md")), *TOP})


def slug(title: str) -> str:
    """The anchor of a heading on the site and on GitHub."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.replace("`", "")).lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip())


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: page.name)
def test_anchors_of_links_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", page.read_text()):
        path = (page.parent / target) if target else page
        assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_links_that_leave_the_folder_lead_to_pages_and_copies():
    text = "[a](../CONTRIBUTING.md#x) [b](../manifests/demo.yaml) [c](http.md) [d](https://e.org) [f](../manifests)"
    assert rewritten(text, "docs") == (
        "[a](CONTRIBUTING.md#x) [b](files/manifests/demo.yaml) [c](http.md) [d](https://e.org) f"
    )


def test_links_with_the_name_of_a_file_have_the_title_of_its_page():
    text = "[migration.md](migration.md#sources) [operations.md](operations.md) [this](migration.md)"
    assert rewritten(text, "docs") == (
        "[Migration from other servers](migration.md#sources) [Operating Slipway](operations.md) [this](migration.md)"
    )
    assert rewritten("[a](docs/bench.md) [b](LICENSE)", "") == "[a](bench.md) [b](files/LICENSE)"
    assert "manifests/demo.yaml" in outside(DOCS / "choose.md")


def test_log_lines_of_the_handbook_are_in_the_code():
    page = (DOCS / "handbook.md").read_text()
    tables = page[page.index("## Log lines") : page.index("## Routine")]
    messages = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
    assert len(messages) > 15
    joined = "".join(path.read_text() for path in (ROOT / "appliance").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*"', "", joined)
    assert [message for message in messages if message not in source] == []


def test_metrics_of_the_handbook_exist():
    named = set(re.findall(r"`(slipway_\w+)`", (DOCS / "handbook.md").read_text()))
    assert named and all(f"`{name}`" in (DOCS / "metrics.md").read_text() for name in named)


def test_the_page_of_choices_is_what_the_manifests_say():
    assert (DOCS / "choose.md").read_text() == choose_page(), "run python -m tools.choose_page"


@pytest.mark.parametrize("name", ALL)
def test_a_picture_is_what_the_tool_draws(name):
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == ALL[name](), "run python -m tools.pictures"


def test_pictures_are_small_and_used():
    text = "".join(path.read_text() for path in (*pages(), ROOT / "README.md"))
    for path in (DOCS / "pictures").iterdir():
        assert path.stat().st_size < 60_000 and f"pictures/{path.name}" in text, path.name
