"""What the stores of buckets share: a listing that is kept for a start without the network, and a folder of the cache
that is named by the content of the listing."""

import hashlib
from pathlib import Path

import msgspec

from appliance.source.remote import Listing, RemoteFile, SourceError, select
from appliance.source.shelf import Shelf


def digest(files: tuple[RemoteFile, ...]) -> str:
    """Changes with the name, size or version of any file."""
    lines = "\n".join(f"{file.name}\t{file.size}\t{file.version}" for file in sorted(files, key=lambda f: f.name))
    return hashlib.sha256(lines.encode()).hexdigest()


def listed(shown: str, home: Path, found: list[RemoteFile]) -> Listing:
    """The listing of what was found below a prefix, kept in `home`."""
    try:
        files = select(found, ())
    except SourceError as error:
        raise SourceError(f"{shown}: {error}") from error
    listing = Listing(digest(files)[:40], files)
    try:
        home.mkdir(parents=True, exist_ok=True)
        (home / "listing.json").write_bytes(msgspec.json.encode(listing))
    except OSError as error:
        cure = "name a folder of your own in model.download.cache"
        raise SourceError(f"{home}: cannot be written: {error.strerror}; {cure}") from error
    return listing


def kept(home: Path) -> Listing | None:
    try:
        return msgspec.json.decode((home / "listing.json").read_bytes(), type=Listing)
    except (OSError, msgspec.DecodeError):
        return None


def shelf(home: Path, listing: Listing) -> Shelf:
    return Shelf(home / listing.revision, home / ".lock")
