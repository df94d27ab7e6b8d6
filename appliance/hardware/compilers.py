"""Parts of an installation that torch.compile needs. Container images lack some. Independent of torch."""

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

PARTS = ("_dynamo", "_inductor")  # of torch
HEADER = "include/torch/csrc/inductor/cpp_prefix.h"  # of torch


def torch_compile_lacks(device: str) -> str:
    """Return what this installation lacks for torch.compile on a "cpu" or on "cuda"; "" if it has all, or if it has no
    torch, which the engine reports."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return ""
    folder = Path(torch.submodule_search_locations[0])
    needed = {f"torch.{name}": (folder / name).is_dir() for name in PARTS}
    needed["sympy"] = find_spec("sympy") is not None
    if device == "cuda":  # Triton compiles the code that launches a kernel
        needed["triton"] = find_spec("triton") is not None
        needed["a C compiler"] = any(map(shutil.which, ("gcc", "clang")))
    else:
        needed["a C++ compiler"] = any(map(shutil.which, ("g++", "clang++")))
        needed["the header files of torch"] = (folder / HEADER).is_file()
    needed["the header files of Python"] = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return ", ".join(name for name, found in needed.items() if not found)
