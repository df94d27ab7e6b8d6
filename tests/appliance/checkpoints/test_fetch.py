"""Downloads from a server with typical faults: it cuts off, stalls, ignores ranges, refuses, changes or corrupts
files."""

import hashlib
import multiprocessing
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from source_servers import Files

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.progress import Progress
from appliance.checkpoints.remote import Listing, Policy, RemoteFile, SourceError, select
from appliance.checkpoints.web import HttpClient

DATA = random.Random(5).randbytes(300_007)
QUICK = Policy(stall_s=0.3, attempts=3, total_s=20.0, min_free=1, pause_s=0.01)


@dataclass
class Plain:
    """A store of files below an address."""

    web: HttpClient
    url: str
    shown: str = "plain"
    name: str = "plain"

    def stream(self, file, start, stop=None):
        return self.web.stream(f"{self.url}/{file.name}", start, stop, file.version)


def listing(**files: bytes) -> Listing:
    return Listing("r", tuple(RemoteFile(n, len(d), "", hashlib.sha256(d).hexdigest()) for n, d in files.items()))


def fetched(server: Files, folder: Path, wanted: Listing, policy: Policy = QUICK, token: str = "") -> CacheDirectory:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    cache_directory = CacheDirectory(folder / "r", folder / "lock")
    store = Plain(HttpClient(stall_s=policy.stall_s, headers=headers, hint="give a token"), server.url)
    fetch(store, wanted, cache_directory, policy, Progress(wanted.bytes))
    return cache_directory


@pytest.fixture
def web(server: Callable[[], Files]) -> Files:
    found = server()
    found.files["/a"] = DATA
    return found


FAULTS: dict[str, list[object]] = {
    "none": [],
    "cut off": [("cut", 100_000)],
    "cut off three times": [("cut", 100_000), ("cut", 7), ("cut", 100_000)],
    "cut off before its first byte": [("cut", 0), ("cut", 0)],
    "stalled": [("stall", 70_000)],
    "busy": [503, 429],
    "no ranges when resumed": [("cut", 100_000), "whole", "whole"],
    "a wrong range when resumed": [("cut", 100_000), ("wrong range", 5)],
    "redirected": [("redirect", "/a")],
}


@pytest.mark.parametrize("name", FAULTS)
def test_file_is_complete_despite_server_faults(name: str, web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = list(FAULTS[name])
    cache_directory = fetched(web, tmp_path, listing(a=DATA))
    assert (cache_directory.folder / "a").read_bytes() == DATA
    assert not web.faults["/a"] and sorted(path.name for path in cache_directory.folder.iterdir()) == ["a"]


@pytest.mark.parametrize("name", ["a wrong range when resumed", "no ranges when resumed", "cut off three times"])
def test_file_is_complete_without_a_checksum(name: str, web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = list(FAULTS[name])
    cache_directory = fetched(web, tmp_path, Listing("r", (RemoteFile("a", len(DATA)),)))
    assert (cache_directory.folder / "a").read_bytes() == DATA


@pytest.mark.parametrize(
    ("size", "words"), [(len(DATA) + 1, "failed after 3 attempts: .* no byte 300,007"), (7, "more than")]
)
def test_file_of_unexpected_size_is_never_published(size: int, words: str, web: Files, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=words):
        fetched(web, tmp_path, Listing("r", (RemoteFile("a", size),)))
    assert not (tmp_path / "r" / "a").exists() and len(web.gets("/a")) <= 6


def test_retry_resumes_at_the_last_received_byte(web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = [("cut", 100_000), ("cut", 50_000)]
    fetched(web, tmp_path, listing(a=DATA))
    assert web.gets("/a") == ["", "bytes=100000-", "bytes=150000-"]


def test_download_resumes_the_data_of_an_earlier_process(web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = [("cut", 100_000), *[403] * 9]
    with pytest.raises(SourceError, match="403"):
        fetched(web, tmp_path, listing(a=DATA))
    assert (tmp_path / "r" / "a.part").read_bytes() == DATA[:100_000] and not (tmp_path / "r" / "a").exists()
    web.faults["/a"] = []
    fetched(web, tmp_path, listing(a=DATA))
    assert web.gets("/a")[-1] == "bytes=100000-" and (tmp_path / "r" / "a").read_bytes() == DATA


def test_part_of_another_version_is_discarded(web: Files, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.part").write_bytes(b"x" * 100_000)
    cache_directory = fetched(web, tmp_path, listing(a=DATA))
    assert (cache_directory.folder / "a").read_bytes() == DATA and web.gets("/a") == ["bytes=100000-", ""]


@pytest.mark.parametrize("left", [len(DATA), len(DATA) + 1])
def test_complete_part_is_used_and_oversized_part_is_not(left: int, web: Files, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "a.part").write_bytes((DATA + b"x")[:left])
    cache_directory = fetched(web, tmp_path, listing(a=DATA))
    assert (cache_directory.folder / "a").read_bytes() == DATA
    assert web.gets("/a") == ([] if left == len(DATA) else [""])


def test_a_wrong_checksum_is_refused_at_once_and_leaves_no_file(web: Files, tmp_path: Path) -> None:
    wanted = Listing("r", (RemoteFile("a", len(DATA), "", hashlib.sha256(b"other").hexdigest()),))
    with pytest.raises(SourceError, match=f"a: has SHA-256 {hashlib.sha256(DATA).hexdigest()}, but .* is expected"):
        fetched(web, tmp_path, wanted)
    assert len(web.gets("/a")) == 1 and not any((tmp_path / "r").iterdir())


@pytest.mark.parametrize(
    ("status", "words"), [(401, "give a token"), (403, "give a token"), (404, "the file does not exist")]
)
def test_permanent_failures_are_not_retried(status: int, words: str, web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = [status] * 9
    with pytest.raises(SourceError, match=words):
        fetched(web, tmp_path, listing(a=DATA))
    assert len(web.gets("/a")) == 1


def test_attempts_without_progress_are_counted(web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = [500] * 9
    with pytest.raises(SourceError, match="a: failed after 3 attempts: .*500"):
        fetched(web, tmp_path, listing(a=DATA))
    assert len(web.gets("/a")) == 3


def test_attempts_with_progress_are_not_counted(web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = [("cut", 10_000)] * 9
    assert (fetched(web, tmp_path, listing(a=DATA)).folder / "a").read_bytes() == DATA
    assert len(web.gets("/a")) == 10


def test_a_silent_connection_ends_its_attempt_after_the_stall_timeout(web: Files, tmp_path: Path) -> None:
    web.faults["/a"] = [("stall", 0)] * 9
    with pytest.raises(SourceError, match=r"failed after 3 attempts: .*no data for 0\.3 s"):
        fetched(web, tmp_path, listing(a=DATA))


def test_total_timeout_ends_the_download(web: Files, tmp_path: Path) -> None:
    web.slow_s = 0.2
    with pytest.raises(SourceError, match=r"not complete after 0\.5 s; raise model.download.total_timeout"):
        fetched(web, tmp_path, listing(a=DATA), Policy(stall_s=5.0, total_s=0.5, min_free=1))
    assert 0 < (tmp_path / "r" / "a.part").stat().st_size < len(DATA)


def test_download_is_refused_without_disk_space(web: Files, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"free, but 300\.0 kB must be downloaded and .*model.download.min_free"):
        fetched(web, tmp_path, listing(a=DATA), Policy(min_free=2**60))
    assert not web.seen


def test_a_failed_file_stops_the_other_downloads_and_is_reported(web: Files, tmp_path: Path) -> None:
    web.files["/b"] = DATA * 40
    web.slow_s, web.faults["/c"] = 0.01, [404]
    with pytest.raises(SourceError, match="c: the server answered 404"):
        fetched(web, tmp_path, listing(b=DATA * 40, c=b"c"))
    assert web.sent.get("/b", 0) < len(DATA) * 40


def test_redirect_to_another_host_does_not_send_the_token(server: Callable[[], Files], tmp_path: Path) -> None:
    front, back = server(), server()
    front.token, back.files["/x"] = "hunter2", DATA
    front.files["/a"], front.faults["/a"] = DATA, [("redirect", f"{back.url.replace('127.0.0.1', 'localhost')}/x")]
    cache_directory = fetched(front, tmp_path, listing(a=DATA), token="hunter2")
    assert (cache_directory.folder / "a").read_bytes() == DATA
    assert back.authorizations == [None] and front.authorizations == ["Bearer hunter2"]


def _in_a_process(url: str, folder: str) -> None:
    wanted = listing(a=DATA)
    cache_directory = CacheDirectory(Path(folder) / "r", Path(folder) / "lock")
    fetch(
        Plain(HttpClient(stall_s=9.0, headers={}, hint=""), url),
        wanted,
        cache_directory,
        Policy(min_free=1),
        Progress(wanted.bytes),
    )


def test_one_of_several_processes_downloads_and_the_others_wait(web: Files, tmp_path: Path) -> None:
    web.slow_s = 0.05
    context = multiprocessing.get_context("spawn")
    found = [context.Process(target=_in_a_process, args=(web.url, str(tmp_path))) for _ in range(3)]
    for process in found:
        process.start()
    for process in found:
        process.join(100)
    assert [process.exitcode for process in found] == [0, 0, 0]
    assert (tmp_path / "r" / "a").read_bytes() == DATA and web.gets("/a") == [""]


def test_a_process_that_waits_for_another_reports_its_progress(web: Files, tmp_path: Path) -> None:
    cache_directory, wanted = CacheDirectory(tmp_path / "r", tmp_path / "lock"), listing(a=DATA)
    progress, texts = Progress(wanted.bytes), []
    cache_directory.folder.mkdir()
    cache_directory.part(wanted.files[0]).write_bytes(DATA[:150_000])
    store = Plain(HttpClient(stall_s=9.0, headers={}, hint=""), web.url)
    with cache_directory.lock(lambda: None):
        thread = threading.Thread(target=fetch, args=(store, wanted, cache_directory, QUICK, progress))
        thread.start()
        while not progress.waiting or not progress.done:
            threading.Event().wait(0.01)
        texts.append(progress.text())
    thread.join()
    assert (
        texts == ["150.0 of 300.0 kB, downloaded by another process"]
        and (cache_directory.folder / "a").read_bytes() == DATA
    )


def test_progress_has_rate_and_remaining_time() -> None:
    now = [0.0]
    progress = Progress(15_200_000_000, clock=lambda: now[0])
    for _ in range(20):
        now[0] += 1.0
        progress.add("a", 100_000_000)
    progress.put("b", 1_100_000_000)  # was here already: no part of the rate
    assert progress.text() == "3.1 of 15.2 GB, 100.0 MB/s, 2 min left"
    assert progress.fraction == pytest.approx(3.1 / 15.2)


def files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1) for name in names]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("config.json", "model.safetensors", "pytorch_model.bin", "README.md"), "config.json model.safetensors"),
        (("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
          "consolidated.safetensors", "original/model.safetensors"),
         "model.safetensors.index.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors"),
        (("config.json", "x-Q4_0.gguf"), "config.json x-Q4_0.gguf"),
        (("slipway_model.py", "tokenizer.json", "model.safetensors"),
         "slipway_model.py tokenizer.json model.safetensors"),
    ],
)  # fmt: skip
def test_one_form_of_the_weights_and_the_small_files_are_selected(names: tuple[str, ...], chosen: str) -> None:
    assert [file.name for file in select(files(*names), ())] == chosen.split()


def test_patterns_select_files_and_unsafe_names_are_refused() -> None:
    assert [file.name for file in select(files("a.json", "b/c.json", "d"), ("b/*",))] == ["b/c.json"]
    with pytest.raises(SourceError, match=r"no file matches \*.gguf; found: a.json"):
        select(files("a.json"), ("*.gguf",))
    with pytest.raises(SourceError, match="no weights"):
        select(files("config.json", "pytorch_model.bin"), ())
    for name in ("../x", "/x", "a/../../x", "a//b", ""):
        with pytest.raises(SourceError, match="not a path inside the folder"):
            select(files("model.safetensors", name), ())
