"""A bundle as an image: an archive of an OCI image layout, for registries and image volumes of Kubernetes.

The image has one layer, the bundle. https://github.com/opencontainers/image-spec has the format.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import IO, Any

from appliance.checkpoints.digest import Digest
from appliance.checkpoints.oci import INDEX, LAYOUT

ARTIFACT = "application/vnd.slipway.bundle.v1"
_TYPE = "application/vnd.oci.image."
_MANIFEST, _INDEX, _CONFIG, _LAYER = (
    f"{_TYPE}{kind}" for kind in ("manifest.v1+json", "index.v1+json", "config.v1+json", "layer.v1.tar")
)
# Files for every processor; a registry of one architecture asks for none.
PLATFORM = {"architecture": "amd64", "os": "linux"}


def write_image(bundle: Path, path: Path) -> None:
    """Write the image of a bundle to `path`. Equal bundles give equal bytes."""
    with bundle.open("rb") as file:
        layer = Digest(bundle.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer.sha256}"]}
    config = _encoded({**PLATFORM, "config": {}, "rootfs": rootfs})
    manifest = _encoded(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "artifactType": ARTIFACT,
            "config": _descriptor(_CONFIG, _digest(config)),
            "layers": [_descriptor(_LAYER, layer)],
        }
    )
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [_descriptor(_MANIFEST, _digest(manifest))]}
    partial = path.with_name(f"{path.name}.partial")
    try:
        with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as archive, bundle.open("rb") as file:
            _add(archive, LAYOUT, io.BytesIO(_encoded({"imageLayoutVersion": "1.0.0"})))
            _add(archive, INDEX, io.BytesIO(_encoded(index)))
            for data in (manifest, config):
                _add(archive, f"blobs/sha256/{_digest(data).sha256}", io.BytesIO(data))
            _add(archive, f"blobs/sha256/{layer.sha256}", file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encoded(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


def _digest(data: bytes) -> Digest:
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def _descriptor(kind: str, digest: Digest) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{digest.sha256}", "size": digest.size}


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes]) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = file.seek(0, io.SEEK_END), 0o644
    file.seek(0)
    archive.addfile(member, file)
