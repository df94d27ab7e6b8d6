"""Archives from a web server and in the file system: unpacked where they belong, and nowhere else."""

import errno
import hashlib
import json
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed_archives import FILES, special, tar, zipped
from source_servers import Files

from appliance.checkpoints.archive import Archive, LocalArchive
from appliance.checkpoints.download import download_checkpoint
from appliance.checkpoints.download_spec import DownloadSpec
from appliance.checkpoints.members import MAX_HEADER
from appliance.checkpoints.remote import Policy, SourceError
from appliance.checkpoints.remote_metadata import is_complete
from appliance.config.problems import Refused
from appliance.config.settings import Given
from appliance.hardware.described import hardware
from appliance.planning.validate import download_missing, validate

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


def as_bundle(layers: list[bytes], kind: str = "tar") -> bytes:
    """The archive of an OCI image layout with these layers."""
    blobs: dict[str, bytes] = {}

    def descriptor(data: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    listed = [descriptor(data, f"application/vnd.oci.image.layer.v1.{kind}") for data in layers]
    manifest = descriptor(json.dumps({"layers": listed}).encode(), "application/vnd.oci.image.manifest.v1+json")
    top = {"oci-layout": b"{}", "index.json": json.dumps({"manifests": [manifest]}).encode()}
    return tar({**top, **blobs}, "w:")


def commented(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.pax_headers = {"comment": "x" * size}
    return member


IN_BUNDLE = {"slipway-bundle.json": b"{}", "manifest.yaml": b"", "model/config.json": b"{}"}
LOCAL = {
    "m.tar.gz": tar({f"checkpoint/{name}": content for name, content in FILES.items()}),
    "m.tar": tar(FILES, "w:"),
    "m.zip": zipped(FILES),
    "m.bundle.tar": tar(IN_BUNDLE, "w:"),
    "m.oci.tar": as_bundle([tar(IN_BUNDLE, "w:")]),
}


def local(path: Path) -> DownloadSpec:
    return DownloadSpec(kind="archive", what=str(path), cache=str(path.parent / "cache"))


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_archive_is_unpacked_once_and_again_when_it_changes(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LOCAL[name])
    folder = download_checkpoint(local(tmp_path / name), Policy(offline=True), {}, lambda _: None)
    assert (folder / "config.json").read_bytes() == b"{}" and (tmp_path / name).exists()
    assert local(tmp_path / name).store({}).name == "m"
    (folder / "seen").touch()
    assert (
        download_checkpoint(local(tmp_path / name), QUICK, {}, lambda _: None) == folder and (folder / "seen").exists()
    )
    os.utime(tmp_path / name, ns=(1, 1))
    assert download_checkpoint(local(tmp_path / name), QUICK, {}, lambda _: None) != folder


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("m.tar.gz", b"\x1f\x8bnothing", "m.tar.gz: is damaged"),
        ("m.zip", b"PK", "m.zip: is damaged"),
        ("m.oci.tar", tar({"a": b""}, "w:"), "index.json: is not in the archive"),
        ("m.oci.tar", as_bundle([b""], "tar+gzip"), "has a compressed layer"),
        ("m.oci.tar", as_bundle([tar({"../x": b""}, "w:")]), "points outside the folder"),
        ("m.oci.tar", as_bundle([]), "m.oci.tar: has no layer"),
        ("m.tar", as_bundle([b""]), "is an OCI image; its name must end with .oci.tar"),
        ("m.oci.tar", tar({"index.json": b'{"manifests": 5}'}, "w:"), r"index.json: Expected `array`, got `int`"),
        (
            "m.oci.tar",
            tar({"": special("index.json", tarfile.SYMTYPE, "index.json")}, "w:"),
            "index.json: is not a file",
        ),
        ("m.oci.tar", tar({"": commented("x", MAX_HEADER)}, "w:"), "has headers of more than 65.5 kB in one piece"),
    ],
)
def test_a_damaged_local_archive_is_refused(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=words):
        download_checkpoint(local(tmp_path / name), QUICK, {}, lambda _: None)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_local_archive_beyond_the_limit_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.tar").write_bytes(tar(FILES, "w:"))
    store = LocalArchive(tmp_path / "m.tar", tmp_path / "cache", max_size=10)
    with pytest.raises(
        SourceError, match=r"more than 10 bytes \(the limit of local archives; unpack it yourself, and set"
    ):
        store.unpack(store.listing())


def test_a_manifest_may_name_an_archive(tmp_path: Path, checkpoint_files: dict[str, bytes]) -> None:
    (tmp_path / "demo.tar").write_bytes(tar({f"demo/{name}": data for name, data in checkpoint_files.items()}, "w:"))
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel: {source: {path: demo.tar}, download: {min_free: 1}}\n")
    given = Given(path, (), {"HOME": str(tmp_path)})
    with pytest.raises(Refused, match=r"demo.tar: an archive; .* unknown until it is unpacked: run `slipway fetch"):
        validate(given, hardware("epyc:2:8GiB"))
    folder = download_missing(given)
    plan = validate(given, hardware("epyc:2:8GiB"))
    assert plan.engines[0].model.path == str(folder) and plan.gateway.names == ("demo",)
