"""Ownership of shared memory to remove, with files in a folder in place of /dev/shm."""

import mmap
import os

import pytest

from appliance.supervisor.shm_cleanup import Segments


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


def segments(folder):
    return Segments(lambda: [os.getpid()], str(folder))


def test_what_is_still_mapped_stays(tmp_path, mapped):
    watched = segments(tmp_path)
    mapped("nccl-a")
    watched.look()
    assert watched.remove() == []


def test_it_goes_when_its_last_user_has_gone(tmp_path, mapped):
    watched = segments(tmp_path)
    close = mapped("nccl-a")
    watched.look()
    close()
    assert watched.remove() == [str(tmp_path / "nccl-a")] and not (tmp_path / "nccl-a").exists()


def test_a_file_that_is_open_elsewhere_stays(tmp_path, mapped):
    watched = segments(tmp_path)
    close = mapped("a")
    watched.look()
    close()
    with (tmp_path / "a").open():
        assert watched.remove() == []


def test_what_was_there_before_or_was_never_mapped_stays(tmp_path, mapped):
    before = mapped("model.safetensors")
    watched = segments(tmp_path)
    (tmp_path / "another's").touch()
    watched.look()
    before()
    assert watched.remove() == [] and len(list(tmp_path.iterdir())) == 2


def test_a_name_that_was_taken_again_is_another_file(tmp_path, mapped):
    watched = segments(tmp_path)
    close = mapped("a")
    watched.look()
    close()
    (tmp_path / "b").touch()
    (tmp_path / "b").rename(tmp_path / "a")
    assert watched.remove() == [] and (tmp_path / "a").exists()


def test_files_of_folders_below_stay(tmp_path, mapped):
    (tmp_path / "slipway").mkdir()
    watched = segments(tmp_path)
    close = mapped("slipway/weights")
    watched.look()
    close()
    assert watched.remove() == []


def test_what_is_mapped_a_little_after_it_was_made_is_seen(tmp_path, mapped):
    watched = segments(tmp_path)
    (tmp_path / "a").write_bytes(bytes(4096))
    watched.look()
    close = mapped("a")
    watched.look()
    close()
    assert watched.remove() == [str(tmp_path / "a")]
