"""Build small archives, ordinary and malicious ones."""

import io
import tarfile
import zipfile
from collections.abc import Mapping

FILES = {"config.json": b"{}", "sub/model.safetensors": b"x" * 5000}


def tar(members: Mapping[str, bytes | tarfile.TarInfo], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            if isinstance(data, bytes):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            else:
                archive.addfile(data)
    return out.getvalue()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zipped(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for name, target in (links or {}).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0xA1FF << 16
            archive.writestr(info, target)
    return out.getvalue()
