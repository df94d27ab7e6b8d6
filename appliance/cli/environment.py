"""Environment report for bug reports: versions, platform, machine. This is the only command that may import torch. It
does so in a separate process, so that a broken torch is reported and does not break the command."""

import importlib.metadata
import json
import platform
import subprocess
import sys
from typing import Any

from appliance.config.version import __version__
from appliance.hardware.machine import read_machine
from appliance.hardware.topology import format_node
from appliance.planning.memory import spell_bytes

PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "llguidance"),
    *("pydantic", "fastapi", "uvicorn", "msgspec", "supervisor", "httpx"),
)
TORCH_TIMEOUT_S = 120
_TORCH = "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available(), t.get_num_threads())"


def collect() -> dict[str, Any]:
    """Return all facts as plain values."""
    machine = read_machine()
    return {
        "slipway": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": _torch(),
        "cores": f"{machine.cores} by {machine.cores_from}",
        "NUMA nodes": [format_node(node) for node in machine.topology.nodes] or ["unknown"],
        "kernels": ", ".join(machine.kernels) or "none compiled; torch is used on CPUs",
        "memory free": f"{spell_bytes(machine.memory_free)} by {machine.memory_from}",
        "gpus": [f"{gpu.name}, {spell_bytes(gpu.memory)}, {spell_bytes(gpu.free)} free" for gpu in machine.gpus]
        or [machine.no_gpu],
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> str:
    """Return torch's view of this machine, or why it cannot be imported."""
    try:
        command = [sys.executable, "-P", "-c", _TORCH]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing torch took longer than {TORCH_TIMEOUT_S} s"
    if answer.returncode:
        return f"cannot be imported: {(answer.stderr.strip().splitlines() or ['no message'])[-1]}"
    version, cuda, available, threads = answer.stdout.split()
    return f"{version}, CUDA {cuda} ({'available' if available == 'True' else 'not available'}), {threads} threads"


def as_text(facts: dict[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{inner:<14} {text}" for inner, text in value.items()]
        elif isinstance(value, list):
            lines += [f"{name:<14} {text}" for text in value]
        else:
            lines.append(f"{name + ' sees' if name == 'torch' else name:<14} {value}")
    return "\n".join(lines)


def as_json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1)
