"""Remove what serving does not use from the image's system: `trim.py [PACKAGE …]`, with packages to keep.

Runs in a stage of the build on Debian, whose files then become the image's only system layer. KEEP and the packages
that they depend on stay, with the owners of the libraries that Python is linked to; package managers, Perl, accounts
and tools of file systems go, and the parts of Python's library that only developers use. Fewer packages are also fewer
to update. Their database is rewritten, because the bill of materials reads it.

Afterwards the standard library is compiled to bytecode, which some images of Python lack, because nothing writes it
while serving. Systems without a database of dpkg keep their packages.
"""

import compileall
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Shell, tools for `docker exec`, Python, C++ for the wheels, certificates, time zones.
KEEP = ("base-files", "base-passwd", "bash", "ca-certificates", "coreutils", "dash", "findutils", "grep", "hostname")
KEEP += ("libc-bin", "libgcc-s1", "libstdc++6", "python3", "sed", "tzdata")
# Installation scripts use these; nis, dbm and sqlite3 of the standard library use the libraries.
NOT_FOLLOWED = ("debconf", "dpkg", "openssl", "perl-base", "libdb5.3", "libdb5.3t64", "libnsl2", "libtirpc3")
NOT_FOLLOWED += ("libsqlite3-0",)
STANDARD_LIBRARY = ("config-*", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo")
STANDARD_LIBRARY += ("site-packages/*", "sqlite3", "turtle.py", "unittest/test", "*/test", "*/tests")
# Python's TLS finds its certificates through these links, which belong to the command `openssl`.
KEPT_FILES = ("/etc/ssl", "/etc/ssl/openssl.cnf", "/usr/lib/ssl", "/usr/lib/ssl/cert.pem", "/usr/lib/ssl/certs")
KEPT_FILES += ("/usr/lib/ssl/openssl.cnf",)
# Character sets for iconv, which Python does not use; copies of the time zones with and without leap seconds.
FILES = ("usr/lib/*/gconv", "usr/share/zoneinfo/right", "usr/share/zoneinfo/posix", "usr/share/man")
FILES += ("usr/share/info", "usr/share/locale", "usr/share/python-wheels", "var/cache/*", "var/lib/apt", "var/log/*")


def packages(status: str) -> dict[str, str]:
    """Return the paragraphs of the database by the packages' names."""
    blocks = [block for block in status.split("\n\n") if block.strip()]
    return {found[1]: block for block in blocks if (found := re.search(r"^Package: (\S+)$", block, re.MULTILINE))}


def dependencies(block: str) -> Iterator[str]:
    """Yield the names in the fields Depends and Pre-Depends, with all alternatives."""
    for field in re.findall(r"^(?:Pre-)?Depends: (.*)$", block, re.MULTILINE):
        for one in re.split(r"[,|]", field):
            yield one.split()[0].partition(":")[0]


def closure(known: dict[str, str], roots: Iterable[str]) -> set[str]:
    """Return the packages among `roots` and those that they depend on, without NOT_FOLLOWED."""
    kept: set[str] = set()
    pending = [name for name in roots if name in known]
    while pending:
        name = pending.pop()
        if name not in kept:
            kept.add(name)
            pending += [one for one in dependencies(known[name]) if one in known and one not in NOT_FOLLOWED]
    return kept


def files(root: Path, name: str) -> set[str]:
    """Return the paths that the package has installed. Links of folders like /lib are resolved."""
    folder = root / "var/lib/dpkg/info"
    found = [folder / f"{name}.list", *folder.glob(f"{name}:*.list")]
    lines = {line for one in found if one.exists() for line in one.read_text().splitlines() if line != "/."}
    return {str(Path("/", (root / line[1:]).parent.resolve().relative_to(root), Path(line).name)) for line in lines}


def linked(root: Path) -> set[str]:
    """Return the paths of the libraries that Python and its extension modules are linked to."""
    modules = [Path(sys.executable).resolve(), *Path(sysconfig.get_path("platstdlib"), "lib-dynload").glob("*.so")]
    found = subprocess.run(["ldd", *modules], capture_output=True, text=True, check=False).stdout
    paths = set(re.findall(r"=> (/\S+)", found))
    return {str(Path("/", (root / path[1:]).resolve().relative_to(root))) for path in paths} | paths


def remove_packages(root: Path, more: Sequence[str]) -> None:
    database = root / "var/lib/dpkg"
    known = packages((database / "status").read_text())
    if absent := [name for name in more if name not in known]:
        raise SystemExit(f"trim: PACKAGES: BASE does not have {', '.join(absent)}. Install them in an image for BASE.")
    owned = {name: files(root, name) for name in known}
    used = linked(root)
    owners = [name for name in known if owned[name] & used and name not in NOT_FOLLOWED]
    kept = closure(known, [*KEEP, *more, *owners])
    stay = set(KEPT_FILES).union(*(owned[name] for name in kept))
    for path in sorted(set().union(*owned.values()) - stay, reverse=True):
        one = root / path[1:]
        if one.is_symlink() or one.is_file():
            one.unlink()
        elif one.is_dir() and not any(one.iterdir()):
            one.rmdir()
    for one in (database / "info").iterdir():
        if one.name.rpartition(".")[0].partition(":")[0] not in kept:
            one.unlink()
    (database / "status").write_text("".join(known[name] + "\n\n" for name in known if name in kept))
    (database / "status-old").unlink(missing_ok=True)
    print(f"trim: {len(known) - len(kept)} of {len(known)} packages removed: {' '.join(sorted(known.keys() - kept))}")


def remove(paths: Iterable[Path]) -> None:
    for one in paths:
        shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()


def remove_documents(root: Path) -> None:
    """Remove the documentation of packages, but not their licenses: an image is a copy that must contain them."""
    folders = [one for one in root.glob("usr/share/doc/*") if one.is_dir() and not one.is_symlink()]
    remove(one for folder in folders for one in list(folder.iterdir()) if one.name != "copyright")


def trim_standard_library() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    for pattern in STANDARD_LIBRARY:
        remove(list(library.glob(pattern)))
    for one in (library / "lib-dynload").glob("*.so"):
        if "not found" in subprocess.run(["ldd", one], capture_output=True, text=True, check=False).stdout:
            one.unlink()
    compileall.compile_dir(library, quiet=2, rx=re.compile(r"site-packages|dist-packages"))


def main(more: Sequence[str], root: Path = Path("/")) -> None:
    if (root / "var/lib/dpkg/status").exists():
        remove_packages(root, more)
    remove_documents(root)
    trim_standard_library()
    for pattern in FILES:
        remove(list(root.glob(pattern)))


if __name__ == "__main__":
    main(sys.argv[1:])
