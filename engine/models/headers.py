"""Read the headers of safetensors files: offset, type and shape of each tensor, without reading weights.

Format: 8 bytes little-endian length n; n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end)}}; the data.
Offsets count from the end of the JSON. Source: the safetensors specification.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import CheckpointError
from engine.api.files import open_file

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    bytes: int
    transposed: bool = False  # the file has the transpose of a matrix of this shape


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Return all tensors of a safetensors file. Raises CheckpointError if it is damaged or truncated."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = file.read(length) if 2 <= length <= min(size - 8, MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not text:
        raise CheckpointError(f"{path}: not a safetensors file, or truncated within its header ({size} bytes)")
    try:
        entries = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is damaged: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is damaged: it is not a JSON object")
    start = 8 + length
    return {name: _tensor(path, name, entry, start, size) for name, entry in entries.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: the header is damaged at tensor {name}") from error
    if begin < 0 or end < begin or any(units < 0 for units in shape):
        raise CheckpointError(f"{path}: the header is damaged: {name} has byte range {begin} to {end}")
    if start + end > size:
        raise CheckpointError(
            f"{path}: truncated: the file has {size:,} bytes, but {name} ends at byte {start + end:,}; copy it again"
        )
    if dtype in ELEMENT_BYTES and end - begin != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise CheckpointError(f"{path}: the header is damaged: {name} has {end - begin} bytes for shape {list(shape)}")
    return TensorInfo(path, dtype, shape, start + begin, end - begin)
