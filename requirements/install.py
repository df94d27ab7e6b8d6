"""Install the pinned requirements with pip, every file checked against its SHA-256.

    python requirements/install.py [runtime|test|browser] [--torch-index URL] [--torch-hash sha256:…] [PIP OPTION …]

torch is installed first, on its own, because its build depends on the machine: the default index has a build for GPUs
that requires CUDA libraries (torch-cuda.txt), PyTorch's indexes have builds for CPUs. torch.txt has the hashes of known
builds. Give the hash of another build, such as one for another processor, with --torch-hash.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Prints the requirements of the installed torch on this machine, one name per line.
NEEDS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("torch") or ():
    one = Requirement(text)
    if one.marker is None or one.marker.evaluate({"extra": ""}):
        print(one.name.lower())
"""


ROCM_TRITON = {"pytorch-triton-rocm", "triton-rocm"}
"""Names of Triton in the builds of torch for ROCm."""
DOWNLOADS = ("--quiet", "-q")
"""Options of pip install that pip download takes as well."""


def pip(command: str, *arguments: str) -> None:
    full = [sys.executable, "-m", "pip", "--disable-pip-version-check", command, *arguments]
    if subprocess.run(full, check=False).returncode:
        sys.exit(f"install: pip {command} failed: {' '.join(arguments)}")


def install_torch(index: str, hashes: list[str], options: list[str]) -> None:
    """Install the pinned torch, unless it is installed."""
    for one in hashes:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", one):
            sys.exit(f"install: --torch-hash {one}: must be sha256: and 64 hexadecimal digits")
    wanted = re.findall(r"^torch==\S+", (FOLDER / "torch.txt").read_text(), re.MULTILINE)[0]
    if installed_torch() != wanted.removeprefix("torch=="):
        install_checked(wanted, index, hashes, options)


def install_checked(wanted: str, index: str, hashes: list[str], options: list[str]) -> None:
    """Install the build that pip chooses without hashes, after its hash was compared.

    With --require-hashes pip drops files of a --find-links folder, whose names have no hashes, as soon as the index
    has a file with one of the hashes: a machine with a build for CPUs at hand would get the one for GPUs."""
    known = {*re.findall(r"sha256:[0-9a-f]{64}", (FOLDER / "torch.txt").read_text()), *hashes}
    with tempfile.TemporaryDirectory() as folder:
        from_index = ["--index-url", index] if index else []
        quiet = [option for option in options if option in DOWNLOADS]
        pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, *from_index, *quiet, wanted)
        (wheel,) = Path(folder).iterdir()
        with wheel.open("rb") as file:
            found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        if found not in known:
            sys.exit(f"install: {wheel.name} has {found}, which torch.txt lacks; to accept it use --torch-hash")
        pip("install", "--no-deps", *options, str(wheel))


def installed_torch() -> str:
    """The version without what names the build (2.13.0 of 2.13.0+cpu); empty without torch."""
    text = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("+")[0]


def torch_needs() -> set[str]:
    done = subprocess.run([sys.executable, "-c", NEEDS], stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


def torch_requirement(name: str) -> str:
    """Return the requirement of the installed torch with this name, such as pytorch-triton-rocm==3.5.1."""
    text = f"""
from importlib.metadata import requires
print(next(one.partition(";")[0].strip() for one in requires("torch") if one.lower().startswith({name!r})))
"""
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Install the pinned requirements with pip, every file checked against its SHA-256.",
        epilog="All other options are passed on to pip install.",
        allow_abbrev=False,
    )
    parser.add_argument("which", nargs="?", choices=("runtime", "test", "browser"), default="runtime")
    parser.add_argument("--torch-index", metavar="URL", default="", help="index to install torch from")
    text = "another accepted hash of torch's wheel; several separated by spaces"
    parser.add_argument("--torch-hash", metavar="SHA256", default="", help=text)
    options, rest = parser.parse_known_args()
    os.environ.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    install_torch(options.torch_index, options.torch_hash.split(), rest)
    needs = torch_needs()
    for name in sorted(needs & ROCM_TRITON):  # the default index lacks it
        install_checked(torch_requirement(name), options.torch_index, options.torch_hash.split(), rest)
    if any(name.startswith(("nvidia-", "cuda-")) for name in needs):
        pip("install", "--require-hashes", "--no-deps", *rest, "-r", str(FOLDER / "torch-cuda.txt"))
    pip("install", "--require-hashes", *rest, "-r", str(FOLDER / f"{options.which}.txt"))
    if options.which != "runtime" and not needs & {"triton", *ROCM_TRITON}:
        pip("install", "--require-hashes", "--no-deps", *rest, "-r", str(FOLDER / "triton.txt"))


if __name__ == "__main__":
    main()
