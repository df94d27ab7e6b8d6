"""The wheel, installed into an environment of its own and used outside of the checkout."""

import os
import re
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from kernels.cpu.library import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
DEMO = "from appliance.cli.default_manifest import demo; print(demo())"
KERNELS_OF_TRANSFORMERS = """
import kernels, transformers
from transformers.utils import is_kernels_available
print(kernels.__file__)
print(is_kernels_available())
from transformers.integrations import hub_kernels
from transformers import LlamaConfig, LlamaForCausalLM
tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
print(LlamaForCausalLM(tiny).num_parameters() > 0)
"""


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without the kernels, which take a minute to compile and have tests of their own."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    environment = os.environ | {"SLIPWAY_BUILD_KERNELS": "0"}
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel, which takes its dependencies from the current environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def run(python: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_has_the_packages_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert metadata.startswith("slipway_serve-") and tops - {metadata} == {"appliance", "engine", "kernels", "slipway"}
    for name in (
        *(
            "appliance/py.typed",
            "engine/py.typed",
            "kernels/py.typed",
            "slipway/py.typed",
            f"{metadata}/licenses/LICENSE",
        ),
        *("appliance/demo/demo.yaml", "appliance/demo/demo/model.safetensors", "appliance/demo/demo/tokenizer.json"),
        *("appliance/server/admin/static/index.html", "kernels/tuned/amd-instinct.json"),
    ):
        assert name in names, f"{name} is not in the wheel"
    assert wheel.stat().st_size < 20e6


def test_check_and_plan_of_the_packaged_demo_work_outside_of_the_checkout(python: Path, tmp_path: Path) -> None:
    demo = run(python, tmp_path, str(python), "-c", DEMO).stdout.strip()
    assert demo.endswith("site-packages/appliance/demo/demo.yaml") and str(python.parents[1]) in demo
    checked = run(python, tmp_path, "slipway", "check", demo)
    assert checked.returncode == 0 and ": ok, " in checked.stdout, checked.stderr
    planned = run(python, tmp_path, "slipway", "plan", demo)
    assert planned.returncode == 0 and "hardware.kernels" in planned.stdout, planned.stderr


def test_serve_without_a_manifest_finds_the_packaged_demo(python: Path, tmp_path: Path) -> None:
    """--endpoints.host is wrong, so that the command ends after its checks."""
    done = run(python, tmp_path, "slipway", "serve", "--host", "203.0.113.1", "--port", "0")
    assert done.returncode != 0
    assert "serving the demo" in done.stderr and "site-packages/appliance/demo/demo.yaml" in done.stderr


@pytest.mark.nightly(
    "tests/packaging/test_wheel.py::test_check_and_plan_of_the_packaged_demo_work_outside_of_the_checkout"
)
def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name(python: Path, tmp_path: Path) -> None:
    done = run(python, tmp_path, str(python), "-W", "ignore", "-c", KERNELS_OF_TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    file, available, built = done.stdout.split()
    assert str(python.parents[1]) in file and available == "False" and built == "True"


def test_the_metadata_describes_a_typed_package_of_supported_pythons(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert "Classifier: Typing :: Typed" in lines and "Requires-Python: >=3.11" in lines
    assert "Classifier: Programming Language :: Python :: 3.11" in lines
    (scripts,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "slipway = appliance.cli.entry:main" in archive.read(scripts).decode()


def test_wheels_are_built_for_each_machine_with_kernels_and_tested_by_files_that_exist() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    machines = {machine for one in VARIANTS for machine in one.machines}
    assert {*settings["archs"]} <= machines and {"x86_64", "aarch64"} == {*settings["archs"]}
    for path in re.findall(r"\{project\}/(\S+)", settings["test-command"]):
        assert (ROOT / path).exists(), path
