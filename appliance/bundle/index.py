"""The index of a bundle: the first file of the archive, with the digest of every other one.

A bundle is an uncompressed tar archive: the index, its signature if there is one, then the files in the order of the
index. Equal inputs give equal bytes.
"""

import hashlib
import re
from pathlib import PurePosixPath

import msgspec

from appliance.checkpoints.digest import Digest
from appliance.config.version import __version__

FORMAT = 1
INDEX, SIGNATURE, MANIFEST, LOCK, SBOM = (
    *("slipway-bundle.json", "slipway-bundle.sig", "manifest.yaml", "manifest.lock", "sbom.spdx.json"),
)
IMAGE, MODEL = "image.tar", "model"
INDEX_BYTES = 16 * 2**20
_SAFE = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")
"""Parts of a path in a bundle. None begins with a dot, so none leads upwards."""


class BundleError(Exception):
    """Raised for an archive that is not an intact bundle. The message names the archive or the file in it."""


class OptionError(BundleError):
    """Raised for options of a command that cannot be used: a key of another kind, or a folder that exists."""


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """The container image that serves the bundle."""

    reference: str = ""
    """Reference for a registry, such as `registry/slipway@sha256:…`."""
    archive: str = ""
    """Name of the image's archive in the bundle, for `docker load`."""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, Digest]
    format: int = FORMAT
    slipway: str = __version__
    image: Image = Image()


def encode(index: Index) -> bytes:
    return msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"


def decode(data: bytes) -> Index:
    """Read an index. Raises BundleError for another format, or names of files outside the bundle."""
    try:
        index = msgspec.json.decode(data, type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{INDEX}: not an index of a bundle: {error}") from error
    if index.format != FORMAT:
        raise BundleError(f"{INDEX}: format {index.format}; this version of Slipway reads format {FORMAT}")
    for name in index.files:
        parts = PurePosixPath(name).parts
        if not parts or "/".join(parts) != name or not all(map(_SAFE.fullmatch, parts)) or name in (INDEX, SIGNATURE):
            raise BundleError(f"{INDEX}: {name!a} is not a name of a file in a bundle")
    if missing := {MANIFEST, LOCK, SBOM} - index.files.keys():
        raise BundleError(f"{INDEX}: {min(missing)} is missing")
    return index


def digest_of(data: bytes) -> Digest:
    return Digest(len(data), hashlib.sha256(data).hexdigest())
