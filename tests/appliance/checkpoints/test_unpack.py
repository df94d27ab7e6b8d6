"""Archives from an untrusted server: nothing outside of the folder is written or can be read, and bounds hold."""

import gzip
import io
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_archives import FILES, special, tar, zipped

from appliance.checkpoints import members as members_module
from appliance.checkpoints.remote import SourceError
from appliance.checkpoints.unpack import unpack

LIMIT = 10**8
SYM = tarfile.SYMTYPE


def entries(*members: tuple[str, bytes] | tuple[str, bytes, str]) -> bytes:
    """Build an uncompressed tar. Two items: a file's name and content; three: a name, kind and link target."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member in members:
            if len(member) == 3:
                archive.addfile(special(*member))
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def sized(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(records: bytes, size: int | None = None, kind: bytes = tarfile.XHDTYPE) -> bytes:
    """A pax header with raw records, before the member that follows."""
    padding = -len(records) % 512
    return sized("pax", len(records) if size is None else size, kind) + records + bytes(padding)


def zip_entry(name: str, data: bytes = b"x", mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.create_system = mode << 16, 3
        archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


END = bytes(1024)


@pytest.mark.parametrize(
    ("name", "data"),
    [("x.tar", tar(FILES, "w")), ("x.tar.gz", tar(FILES)), ("x.tgz", tar(FILES)), ("x.zip", zipped(FILES))],
    ids=["tar", "tar.gz", "tgz", "zip"],
)
def test_every_kind_of_archive_is_unpacked(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    folder = unpack(tmp_path / name, tmp_path / "out", LIMIT)
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES


def test_the_only_folder_of_an_archive_is_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(tar({f"top/{name}": data for name, data in FILES.items()}, "w"))
    assert unpack(tmp_path / "x.tar", tmp_path / "out", LIMIT) == tmp_path / "out" / "top"


ESCAPES: dict[str, tuple[str, bytes, str]] = {
    "parent": ("x.tar", entries(("../out-x", b"x")), "points outside"),
    "parent inside": ("x.tar", entries(("a/../../x", b"x")), "points outside"),
    "absolute": ("x.tar", entries(("/tmp/x", b"x")), "points outside"),
    "absolute in pax": ("x.tar", pax(b"18 path=/tmp/zzzz\n") + sized("a", 0) + END, "points outside"),
    "zip parent": ("x.zip", zipped({"../x": b"x"}), "points outside"),
    "zip absolute": ("x.zip", zip_entry("/x"), "points outside"),
    "zip link": ("x.zip", zipped({"a": b"x"}, {"l": "../../etc/passwd"}), "points outside"),
    "absolute link": ("x.tar", entries(("l", SYM, "/etc/passwd")), "points outside"),
    "link to the parent": ("x.tar", entries(("l", SYM, ".."), ("k", b"")), "points outside"),
    "below a link": ("x.tar", entries(("l", SYM, ".."), ("l/x", b"x")), "contains l twice"),
    "below a later link": ("x.tar", entries(("l/x", b"x"), ("l", SYM, "..")), "contains l twice"),
    "part of a target becomes a link later": (
        "x.tar",
        entries(("a/l", SYM, "x/../../secret"), ("k", b""), ("a/x", SYM, ".")),
        "points outside",
    ),
    "part of a target becomes a link two folders up": (
        "x.tar",
        entries(("k", b""), ("p/q/l", SYM, "x/../../secret"), ("p/q/x", SYM, "../..")),
        "points outside",
    ),
    "chain of links": ("x.tar", entries(("k", b""), ("a/l", SYM, "m"), ("a/m", SYM, "../../secret")), "points outside"),
    "out of the only folder": ("x.tar", entries(("top/k", b""), ("top/l", SYM, "../secret")), "points outside"),
    "out of the only folder and back": ("x.tar", entries(("top/k", b""), ("top/l", SYM, "../top/k")), "points outside"),
    "the only member is a link": ("x.tar", entries(("l", SYM, "..")), "points outside"),
    "dangling link": ("x.tar", entries(("k", b""), ("l", SYM, "nothing")), "has no target in the archive"),
    "link loop": ("x.tar", entries(("l", SYM, "m"), ("m", SYM, "l")), "more than 8 links"),
    "hard link": ("x.tar", entries(("l", tarfile.LNKTYPE, "../x")), "hard link"),
    "fifo": ("x.tar", entries(("l", tarfile.FIFOTYPE, "")), "neither a file, a folder nor a link"),
    "character device": ("x.tar", entries(("l", tarfile.CHRTYPE, "")), "neither a file, a folder nor a link"),
    "block device": ("x.tar", entries(("l", tarfile.BLKTYPE, "")), "neither a file, a folder nor a link"),
    "unknown kind": ("x.tar", sized("l", 0, b"Z") + END, "neither a file, a folder nor a link|damaged"),
    "zip device": ("x.zip", zip_entry("l", mode=0o20666), "neither a file, a folder nor a link"),
    "twice": ("x.tar", entries(("a", b"1"), ("./a", b"2")), "a twice"),
    "link twice": ("x.tar", entries(("k", b""), ("l", SYM, "k"), ("l", SYM, "k")), "l twice"),
    "below a file": ("x.tar", entries(("a", b"1"), ("a/b", b"2")), "a twice|below a file"),
    "control characters": ("x.tar", entries(("a\x1b[2J", b"")), "cannot be printed"),
    "NUL in pax": ("x.tar", pax(b"12 path=a\0b\n") + sized("a", 0) + END, "cannot be printed"),
    "name that is not UTF-8": ("x.tar", sized("z", 0).replace(b"z", b"\xff", 1) + END, "damaged|cannot be printed"),
    "long name": ("x.tar", entries(("a" * 2000, b"")), "more than 1,024 bytes"),
    "deep name": ("x.tar", entries(("a/" * 50 + "b", b"")), "16 folders"),
    "long target": ("x.tar", entries(("k", b""), ("l", SYM, "./" * 2000 + "k")), "more than 1,024 bytes"),
}


@pytest.mark.parametrize(("name", "data", "words"), ESCAPES.values(), ids=ESCAPES)
def test_members_outside_of_the_folder_are_refused(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    archive, secret = tmp_path / "in" / name, tmp_path / "in" / "secret"
    archive.write_bytes(data)
    secret.write_text("secret")
    with pytest.raises(SourceError, match=words):
        unpack(archive, tmp_path / "in" / "out", LIMIT)
    outside = [path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "in" / "out")]
    assert sorted(outside) == sorted([tmp_path / "in", archive, secret])


def gnu_sparse() -> bytes:
    """A sparse file that declares a thousand gigabytes."""
    header = bytearray(sized("s", 0, tarfile.GNUTYPE_SPARSE))
    header[483:495] = b"\x80" + (10**12).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * 32 + sum(header[156:512]))
    return bytes(header) + END


BOMBS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "members": ("x.tar.gz", lambda: tar({str(n): b"" for n in range(10_001)}), "more than 10,000 members"),
    "zip directory": ("x.zip", lambda: zipped({f"{n:0500}": b"" for n in range(9_000)}), "headers of more than 4.2 MB"),
    "declared size": ("x.tar", lambda: sized("a", 10**12) + END, "unpacks to more than 100.0 MB"),
    "negative size": ("x.tar", lambda: sized("a", -1024) + END, "damaged"),
    "negative size in pax": ("x.tar", lambda: pax(b"12 size=-512\n") + sized("a", 0) + END, "damaged"),
    "size of 5,000 digits": ("x.tar", lambda: pax(b"5011 size=" + b"9" * 5000 + b"\n") + END, "damaged"),
    "pax header": ("x.tar.gz", lambda: gzip.compress(pax(bytes(1 << 24)) + sized("a", 0), 1), "headers of more than"),
    "pax header of a terabyte": ("x.tar", lambda: pax(b"", 10**12), "headers of more than 65.5 kB"),
    "global pax header": ("x.tar", lambda: pax(bytes(1 << 20), kind=tarfile.XGLTYPE), "headers of more than"),
    "chain of pax headers": ("x.tar", lambda: pax(b"10 a=bcde\n") * 5000 + sized("a", 0) + END, "headers of more than"),
    "long name of a gigabyte": ("x.tar", lambda: sized("n", 10**9, tarfile.GNUTYPE_LONGNAME), "headers of more than"),
    "sparse file": ("x.tar", gnu_sparse, "a sparse file"),
    "zip bomb": ("x.zip", lambda: zipped({"a": bytes(100_000_001)}), "unpacks to more than 100.0 MB"),
    "gzip bomb behind the end": ("x.tgz", lambda: gzip.compress(END + bytes(1 << 24), 1), "headers of more than 4.2"),
    "link target": ("x.zip", lambda: zip_entry("l", bytes(2_000_000), 0o120777), "target of more than 1,024 bytes"),
}


@pytest.mark.parametrize(("name", "make", "words"), BOMBS.values(), ids=BOMBS)
def test_archives_beyond_a_limit_are_refused(name: str, make: Callable[[], bytes], words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(make())
    with pytest.raises(SourceError, match=words):
        unpack(tmp_path / name, tmp_path / "out", LIMIT)


def test_headers_are_refused_before_they_are_read_into_memory(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(pax(b"", 2**33))
    reads: list[int] = []

    class Watched(members_module._LimitedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            reads.append(len(data))
            return data

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(members_module, "_LimitedReader", Watched)
        with pytest.raises(SourceError, match="headers of more than"):
            unpack(tmp_path / "x.tar", tmp_path / "out", LIMIT)
    assert sum(reads) <= 1024


@pytest.mark.parametrize("make", [tar, zipped])
def test_archive_beyond_its_unpacked_size_is_refused(make: Callable[..., bytes], tmp_path: Path) -> None:
    name = "x.zip" if make is zipped else "x.tar.gz"
    (tmp_path / name).write_bytes(make({"a": bytes(3_000_000), "b": bytes(3_000_000)}))
    with pytest.raises(SourceError, match=r"more than 4\.0 MB \(model.source.http.max_size\)"):
        unpack(tmp_path / name, tmp_path / "out", 4_000_000)


def test_minimum_free_space_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(tar({"a": b"x"}, "w"))
    with pytest.raises(SourceError, match=r"needs 1 bytes for a, .* \(model.download.min_free\)"):
        unpack(tmp_path / "x.tar", tmp_path / "out", LIMIT, min_free=2**60)


def flipped(data: bytes, what: bytes, other: bytes) -> bytes:
    assert what in data
    return data.replace(what, other)


DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "truncated gzip": ("x.tar.gz", tar({"a": b"x" * 9999})[:60], "damaged"),
    "wrong checksum of gzip": ("x.tar.gz", tar(FILES)[:-8] + b"\0" * 8, "damaged: CRC check failed"),
    "no archive": ("x.tar", b"no archive at all" * 99, "damaged"),
    "empty tar": ("x.tar", b"", "damaged"),
    "empty gzip": ("x.tgz", b"\x1f\x8b", "damaged"),
    "empty zip": ("x.zip", b"", "damaged"),
    "truncated zip": ("x.zip", zipped({"a": b"x"})[:-9], "damaged"),
    "zip without its local header": ("x.zip", flipped(zipped({"a": b"x"}), b"PK\x03\x04", b"PK\x09\x09"), "damaged"),
    "tar cut in a file": ("x.tar", tar(FILES, "w")[:1500], "damaged"),
    "tar cut between two members": ("x.tar", entries(("a", b"1"), ("b", b"2"))[:1024], "does not end with a block"),
    "tar with a damaged second header": (
        "x.tar",
        entries(("a", b"1"))[:1024] + b"\x07" * 512 + END,
        "does not end with a block of zeros",
    ),
    "encrypted": (
        "x.zip",
        flipped(zip_entry("a"), b"PK\x01\x02\x14\x03\x14\0\0", b"PK\x01\x02\x14\x03\x14\0\1"),
        "a is encrypted",
    ),
    "LZMA": (
        "x.zip",
        flipped(zip_entry("a"), b"PK\x01\x02\x14\x03\x14\0\0\0\x08\0", b"PK\x01\x02\x14\x03\x14\0\0\0\x0e\0"),
        "neither stored nor deflated",
    ),
    "UTF-8 name that is none": (
        "x.zip",
        flipped(zip_entry("ä"), "ä".encode(), b"\xff\xff"),
        "damaged",
    ),
    "target that is no text": ("x.zip", zip_entry("l", b"\xff\xfe", 0o120777), "damaged"),
    "directory at a wrong place": (
        "x.zip",
        zip_entry("a")[:-6] + struct.pack("<L", 0xFFFFFF00) + b"\0\0",
        "damaged",
    ),
}


@pytest.mark.parametrize(("name", "data", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_archives_are_refused_with_a_clear_error(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=words):
        unpack(tmp_path / name, tmp_path / "out", LIMIT)


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_archives_with_random_damage_are_refused_or_unpacked(name: str, tmp_path: Path) -> None:
    whole = {"x.tar": tar(FILES, "w"), "x.tar.gz": tar(FILES), "x.zip": zipped(FILES, {"l": "config.json"})}[name]
    draw = random.Random(name)
    for round in range(150):
        data = bytearray(whole[: draw.choice((len(whole), len(whole), draw.randrange(len(whole))))])
        for _ in range(draw.randrange(1, 4)):
            if data:
                data[draw.randrange(min(len(data), 1500))] = draw.randrange(256)
        (tmp_path / name).write_bytes(data)
        try:
            unpack(tmp_path / name, tmp_path / f"out{round}", LIMIT)
        except SourceError as error:
            assert str(error).startswith(f"{name}: "), f"round {round}"


def test_link_inside_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(entries(("snap/f", SYM, "../blobs/1"), ("snap/g", SYM, "f"), ("blobs/1", b"x")))
    folder = unpack(tmp_path / "x.tar", tmp_path / "out", LIMIT)
    assert (folder / "snap/f").read_bytes() == (folder / "snap/g").read_bytes() == b"x"


PARTS = st.lists(st.sampled_from(("a", "b", "x", "..", ".", "secret")), min_size=1, max_size=5).map("/".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PARTS, st.none() | PARTS), min_size=1, max_size=8))
def test_no_order_of_files_and_links_escapes_the_folder(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, str | None]]
) -> None:
    base = tmp_path_factory.mktemp("links")
    for outside in (base / "secret", base / "cache" / "secret", base / "cache" / "work" / "secret"):
        outside.parent.mkdir(exist_ok=True)
        outside.write_text("secret")
    data = entries(*((name, b"own") if link is None else (name, SYM, link) for name, link in drawn))
    (base / "x.tar").write_bytes(data)
    try:
        found = unpack(base / "x.tar", base / "cache" / "work" / "out", LIMIT)
    except SourceError:
        return
    final = found.rename(base / "cache" / "final")
    for path in final.rglob("*"):
        assert path.resolve(strict=True).is_relative_to(final)
        assert path.is_dir() or path.read_bytes() == b"own"
