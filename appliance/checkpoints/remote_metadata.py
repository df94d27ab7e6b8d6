"""Metadata of a remote checkpoint for a plan: its small files, which are downloaded, and the headers of its weights,
which are read as byte ranges. They form a folder that can be read like the checkpoint: each weight file has its header
and its size there, but no data (a sparse file takes no space)."""

import contextlib
import struct
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.download_spec import DownloadSpec, Job
from appliance.checkpoints.facts import Facts, NotDownloaded
from appliance.checkpoints.fetch import CONNECTIONS, check_space, fetch, with_retries
from appliance.checkpoints.progress import Progress, format_bytes, format_duration
from appliance.checkpoints.remote import WEIGHTS, Listing, PackedStore, Policy, RemoteFile, SourceError, Store

FIRST_READ = 1 << 16
GIGABIT = 125e6  # bytes per second
MAX_HEADER_BYTES = 100 * 10**6  # the limit of the format


@dataclass(frozen=True)
class Resolved:
    """A resolved version of a checkpoint. `stale` says why the cache was used without asking the server."""

    store: Store
    listing: Listing
    stale: str = ""

    @property
    def cache_directory(self) -> CacheDirectory:
        return self.store.cache_directory(self.listing)


def resolve(spec: DownloadSpec, policy: Policy, environ: Mapping[str, str]) -> Resolved:
    """Resolve the version of the checkpoint: from the server, or from the cache if that is sufficient or the only
    source. Raise SourceError."""
    try:
        store = spec.store(environ)
    except OSError as error:
        raise SourceError(f"model.credentials: cannot read the file: {error.strerror}") from error
    known = store.known()
    complete = known is not None and is_complete(store, known)
    if known is not None and complete and known.fixed:
        return Resolved(store, known)
    if policy.offline and spec.kind != "archive":
        if known is not None and complete:
            return Resolved(store, known, "offline")
        what = "is not in the cache" if known is None else "is only partly in the cache"
        hint = "first run `slipway fetch MANIFEST` with network access and the same cache"
        raise SourceError(f"{store.shown}: {what} ({spec.cache}), and downloads are disabled; {hint}")
    try:
        return Resolved(store, with_retries(policy, store.listing))
    except SourceError as error:
        if known is None or not complete or not error.transient:
            raise
        return Resolved(store, known, f"the cached version is used: {error}")


def is_complete(store: Store, listing: Listing) -> bool:
    if isinstance(store, PackedStore):
        return store.folder(listing).is_dir()
    return all(map(store.cache_directory(listing).has, listing.files))


@contextlib.contextmanager
def remote_facts(found: DownloadSpec, policy: Policy, environ: Mapping[str, str]) -> Iterator[Facts]:
    """Yield the metadata of a remote checkpoint; see `metadata.facts`."""
    resolved = resolve(found, policy, environ)
    store, listing = resolved.store, resolved.listing
    shown, note = f"{store.shown}@{listing.revision[:12]}", f"; {resolved.stale}" if resolved.stale else ""
    version = "" if found.revision == listing.revision else f"{_version_name(found)}{note}"
    if is_complete(store, listing):
        folder = store.folder(listing) if isinstance(store, PackedStore) else resolved.cache_directory.folder
        yield Facts(folder, folder, store.name, shown, listing.revision, f"in {folder}{note}", version)
        return
    missing = [file for file in listing.files if not resolved.cache_directory.has(file)]
    if isinstance(store, PackedStore) or any(file.name.endswith(".gguf") for file in missing):
        kind = store.form if isinstance(store, PackedStore) else "a GGUF file"
        size = f" of {_estimate(listing.bytes, listing.bytes, policy)}" if listing.bytes else ""
        hint = "run `slipway fetch MANIFEST` or `slipway serve`"
        done = "unpacked" if found.kind == "archive" else "downloaded"
        raise NotDownloaded(f"{store.shown}: {kind}{size}; its metadata is unknown until it is {done}: {hint}")
    with contextlib.ExitStack() as stack:
        folder = resolved.cache_directory.folder
        try:
            check_space(resolved.cache_directory, missing, policy)
            known = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-facts-")))
            _download_metadata(known, store, listing, policy)
        except OSError as error:
            raise SourceError(f"{folder}: cannot be written: {error.strerror or error}") from error
        left = sum((file.size or 0) - resolved.cache_directory.cached_bytes(file) for file in listing.files)
        note = f"{_estimate(left, listing.bytes, policy)} to be downloaded into {folder}{note}"
        job = Job(spec=found, listing=listing, policy=policy)
        yield Facts(known, folder, store.name, shown, listing.revision, note, version, job)


def _version_name(spec: DownloadSpec) -> str:
    return f"the commit of {spec.revision}" if spec.kind == "huggingface" else "the current version"


def _estimate(left: int, total: int, policy: Policy) -> str:
    """Return for example `3.1 of 15.2 GB (25 s at 1 Gbit/s; at least 1.2 MB/s for model.download.total_timeout)`."""
    size = format_bytes(total) if left == total else format_bytes(left, total)
    least = f"at least {format_bytes(left / policy.total_s)}/s for model.download.total_timeout"
    return f"{size} ({format_duration(left / GIGABIT)} at 1 Gbit/s; {least})"


def _download_metadata(folder: Path, store: Store, listing: Listing, policy: Policy) -> None:
    """Download the small files into the cache, and put links to them and the headers of weights into `folder`."""
    cache_directory = store.cache_directory(listing)
    small = tuple(file for file in listing.files if not file.name.endswith(WEIGHTS))
    part = Listing(listing.revision, small, listing.fixed)
    fetch(store, part, cache_directory, policy, Progress(part.bytes))
    for file in listing.files:
        if cache_directory.has(file):
            place = folder / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to((cache_directory.folder / file.name).resolve())
    without_header = [
        file for file in listing.files if not cache_directory.has(file) and file.name.endswith(".safetensors")
    ]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        done = [
            pool.submit(with_retries, policy, lambda file=file: _read_header(folder, store, file))
            for file in without_header
        ]
        for future in done:
            future.result()


def _read_header(folder: Path, store: Store, file: RemoteFile) -> None:
    first = _read_range(store, file, 0, FIRST_READ)
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise SourceError(f"{store.shown}: {file.name} is not a safetensors file")
    if 8 + length > len(first):
        first += _read_range(store, file, len(first), 8 + length)
    place = folder / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as out:
        out.write(first[: 8 + length])
        out.truncate(file.size if file.size is not None else 8 + length)


def _read_range(store: Store, file: RemoteFile, start: int, stop: int) -> bytes:
    stop = stop if file.size is None else min(stop, file.size)
    data = b"".join(store.stream(file, start, stop))
    if len(data) < stop - start:
        raise SourceError(f"{store.shown}: {file.name} ended at byte {start + len(data):,}", transient=True)
    return data
