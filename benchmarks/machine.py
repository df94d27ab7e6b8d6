"""Description of the measuring machine in every result file: processor, cores, memory, versions."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("slipway", "torch", "triton", "transformers", "numpy")
_INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_bf16")


@dataclass(frozen=True)
class Facts:
    """Facts about the machine.

    processor: name from the kernel. cores: number available to this process. memory_bytes: of the host. instructions:
    instruction sets that determine the fast arithmetic. versions: by package.
    """

    processor: str
    cores: int
    memory_bytes: int
    instructions: tuple[str, ...]
    system: str
    python: str
    versions: dict[str, str]


def facts() -> Facts:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return Facts(
        processor=fields.get("model name", platform.processor() or "unknown"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        instructions=tuple(
            flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_bf16") if flag in flags
        ),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=versions,
    )
