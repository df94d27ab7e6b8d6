"""The build context of the image, as .dockerignore filters it, has every file that the build reads."""

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Prints what setup.py declares, without building: the extensions with their sources and headers.
DECLARED = """
import json, runpy, setuptools
given = {}
setuptools.setup = given.update
runpy.run_path("setup.py")
print(json.dumps({one.name: [*one.sources, *one.depends] for one in given["ext_modules"]}))
"""


def admits(patterns: list[str], path: str) -> bool:
    """Return whether .dockerignore lets this file into the context. The last matching pattern decides, and a
    pattern that matches a folder matches all files below it, as in Docker."""
    parts = path.split("/")
    names = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    kept = True
    for pattern in patterns:
        plain = pattern.lstrip("!")
        tails = [plain, *([plain[3:]] if plain.startswith("**/") else [])]
        if any(
            fnmatchcase(name if "/" in tail else name.split("/")[0], tail)
            or (plain.startswith("**/") and fnmatchcase(name.rsplit("/", 1)[-1], plain[3:]))
            for name in names
            for tail in tails
        ):
            kept = pattern.startswith("!")
    return kept


def ignore_patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The tracked and new files of the checkout that are sent to the build."""
    folder = tmp_path_factory.mktemp("context")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    patterns = ignore_patterns()
    for name in names:
        if admits(patterns, name) and (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    return folder


def declared(folder: Path) -> dict[str, list[str]]:
    command = [sys.executable, "-B", "-c", DECLARED]
    environment = os.environ | {"CXX": sys.executable}  # any program does: nothing is compiled
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_patterns_are_evaluated_as_docker_does():
    patterns = ["*", "!setup.py", "!kernels", "**/*.so", "kernels/old"]
    assert admits(patterns, "setup.py") and admits(patterns, "kernels/cpu/simd.h")
    assert not admits(patterns, "tests/setup.py") and not admits(patterns, "kernels/cpu/_avx2.so")
    assert not admits(patterns, "kernels/old/a.py") and not admits(patterns, "README.md")


def test_the_context_declares_the_same_extensions_as_the_checkout_and_has_their_sources(context):
    here, there = declared(ROOT), declared(context)
    assert len(here) >= 2 and there == here
    assert [name for names in there.values() for name in names if not (context / name).is_file()] == []


def test_every_file_that_the_dockerfile_and_pyproject_name_is_in_the_context(context):
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE) for word in line.split()
    ]
    read = re.findall(r"/source/([\w./-]*\w)", dockerfile)
    assert "docker/prune.py" in read and "requirements/install.py" in read
    for name in {*copied, *read, "pyproject.toml", "setup.py", "README.md", "LICENSE"}:
        assert (context / name).exists(), f"{name} is not admitted by .dockerignore"


def test_every_file_of_the_packages_is_in_the_context(context):
    command = ["git", "ls-files", "appliance", "engine", "kernels", "benchmarks/*.py", "manifests", "docker"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    present = [name for name in tracked if (ROOT / name).is_file()]
    assert len(present) > 300
    assert [name for name in present if not (context / name).is_file()] == []


def test_compiled_files_and_other_folders_stay_out(context):
    assert not list(context.rglob("*.so")) and not list(context.rglob("*.pyc"))
    assert not (context / "tests").exists() and not (context / ".git").exists()
