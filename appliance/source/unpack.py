"""Unpacks an archive that nobody here made: only files, folders and links that stay inside, up to a number of bytes."""

import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from appliance.source.progress import spell
from appliance.source.remote import SourceError

BLOCK = 1 << 20


@dataclass(frozen=True)
class Member:
    """`data` of a file; `link` is the target of a link, as written; neither for a folder."""

    name: str
    data: IO[bytes] | None = None
    link: str | None = None


def unpack(archive: Path, folder: Path, max_size: int) -> None:
    """Raises SourceError naming the member that is not allowed, or what is damaged; OSError of the disk."""
    folder.mkdir(parents=True)
    root = folder.resolve()
    size = 0
    try:
        for member in _members(archive):
            target = _inside(archive, root, member.name)
            if member.link is not None:
                _link(archive, root, target, member.link)
            elif member.data is None:
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as out:
                    while block := member.data.read(BLOCK):
                        size += len(block)
                        if size > max_size:
                            limit = f"{spell(max_size)} (model.source.http.max_size)"
                            raise SourceError(f"{archive.name}: unpacks to more than {limit}")
                        out.write(block)
    except FileExistsError as error:
        raise SourceError(f"{archive.name}: has {Path(error.filename).name} twice") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise SourceError(f"{archive.name}: is damaged: {error}") from error
    except OSError as error:
        if error.errno is None:  # gzip: a wrong checksum or header
            raise SourceError(f"{archive.name}: is damaged: {error}") from error
        raise


def _members(archive: Path) -> Iterator[Member]:
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                kind = info.external_attr >> 28
                if kind == 0xA:
                    yield Member(info.filename, link=opened.read(info).decode())
                elif info.is_dir():
                    yield Member(info.filename)
                else:
                    with opened.open(info) as data:
                        yield Member(info.filename, data)
        return
    with tarfile.open(archive) as opened_tar:
        for part in opened_tar:
            if part.issym():
                yield Member(part.name, link=part.linkname)
            elif part.islnk():
                raise SourceError(f"{archive.name}: {part.name} is a hard link, which is not unpacked")
            elif part.isdir():
                yield Member(part.name)
            elif part.isfile():
                yield Member(part.name, opened_tar.extractfile(part))
            else:
                raise SourceError(f"{archive.name}: {part.name} is neither a file nor a folder")


def _inside(archive: Path, root: Path, name: str) -> Path:
    """Where a member goes. Links that came before are followed, so none leads out."""
    target = (root / name).resolve()
    if os.path.isabs(name) or not target.is_relative_to(root):
        raise SourceError(f"{archive.name}: {name!r} leads out of its folder")
    return target


def _link(archive: Path, root: Path, target: Path, link: str) -> None:
    aim = (target.parent / link).resolve()
    if os.path.isabs(link) or not aim.is_relative_to(root):
        raise SourceError(f"{archive.name}: the link {target.name} → {link} leads out of its folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(link)
