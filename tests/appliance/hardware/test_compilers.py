"""torch.compile's needs are found in folders like those that docker/prune.py leaves."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.hardware import compilers
from appliance.hardware.compilers import HEADER, PARTS, torch_compile_lacks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a complete torch; sympy, Triton, a compiler and the header files of Python are installed."""
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    modules = {"torch": spec, "sympy": ModuleSpec("sympy", None), "triton": ModuleSpec("triton", None)}
    monkeypatch.setattr(compilers, "find_spec", modules.get)
    monkeypatch.setattr(compilers.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda name: str(tmp_path))
    for name in PARTS:
        (tmp_path / "torch" / name).mkdir(parents=True)
    for file in (tmp_path / "Python.h", tmp_path / "torch" / HEADER):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "torch"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_complete_installation_lacks_nothing(device: str, folder: Path) -> None:
    assert torch_compile_lacks(device) == ""


def test_an_image_for_cpus_is_named_with_all_that_it_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PARTS:
        (folder / name).rmdir()
    (folder / HEADER).unlink()
    (folder.parent / "Python.h").unlink()
    found = compilers.find_spec("torch")
    monkeypatch.setattr(compilers, "find_spec", {"torch": found}.get)
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    headers = "the header files of torch, the header files of Python"
    assert torch_compile_lacks("cpu") == f"torch._dynamo, torch._inductor, sympy, a C++ compiler, {headers}"


def test_a_gpu_needs_triton_and_a_c_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / HEADER).unlink()  # only programs of CPUs include it
    assert torch_compile_lacks("cuda") == ""
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    found = compilers.find_spec("torch"), compilers.find_spec("sympy")
    monkeypatch.setattr(compilers, "find_spec", dict(zip(("torch", "sympy"), found, strict=True)).get)
    assert torch_compile_lacks("cuda") == "triton, a C compiler"
