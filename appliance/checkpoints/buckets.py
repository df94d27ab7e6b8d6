"""Folders of buckets, for all kinds of stores. The listing is cached, for starts without a network; the cache folder is
named by a hash of the listing."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.remote import Listing, RemoteFile, SourceError, select


@dataclass(frozen=True)
class Folder:
    """A folder of a bucket."""

    bucket: str
    prefix: str  # has no slash at either end
    cache: Path
    stall_s: float = 60.0

    scheme = ""  # scheme of the folder's URI

    @property
    def shown(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2] or self.bucket

    @property
    def start(self) -> str:
        """Return the common prefix of the keys of its objects."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def _home(self) -> Path:
        return self.cache / self.bucket / (self.prefix.replace("/", "--") or "-")

    def known(self) -> Listing | None:
        try:
            return msgspec.json.decode((self._home / "listing.json").read_bytes(), type=Listing)
        except (OSError, msgspec.DecodeError):
            return None

    def cache_directory(self, listing: Listing) -> CacheDirectory:
        return CacheDirectory(self._home / listing.revision, self._home / ".lock")

    def build_listing(self, objects: Iterable[tuple[str, int, str]]) -> Listing:
        """Build the listing from key, size and version of each object, and store it in the cache. Raise SourceError."""
        found = [RemoteFile(key.removeprefix(self.start), size, version) for key, size, version in objects]
        try:
            files = select([file for file in found if file.name and not file.name.endswith("/")], ())
        except SourceError as error:
            raise SourceError(f"{self.shown}: {error}") from error
        listing = Listing(digest(files)[:40], files)
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            (self._home / "listing.json").write_bytes(msgspec.json.encode(listing))
        except OSError as error:
            hint = "set model.download.cache to a writable folder"
            raise SourceError(f"{self._home}: cannot be written: {error.strerror}; {hint}") from error
        return listing


def digest(files: tuple[RemoteFile, ...]) -> str:
    """Return a hash of names, sizes and versions of the files."""
    lines = "\n".join(f"{file.name}\t{file.size}\t{file.version}" for file in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(lines.encode()).hexdigest()
