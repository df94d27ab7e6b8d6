"""AMD GPUs that this process may use, from the files of the amdgpu driver. Neither torch nor ROCm is loaded.

The driver hides the properties of GPUs whose device file the container lacks. Sources: `kfd_topology.c` of the Linux
kernel; admin-guide of amdgpu (`mem_info_vram_used`, `product_name`); "GPU isolation techniques" of ROCm's
documentation.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.hardware.devices import CONTEXT_BYTES, GPUS, GpuModel

VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that select devices. ROCm applies the first one, then HIP the first of the others that is not empty."""
INTEL = "0x8086"  # PCI vendor


@dataclass(frozen=True)
class AmdGpu:
    """One GPU. Sizes are in bytes."""

    name: str
    arch: str
    memory: int
    free: int
    unique_id: int

    @property
    def capability(self) -> tuple[int, int]:
        """Return the first two numbers of the architecture, which torch reports as the compute capability."""
        return int(self.arch[3:-2]), int(self.arch[-2], 16)


def visible_gpus(root: Path) -> tuple[AmdGpu, ...]:
    """Return the GPUs that the variables of this process leave visible, in their order."""
    return select(read_gpus(root), os.environ)


def read_gpus(root: Path) -> tuple[AmdGpu, ...]:
    """Return all GPUs whose properties are readable, in the order of the driver."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    numbered = sorted((int(path.name), path) for path in nodes.glob("*") if path.name.isdigit())
    found = (_gpu(root, path) for _, path in numbered)
    return tuple(gpu for gpu in found if gpu is not None)


def _gpu(root: Path, node: Path) -> AmdGpu | None:
    """Return the GPU of a node, or None for a CPU or a hidden GPU."""
    properties = _numbers(node / "properties")
    version = properties.get("gfx_target_version", 0)  # 90402 for gfx942
    if not properties.get("simd_count") or not version:
        return None
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    device = root / f"sys/class/drm/renderD{properties.get('drm_render_minor', 0)}/device"
    banks = (_numbers(path / "properties").get("size_in_bytes", 0) for path in node.glob("mem_banks/*"))
    memory = _number(device / "mem_info_vram_total") or sum(banks)
    model = _model(arch, memory)
    name = _text(device / "product_name") or (model.title if model else f"AMD {arch}")
    used = _number(device / "mem_info_vram_used")
    free = max(0, memory - used - CONTEXT_BYTES)
    return AmdGpu(name, arch, memory, free, properties.get("unique_id", 0))


def _model(arch: str, memory: int) -> GpuModel | None:
    """Return the model of this architecture with the nearest memory, or None without one."""
    models = [one for one in GPUS if one.arch == arch]
    return min(models, key=lambda one: abs(one.memory - memory)) if models else None


def select(gpus: Sequence[AmdGpu], variables: Mapping[str, str]) -> tuple[AmdGpu, ...]:
    """Return the GPUs that the variables leave visible. A list ends at its first entry that names no GPU; repeated
    entries have no effect."""
    rocr, *hip = (variables.get(name) for name in VISIBLE)
    return _listed(_listed(tuple(gpus), rocr), next(filter(None, hip), None))


def _listed(gpus: tuple[AmdGpu, ...], text: str | None) -> tuple[AmdGpu, ...]:
    if text is None:
        return gpus
    found: list[AmdGpu] = []
    for entry in text.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None:
            break
        if not any(gpu is one for one in found):  # equal GPUs without an identifier are distinct
            found.append(gpu)
    return tuple(found)


def _named(gpus: tuple[AmdGpu, ...], entry: str) -> AmdGpu | None:
    """Return the GPU of an index, or of an identifier such as GPU-4b2c1a9f784ba87c."""
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    return next((gpu for gpu in gpus if entry.lower() == f"gpu-{gpu.unique_id:016x}"), None)


def has_intel_gpu(root: Path) -> bool:
    """Return whether there is a GPU of Intel, which Slipway does not use."""
    return any(_text(path / "device/vendor") == INTEL for path in root.glob("sys/class/drm/renderD*"))


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name and a number; return nothing if the file is missing or may not be read."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
