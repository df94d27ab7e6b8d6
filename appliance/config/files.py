"""Suggestions for names of files and folders that do not exist."""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from appliance.config.aliases import flat
from appliance.config.fix import Hint, Move, Write
from appliance.config.suggest import scalar
from engine.api.files import is_path

MOST_SHOWN = 5
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Repository name on the Hugging Face hub, ORG/NAME."""
MOST_READ = 2000  # maximum number of folder entries examined


def suggest_checkpoint(given: str, folder: Path) -> Hint:
    """Return a suggestion for model.source.path.

    This is a repository of the hub if the text looks like one and no such path exists, else a folder from
    `suggest_file`.
    """
    if HUB_ID.fullmatch(given) and not (folder / Path(given).parts[0]).exists() and not Path(given).exists():
        repository = f"{{repo: {scalar(given)}}}"
        text = f"for the repository of the Hugging Face hub write source: {{huggingface: {repository}}}"
        return Hint(text, Move(("model", "source", "huggingface"), repository))
    return suggest_file(given, folder, holds="config.json")


def suggest_file(given: str, folder: Path, *, holds: str = "") -> Hint:
    """Return a suggestion for a path that is relative to `folder` or absolute, in the same form.

    `holds` is a file that the folder must contain, such as config.json. Only names of files are read.
    """
    if not is_path(folder / given):
        return Hint()
    path = folder / given
    if given.startswith("~"):
        return _write("~ is not expanded", os.path.expanduser(given), certain=Path(given).expanduser().exists())
    if path.exists():
        return _inside(given, path, holds) if holds and not (path / holds).exists() else Hint()
    if not Path(given).is_absolute() and (there := Path.cwd() / given).exists():
        written = os.path.relpath(there, folder)
        return _write(f"it exists below the current folder, but relative paths start at {folder}", written)
    return _near(given, folder)


def _near(given: str, folder: Path) -> Hint:
    """Find the first missing part of the path, and suggest similar names in the same folder."""
    before, parts = Path(), Path(given).parts
    for index, part in enumerate(parts):
        if (folder / before / part).exists():
            before = before / part
            continue
        names = _names(folder / before)
        rest = Path(*parts[index + 1 :])
        fitting = [name for name in _like(part, names) if (folder / before / name / rest).exists()]
        if fitting:
            return _mean(str(before / fitting[0] / rest), certain=len(fitting) == 1)
        where = folder / before
        if close := _like(part, names):
            return _mean(str(before / close[0]), certain=False)
        return Hint(_listed(where, names))
    return Hint()


def _inside(given: str, path: Path, holds: str) -> Hint:
    """Return a suggestion for a folder that lacks the required file: one or two levels below, or one above."""
    if path.is_file():
        return _mean(str(Path(given).parent)) if (path.parent / holds).exists() else Hint()
    deeper = [name for name in _deeper(path) if (path / name / holds).exists()]
    if len(deeper) == 1:
        return _mean(str(Path(given) / deeper[0]))
    if deeper:
        return Hint(f"{holds} is in {', '.join(deeper[:MOST_SHOWN])} below it")
    if (path.parent / holds).exists():
        return _mean(str(Path(given).parent))
    return Hint()


def _deeper(path: Path) -> Iterator[str]:
    """Yield subfolders, including the snapshots of a Hugging Face cache."""
    for name in _names(path):
        if (path / name).is_dir():
            yield name
            if name == "snapshots":
                yield from (f"{name}/{inner}" for inner in _names(path / name))


def _like(part: str, names: list[str]) -> list[str]:
    """Return similar names; different spellings of the same name come first."""
    same = [name for name in names if flat(name) == flat(part)]
    if same:
        return same
    lowered = {name.lower(): name for name in names}
    stems = [name for name in names if Path(name).stem == Path(part).stem and Path(name).stem != part]
    close = difflib.get_close_matches(part.lower(), lowered, 3, 0.7)
    return [*stems, *(lowered[name] for name in close if lowered[name] not in stems)]


def _names(folder: Path) -> list[str]:
    """Return the sorted names in a folder, without hidden ones; an unreadable folder has none."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry, _ in zip(entries, range(MOST_READ), strict=False)]
    except OSError:
        return []
    return sorted(name for name in found if not name.startswith("."))


def _listed(folder: Path, names: list[str]) -> str:
    if not names:
        return f"{folder} has no files" if folder.is_dir() else ""
    if folder == folder.parent:
        return ""  # other names in the root directory are not helpful
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"{folder} has {', '.join(names[:MOST_SHOWN])}{more}"


def _mean(text: str, certain: bool = True) -> Hint:
    return Hint(f"did you mean {text}?", Write(scalar(text)), certain)


def _write(why: str, text: str, certain: bool = True) -> Hint:
    return Hint(f"{why}: write {text}", Write(scalar(text)), certain)
