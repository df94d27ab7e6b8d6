"""Check that the installed torch can use the GPUs, by reading its files, because importing torch takes a second.

BUILT_FOR lists the architectures for which torch's own wheels contain machine code, by CUDA toolkit (release notes of
PyTorch 2.9 to 2.11; `torch.cuda.get_arch_list()` of a wheel). Code for X.Y runs on GPUs of X.Y and later within the
same X: code for 10.0 on 10.3, code for 8.6 on 8.9. A driver supports all toolkits up to its own major release (CUDA
Compatibility guide).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

Capability = tuple[int, int]

BUILT_FOR: dict[str, tuple[Capability, ...]] = {
    "12.6": ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0)),
    "12.8": ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    "12.9": ((7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
    "13.0": ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)),
}
_ENTRY = re.compile(r"^(__version__|cuda|hip)\b[^=]*= (?:'([^']*)'|None)", re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """A torch build."""

    version: str
    toolkit: str | None  # CUDA release that torch was built with; None for a build that lacks CUDA
    rocm: str | None = None  # ROCm release that torch was built with

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in (self.toolkit or "0").split(".")[:2])


def installed_build() -> Build | None:
    """Return the build of the torch that an engine would import, or None if it is missing or cannot be determined."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        return parse_build((Path(found.origin).parent / "version.py").read_text())
    except OSError:
        return None


def parse_build(text: str) -> Build | None:
    """Parse the text of torch/version.py."""
    entries = {name: value or None for name, value in _ENTRY.findall(text)}
    version = entries.get("__version__")
    return None if version is None else Build(version, entries.get("cuda"), entries.get("hip"))


def unusable(build: Build | None, driver: Capability | None, gpus: Iterable[tuple[str, Capability]]) -> str:
    """Return why torch cannot use these GPUs, or "".

    `driver` is the newest CUDA release that the driver supports; `gpus` are names and compute capabilities. Unknown
    facts are not a reason.
    """
    if build is None:
        return ""
    if build.toolkit is None:
        return f"torch {build.version} is built {'for ROCm' if build.rocm else 'without CUDA'}; install a CUDA build"
    if driver is not None and driver[0] < build.release[0]:
        return (
            f"torch {build.version} is built with CUDA {build.toolkit}, but the driver supports only "
            f"{driver[0]}.{driver[1]}; update the driver, or install a torch for CUDA {driver[0]}"
        )
    built = BUILT_FOR.get(build.toolkit)
    for name, capability in gpus:
        if built is not None and not _supports(built, capability):
            others = [toolkit for toolkit, archs in BUILT_FOR.items() if _supports(archs, capability)]
            instead = f"install a torch for CUDA {' or '.join(others)}" if others else "no known build supports it"
            return (
                f"torch {build.version} has no code for {name} (compute capability {capability[0]}.{capability[1]}): "
                f"{instead}"
            )
    return ""


def unusable_rocm(build: Build | None, gpu: str) -> str:
    """Return why torch cannot use this AMD GPU, or ""."""
    if build is None or build.rocm is not None:
        return ""
    instead = f"built {'for CUDA' if build.toolkit else 'without ROCm'}; install a ROCm build"
    return f"{gpu}: torch {build.version} is {instead}"


def _supports(built: tuple[Capability, ...], capability: Capability) -> bool:
    return any(one[0] == capability[0] and one[1] <= capability[1] for one in built)
