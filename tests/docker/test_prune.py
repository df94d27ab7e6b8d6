"""docker/prune.py: unused libraries are replaced by libraries that load and report errors."""

import ast
import ctypes
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRUNE = runpy.run_path(str(ROOT / "docker" / "prune.py"))


def library(path: Path, source: str, *needed: Path, options: Sequence[str] = ()) -> None:
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-o", str(path)]
    command += ["-x", "none", *map(str, needed), *(f"-Wl,-rpath,{one.parent}" for one in needed)]
    subprocess.run([*command, *options], input=source, text=True, check=True)


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="the build stage has cc and nm")
def test_an_encoder_is_replaced_and_what_is_linked_to_it_still_loads(tmp_path):
    encoder, codec = tmp_path / "libx265-abc.so.1", tmp_path / "libavcodec-abc.so.1"
    library(encoder, "char filling[300000] = {1}; long x265_get(void) { return 7; } long unused(void) { return 8; }")
    library(
        codec, "long x265_get(void); long ask(void) { return x265_get(); } long decode(void) { return 5; }", encoder
    )
    before = codec.read_bytes()
    freed = PRUNE["replace_unused"](tmp_path)
    assert freed > 200_000 and codec.read_bytes() == before
    loaded = ctypes.CDLL(str(codec))
    assert loaded.decode() == 5 and loaded.ask() == 0
    assert PRUNE["symbols"](encoder, "--defined-only") == {"x265_get": ""}


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("nm")), reason="the build stage has cc and nm")
def test_a_replaced_library_has_the_versions_of_its_symbols(tmp_path):
    tls, reader = tmp_path / "libgnutls-abc.so.30", tmp_path / "libavformat-abc.so.1"
    script = tmp_path / "versions"
    script.write_text("TLS_1 { old; }; TLS_2 { start; } TLS_1;")
    library(
        tls, "long start(void) { return 7; } long old(void) { return 8; }", options=[f"-Wl,--version-script={script}"]
    )
    library(reader, "long start(void); long old(void); long ask(void) { return start() + old(); }", tls)
    assert PRUNE["symbols"](reader, "--undefined-only")["start"] == "TLS_2"
    PRUNE["replace_unused"](tmp_path)
    assert ctypes.CDLL(str(reader)).ask() == -2


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("readelf")), reason="the build stage has cc and readelf")
def test_libraries_that_only_removed_ones_need_are_removed(tmp_path):
    package, folder = tmp_path / "package", tmp_path / "package.libs"
    package.mkdir()
    folder.mkdir()
    used, lower, upper = folder / "libused.so.1", folder / "liblower.so.1", folder / "libupper.so.1"
    library(used, "long used(void) { return 1; }")
    library(lower, "long lower(void) { return 2; }")
    library(upper, "long lower(void); long upper(void) { return lower(); }", lower)
    library(package / "module.so", "long used(void); long module(void) { return used(); }", used)
    assert PRUNE["remove_orphans"](package, folder) > 0
    assert sorted(path.name for path in folder.iterdir()) == ["libused.so.1"]
    assert ctypes.CDLL(str(package / "module.so")).module() == 1


def test_no_decoder_is_named():
    assert not [name for name in PRUNE["UNUSED"] if "avcodec" in name or "dav1d" in name or "vpx" in name]


def test_a_build_for_gpus_keeps_what_torch_compile_imports(tmp_path):
    names = ("torch/_dynamo/utils.py", "torch/_inductor/config.py", "numpy/random/__init__.py")
    for name in (*names, "numpy/f2py/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    for pattern in PRUNE["ANY_BUILD"]:
        PRUNE["remove"](sorted(tmp_path.glob(pattern)))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")) == sorted(names)


def test_the_build_imports_every_kind_of_source():
    """The import fails if pruning removed the package of a source, and writes bytecode."""
    source = ast.parse((ROOT / "appliance/checkpoints/download_spec.py").read_text())
    store = next(node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "store")
    kinds = {node.module for node in ast.walk(store) if isinstance(node, ast.ImportFrom)}
    verify = ast.parse((ROOT / "docker/verify.py").read_text())
    checked = next(
        ast.literal_eval(node.value)
        for node in verify.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SERVICE"
    )
    assert len(kinds) == 4 and kinds <= set(checked)


TRIM = runpy.run_path(str(ROOT / "docker" / "trim.py"))
STATUS = """Package: python3
Status: install ok installed
Version: 3.11
Depends: lib (>= 2), absent | other, debconf

Package: lib
Pre-Depends: libc6:any
Version: 2

Package: libc6
Version: 1

Package: other
Version: 1

Package: debconf
Version: 1
Depends: perl-base

Package: perl-base
Version: 5
"""


def test_the_system_keeps_the_packages_that_serving_depends_on():
    known = TRIM["packages"](STATUS)
    assert TRIM["closure"](known, ["python3"]) == {"python3", "lib", "libc6", "other"}
    assert TRIM["closure"](known, ["absent"]) == set()
    assert TRIM["closure"](known, ["debconf"]) == {"debconf"}, "a package of PACKAGES, without the perl-base it needs"


def test_packages_to_keep_are_packages_of_the_base(tmp_path):
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    with pytest.raises(SystemExit, match="BASE does not have curll"):
        TRIM["remove_packages"](tmp_path, ["python3", "curll"])


def test_certificates_and_licenses_stay(tmp_path):
    """Debian's links from OpenSSL's folder to the certificates belong to the command, which is removed."""
    database, tls, documents = tmp_path / "var/lib/dpkg", tmp_path / "usr/lib/ssl", tmp_path / "usr/share/doc"
    (database / "info").mkdir(parents=True)
    (database / "status").write_text(STATUS + "\nPackage: openssl\nVersion: 3\n")
    (database / "info/openssl.list").write_text(
        "/usr/bin/openssl\n/usr/lib/ssl\n/usr/lib/ssl/certs\n/usr/lib/ssl/misc\n/usr/lib/ssl/misc/CA.pl\n"
    )
    for folder in (tmp_path / "etc/ssl/certs", tls / "misc", tmp_path / "usr/bin", documents / "lib/examples"):
        folder.mkdir(parents=True)
    (tls / "certs").symlink_to("../../../etc/ssl/certs")
    for file in (tls / "misc/CA.pl", tmp_path / "usr/bin/openssl", documents / "lib/copyright", documents / "lib/NEWS"):
        file.touch()
    (documents / "lib2").symlink_to("lib")
    TRIM["remove_packages"](tmp_path, [])
    TRIM["remove_documents"](tmp_path)
    assert (tls / "certs").is_dir() and not (tls / "misc").exists() and not (tmp_path / "usr/bin/openssl").exists()
    assert [path.name for path in (documents / "lib").iterdir()] == ["copyright"]


def test_packages_are_removed_with_their_files_and_entries(tmp_path):
    database = tmp_path / "var/lib/dpkg"
    (database / "info").mkdir(parents=True)
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (database / "status").write_text(STATUS)
    for name, files in {"python3": "/bin/python", "perl-base": "/usr/bin/perl\n/usr/share/perl", "lib": "/bin"}.items():
        (database / "info" / f"{name}.list").write_text(f"/.\n{files}\n")
    for name in ("python", "perl", "unowned"):
        (tmp_path / "usr/bin" / name).touch()
    (tmp_path / "usr/share/perl").mkdir(parents=True)
    TRIM["remove_packages"](tmp_path, ["python3"])
    assert sorted(path.name for path in (tmp_path / "usr/bin").iterdir()) == ["python", "unowned"]
    assert (tmp_path / "bin").is_symlink() and not (tmp_path / "usr/share/perl").exists()
    assert set(TRIM["packages"]((database / "status").read_text())) == {"python3", "lib", "libc6", "other"}
    assert sorted(path.name for path in (database / "info").iterdir()) == ["lib.list", "python3.list"]


def test_contents_name_every_file_once(tmp_path, capsys):
    contents = runpy.run_path(str(ROOT / "docker" / "contents.py"))
    site = tmp_path / "opt/slipway/venv/lib/python3.11/site-packages"
    sizes = {
        "torch/lib/libtorch_cpu.so": 4_000_000,
        "torch/nn/__init__.py": 100_000,
        "torch-2.dist-info/RECORD": 200_000,
        "appliance/demo/demo/model.safetensors": 1_000_000,
        "appliance/cli/main.py": 300_000,
        "click/core.py": 500_000,
    }
    for name, count in sizes.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(bytes(count))
    (tmp_path / "link").symlink_to(site / "click/core.py")
    (site / "again").hardlink_to(site / "click/core.py")
    contents["main"](str(tmp_path))
    lines = [line.removeprefix("contents:").split(" MB  ") for line in capsys.readouterr().out.splitlines()]
    assert {text: float(count) for count, text in lines} == {
        "torch: operators and MKL (libtorch_cpu.so)": 4.0,
        "torch: bindings and Python modules": 0.3,
        "Slipway: demo model": 1.0,
        "Slipway: Python modules, page, manifests": 0.3,
        "other Python packages": 0.5,
        "in all": 6.1,
    }
