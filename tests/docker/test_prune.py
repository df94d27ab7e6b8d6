"""docker/prune.py: encoders are replaced by libraries that load and report errors."""

import ctypes
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRUNE = runpy.run_path(str(ROOT / "docker" / "prune.py"))


def library(path: Path, source: str, *needed: Path) -> None:
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-o", str(path)]
    command += ["-x", "none", *map(str, needed), f"-Wl,-rpath,{path.parent}"]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="the build stage has cc and nm")
def test_an_encoder_is_replaced_and_what_is_linked_to_it_still_loads(tmp_path):
    encoder, codec = tmp_path / "libx265-abc.so.1", tmp_path / "libavcodec-abc.so.1"
    library(encoder, "char filling[300000] = {1}; long x265_get(void) { return 7; } long unused(void) { return 8; }")
    library(
        codec, "long x265_get(void); long ask(void) { return x265_get(); } long decode(void) { return 5; }", encoder
    )
    before = codec.read_bytes()
    freed = PRUNE["replace_encoders"](tmp_path)
    assert freed > 200_000 and codec.read_bytes() == before
    loaded = ctypes.CDLL(str(codec))
    assert loaded.decode() == 5 and loaded.ask() == 0
    assert PRUNE["symbols"](encoder, "--defined-only") == {"x265_get"}


def test_only_encoders_are_named():
    assert not [name for name in PRUNE["ENCODERS"] if "avcodec" in name or "dav1d" in name or "vpx" in name]
