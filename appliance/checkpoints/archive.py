"""Checkpoint in an archive: a local file, or a file on a web server. A remote archive is downloaded completely while
its SHA-256 is computed, unpacked next to its final folder and renamed. The contents are unknown before."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.remote import Listing, RemoteFile, RestartFile, SourceError
from appliance.checkpoints.unpack import unpack

if TYPE_CHECKING:
    from appliance.checkpoints.web import HttpClient

MAX_SIZE = 2**40  # bytes of the unpacked files of a local archive
ACCESS_HINT = "declare the server's bearer token in `secrets` and set model.credentials to it"


@dataclass(frozen=True)
class Archive:
    """An archive at a URL."""

    url: str  # address of the archive
    sha256: str
    max_size: int
    cache: Path
    """Folder of all archives. The subfolder of one is named by its SHA-256 if that is given, else by a hash of address,
    version (entity tag, else modification time) and size."""
    token: str = field(default="", repr=False)
    stall_s: float = 60.0

    @property
    def shown(self) -> str:
        return self.url.partition("?")[0]

    @property
    def name(self) -> str:
        file = urlsplit(self.url).path.rpartition("/")[2]
        return _stem(file)

    @property
    def form(self) -> str:
        return "an archive"

    def expected(self) -> int:
        return 0  # the server reports the size at the start of the download, or never

    @property
    def _list_file(self) -> Path:
        return self.cache / f"{_digest(self.url)}.json"

    def known(self) -> Listing | None:
        try:
            listing = msgspec.json.decode(self._list_file.read_bytes(), type=Listing)
        except (OSError, msgspec.DecodeError):
            listing = None
        if self.sha256 and (listing is None or listing.files[0].sha256 != self.sha256):
            # the cached copy may come from another address, or from the image
            listing = Listing(self.sha256, (RemoteFile(self._file_name, None, "", self.sha256),))
            return listing if self.folder(listing).is_dir() else None
        return None if listing is None else msgspec.structs.replace(listing, fixed=bool(self.sha256))

    @property
    def _file_name(self) -> str:
        return urlsplit(self.url).path.rpartition("/")[2]

    def listing(self) -> Listing:
        head = self._web.head(self.url)
        file = RemoteFile(self._file_name, head.size, head.version, self.sha256)
        revision = self.sha256 or _digest(f"{self.url}\n{head.version}\n{head.size}")
        listing = Listing(revision, (file,), fixed=bool(self.sha256))
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            self._list_file.write_bytes(msgspec.json.encode(listing))
        except OSError as error:
            hint = "set model.download.cache to a writable folder"
            raise SourceError(f"{self.cache}: cannot be written: {error.strerror}; {hint}") from error
        return listing

    def cache_directory(self, listing: Listing) -> CacheDirectory:
        """Return the cache entry of the archive file. `folder` returns where its contents go."""
        folder = self.cache / listing.revision
        return CacheDirectory(folder.with_name(f"{folder.name}.archive"), folder.with_name(f"{folder.name}.lock"))

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        if start and not (file.version or file.sha256):
            raise RestartFile(f"{self.shown}: the server sends no version, so the download cannot be resumed")
        return self._web.stream(self.url, start, stop, file.version)

    def folder(self, listing: Listing) -> Path:
        return self.cache / listing.revision

    def unpack(self, listing: Listing, min_free: int = 0) -> None:
        """Unpack the downloaded archive and move its files into place. `min_free` bytes of the disk stay free.

        Raise SourceError if the archive is invalid or the disk cannot be written.
        """
        cache_directory = self.cache_directory(listing)
        archive = cache_directory.folder / listing.files[0].name
        limit = "model.source.http.max_size"
        _unpack_into(archive, self.folder(listing), cache_directory, self.max_size, min_free, limit)

    @cached_property
    def _web(self) -> "HttpClient":
        from appliance.checkpoints.web import HttpClient

        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return HttpClient(stall_s=self.stall_s, headers=headers, hint=ACCESS_HINT)


@dataclass(frozen=True)
class LocalArchive:
    """An archive in the file system. It is unpacked into the cache without a copy of it. The folder is named by a hash
    of its path, size and modification time."""

    path: Path
    cache: Path
    max_size: int = MAX_SIZE

    @property
    def shown(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return _stem(self.path.name)

    @property
    def form(self) -> str:
        return "an archive"

    def expected(self) -> int:
        return 0

    def known(self) -> Listing:
        return self.listing()

    def listing(self) -> Listing:
        try:
            about = self.path.stat()
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read: {error.strerror}") from error
        revision = _digest(f"{self.path}\n{about.st_size}\n{about.st_mtime_ns}")
        return Listing(revision, (), fixed=True)

    def cache_directory(self, listing: Listing) -> CacheDirectory:
        folder = self.cache / listing.revision
        return CacheDirectory(folder.with_name(f"{folder.name}.archive"), folder.with_name(f"{folder.name}.lock"))

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        """Yield nothing: `unpack` reads the archive."""
        return iter(())

    def folder(self, listing: Listing) -> Path:
        return self.cache / listing.revision

    def unpack(self, listing: Listing, min_free: int = 0) -> None:
        """Unpack the archive. `min_free` bytes of the disk stay free. Raise SourceError."""
        limit = "the limit of local archives; unpack it yourself, and set model.source.path to the folder"
        _unpack_into(self.path, self.folder(listing), self.cache_directory(listing), self.max_size, min_free, limit)


def _unpack_into(
    archive: Path, final: Path, cache_directory: CacheDirectory, max_size: int, min_free: int, limit: str
) -> None:
    """Unpack the archive, move its files into place and remove a downloaded archive. Raise SourceError."""
    with cache_directory.lock(lambda: None):
        working = final.with_name(f"{final.name}.unpacking")
        shutil.rmtree(working, ignore_errors=True)
        try:
            if not final.is_dir():
                os.replace(unpack(archive, working, max_size, min_free, limit=limit), final)
        except OSError as error:  # the archive is kept, so that the next start continues here when there is space
            raise SourceError(f"{working}: cannot be written: {error.strerror or error}") from error
        except SourceError:
            shutil.rmtree(cache_directory.folder, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(working, ignore_errors=True)
        shutil.rmtree(cache_directory.folder, ignore_errors=True)


def _stem(name: str) -> str:
    plain = name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz").removesuffix(".zip")
    return plain.removesuffix(".bundle").removesuffix(".oci")  # suffixes of `slipway bundle`


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
