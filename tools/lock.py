"""Write requirements/*.txt: exact versions with the SHA-256 of all their files.

    python tools/lock.py            # in an environment where the test suite passes; needs uv (`make lock` installs it)

The versions come from this environment. uv adds requirements of other systems and Python versions, and the hashes from
the package index. `requirements/install.py` installs from these files.

torch has a file of its own. Its builds differ: the default index has one for GPUs, PyTorch's indexes have one for CPUs
and one for each release of CUDA, all with the same version but other hashes. The hashes of all builds that were seen
are kept: from the default index, --torch-index URL, --wheels FOLDER, and earlier records of this version.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
HEAD = "# Written by tools/lock.py; installed by requirements/install.py.\n"
# Requirements of the GPU build of torch that the CPU build does not have.
CUDA = re.compile(r"nvidia-(?!ml-py$).*|cuda-.*|triton")
# Installed packages that are not locked: this project, and packages that depend on the installed build of torch.
UNCONSTRAINED = re.compile(rf"slipway.*|{CUDA.pattern}")
Locked = dict[str, str]
"""The text of each requirement, hashes included, by normalised name."""


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parsed(text: str) -> Locked:
    """Split the text of a requirements file, with one requirement each with its hashes on continuation lines."""
    found: Locked = {}
    for match in re.finditer(r"^([A-Za-z0-9][\w.-]*)(?:.*\\\n)*.*\n", text, re.MULTILINE):
        found[normalised(match[1])] = match[0]
    return found


def compiled(wanted: Iterable[str], constraints: Iterable[str] = (), *options: str) -> Locked:
    """Resolve these requirements for all systems. Raises SystemExit if they contradict each other."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if uv is None:
        raise SystemExit("uv is not installed; run pip install uv first")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.txt").write_text("".join(f"{one}\n" for one in wanted))
        (folder / "constraints.txt").write_text("".join(f"{one}\n" for one in constraints))
        command = [
            *(uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"),
            *("--no-header", "--no-annotate", "--system-certs", "--constraints", str(folder / "constraints.txt")),
            *(*options, "--output-file", str(folder / "out.txt"), str(folder / "in.txt")),
        ]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("uv found no compatible versions; check that the installed versions match pyproject.toml")
        return parsed((folder / "out.txt").read_text())


def installed() -> Iterator[str]:
    """Yield a constraint for each installed distribution, without the suffix of its build."""
    for package in distributions():
        name = normalised(package.metadata["Name"])
        if not UNCONSTRAINED.fullmatch(name):
            yield f"{name}=={package.version.split('+')[0]}"


def hashes(text: str) -> set[str]:
    return set(re.findall(r"--hash=(sha256:[0-9a-f]{64})", text))


def pinned(requirement: str, found: Iterable[str]) -> str:
    """Return the requirement with these hashes."""
    return " \\\n    ".join([requirement, *(f"--hash={one}" for one in sorted(found))]) + "\n"


def torch_lock(resolved: str, indexes: Iterable[str], folders: Iterable[Path]) -> str:
    """Return torch's requirement with the hashes of every known build of its version."""
    requirement = resolved.split(" ", 1)[0]
    version, found = requirement.partition("==")[2], hashes(resolved)
    recorded = REQUIREMENTS / "torch.txt"
    if recorded.exists() and f"{requirement} " in (text := recorded.read_text()):
        found |= hashes(text)
    for index in indexes:
        found |= hashes(compiled([requirement], (), "--no-deps", "--index-url", index)["torch"])
    for folder in folders:
        for wheel in sorted(folder.glob(f"torch-{version}[+-]*.whl")):
            found.add(f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    return pinned(requirement, found)


def write(name: str, requirements: Iterable[str], head: str = "") -> None:
    lines = list(requirements)
    (REQUIREMENTS / f"{name}.txt").write_text(HEAD + head + "".join(lines))
    print(f"requirements/{name}.txt: {len(lines)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements/*.txt: exact versions with hashes.")
    text = "additional index of torch builds, whose hashes are added"
    parser.add_argument("--torch-index", metavar="URL", action="append", default=[], help=text)
    text = "folder with wheels of other torch builds, whose hashes are added"
    parser.add_argument("--wheels", metavar="FOLDER", type=Path, action="append", default=[], help=text)
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, constraints = project["optional-dependencies"], sorted(installed())
    triton = [one for one in extras["test"] if one.startswith("triton")]
    runtime = compiled(project["dependencies"], constraints)
    test = compiled([*project["dependencies"], *extras["test"]], constraints, "--no-emit-package", "triton")
    browser = compiled([*project["dependencies"], *extras["browser"]], constraints)
    write("torch", [torch_lock(runtime["torch"], options.torch_index, options.wheels)])
    write("torch-cuda", [text for name, text in runtime.items() if CUDA.fullmatch(name)])
    write("runtime", [text for name, text in runtime.items() if name != "torch" and not CUDA.fullmatch(name)])
    write("test", [text for name, text in test.items() if name not in runtime], "-r runtime.txt\n")
    write("triton", compiled(triton).values())
    write("browser", [text for name, text in browser.items() if name not in runtime | test], "-r test.txt\n")
    write("docs", compiled(extras["docs"]).values())
    for name in ("models", "clients", "lock"):
        path = REQUIREMENTS / f"{name}.txt"
        kept = compiled([text.split(" ", 1)[0].strip() for text in parsed(path.read_text()).values()], (), "--no-deps")
        write(name, [text for one, text in kept.items() if one != "torch"])


if __name__ == "__main__":
    main()
