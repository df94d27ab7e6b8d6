"""Archives from a web server: unpacked where they belong, and nowhere else."""

import errno
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed_archives import FILES, tar
from source_servers import Files

from appliance.checkpoints.archive import Archive
from appliance.checkpoints.download import download_checkpoint
from appliance.checkpoints.download_spec import DownloadSpec
from appliance.checkpoints.remote import Policy, SourceError
from appliance.checkpoints.remote_metadata import is_complete

QUICK = Policy(stall_s=0.5, attempts=3, total_s=20.0, min_free=1, pause_s=0.01)
LIMIT = 10**8


def spec(server: Files, cache: Path, sha256: str = "") -> DownloadSpec:
    return DownloadSpec(
        kind="http", what=f"{server.url}/m.tar.gz", cache=str(cache), sha256=sha256, max_size=LIMIT, stall_s=0.5
    )


def test_archive_is_downloaded_verified_and_unpacked_once(server: Callable[[], Files], tmp_path: Path) -> None:
    web, data = server(), tar({f"checkpoint/{name}": content for name, content in FILES.items()})
    web.files["/m.tar.gz"] = data
    web.faults["/m.tar.gz"] = [("cut", 100)]
    wanted = spec(web, tmp_path, hashlib.sha256(data).hexdigest())
    folder = download_checkpoint(wanted, QUICK, {}, lambda _: None)
    assert folder == tmp_path / hashlib.sha256(data).hexdigest() and (folder / "config.json").read_bytes() == b"{}"
    assert web.gets("/m.tar.gz") == ["", "bytes=100-"]
    before = len(web.seen)
    assert download_checkpoint(wanted, QUICK, {}, lambda _: None) == folder and len(web.seen) == before
    assert {path.suffix for path in tmp_path.iterdir()} <= {"", ".json", ".lock"}


def test_an_archive_with_another_checksum_is_refused_before_it_is_unpacked(
    server: Callable[[], Files], tmp_path: Path
) -> None:
    web = server()
    web.files["/m.tar.gz"] = tar(FILES)
    with pytest.raises(SourceError, match="is expected"):
        download_checkpoint(spec(web, tmp_path, "0" * 64), QUICK, {}, lambda _: None)
    assert not (tmp_path / ("0" * 64)).exists()


def test_archive_without_a_checksum_is_checked_again_and_updated(server: Callable[[], Files], tmp_path: Path) -> None:
    web = server()
    web.files["/m.tar.gz"] = tar(FILES)
    first = download_checkpoint(spec(web, tmp_path), QUICK, {}, lambda _: None)
    assert (
        download_checkpoint(spec(web, tmp_path), QUICK, {}, lambda _: None) == first and len(web.gets("/m.tar.gz")) == 1
    )
    web.files["/m.tar.gz"] = tar({**FILES, "config.json": b"[]"})
    second = download_checkpoint(spec(web, tmp_path), QUICK, {}, lambda _: None)
    assert second != first and (second / "config.json").read_bytes() == b"[]"


def test_offline_uses_the_cache_only(server: Callable[[], Files], tmp_path: Path) -> None:
    web, offline = server(), Policy(offline=True)
    web.files["/m.tar.gz"] = tar(FILES)
    with pytest.raises(SourceError, match="is not in the cache .* downloads are disabled; .*slipway fetch"):
        download_checkpoint(spec(web, tmp_path), offline, {}, lambda _: None)
    folder = download_checkpoint(spec(web, tmp_path), QUICK, {}, lambda _: None)
    before = len(web.seen)
    assert download_checkpoint(spec(web, tmp_path), offline, {}, lambda _: None) == folder and len(web.seen) == before


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize(
    ("modified", "later", "gets"),
    [
        ("", "", ["", ""]),
        ("Sat, 21 Nov 2026 10:00:00 GMT", "Sat, 21 Nov 2026 10:00:00 GMT", ["", "bytes=100-"]),
        ("Sat, 21 Nov 2026 10:00:00 GMT", "Sat, 21 Nov 2026 10:00:09 GMT", ["", "bytes=100-", ""]),
    ],
)
def test_last_modified_allows_resuming_without_an_entity_tag(
    modified: str, later: str, gets: list[str], weak: bool, server: Callable[[], Files], tmp_path: Path
) -> None:
    web = server()
    web.files["/m.tar.gz"], web.modified = tar(FILES), modified
    web.tags, web.weak = weak, weak  # a weak one says nothing about bytes
    web.faults["/m.tar.gz"] = [("cut", 100)]
    told: list[str] = []

    def change(text: str) -> None:
        told.append(text)
        if "attempt 2 of 3 follows" in text:
            web.modified = later

    folder = download_checkpoint(spec(web, tmp_path), QUICK, {}, change)
    assert (folder / "config.json").read_bytes() == b"{}" and web.gets("/m.tar.gz") == gets
    assert any("m.tar.gz" in text and "attempt 2 of 3 follows" in text for text in told)


def test_a_process_that_waited_does_not_download_unpacked_files(
    server: Callable[[], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web, asked = server(), threading.Event()
    web.files["/m.tar.gz"] = tar(FILES)
    wanted = spec(web, tmp_path)

    def seen(*arguments: Any) -> bool:
        found = is_complete(*arguments)
        asked.set()
        return found

    monkeypatch.setattr("appliance.checkpoints.download.is_complete", seen)
    store = wanted.store({})
    assert isinstance(store, Archive)
    listing = store.listing()
    with store.cache_directory(listing).lock(lambda: None):
        waiting = threading.Thread(target=download_checkpoint, args=(wanted, QUICK, {}, lambda _: None))
        waiting.start()
        asked.wait(100)
        store.folder(listing).mkdir()
    waiting.join()
    assert not web.gets("/m.tar.gz") and not store.cache_directory(listing).folder.exists()


def test_full_disk_keeps_the_archive_without_partial_files(
    server: Callable[[], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = server()
    web.files["/m.tar.gz"] = tar(FILES)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("appliance.checkpoints.archive.os.replace", full)
        with pytest.raises(SourceError, match="cannot be written: No space left on device"):
            download_checkpoint(spec(web, tmp_path), QUICK, {}, lambda _: None)
    assert not any(path.is_dir() and not path.name.endswith(".archive") for path in tmp_path.iterdir())
    assert (download_checkpoint(spec(web, tmp_path), QUICK, {}, lambda _: None) / "config.json").exists()
    assert len(web.gets("/m.tar.gz")) == 1
