"""Hooks of mkdocs: pages and files outside docs/ that the documentation site contains.

CONTRIBUTING.md, CHANGELOG.md and SECURITY.md become pages. Other files to which pages link, such as manifests, are
copied below files/. Links to folders lead to nothing on the site, so they become text.
"""

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOP = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top folder and the linked files."""
    from mkdocs.structure.files import File  # only the environment of the site has it

    for name in TOP:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    linked = {target for path in pages() for target in outside(path) if (ROOT / target).is_file() and target not in TOP}
    for target in sorted(linked):
        files.append(File.generated(config, f"files/{target}", content=(ROOT / target).read_bytes()))
    return files


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in TOP)]


def outside(page: Path) -> list[str]:
    """Return the linked files that are not in docs/, by their path from the top folder."""
    targets = (target for _, target, _ in LINK.findall(page.read_text()) if "://" not in target)
    found = (posixpath.normpath((page.parent.relative_to(ROOT) / target).as_posix()) for target in targets)
    return [target for target in found if not target.startswith("docs/")]


@cache
def title(path: str) -> str:
    """Return the first heading of a page, which the site shows where a link has the name of its file."""
    found = re.search(r"^# (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    return posixpath.basename(path) if found is None else found[1]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links that leave docs/ by links to the copies."""
    return rewritten(markdown, "" if page.file.src_uri in TOP else "docs")


def rewritten(markdown: str, folder: str) -> str:
    """Return the text of a page of this folder with the links that it has on the site."""

    def replace(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if words == posixpath.basename(target) and words.endswith(".md") and path != "README.md":
            words = title(path)
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{anchor})"
        if path in TOP or path == "README.md":
            return f"[{words}]({'index.md' if path == 'README.md' else path}{anchor})"
        return f"[{words}](files/{path}{anchor})" if (ROOT / path).is_file() else words

    return LINK.sub(replace, markdown)
