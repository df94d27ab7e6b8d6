"""Ownership of shared memory to remove, with files in a folder in place of /dev/shm."""

import mmap
import os

import pytest

from appliance.supervisor.shm_cleanup import SharedMemoryCleaner


@pytest.fixture
def mapped(tmp_path):
    """Makes a file in the folder and maps it here, as a rank would; gives what lets go of it."""
    maps = []

    def make(name):
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 4096))
        return maps[-1].close

    yield make
    for each in maps:
        each.close()


def cleaner(folder):
    return SharedMemoryCleaner(lambda: [os.getpid()], str(folder))


def test_mapped_file_is_kept(tmp_path, mapped):
    watched = cleaner(tmp_path)
    mapped("nccl-a")
    watched.scan()
    assert watched.remove() == []


def test_file_without_users_is_removed(tmp_path, mapped):
    watched = cleaner(tmp_path)
    close = mapped("nccl-a")
    watched.scan()
    close()
    assert watched.remove() == [str(tmp_path / "nccl-a")] and not (tmp_path / "nccl-a").exists()


def test_file_that_is_open_is_kept(tmp_path, mapped):
    watched = cleaner(tmp_path)
    close = mapped("a")
    watched.scan()
    close()
    with (tmp_path / "a").open():
        assert watched.remove() == []


def test_earlier_and_unmapped_files_are_kept(tmp_path, mapped):
    before = mapped("model.safetensors")
    watched = cleaner(tmp_path)
    (tmp_path / "another's").touch()
    watched.scan()
    before()
    assert watched.remove() == [] and len(list(tmp_path.iterdir())) == 2


def test_replaced_file_with_the_same_name_is_kept(tmp_path, mapped):
    watched = cleaner(tmp_path)
    close = mapped("a")
    watched.scan()
    close()
    (tmp_path / "b").touch()
    (tmp_path / "b").rename(tmp_path / "a")
    assert watched.remove() == [] and (tmp_path / "a").exists()


def test_files_in_subfolders_are_kept(tmp_path, mapped):
    (tmp_path / "slipway").mkdir()
    watched = cleaner(tmp_path)
    close = mapped("slipway/weights")
    watched.scan()
    close()
    assert watched.remove() == []


def test_file_mapped_after_its_creation_is_removed(tmp_path, mapped):
    watched = cleaner(tmp_path)
    (tmp_path / "a").write_bytes(bytes(4096))
    watched.scan()
    close = mapped("a")
    watched.scan()
    close()
    assert watched.remove() == [str(tmp_path / "a")]
