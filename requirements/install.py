"""Install the pinned requirements with pip, every file checked against its SHA-256.

    python requirements/install.py [runtime|test|browser] [--torch-index URL] [--torch-hash sha256:…] [PIP OPTION …]

torch is installed first, on its own, because the machine decides which build it gets: that of the default index is for
GPUs and requires CUDA libraries (torch-cuda.txt), others are for CPUs. torch.txt has the hashes of the builds that are
known. For another one, such as that of a PyTorch index for another processor, give its hash with --torch-hash.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Prints what the installed torch requires on this machine, one name a line.
NEEDS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("torch") or ():
    one = Requirement(text)
    if one.marker is None or one.marker.evaluate({"extra": ""}):
        print(one.name.lower())
"""


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--require-hashes", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"install: pip failed: {' '.join(arguments)}")


def install_torch(index: str, hashes: list[str], options: list[str]) -> None:
    text = (FOLDER / "torch.txt").read_text().rstrip("\n")
    for one in hashes:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", one):
            sys.exit(f"install: --torch-hash {one}: must be sha256: and 64 hexadecimal digits")
        text += f" \\\n    --hash={one}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "torch.txt")
        file.write_text(f"{text}\n")
        from_index = ["--index-url", index] if index else []
        pip("--no-deps", *from_index, *options, "-r", str(file))


def torch_needs() -> set[str]:
    done = subprocess.run([sys.executable, "-c", NEEDS], stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


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
    if any(name.startswith(("nvidia-", "cuda-")) for name in needs):
        pip("--no-deps", *rest, "-r", str(FOLDER / "torch-cuda.txt"))
    pip(*rest, "-r", str(FOLDER / f"{options.which}.txt"))
    if options.which != "runtime" and "triton" not in needs:
        pip("--no-deps", *rest, "-r", str(FOLDER / "triton.txt"))


if __name__ == "__main__":
    main()
