"""What all kinds of sources share: a list of files that lie elsewhere, and a way to read any range of one."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from appliance.checkpoints.cache_directory import Shelf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
SMALL = (
    "*.json",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.py",
)  # all but weights; code is inert until it is allowed
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses that another attempt may not get
MODULES = "modules.json"
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers: 1_Pooling, 2_Dense
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class SourceError(Exception):
    """The source does not give what is wanted. `transient`: another attempt may."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class StartOver(SourceError):
    """What was kept of an interrupted download is of no use: the file has to be read from its first byte."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=True)


class Policy(msgspec.Struct, frozen=True):
    """`pause_s` is the wait after the first attempt that brings nothing; it doubles with each further one."""

    stall_s: float = 60.0
    attempts: int = 5
    total_s: float = 2700.0
    min_free: int = 2**30
    offline: bool = False
    pause_s: float = 0.5


class RemoteFile(msgspec.Struct, frozen=True):
    """`size` in bytes, None where the server does not tell. `version` changes with the content: a checksum, an entity
    tag, a generation. `sha256` is checked while the file is read."""

    name: str
    size: int | None
    version: str = ""
    sha256: str = ""


class Listing(msgspec.Struct, frozen=True):
    """One version of a checkpoint. `fixed`: the same revision always means the same files."""

    revision: str
    files: tuple[RemoteFile, ...]
    fixed: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.size or 0 for file in self.files)


class Store(Protocol):
    """One source of one kind. All methods raise SourceError."""

    @property
    def shown(self) -> str:
        """What it is called in messages."""

    @property
    def name(self) -> str:
        """What the model is called if nobody says."""

    def known(self) -> Listing | None:
        """What the cache knows, without the network."""

    def listing(self) -> Listing:
        """The files that make the checkpoint, as the other side has them now."""

    def shelf(self, listing: Listing) -> "Shelf": ...

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        """The bytes of a file from `start` until before `stop`, or to its end. Raises StartOver where only the whole
        file can be had."""


@runtime_checkable
class PackedStore(Store, Protocol):
    """A source whose checkpoint is inside one file: nothing is known of it before it is downloaded and unpacked."""

    @property
    def form(self) -> str:
        """Name of this kind of file in messages, such as `an archive`."""

    def expected(self) -> int:
        """Size of the file in bytes, as a running download says it; 0 if it does not."""

    def folder(self, listing: Listing) -> Path:
        """The folder of the unpacked checkpoint."""

    def unpack(self, listing: Listing, min_free: int = 0) -> None:
        """Unpack the downloaded file and move the checkpoint into place. `min_free` bytes of the disk stay free."""


def select(files: Sequence[RemoteFile], patterns: Sequence[str]) -> tuple[RemoteFile, ...]:
    """The files of a repository or folder that are a checkpoint: what `patterns` name, or else the small files at its
    top and one form of its weights. Raises SourceError where there are none."""
    if strange := [file.name for file in files if not _harmless(file.name)]:
        raise SourceError(f"lists {strange[0]!r}, which is no path within a folder")
    if patterns:
        chosen = [file for file in files if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns)]
        if not chosen:
            raise SourceError(f"no file matches {', '.join(patterns)}; there are {_some(files)}")
        return tuple(chosen)
    top = [file for file in files if "/" not in file.name]
    small = [file for file in top if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in SMALL)]
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
        raise SourceError(f"has no weights: no .safetensors and no .gguf file; there are {_some(files)}")
    return (*small, *modules, *weights)


def _harmless(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def _some(files: Sequence[RemoteFile]) -> str:
    names = sorted(file.name for file in files)
    return f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}" if names else "no files at all"
