"""Command line of the tools that write pages of docs/."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_pages(description: str | None, pages: Mapping[str, Callable[[], str]]) -> None:
    """Parse the command line and write each page. pages: file names with functions that return the text."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder that receives the page (default: docs)")
    folder = parser.parse_args().out
    for name, render in pages.items():
        (folder / name).write_text(render())
        print(f"written to {folder / name}")
