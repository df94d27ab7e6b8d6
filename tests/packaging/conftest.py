"""A copy of the checkout, as a source distribution or the image's build would have it: builds leave nothing behind."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tracked and new files of the packages, without compiled ones."""
    folder = tmp_path_factory.mktemp("sources")
    places = [*SOURCES, "appliance", "engine", "kernels", "slipway", "manifests", "benchmarks", "tools"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder
