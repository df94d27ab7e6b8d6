"""Layers of an image in an archive of an OCI image layout, as `slipway bundle --oci`, skopeo and buildah write it.

https://github.com/opencontainers/image-spec
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

LAYOUT, INDEX = "oci-layout", "index.json"
MAX_JSON = 1 << 22  # bytes of an index or manifest

T = TypeVar("T")


class OciError(Exception):
    """Raised if an archive is not an image layout with one image of uncompressed layers."""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    media_type: str = ""

    @property
    def blob(self) -> str:
        return f"blobs/{self.digest.replace(':', '/', 1)}"


class _Index(msgspec.Struct):
    manifests: tuple[_Descriptor, ...] = ()


class _Manifest(msgspec.Struct):
    layers: tuple[_Descriptor, ...] = ()


def is_layout(archive: tarfile.TarFile) -> bool:
    return LAYOUT in archive.getnames()


def open_layers(path: Path) -> Iterator[IO[bytes]]:
    """Yield each layer as a file. Raise OciError, tarfile.TarError and OSError."""
    with tarfile.open(path, "r:") as archive:
        manifests = _read(archive, INDEX, _Index).manifests
        if len(manifests) != 1:
            raise OciError(f"has {len(manifests)} images; it must have one")
        layers = _read(archive, manifests[0].blob, _Manifest).layers
        if not layers:
            raise OciError("has no layer; its manifest is not that of an image")
        for layer in layers:
            if not layer.media_type.endswith(".tar"):
                raise OciError("has a compressed layer; write it with `slipway bundle --oci`")
            yield _open(archive, layer.blob)


def _read(archive: tarfile.TarFile, name: str, kind: type[T]) -> T:
    data = _open(archive, name).read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise OciError(f"{name}: has more than {MAX_JSON:,} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise OciError(f"{name}: {error}") from error


def _open(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        member = archive.getmember(name)
    except KeyError:
        raise OciError(f"{name}: is not in the archive") from None
    file = archive.extractfile(member) if member.isreg() else None  # a link may lead to itself
    if file is None:
        raise OciError(f"{name}: is not a file")
    return file
