"""Commands in the shell blocks of the pages, for the tests that run them."""

import base64
import io
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted(path.name for path in ROOT.glob("*.md")),
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "bash")
_SERVICE = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1):[89]000")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block of a page."""
    for match in FENCE.finditer((ROOT / page).read_text()):
        yield match[2], match[3]


def commands(page: str) -> Iterator[str]:
    """The commands of the shell blocks of a page: lines, joined where one ends with a backslash or inside quotes."""
    for language, text in blocks(page):
        if language not in SHELL:
            continue
        joined = ""
        for line in text.splitlines():
            joined += line
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            try:
                words = shlex.split(joined, comments=True)
            except ValueError:  # an open quotation
                joined += "\n"
                continue
            if words:
                yield joined.strip()
            joined = ""
        assert not joined, f"{page}: {joined} does not end"


def at(command: str, url: str) -> str:
    """The command with the address of a running service."""
    return _SERVICE.sub(url, command)


def command_with(page: str, words: str) -> str:
    """The only command of a page with these words."""
    (command,) = (one for one in commands(page) if words in one)
    return command


def documented(page: str, words: str, url: str, replaced: Mapping[str, str] = {}, cwd: Path = ROOT) -> str:
    """Run the only command of a page with these words against a service. Return what it prints.

    Pictures that the page shortens are replaced by a small one."""
    command = command_with(page, words)
    for old, new in {"iVBORw0KGgo…": png(), **replaced}.items():
        command = command.replace(old, new)
    program, *arguments = shlex.split(at(command, url), comments=True)
    assert program == "curl", command
    done = subprocess.run(
        [program, "-fsS", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), f"{command}\n{done.stderr}"
    return done.stdout


def png() -> str:
    file = io.BytesIO()
    Image.new("RGB", (24, 24), (200, 30, 30)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()
