"""Changes of weight files on disk, each as an operator's tools make them."""

import os
import shutil
from pathlib import Path

import pytest

from engine.models.changes import PAGE, Change, WeightFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a checkpoint has it: two shards, a small one, and files without weights."""
    for name, size in (("a.safetensors", 100 * PAGE), ("b.safetensors", 100 * PAGE + 17), ("c.gguf", 100)):
        (tmp_path / name).write_bytes(os.urandom(size))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def changes(files: WeightFiles) -> list[Change]:
    found = list(files.changes())
    assert list(files.changes()) == [], "each is told once"
    return found


def later(file: Path) -> None:
    """A modification time of its own, however coarse the file system counts."""
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("at", [0, 50 * PAGE, 100 * PAGE + 16])
def test_contents_overwritten_in_place_are_found(folder: Path, at: int) -> None:
    files = WeightFiles(folder)
    file = folder / "b.safetensors"
    with file.open("r+b") as opened:  # all of it from there on, as cp and rsync --inplace write
        opened.seek(at)
        opened.write(bytes(file.stat().st_size - at))
    later(file)
    (change,) = changes(files)
    assert change.file == file and change.overwritten and "overwritten in place" in change.what


def test_another_size_is_found(folder: Path) -> None:
    files = WeightFiles(folder)
    os.truncate(folder / "a.safetensors", 7)
    (change,) = changes(files)
    assert change.overwritten and "from 409,600 to 7 bytes" in change.what


def test_a_touched_or_replaced_file_is_told_and_does_no_harm(folder: Path) -> None:
    files = WeightFiles(folder)
    later(folder / "a.safetensors")
    shutil.copy(folder / "b.safetensors", folder / "new")
    (folder / "new").replace(folder / "c.gguf")
    touched, replaced = changes(files)
    assert not touched.overwritten and "same contents" in touched.what
    assert not replaced.overwritten and "replaced" in replaced.what


def test_other_files_and_removed_ones_are_no_change(folder: Path) -> None:
    files = WeightFiles(folder)
    later(folder / "config.json")
    (folder / "a.safetensors").unlink()
    assert changes(files) == []


def test_one_file_is_a_checkpoint(folder: Path) -> None:
    files = WeightFiles(folder / "c.gguf")
    (folder / "c.gguf").write_bytes(bytes(100))
    later(folder / "c.gguf")
    (change,) = changes(files)
    assert change.file == folder / "c.gguf" and change.overwritten


def test_links_of_a_cache_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")
    (snapshot / "model.safetensors").symlink_to(folder / "a.safetensors")
    files = WeightFiles(snapshot)
    (folder / "a.safetensors").write_bytes(bytes(100 * PAGE))
    later(folder / "a.safetensors")
    (change,) = changes(files)
    assert change.file == folder / "a.safetensors"
