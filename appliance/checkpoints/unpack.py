"""Unpack an archive from an untrusted server: files, folders, and symbolic links that stay inside.

Links are created after everything else, so no file is ever written through a link. A second pass over the disk then
follows each link step by step, so the order of members does not matter.
"""

import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from appliance.checkpoints.members import DAMAGE, MAX_DEPTH, OCI_SUFFIX, ArchiveError, Member, read_members
from appliance.checkpoints.oci import LAYOUT
from appliance.checkpoints.progress import format_bytes
from appliance.checkpoints.remote import SourceError

BLOCK = 1 << 20
MAX_LINK_CHAIN = 8


def unpack(
    archive: Path, folder: Path, max_size: int, min_free: int = 0, *, limit: str = "model.source.http.max_size"
) -> Path:
    """Unpack into `folder`, which must not exist, and return the folder with the checkpoint: `folder` or the only
    folder in it.

    max_size: maximum total size of the files in bytes.
    min_free: bytes that stay free on the disk.
    limit: name of the limit `max_size` in messages.

    Raise SourceError if the archive is damaged or a member is not allowed; OSError if the disk fails.
    """
    try:
        return _unpack(archive, folder, max_size, min_free, limit)
    except ArchiveError as error:
        raise SourceError(f"{archive.name}: {error}") from error
    except FileExistsError as error:
        raise SourceError(f"{archive.name}: contains {Path(error.filename).name} twice") from error
    except NotADirectoryError as error:
        raise SourceError(f"{archive.name}: contains {Path(error.filename).name} below a file") from error
    except DAMAGE as error:
        raise SourceError(f"{archive.name}: is damaged: {error}") from error
    except OSError as error:
        if error.errno is None:  # gzip: a wrong checksum or header
            raise SourceError(f"{archive.name}: is damaged: {error}") from error
        raise


def _unpack(archive: Path, folder: Path, max_size: int, min_free: int, limit: str) -> Path:
    folder.mkdir(parents=True)
    links: dict[Path, str] = {}
    left = max_size
    for member in read_members(archive):
        if member.size > left:
            raise ArchiveError(f"unpacks to more than {format_bytes(max_size)} ({limit})")
        if shutil.disk_usage(folder).free - member.size < min_free:
            raise ArchiveError(
                f"needs {format_bytes(member.size)} for {member.path.name}, which would leave less than "
                f"{format_bytes(min_free)} of the disk free (model.download.min_free)"
            )
        left -= member.size
        _write(folder, member, links)
    for path, target in links.items():
        if os.path.lexists(path):
            raise ArchiveError(f"contains {path.name} twice")
        path.symlink_to(target)
    top = _top(folder)
    _check_files(top)
    return top


def _write(folder: Path, member: Member, links: dict[Path, str]) -> None:
    path = folder / member.path
    if member.link is None and member.data is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.link is not None:
        if path in links:
            raise ArchiveError(f"contains {path.name} twice")
        links[path] = member.link
    elif member.data is not None:
        with path.open("xb") as out:
            shutil.copyfileobj(member.data, out, BLOCK)


def _top(folder: Path) -> Path:
    """Return the folder with the checkpoint: many archives have one folder with all their files, and bundles have it
    in one of several."""
    if (folder / LAYOUT).is_file():
        raise ArchiveError(f"is an OCI image; its name must end with {OCI_SUFFIX}")
    if (folder / "slipway-bundle.json").is_file() and (folder / "model").is_dir():
        return folder / "model"
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() and not inside[0].is_symlink() else folder


def _check_files(root: Path) -> None:
    """Raise ArchiveError unless `root` holds only files, folders, and links that stay inside."""
    folders = [root]
    while folders:
        for path in folders.pop().iterdir():
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                _follow(root, path)
            elif stat.S_ISDIR(mode):
                folders.append(path)
            elif not stat.S_ISREG(mode):
                raise ArchiveError(f"{path.relative_to(root)} is neither a file, a folder nor a link")


def _follow(root: Path, link: Path) -> None:
    """Raise ArchiveError unless the link leads to a file or folder, and every step of its path is inside `root`.

    The second condition is needed because `root` is renamed afterwards: `../root/x` would then lead elsewhere.
    """
    at, parts, links = link.parent, [link.name], 0
    shown = f"the link {link.relative_to(root)} → {os.readlink(link)}"
    while parts:
        part = parts.pop()
        if part == ".." and at == root:
            raise ArchiveError(f"{shown} points outside the folder")
        if not at.is_dir() or not os.path.lexists(at / part):
            raise ArchiveError(f"{shown} has no target in the archive")
        at = at.parent if part == ".." else at / part
        if not at.is_symlink():
            continue
        links += 1
        target = PurePosixPath(os.readlink(at)).parts
        if links > MAX_LINK_CHAIN or len(target) > MAX_DEPTH:
            raise ArchiveError(f"{shown} follows more than {MAX_LINK_CHAIN} links")
        at = at.parent
        parts += reversed(target)
    if not link.exists():  # for example with the target `file/.`
        raise ArchiveError(f"{shown} has no target in the archive")
