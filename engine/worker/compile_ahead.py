"""Compile the kernels of an engine in several processes while its weights are loaded.

A first start compiles 30 to 40 kernels, one after the other in 20 to 35 s. `CompileAhead` runs
engine.worker.precompile, whose processes put them into Triton's cache. A file in the cache, named by a hash of all that
the kernels depend on, tells later starts that nothing is missing. Errors are not fatal: the warm-up compiles what is
missing.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec
import torch

import kernels
from engine.api.config import EngineConfig, write_config
from kernels.jit import interpreted, triton

MAX_PROCESSES = 8
LIMIT_S = 300.0


def configuration_hash(config: EngineConfig, device: str) -> str:
    """Return the hash of all that the kernels of an engine depend on. device: name of the GPU."""
    found = hashlib.sha256(f"{triton.__version__} {torch.__version__} {device}\n".encode())
    model = msgspec.structs.replace(config.model, path="")
    for part in (model, config.quantization, config.hardware, config.adapter_loading, config.cache, config.scheduling):
        found.update(msgspec.json.encode(part))
    found.update((Path(config.model.path) / "config.json").read_bytes())
    for file in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def command(config_file: Path, capability: tuple[int, int], device: str, processes: int) -> list[str]:
    """Return the command that compiles for a GPU of this compute capability and name."""
    target = "sm_{}{}".format(*capability)
    own = [sys.executable, "-m", "engine.worker.precompile", "--config", str(config_file)]
    return [*own, "--target", target, "--device", device, "--processes", str(processes)]


def can_compile(config: EngineConfig, device: torch.device) -> bool:
    """Return whether the kernels can be derived from the configuration alone: one rank, adapters in slots, and a folder
    with a config.json."""
    if device.type != "cuda" or config.hardware.kernels != "triton" or triton is None or interpreted():
        return False
    alone = config.parallelism.tensor == 1 and not config.adapters and torch.version.hip is None
    return alone and (Path(config.model.path) / "config.json").is_file()


class CompileAhead:
    """`with CompileAhead(config, device) as ahead:` starts the compilation; `ahead.wait()` waits for it."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._process: subprocess.Popen[bytes] | None = None
        self._marker: Path | None = None

    def __enter__(self) -> "CompileAhead":
        processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1)
        if processes < 2 or not can_compile(self._config, self._device):
            return self
        name = torch.cuda.get_device_name(self._device)
        marker = Path(triton.knobs.cache.dir) / f"slipway-{configuration_hash(self._config, name)}.compiled"
        if not marker.exists():
            self._marker, self._folder = marker, tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "engine.json"
            write_config(self._config, file)
            wanted = command(file, torch.cuda.get_device_capability(self._device), name, processes)
            self._process = subprocess.Popen(wanted, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def wait(self) -> bool:
        """Wait for the compilation. Return whether it has compiled all kernels."""
        if self._process is None or self._marker is None:
            return False
        try:
            compiled = self._process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        if compiled:
            self._marker.parent.mkdir(parents=True, exist_ok=True)
            self._marker.touch()
        return compiled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()
