"""Read the members of a tar or zip archive from an untrusted server within fixed bounds.

Every check that needs no file system is made here: names, kinds, declared sizes, number of members and size of headers.
`appliance.checkpoints.unpack` writes the members and checks the links.
"""

import errno
import gzip
import io
import itertools
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from appliance.checkpoints.oci import OciError, open_layers
from appliance.checkpoints.progress import format_bytes

MAX_MEMBERS = 10_000
MAX_DEPTH = 16  # folders below one another, in names and in link targets
MAX_NAME = 1024
MAX_HEADER = 1 << 16  # bytes of one tar member's headers: pax records, long names
MAX_DIRECTORY = 1 << 22  # bytes of a zip file's central directory: MAX_MEMBERS with ordinary names take 1.5 MB
TAR_BLOCK = 512
GZIP_MAGIC = b"\x1f\x8b"
OCI_SUFFIX = ".oci.tar"
UNIX = 3  # zipfile.ZipInfo.create_system
ENCRYPTED = 0x1  # zipfile.ZipInfo.flag_bits
DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,  # numbers and text that cannot be decoded
    OverflowError,
    RuntimeError,  # NotImplementedError of zipfile, RecursionError
    LookupError,
)


class ArchiveError(Exception):
    """Raised if the archive is damaged, or contains a member that cannot be unpacked."""


@dataclass(frozen=True)
class Member:
    """One entry of an archive. Its name is relative and has no `..`."""

    path: PurePosixPath
    data: IO[bytes] | None = None
    """Content of a file; read it before requesting the next member."""
    size: int = 0
    """Declared size of a file in bytes; `data` returns at most this many."""
    link: str | None = None
    """Target of a symbolic link, relative."""


def read_members(archive: Path) -> Iterator[Member]:
    """Yield the members in the order of the archive. Raise ArchiveError, one of DAMAGE, or OSError of the disk."""
    kinds = {".zip": _zip_members, ".whl": _zip_members, OCI_SUFFIX: _layer_members}
    reader = next((one for suffix, one in kinds.items() if archive.name.endswith(suffix)), _tar_members)
    for count, member in enumerate(reader(archive), start=1):
        if count > MAX_MEMBERS:
            raise ArchiveError(f"has more than {MAX_MEMBERS:,} members, the maximum")
        yield member


class _LimitedReader(io.BufferedReader):
    """A file that refuses to return more than `allowance` bytes while that is set."""

    allowance: int | None = None
    limit = 0

    def restrict(self, limit: int) -> None:
        """Allow `limit` more bytes to be read."""
        self.allowance = self.limit = limit

    def lift(self) -> None:
        self.allowance = None

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        try:
            return super().seek(target, whence)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise ArchiveError("is damaged: it refers to bytes before its beginning") from error
            raise

    def read(self, size: int | None = -1, /) -> bytes:
        if self.allowance is None:
            return super().read(size)
        wanted = self.allowance + 1 if size is None or size < 0 else size
        data = super().read(wanted) if wanted <= self.allowance + 1 else None
        if data is None or len(data) > self.allowance:
            raise ArchiveError(f"has headers of more than {format_bytes(self.limit)} in one piece, the maximum")
        self.allowance -= len(data)
        return data


def _tar_members(archive: Path) -> Iterator[Member]:
    with archive.open("rb", buffering=0) as raw:
        compressed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        raw.seek(0)
        yield from _tar_file(gzip.GzipFile(fileobj=raw) if compressed else raw)


def _layer_members(archive: Path) -> Iterator[Member]:
    # The bounds of headers are valid for the layout too, not only for its layers.
    if sum(1 for _ in itertools.islice(_tar_members(archive), MAX_MEMBERS + 1)) > MAX_MEMBERS:
        raise ArchiveError(f"has more than {MAX_MEMBERS:,} members, the maximum")
    try:
        for layer in open_layers(archive):
            yield from _tar_file(layer)
    except OciError as error:
        raise ArchiveError(str(error)) from error


def _tar_file(raw: Any) -> Iterator[Member]:
    with _LimitedReader(raw) as file:
        file.restrict(MAX_HEADER)
        with tarfile.open(fileobj=file, mode="r:") as opened:
            while part := opened.next():
                file.lift()
                yield _tar_member(opened, part)
                file.restrict(MAX_HEADER)
            _read_end(opened, file)


def _tar_member(opened: tarfile.TarFile, part: tarfile.TarInfo) -> Member:
    path = _checked_path(part.name)
    if part.size < 0:
        raise ArchiveError(f"is damaged: {part.name} has a size of {part.size} bytes")
    if part.islnk():
        raise ArchiveError(f"{part.name} is a hard link, which is not supported")
    if part.issparse():
        raise ArchiveError(f"{part.name} is a sparse file, which is not supported; pack it without --sparse")
    if part.issym():
        return Member(path, link=_checked_link(part.name, part.linkname))
    if part.isdir():
        return Member(path)
    if not part.isfile():
        raise ArchiveError(f"{part.name} is neither a file, a folder nor a link")
    return Member(path, opened.extractfile(part), part.size)


def _read_end(opened: tarfile.TarFile, file: _LimitedReader) -> None:
    """Refuse a tar file that is truncated between two members, or whose gzip checksum is wrong.

    tarfile treats the end of the file and a damaged header as the end of the archive.
    """
    file.seek(opened.offset)
    file.restrict(MAX_DIRECTORY)
    rest = file.read()
    if len(rest) < TAR_BLOCK or rest.strip(b"\0"):
        raise ArchiveError("is damaged: it does not end with a block of zeros, as every tar file does")


def _zip_members(archive: Path) -> Iterator[Member]:
    with archive.open("rb", buffering=0) as raw:
        file = _LimitedReader(raw)
        file.restrict(MAX_DIRECTORY)
        with zipfile.ZipFile(file) as opened:
            file.lift()
            for info in opened.infolist():
                yield from _zip_member(opened, info)


def _zip_member(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[Member]:
    name, path = info.filename, _checked_path(info.filename)
    mode = info.external_attr >> 16 if info.create_system == UNIX else 0
    if info.flag_bits & ENCRYPTED:
        raise ArchiveError(f"{name} is encrypted, which is not supported")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(f"{name} is neither stored nor deflated; other compression methods are not supported")
    if stat.S_ISLNK(mode):
        if info.file_size > MAX_NAME:
            raise ArchiveError(f"the link {name} has a target of more than {MAX_NAME:,} bytes")
        yield Member(path, link=_checked_link(name, opened.read(info).decode()))
    elif info.is_dir() or stat.S_ISDIR(mode):
        yield Member(path)
    elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise ArchiveError(f"{name} is neither a file, a folder nor a link")
    else:
        with opened.open(info) as data:
            yield Member(path, data, info.file_size)


def _checked_path(name: str) -> PurePosixPath:
    path = _relative(name, f"{_printable(name)}")
    if ".." in path.parts:
        raise ArchiveError(f"{name} points outside the folder")
    return path


def _checked_link(name: str, link: str) -> str:
    _relative(link, f"the link {name} → {_printable(link)}")
    return link


def _relative(text: str, shown: str) -> PurePosixPath:
    path = PurePosixPath(text)
    if path.is_absolute():
        raise ArchiveError(f"{shown} points outside the folder")
    if len(text.encode(errors="surrogatepass")) > MAX_NAME or len(path.parts) > MAX_DEPTH:
        raise ArchiveError(f"{shown} is a path of more than {MAX_NAME:,} bytes or {MAX_DEPTH} folders")
    if not text.isprintable():
        raise ArchiveError(f"{shown} is a path with characters that cannot be printed")
    return path


def _printable(text: str) -> str:
    return text if text.isprintable() and len(text) <= 80 else f"{ascii(text[:60])}…"
