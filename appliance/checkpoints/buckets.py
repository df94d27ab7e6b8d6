"""A folder of a bucket, whatever its store: a listing that is kept for a start without the network, and a folder of the
cache that is named by the content of the listing."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from appliance.checkpoints.cache_directory import Shelf
from appliance.checkpoints.remote import Listing, RemoteFile, SourceError, select


@dataclass(frozen=True)
class Folder:
    """`prefix` has no slash at either end. `scheme` begins the folder's URI."""

    bucket: str
    prefix: str
    cache: Path
    stall_s: float = 60.0

    scheme = ""

    @property
    def shown(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2] or self.bucket

    @property
    def start(self) -> str:
        """What the keys of all its objects begin with."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def _home(self) -> Path:
        return self.cache / self.bucket / (self.prefix.replace("/", "--") or "-")

    def known(self) -> Listing | None:
        try:
            return msgspec.json.decode((self._home / "listing.json").read_bytes(), type=Listing)
        except (OSError, msgspec.DecodeError):
            return None

    def shelf(self, listing: Listing) -> Shelf:
        return Shelf(self._home / listing.revision, self._home / ".lock")

    def listed(self, objects: Iterable[tuple[str, int, str]]) -> Listing:
        """The listing of its objects, each with key, size and version, which is kept. Raises SourceError."""
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
            cure = "name a folder of your own in model.download.cache"
            raise SourceError(f"{self._home}: cannot be written: {error.strerror}; {cure}") from error
        return listing


def digest(files: tuple[RemoteFile, ...]) -> str:
    """Changes with the name, size or version of any file."""
    lines = "\n".join(f"{file.name}\t{file.size}\t{file.version}" for file in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(lines.encode()).hexdigest()
