"""Bounded reading of files from outside: manifests, checkpoints, templates, key lists.

All such files are read through these functions. Named pipes, devices and sockets are refused without waiting. Files
above a size limit are refused without being loaded. Damaged JSON, excessive nesting and absurdly long numbers raise one
known error type.
"""

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError

MAX_PATH, MAX_NAME = 4095, 255  # bytes: Linux' limits for a path and for each name in it
MIB = 2**20
MANIFEST_BYTES = MIB // 4
TEXT_BYTES = 4 * MIB  # chat templates, key lists, PEM files
CONFIG_BYTES = 16 * MIB  # config.json and similar files: 1 MiB for a classifier with 20,000 labels
INDEX_BYTES = 128 * MIB  # the list of tensors: 9 MiB for 91,000 tensors
TOKENIZER_BYTES = 512 * MIB  # 35 MiB for 262,000 tokens
_MAX_DIGITS = 40  # 1e30 as a whole number is common: tokenizer_config.json's model_max_length
_KINDS = {
    stat.S_IFDIR: (errno.EISDIR, "Is a directory"),
    stat.S_IFIFO: (errno.EINVAL, "Is a named pipe, not a file"),
    stat.S_IFSOCK: (errno.EINVAL, "Is a socket, not a file"),
    stat.S_IFCHR: (errno.EINVAL, "Is a device, not a file"),
    stat.S_IFBLK: (errno.EINVAL, "Is a device, not a file"),
}


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for other kinds of files, without waiting for a pipe's writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a null character in the path
        raise OSError(errno.EINVAL, "Is not a valid path", str(path)) from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(*_KINDS[stat.S_IFSOCK], str(path)) from error
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(*_KINDS.get(kind, (errno.EINVAL, "Is not a regular file")), str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError, also for a file of more than `max_bytes`."""
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"Is larger than the {_size(max_bytes)} allowed", str(path))
    return data


def read_text(path: Path, max_bytes: int = TEXT_BYTES) -> str:
    """Return the content of a regular file in UTF-8. Raises OSError and UnicodeDecodeError."""
    return read_file(path, max_bytes).decode("utf-8")


def read_json(path: Path, max_bytes: int = CONFIG_BYTES) -> Any:
    """Return the value in a JSON file. Raises OSError if it cannot be read, CheckpointError if it is damaged."""
    data = read_file(path, max_bytes)
    try:
        return parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged: {error}; copy the checkpoint again") from error


def read_json_object(path: Path, max_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError with the file's name for every failure."""
    try:
        value = read_json(path, max_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return value


def parse_json(data: bytes) -> Any:
    """Return the value in JSON text. Infinity and NaN are accepted, as Python writes them. Raises ValueError."""
    try:
        return json.loads(data.decode("utf-8"), parse_int=_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits.lstrip('-'))} digits")
    return int(digits)


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


def is_path(path: Path | str) -> bool:
    """Return whether the system accepts this text as a path: within the length limits, without null characters."""
    encoded = os.fsencode(path)
    return len(encoded) <= MAX_PATH and b"\0" not in encoded and all(len(p) <= MAX_NAME for p in encoded.split(b"/"))


def real_path(path: Path | str) -> Path:
    """Return the path with symbolic links resolved. Unlike `Path.resolve`, circular links do not raise."""
    return Path(os.path.realpath(path))
