"""Interfaces that all kinds of sources share: a list of remote files, and reads of byte ranges."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from appliance.checkpoints.cache_directory import CacheDirectory

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
SMALL_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.py",
)  # everything except weights; code is not executed unless allowed
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses of temporary errors
MODULES = "modules.json"
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers: 1_Pooling, 2_Dense
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class SourceError(Exception):
    """Raised if the source does not return the requested data. `transient` says whether another attempt may succeed."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class RestartFile(SourceError):
    """Raised if the cached part of a download cannot be used, so the file has to be read from its first byte."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=True)


class Policy(msgspec.Struct, frozen=True):
    """Limits and retries of a download."""

    stall_s: float = 60.0  # longest time without a byte
    attempts: int = 5  # attempts without progress
    total_s: float = 2700.0  # limit of the whole download
    min_free: int = 2**30  # bytes that stay free on the disk
    offline: bool = False
    pause_s: float = 0.5  # wait after the first attempt without progress; doubled after each further one


class RemoteFile(msgspec.Struct, frozen=True):
    """A remote file."""

    name: str
    size: int | None  # in bytes; None if the server does not report it
    version: str = ""  # changes with the content: a checksum, an entity tag, a generation
    sha256: str = ""  # verified while the file is read


class Listing(msgspec.Struct, frozen=True):
    """Files of one version of a checkpoint. `fixed` says that the revision always refers to the same files."""

    revision: str
    files: tuple[RemoteFile, ...]
    fixed: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.size or 0 for file in self.files)


class Store(Protocol):
    """A source of a checkpoint. All methods raise SourceError."""

    @property
    def shown(self) -> str:
        """Return the name of the source for messages."""

    @property
    def name(self) -> str:
        """Return the default name of the model."""

    def known(self) -> Listing | None:
        """Return the listing in the cache, without using the network."""

    def listing(self) -> Listing:
        """Return the current files of the checkpoint from the server."""

    def cache_directory(self, listing: Listing) -> "CacheDirectory": ...

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` up to but excluding `stop`, or to its end. Raise RestartFile if only
        the whole file is available."""


@runtime_checkable
class PackedStore(Store, Protocol):
    """A source whose checkpoint is inside one file. Its metadata is unknown before it is downloaded and unpacked."""

    @property
    def form(self) -> str:
        """Return the name of this kind of file in messages, such as `an archive`."""

    def expected(self) -> int:
        """Return the size of the file in bytes as reported by a running download; 0 if unknown."""

    def folder(self, listing: Listing) -> Path:
        """Return the folder of the unpacked checkpoint."""

    def unpack(self, listing: Listing, min_free: int = 0) -> None:
        """Unpack the downloaded file and move the checkpoint into place. `min_free` bytes of the disk stay free."""


def select(files: Sequence[RemoteFile], patterns: Sequence[str]) -> tuple[RemoteFile, ...]:
    """Return the files of a repository or folder that form the checkpoint: those that match `patterns`, else the small
    files at the top level and one form of the weights. Raise SourceError if there are none."""
    if strange := [file.name for file in files if not _is_safe_name(file.name)]:
        raise SourceError(f"lists {strange[0]!r}, which is not a path inside the folder")
    if patterns:
        chosen = [file for file in files if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns)]
        if not chosen:
            raise SourceError(f"no file matches {', '.join(patterns)}; found: {_name_list(files)}")
        return tuple(chosen)
    top = [file for file in files if "/" not in file.name]
    small = [file for file in top if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in SMALL_FILES)]
    names = {file.name for file in top}
    if INDEX in names:
        weights = [file for file in top if file.name.endswith(".safetensors") and _SHARD.fullmatch(file.name)]
        weights = weights or [file for file in top if file.name.endswith(".safetensors")]
    elif SINGLE in names:
        weights = [file for file in top if file.name == SINGLE]
    else:
        weights = [file for file in top if file.name.endswith((".gguf", ".safetensors"))]
    modules = [file for file in files if _MODULE.fullmatch(file.name)] if MODULES in names else []
    if not weights:
        raise SourceError(f"has no weights: no .safetensors and no .gguf file; found: {_name_list(files)}")
    return (*small, *modules, *weights)


def _is_safe_name(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def _name_list(files: Sequence[RemoteFile]) -> str:
    names = sorted(file.name for file in files)
    return f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}" if names else "no files"
