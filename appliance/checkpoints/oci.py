"""Layers of an image in an archive of an OCI image layout, as `slipway bundle --oci`, skopeo and buildah write it.

https://github.com/opencontainers/image-spec
"""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

LAYOUT, INDEX = "oci-layout", "index.json"
MAX_JSON = 1 << 22  # bytes of an index or manifest


class OciError(Exception):
    """Raised if an archive is not an image layout with one image of uncompressed layers."""


def is_layout(archive: tarfile.TarFile) -> bool:
    return LAYOUT in archive.getnames()


def open_layers(path: Path) -> Iterator[IO[bytes]]:
    """Yield each layer as a file. Raise OciError, tarfile.TarError and OSError."""
    with tarfile.open(path, "r:") as archive:
        manifests = _json(archive, INDEX).get("manifests", ())
        if len(manifests) != 1:
            raise OciError(f"{path.name}: has {len(manifests)} images; it must have one")
        for layer in _json(archive, _blob(manifests[0])).get("layers", ()):
            if not str(layer.get("mediaType", "")).endswith(".tar"):
                raise OciError(f"{path.name}: has a compressed layer; write it with `slipway bundle --oci`")
            yield _open(archive, _blob(layer))


def _blob(descriptor: Any) -> str:
    """Return the name of the blob of a descriptor."""
    try:
        algorithm, _, digest = descriptor["digest"].partition(":")
    except (KeyError, TypeError, AttributeError) as error:
        raise OciError(f"an image layout has a descriptor without digest: {descriptor!a}") from error
    return f"blobs/{algorithm}/{digest}"


def _json(archive: tarfile.TarFile, name: str) -> dict[str, Any]:
    data = _open(archive, name).read(MAX_JSON + 1)
    try:
        found = json.loads(data if len(data) <= MAX_JSON else b"")
    except ValueError as error:
        raise OciError(f"{name}: is not JSON of at most {MAX_JSON:,} bytes") from error
    if not isinstance(found, dict):
        raise OciError(f"{name}: is not a JSON object")
    return found


def _open(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise OciError(f"{name}: is not in the archive")
    return file
