"""Clean up shared memory in /dev/shm that a program's libraries (nccl, torch, CUDA) leave there when it is killed.

The files do not record their owner process, and other containers may share the folder. So a file is removed only if a
process of the program was seen to map it, if it did not exist before the program, if it is directly in the folder, and
if no process uses it. The folder's modification time shows when to check, so an idle check costs one system call.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = "/dev/shm"
_EAGER = 4  # checks after a change, because a new file is mapped a little later


class SharedMemoryCleaner:
    """Shared-memory files of one program. `processes` returns its running processes."""

    def __init__(self, processes: Callable[[], Iterable[int]], folder: str = FOLDER) -> None:
        self._processes = processes
        self._folder = folder
        self._before = set(self._list().values())
        self._seen: dict[str, int] = {}  # name to inode
        self._changed_ns = 0
        self._eager = 0

    def scan(self) -> None:
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
        except OSError:  # the folder does not exist here
            return
        if changed_ns != self._changed_ns:
            self._changed_ns, self._eager = changed_ns, _EAGER
        if self._eager:
            self._eager -= 1
            for pid in self._processes():
                self._seen.update(
                    {name: inode for name, inode in _mapped(pid, self._folder) if inode not in self._before}
                )

    def remove(self) -> list[str]:
        """Remove the program's files that are no longer used by any process. Return their paths."""
        names, removed = self._list(), []
        unused = {name: inode for name, inode in self._seen.items() if names.get(name) == inode}
        if unused:
            used = _used(self._folder)
            for name, inode in unused.items():
                if inode not in used:
                    with contextlib.suppress(OSError):
                        os.unlink(path := os.path.join(self._folder, name))
                        removed.append(path)
        self._seen.clear()
        return removed

    def _list(self) -> dict[str, int]:
        """Return the inodes of our user's files by name."""
        found = {}
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.geteuid() and entry.is_file(follow_symlinks=False):
                        found[entry.name] = status.st_ino
        return found


def _mapped(pid: int, folder: str) -> Iterable[tuple[str, int]]:
    """Yield name and inode of each file directly in the folder that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) == 6 and os.path.dirname(fields[5]) == folder:
            yield os.path.basename(fields[5]), int(fields[4])


def _used(folder: str) -> set[int]:
    """Return the inodes of the folder's files that a visible process maps or has open."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        found.update(inode for _, inode in _mapped(int(entry.name), folder))
        with contextlib.suppress(OSError):
            for descriptor in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.path.dirname(os.readlink(descriptor)) == folder:
                        found.add(descriptor.stat().st_ino)
    return found
