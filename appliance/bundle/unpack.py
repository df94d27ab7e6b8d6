"""Verification and unpacking of a bundle. Each file is compared with the digest in the index first."""

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.bundle.index import (
    INDEX,
    INDEX_BYTES,
    MANIFEST,
    MODEL,
    SIGNATURE,
    BundleError,
    Index,
    OptionError,
    decode,
)
from appliance.bundle.signature import verify
from appliance.checkpoints.digest import Digest
from appliance.checkpoints.oci import OciError, is_layout, open_layers

_BUFFER_BYTES = 4 * 2**20
_SIGNATURE_BYTES = 4096
FOLDERS = ("data", "data/journal", "data/crashes", "cache")
"""Folders that a manifest of a bundle may name, which `serve` expects to exist."""


def unpack(path: Path, folder: Path, key: Path | None = None) -> Index:
    """Verify a bundle and unpack it into a new folder. With `key` its signature is required. Raises BundleError and
    OSError; then the folder does not exist."""
    if folder.exists():
        raise OptionError(f"{folder}: exists; name a new folder")
    with _members(path) as members:
        index, data = _index(members, key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
            made = Path(name, "files")
            made.mkdir()
            (made / INDEX).write_bytes(data)
            _unpack_files(members, index, made)
            for inner in FOLDERS:
                (made / inner).mkdir(exist_ok=True)
            os.replace(made, folder)
    return index


def unpack_once(path: Path, cache: Path, key: Path | None = None) -> Path:
    """Return the folder of the unpacked bundle below `cache`.

    A complete folder of an earlier call is used again. The lock verifies the files of the model at each start. Raises
    BundleError and OSError.
    """
    with _members(path) as members:
        index, data = _index(members, key)
    folder = cache / hashlib.sha256(data).hexdigest()[:32]
    if folder.exists():
        if _is_intact(folder, index, data):
            return folder
        shutil.rmtree(folder)
    unpack(path, folder, key)
    return folder


def _is_intact(folder: Path, index: Index, data: bytes) -> bool:
    def same(name: str, expected: Digest) -> bool:
        file = folder / name
        if not file.is_file() or file.is_symlink() or file.stat().st_size != expected.size:
            return False
        if name.startswith(f"{MODEL}/"):
            return True
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == expected.sha256

    return (folder / INDEX).is_file() and all(same(name, one) for name, one in index.files.items())


class _Members:
    """Regular files of an archive, in order."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._next: tarfile.TarInfo | None = None

    def peek(self) -> tarfile.TarInfo | None:
        if self._next is None:
            self._next = self._archive.next()
            if self._next is not None and (not self._next.isreg() or self._next.issparse()):
                raise BundleError(f"{self._next.name!a}: a bundle has only regular files")
        return self._next

    def read(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        self._next = None
        file = self._archive.extractfile(member)
        assert file is not None, "a regular file has contents"
        while data := file.read(_BUFFER_BYTES):
            yield data


@contextmanager
def _members(path: Path) -> Iterator[_Members]:
    """Yield the files of a bundle, or of the bundle that is the layer of an image."""
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as outer:
            first = outer.next()
            layered = first is not None and first.name != INDEX and is_layout(outer)
        layers = open_layers(path) if layered else iter((path.open("rb"),))
        with next(layers) as layer, tarfile.open(fileobj=layer, mode="r|") as archive:
            yield _Members(archive)
    except (tarfile.TarError, OciError, StopIteration) as error:
        raise BundleError(f"{path}: not a bundle, or truncated: {error}") from error
    except BundleError as error:
        raise type(error)(f"{path}: {error}") from error


def _index(members: _Members, key: Path | None) -> tuple[Index, bytes]:
    first = members.peek()
    if first is None or first.name != INDEX or first.size > INDEX_BYTES:
        raise BundleError(f"the first file is not {INDEX}")
    data = b"".join(members.read(first))
    second, signature = members.peek(), None
    if second is not None and second.name == SIGNATURE:
        if second.size > _SIGNATURE_BYTES:
            raise BundleError(f"{SIGNATURE}: too large")
        signature = b"".join(members.read(second))
    if key is not None:
        verify(data, signature, key)
    return decode(data), data


def _unpack_files(members: _Members, index: Index, folder: Path) -> None:
    remaining = dict(index.files)
    while (member := members.peek()) is not None:
        expected = remaining.pop(member.name, None)
        if expected is None:
            raise BundleError(f"{member.name!a}: is not in the index, or is repeated")
        if member.size != expected.size:
            raise BundleError(f"{member.name}: has {member.size} bytes, the index has {expected.size}")
        target = folder / member.name
        target.parent.mkdir(parents=True, exist_ok=True)
        found = hashlib.sha256()
        with target.open("xb") as file:
            for data in members.read(member):
                found.update(data)
                file.write(data)
        if found.hexdigest() != expected.sha256:
            raise BundleError(f"{member.name}: sha256 {found.hexdigest()}, the index has {expected.sha256}")
    if remaining:
        raise BundleError(f"{min(remaining)}: is in the index, but not in the archive")


def manifest_of(folder: Path) -> Path:
    return folder / MANIFEST
