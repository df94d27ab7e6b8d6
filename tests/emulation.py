"""AVX-512 and AMX kernels on a CPU that has only AVX2: `pytest --emulate` compiles them with tests/kernels/emulated."""

import hashlib
import subprocess
import tempfile
from pathlib import Path

import pytest

from kernels.cpu import library

EMULATED = {"amx": "EMULATE_AMX", "avx512bf16": "EMULATE_AVX512BF16", "avx512": "EMULATE_AVX512"}
HEADERS = Path(__file__).parent / "kernels" / "emulated"
FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-fno-math-errno", "-mavx2", "-mfma", "-mf16c", "-shared", "-fPIC")


def use_emulated(patch: pytest.MonkeyPatch) -> None:
    """Make the emulated variants the only usable ones until the patch is undone. Compiles them once per source."""
    sources = sorted(library.FOLDER.glob("*.cpp"))
    files = [*sorted(library.FOLDER.glob("*.h")), *sources, *sorted(HEADERS.iterdir())]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"slipway-emulated-{digest}"
    folder.mkdir(exist_ok=True)
    for name, macro in EMULATED.items():
        if not (file := folder / f"_{name}.so").exists():
            part = file.with_suffix(".part")
            options = (*FLAGS, f"-I{HEADERS}", f"-D{macro}")
            subprocess.run(["g++", *options, *map(str, sources), "-o", str(part)], check=True)
            part.rename(file)
    patch.setattr(library, "FOLDER", folder)
    patch.setattr(library, "_usable", lambda folder, flags: tuple(EMULATED))
