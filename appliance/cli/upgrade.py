"""`slipway upgrade`: convert manifests of an older apiVersion, as a diff or in place."""

import difflib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from appliance.config import exits
from appliance.config.manifest import API_VERSION
from appliance.config.upgrade import NoUpgrade, upgrade
from engine.api.files import MANIFEST_BYTES, read_file, real_path


def upgrade_files(files: Sequence[Path], *, write: bool, check: bool) -> int:
    """Convert the files. Return the exit code: of a failed conversion first, else of an outdated file."""
    code = exits.OK
    for file in files:
        try:
            before = read_file(file, MANIFEST_BYTES)
            after = upgrade(before, str(file))
            if after == before:
                print(f"{file}: already is {API_VERSION}", file=sys.stderr)
                continue
            if write:
                _replace(file, after)
        except NoUpgrade as error:
            print(error, file=sys.stderr)
            code = exits.MANIFEST
            continue
        except OSError as error:
            print(f"{file}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
            code = exits.MANIFEST
            continue
        if write:
            print(f"{file}: rewritten as {API_VERSION}", file=sys.stderr)
            continue
        print(f"{file}: would be rewritten as {API_VERSION}" if check else _difference(file, before, after))
        code = exits.OUTDATED if code is exits.OK else code
    return code.number


def _difference(file: Path, before: bytes, after: bytes) -> str:
    old, new = (data.decode().splitlines() for data in (before, after))
    return "\n".join(difflib.unified_diff(old, new, str(file), str(file), lineterm=""))


def _replace(file: Path, data: bytes) -> None:
    """Replace the file atomically through a temporary file next to it. Links are followed, and the mode is kept."""
    target = real_path(file)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
            os.fchmod(out.fileno(), target.stat().st_mode & 0o7777)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
