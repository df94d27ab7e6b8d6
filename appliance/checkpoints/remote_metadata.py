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

from appliance.checkpoints.cache_directory import Shelf
from appliance.checkpoints.download_spec import Job, Order
from appliance.checkpoints.facts import Facts, NotHere
from appliance.checkpoints.fetch import CONNECTIONS, check_space, fetch, tried
from appliance.checkpoints.progress import Progress, spell, spell_time
from appliance.checkpoints.remote import WEIGHTS, Listing, PackedStore, Policy, RemoteFile, SourceError, Store

FIRST_READ = 1 << 16
GIGABIT = 125e6  # bytes per second
LONGEST_HEADER = 100 * 10**6  # the limit of the format


@dataclass(frozen=True)
class Resolved:
    """A resolved version of a checkpoint. `stale` says why the cache was used without asking the server."""

    store: Store
    listing: Listing
    stale: str = ""

    @property
    def shelf(self) -> Shelf:
        return self.store.shelf(self.listing)


def resolve(order: Order, policy: Policy, environ: Mapping[str, str]) -> Resolved:
    """Resolve the version of the checkpoint: from the server, or from the cache if that is sufficient or the only
    source. Raise SourceError."""
    try:
        store = order.store(environ)
    except OSError as error:
        raise SourceError(f"model.credentials: cannot be read: {error.strerror}") from error
    known = store.known()
    whole = known is not None and is_whole(store, known)
    if known is not None and whole and known.fixed:
        return Resolved(store, known)
    if policy.offline:
        if known is not None and whole:
            return Resolved(store, known, "offline")
        what = "is not in the cache" if known is None else "is in the cache only in part"
        cure = "download it first with `slipway fetch MANIFEST`, where there is a network, into the same cache"
        raise SourceError(f"{store.shown}: {what} ({order.cache}), and downloads are switched off; {cure}")
    try:
        return Resolved(store, tried(policy, store.listing))
    except SourceError as error:
        if known is None or not whole or not error.transient:
            raise
        return Resolved(store, known, f"as cached: {error}")


def is_whole(store: Store, listing: Listing) -> bool:
    if isinstance(store, PackedStore):
        return store.folder(listing).is_dir()
    return all(map(store.shelf(listing).has, listing.files))


@contextlib.contextmanager
def facts_from_afar(found: Order, policy: Policy, environ: Mapping[str, str]) -> Iterator[Facts]:
    """Yield the metadata of a remote checkpoint; see `metadata.facts`."""
    resolved = resolve(found, policy, environ)
    store, listing = resolved.store, resolved.listing
    shown, note = f"{store.shown}@{listing.revision[:12]}", f"; {resolved.stale}" if resolved.stale else ""
    version = "" if found.revision == listing.revision else f"{_what(found)}{note}"
    if is_whole(store, listing):
        folder = store.folder(listing) if isinstance(store, PackedStore) else resolved.shelf.folder
        yield Facts(folder, folder, store.name, shown, listing.revision, f"in {folder}{note}", version)
        return
    missing = [file for file in listing.files if not resolved.shelf.has(file)]
    if isinstance(store, PackedStore) or any(file.name.endswith(".gguf") for file in missing):
        kind = store.form if isinstance(store, PackedStore) else "a GGUF file"
        size = f" of {_estimate(listing.bytes, listing.bytes, policy)}" if listing.bytes else ""
        cure = "`slipway fetch MANIFEST` downloads it, and so does `slipway serve`"
        raise NotHere(f"{store.shown}: {kind}{size}; nothing can be known of it before it is in the cache: {cure}")
    with contextlib.ExitStack() as stack:
        folder = resolved.shelf.folder
        try:
            check_space(resolved.shelf, missing, policy)
            known = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-facts-")))
            _fill(known, store, listing, policy)
        except OSError as error:
            raise SourceError(f"{folder}: cannot be written: {error.strerror or error}") from error
        left = sum((file.size or 0) - resolved.shelf.kept(file) for file in listing.files)
        note = f"{_estimate(left, listing.bytes, policy)} to be downloaded into {folder}{note}"
        job = Job(order=found, listing=listing, policy=policy)
        yield Facts(known, folder, store.name, shown, listing.revision, note, version, job)


def _what(order: Order) -> str:
    return f"the commit of {order.revision}" if order.kind == "huggingface" else "what is there now"


def _estimate(left: int, of: int, policy: Policy) -> str:
    """Return for example `3.1 of 15.2 GB (25 s at 1 Gbit/s; at least 1.2 MB/s for model.download.total_timeout)`."""
    size = spell(of) if left == of else spell(left, of)
    least = f"at least {spell(left / policy.total_s)}/s for model.download.total_timeout"
    return f"{size} ({spell_time(left / GIGABIT)} at 1 Gbit/s; {least})"


def _fill(folder: Path, store: Store, listing: Listing, policy: Policy) -> None:
    """Download the small files into the cache, and put links to them and the headers of weights into `folder`."""
    shelf = store.shelf(listing)
    small = tuple(file for file in listing.files if not file.name.endswith(WEIGHTS))
    part = Listing(listing.revision, small, listing.fixed)
    fetch(store, part, shelf, policy, Progress(part.bytes))
    for file in listing.files:
        if shelf.has(file):
            place = folder / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to((shelf.folder / file.name).resolve())
    headless = [file for file in listing.files if not shelf.has(file) and file.name.endswith(".safetensors")]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        done = [pool.submit(tried, policy, lambda file=file: _header(folder, store, file)) for file in headless]
        for future in done:
            future.result()


def _header(folder: Path, store: Store, file: RemoteFile) -> None:
    first = _range(store, file, 0, FIRST_READ)
    length = struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else 0
    if not 2 <= length <= LONGEST_HEADER:
        raise SourceError(f"{store.shown}: {file.name} is no safetensors file")
    if 8 + length > len(first):
        first += _range(store, file, len(first), 8 + length)
    place = folder / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as out:
        out.write(first[: 8 + length])
        out.truncate(file.size if file.size is not None else 8 + length)


def _range(store: Store, file: RemoteFile, start: int, stop: int) -> bytes:
    stop = stop if file.size is None else min(stop, file.size)
    data = b"".join(store.stream(file, start, stop))
    if len(data) < stop - start:
        raise SourceError(f"{store.shown}: {file.name} ended at byte {start + len(data):,}", transient=True)
    return data
