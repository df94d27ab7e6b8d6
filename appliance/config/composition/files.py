"""Reading of a manifest file and the files that it extends, merged into one tree.

    extends: base.yaml                 one file
    extends: [base.yaml, gpu.yaml]     several: a later file overrides an earlier one, and the file itself overrides all

Paths are relative to the folder of the file that contains them. Only environment variables can be interpolated in them,
because `variables` are known only after all files are read.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path as File

from appliance.config.composition.interpolate import Names, interpolate
from appliance.config.deprecated import rename
from appliance.config.files import suggest_file
from appliance.config.fix import Hint, Write
from appliance.config.keys import children
from appliance.config.merge import at, fault, merged, place_of, without, without_notes
from appliance.config.problems import Problem
from appliance.config.versions import Older, translate
from appliance.config.yaml_loader import Fault, Path, Place, Tree, read_yaml
from engine.api import files
from engine.api.files import real_path

MAX_FILES = 100


@dataclass
class Reading:
    """State of reading the files of one manifest."""

    environ: Mapping[str, str]
    count: int = 0  # files read so far, counting repetitions; limits the cost of files that are extended repeatedly
    files: list[File] = field(default_factory=list)
    notices: list[Problem] = field(default_factory=list)  # warnings about names in the files
    older: dict[str, Older] = field(default_factory=dict)  # files of an older version, by name


def read_file(reading: Reading, path: File, text: str = "") -> Tree:
    """Read a file and the files that it extends.

    Raise OSError if the file itself cannot be read. An unreadable base file is recorded as a fault at its name. If
    `text` is given, it replaces the content of the file.
    """
    return _read(reading, path, (), ((real_path(path), str(path)),), text)


def folder_of(source: str) -> File:
    """Return the folder for relative paths in a file. For a symbolic link this is the folder of its target."""
    path = File(source)
    real = real_path(path).parent
    return path.parent if real_path(path.parent) == real else real


def _is_manifest(own: Tree, data: bytes) -> bool:
    """Return whether messages may quote lines of a file named by another file: it has a manifest key, or is empty."""
    known = children(())
    if own.value:
        names = [str(name) for name in own.value][:MAX_FILES]
        return any(name in known or get_close_matches(name, known, 1, 0.8) for name in names)
    pattern = rf"""^\ufeff?["']?({"|".join(known)})["']?\s*:"""
    return not data.strip() or re.search(pattern, data.decode("utf-8", "replace"), re.MULTILINE) is not None


Chain = tuple[tuple[File, str], ...]


def _read(reading: Reading, path: File, via: tuple[Place, ...], chain: Chain, text: str = "") -> Tree:
    data = text.encode() if text else files.read_file(path, files.MANIFEST_BYTES)
    own = without_notes(read_yaml(data, str(path), via))
    reading.count += 1
    if path not in reading.files:
        reading.files.append(path)
    # A file without an apiVersion has the version of the first file.
    first = next(iter(reading.older.values()), None) if "apiVersion" not in own.value else None
    if version := translate(own, first):
        reading.older[str(path)] = version
        if "apiVersion" in own.value:
            reading.notices.append(version.warning(own))
    notices = rename(own)
    if reading.count > 1 and not _is_manifest(own, data):
        raise OSError(errno.EINVAL, "is not a manifest: it has no key of a manifest", str(path))
    reading.notices += notices
    bases = [base for name in _names(own, reading.environ) if (base := _base(reading, own, name, chain))]
    rest = without(own, ("extends",))
    rest.faults += [one for one in own.faults if one.path[:1] == ("extends",)]
    whole = merged(*bases, rest)
    for base in bases:
        whole.faults += _other_version(base, rest)
    return whole


def _names(own: Tree, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the path of each name in `extends` after interpolation. Faults are added to the tree."""
    if "extends" not in own.value:
        return
    if any(path[:1] == ("extends",) for path in own.dollars):
        if names := [text for path in own.dollars if path[:1] == ("extends",) and "${var." in (text := at(own, path))]:
            what = f"{names[0]}: variables cannot be used in extends"
            hint = "use an environment variable: ${NAME}"
            own.faults.append(fault(own, ("extends",), what, hint, "interpolation"))
            return
        done = interpolate(own, Names(environ, {}))
        own.faults += [one for one in done.faults[len(own.faults) :] if one.path[:1] == ("extends",)]
        own.value["extends"], own.interpolated = done.value["extends"], done.interpolated
    given = own.value["extends"]
    paths: list[Path] = [("extends", i) for i in range(len(given))] if isinstance(given, list) else [("extends",)]
    faulty = {one.path for one in own.faults}
    for path in paths:
        name = at(own, path)
        if path in faulty:
            continue
        if isinstance(name, str) and name:
            yield path
        else:
            own.faults.append(fault(own, path, "must be the path of a manifest, or a list of them", code="wrong-value"))


def _base(reading: Reading, own: Tree, path: Path, chain: Chain) -> Tree | None:
    """Return the tree of one base file, or None after a fault."""
    name, place = str(at(own, path)), place_of(own, path)
    target = joined(folder_of(place.source), name)
    real = real_path(target)
    known = [number for number, (file, _) in enumerate(chain) if file == real]
    if known:
        circle = " → ".join([*(text for _, text in chain[known[0] :]), str(target)])
        own.faults.append(Fault(path, place, f"{name}: a file cannot extend itself: {circle}", code="wrong-layer"))
        return None
    if reading.count >= MAX_FILES:
        what = f"{name}: more than {MAX_FILES} files are read for one manifest"
        own.faults.append(Fault(path, place, what, code="wrong-layer"))
        return None
    try:
        return _read(reading, target, (replace(place, via=()), *place.via), (*chain, (real, str(target))))
    except OSError as error:
        what, hint = unreadable(error, name, folder_of(place.source))
        fix = None if path in own.interpolated else hint.fix
        own.faults.append(Fault(path, place, f"{name}: {what}", (), hint.text, "unread", fix, hint.certain))
        return None


def joined(folder: File, name: str) -> File:
    """Return `folder/name` with `..` removed, if that is the same file."""
    path = folder / name
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] not in ("..", "/"):
            parts.pop()
        else:
            parts.append(part)
    short = File(*parts)
    return short if real_path(short) == real_path(path) else path


def unreadable(error: OSError, name: str, folder: File) -> tuple[str, Hint]:
    """Return the message for an unreadable file, and a suggestion. `name` is relative to `folder`."""
    if not isinstance(error, FileNotFoundError):
        return (error.strerror or str(error)).lower(), Hint()
    above, hint = joined(folder, name).parent, suggest_file(name, real_path(folder))
    if hint.fix is not None:
        return "no such file", hint
    return ("no such file", hint) if above.is_dir() else (f"no such file, nor the folder {above}", Hint())


def _other_version(base: Tree, own: Tree) -> Iterator[Fault]:
    """Yield a fault if two files of one manifest have different versions."""
    theirs, ours = base.value.get("apiVersion"), own.value.get("apiVersion")
    if isinstance(theirs, str) and isinstance(ours, str) and theirs != ours:
        path: Path = ("apiVersion",)
        at_place: Place = place_of(base, path)
        what, hint = f"{theirs}, but the file that extends this one has {ours}", f"write {ours} in both"
        yield Fault(path, at_place, what, (), hint, "wrong-layer", Write(ours), certain=False)
