"""Read the keys and the list of tensors of a GGUF file, and find the file of a checkpoint.

A model may be in several files, such as NAME-00001-of-00003.gguf. The first file has the keys of the model, and the
tensors are divided among all of them.

    magic "GGUF", version u32, number of tensors u64, number of keys u64
    each key: name, type u32, value; an array is its element type, the number of elements u64, and the elements
    each tensor: name, number of dimensions u32, dimensions u64 (the fastest first), type u32, offset u64
    tensor data, aligned to general.alignment (32)

A string is its length as u64 and UTF-8. All numbers are little-endian. The file is mapped, so that only the pages with
keys are read. Every length is checked against the rest of the file before it is used.
Source: ggml's description of GGUF, version 3.
"""

import mmap
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import open_file

VERSIONS = (2, 3)
MAX_ELEMENTS = 1 << 24  # of an array; the largest vocabularies have 2^18 tokens
MAX_DIMENSIONS = 4
MAX_DEPTH = 4  # of arrays in arrays
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY, _FLOAT = 8, 9, 6
_ARRAY_HEADER = 12  # bytes before the elements of an array
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_TOWER = "mmproj"  # begins the name of a file with the tower of images, which is not read
# Type number → (name, elements per block, bytes per block).
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


class _Damaged(Exception):
    """Raised with a description of the damage."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor."""

    name: str
    type: str
    shape: tuple[int, ...]  # the slowest dimension first, as in torch
    offset: int  # in the file
    bytes: int
    file: Path


@dataclass(frozen=True)
class GgufFile:
    """The keys and tensors of a file, or of all parts of a split one. Arrays are tuples. `path`: of the first part."""

    path: Path
    keys: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    arrays: Mapping[str, int] = field(default_factory=dict)  # place of the first number of each array of float32

    def require(self, key: str) -> Any:
        """Return the value of a key. Raises CheckpointError if it is missing."""
        if key not in self.keys:
            raise CheckpointError(f"{self.path}: lacks the key {key}")
        return self.keys[key]


def find_gguf(checkpoint: Path) -> Path | None:
    """Return the GGUF file of a checkpoint, the first part of a split one: the path itself, or the only one in a folder
    without other weights.

    Raises CheckpointError for a folder with several.
    """
    if checkpoint.suffix == ".gguf" and os.path.isfile(checkpoint):
        return parts_of(checkpoint)[0]
    found = list_gguf(checkpoint)
    if not found or any(checkpoint.glob("*.safetensors*")):
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{checkpoint}: has {len(found)} GGUF models, such as {found[0].name} and {found[1].name}; "
            "name the one to serve (model.source.path may be a .gguf file), or put it in a folder of its own"
        )
    return found[0]


def list_gguf(folder: Path) -> list[Path]:
    """Return the first files of the models in a folder, sorted."""
    listed = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith(_TOWER)]
    return list(dict.fromkeys(parts_of(path)[0] for path in listed))


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model, in order, by the name of one of them; they need not exist."""
    part = _PART.fullmatch(path.name)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        return (path,)
    return tuple(path.with_name(f"{part[1]}-{at:05}-of-{part[3]}.gguf") for at in range(1, int(part[3]) + 1))


def root_of(checkpoint: Path) -> Path:
    """Return the folder of the checkpoint's files: the checkpoint itself, or the parent of a single file."""
    return checkpoint.parent if checkpoint.suffix == ".gguf" and os.path.isfile(checkpoint) else checkpoint


def read_gguf(path: Path) -> GgufFile:
    """Read a file, and the other parts of a split one, without the data. Raises CheckpointError naming the file."""
    first, *others = map(_read_file, parts_of(path))
    if not others:
        return first
    tensors = list(first.tensors)
    for number, part in enumerate(others, 1):
        if part.keys.get("split.no") != number or part.keys.get("split.count") != 1 + len(others):
            raise CheckpointError(
                f"{part.path}: is part {part.keys.get('split.no')} of {part.keys.get('split.count')}, counted from 0, "
                f"but its name says part {number} of {1 + len(others)}; copy all parts of one model"
            )
        tensors += part.tensors
    wanted = first.keys.get("split.tensors.count", len(tensors))
    if wanted != len(tensors) or len({tensor.name for tensor in tensors}) < len(tensors):
        raise CheckpointError(
            f"{first.path}: states {wanted} tensors, but its {1 + len(others)} parts have {len(tensors)}; copy all "
            "parts of one model"
        )
    return replace(first, tensors=tuple(tensors))


def _read_file(path: Path) -> GgufFile:
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (_Damaged, UnicodeDecodeError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: not a GGUF file, or truncated or damaged: {error}; copy it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Cursor:
    """A position in the mapped file. Every read is checked against the size of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0
        self.size = len(data)

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Read little-endian numbers by a format of `struct`."""
        found = struct.Struct(f"<{layout}")
        start = self._advance(found.size)
        return found.unpack_from(self._data, start)

    def number(self, layout: str) -> Any:
        return self.unpack(layout)[0]

    def number_at(self, layout: str, place: int) -> Any:
        """Return a number that was read before, without a move."""
        return struct.unpack_from(f"<{layout}", self._data, place)[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self._advance(size)
        return self._data[start : start + size].decode()

    def _advance(self, size: int) -> int:
        start = self.at
        if size > self.size - start:
            raise _Damaged(f"it ends after {self.size:,} bytes, within a value of {size:,} at byte {start:,}")
        self.at = start + size
        return start


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.size < 4 or cursor.unpack("4s")[0] != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise _Damaged("its numbers are big-endian" if swapped else f"its version is {version}, supported are 2 and 3")
    num_tensors, num_keys = cursor.unpack("QQ")
    keys: dict[str, Any] = {}
    arrays: dict[str, int] = {}
    for _ in range(num_keys):
        name = cursor.text()
        if name in keys:
            raise _Damaged(f"it has the key {name} twice")
        kind, start = cursor.number("I"), cursor.at
        keys[name] = _value(cursor, kind)
        if kind == _ARRAY and cursor.number_at("I", start) == _FLOAT:
            arrays[name] = start + _ARRAY_HEADER
    described = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = keys.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"general.alignment is {alignment!r}")
    begin = -(-cursor.at // alignment) * alignment
    tensors = tuple(_placed(path, one, begin, cursor.size) for one in described)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise _Damaged("it has a tensor twice")
    return GgufFile(path, keys, tensors, arrays)


def _value(cursor: _Cursor, kind: int, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _TEXT:
        return cursor.text()
    if kind != _ARRAY or depth == MAX_DEPTH:
        raise _Damaged(f"byte {cursor.at:,} begins a value of unknown type {kind}, or arrays are nested too deeply")
    inner, count = cursor.unpack("IQ")
    if count > MAX_ELEMENTS:
        raise _Damaged(f"an array has {count:,} elements, at most {MAX_ELEMENTS:,} are supported")
    if inner in _SCALARS:
        return cursor.unpack(f"{count}{_SCALARS[inner]}")
    read: Callable[[], Any] = cursor.text if inner == _TEXT else lambda: _value(cursor, inner, depth + 1)
    return tuple(read() for _ in range(count))


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, dimensions, type and relative offset."""
    name, count = cursor.text(), cursor.number("I")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise _Damaged(f"the tensor {name} has {count} dimensions")
    shape = cursor.unpack(f"{count}Q")
    kind, offset = cursor.unpack("IQ")
    return name, tuple(reversed(shape)), kind, offset


def _placed(path: Path, described: tuple[str, tuple[int, ...], int, int], begin: int, end: int) -> GgufTensor:
    name, shape, kind, offset = described
    if kind not in TYPES:
        raise _Damaged(f"the tensor {name} is of the unknown type {kind}")
    label, block, block_bytes = TYPES[kind]
    count = 1
    for size in shape:
        count *= size
    if shape[-1] % block:
        raise _Damaged(f"the tensor {name} has rows of {shape[-1]} elements, and {label} has blocks of {block}")
    size = count // block * block_bytes
    if begin + offset + size > end:
        raise _Damaged(f"it ends after {end:,} bytes, within the tensor {name}")
    return GgufTensor(name, label, shape, begin + offset, size, path)
