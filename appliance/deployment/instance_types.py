"""Machine types of hosting platforms, and the choice of the smallest type that holds a deployment.

Tests compare the names of Amazon SageMaker with botocore. The sizes of Vertex AI and Azure ML types were not compared
with an offline source. GPUs have the names of appliance/hardware/devices.py.
"""

from dataclasses import dataclass

from appliance.config.problems import Problem, Refused
from appliance.config.yaml_loader import Place
from appliance.deployment.service import GIB, Deployment, gibibytes
from appliance.hardware.devices import gpu_by_cuda_name
from appliance.planning.plan import Plan


@dataclass(frozen=True)
class InstanceType:
    """A machine type. `memory` is in GiB."""

    name: str
    cores: int
    memory: int
    gpu: str = ""
    gpus: int = 0


def _family(prefix: str, gpu: str, *rows: tuple[str, int, int, int]) -> tuple[InstanceType, ...]:
    return tuple(InstanceType(f"{prefix}{size}", cores, memory, gpu, gpus) for size, cores, memory, gpus in rows)


_SIZES = (("xlarge", 4), ("2xlarge", 8), ("4xlarge", 16), ("8xlarge", 32), ("16xlarge", 64), ("24xlarge", 96))
_G_SIZES = (
    ("xlarge", 4, 16, 1), ("2xlarge", 8, 32, 1), ("4xlarge", 16, 64, 1), ("8xlarge", 32, 128, 1),
    ("12xlarge", 48, 192, 4), ("24xlarge", 96, 384, 4), ("48xlarge", 192, 768, 8),
)  # fmt: skip
_G6E_SIZES = tuple((size, cores, memory * 2, gpus) for size, cores, memory, gpus in _G_SIZES)

SAGEMAKER = (
    *_family("ml.g4dn.", "t4", *(row for row in _G_SIZES if row[0] in ("xlarge", "2xlarge", "4xlarge", "12xlarge"))),
    *_family("ml.g5.", "a10g", *_G_SIZES),
    *_family("ml.g6.", "l4", *_G_SIZES),
    *_family("ml.g6e.", "l40s", *_G6E_SIZES),
    InstanceType("ml.p4d.24xlarge", 96, 1152, "a100-40", 8),
    InstanceType("ml.p4de.24xlarge", 96, 1152, "a100-80", 8),
    InstanceType("ml.p5.4xlarge", 16, 256, "h100", 1),
    InstanceType("ml.p5.48xlarge", 192, 2048, "h100", 8),
    InstanceType("ml.p5en.48xlarge", 192, 2048, "h200", 8),
    InstanceType("ml.p6-b200.48xlarge", 192, 2048, "b200", 8),
    *(InstanceType(f"ml.c7i.{size}", cores, 2 * cores) for size, cores in _SIZES),
    *(InstanceType(f"ml.m7i.{size}", cores, 4 * cores) for size, cores in _SIZES),
    *(InstanceType(f"ml.r7i.{size}", cores, 8 * cores) for size, cores in _SIZES),
)
VERTEX = (
    *_family(
        "g2-standard-", "l4", ("4", 4, 16, 1), ("8", 8, 32, 1), ("12", 12, 48, 1), ("16", 16, 64, 1),
        ("24", 24, 96, 2), ("32", 32, 128, 1), ("48", 48, 192, 4), ("96", 96, 384, 8),
    ),
    *_family(
        "a2-highgpu-", "a100-40", ("1g", 12, 85, 1), ("2g", 24, 170, 2), ("4g", 48, 340, 4), ("8g", 96, 680, 8)
    ),
    *_family(
        "a2-ultragpu-", "a100-80", ("1g", 12, 170, 1), ("2g", 24, 340, 2), ("4g", 48, 680, 4), ("8g", 96, 1360, 8)
    ),
    *_family("a3-highgpu-", "h100", ("1g", 26, 234, 1), ("2g", 52, 468, 2), ("4g", 104, 936, 4), ("8g", 208, 1872, 8)),
    InstanceType("a3-ultragpu-8g", 224, 2952, "h200", 8),
    InstanceType("a4-highgpu-8g", 224, 3968, "b200", 8),
    *(InstanceType(f"n2-standard-{cores}", cores, 4 * cores) for cores in (2, 4, 8, 16, 32, 48, 64, 80)),
    *(InstanceType(f"n2-highmem-{cores}", cores, 8 * cores) for cores in (2, 4, 8, 16, 32, 48, 64, 80)),
)  # fmt: skip
VERTEX_GPUS = {
    "l4": "NVIDIA_L4",
    "a100-40": "NVIDIA_TESLA_A100",
    "a100-80": "NVIDIA_A100_80GB",
    "h100": "NVIDIA_H100_80GB",
    "h200": "NVIDIA_H200_141GB",
    "b200": "NVIDIA_B200",
}
"""Vertex AI's names of GPUs."""
AZUREML = (
    *_family("Standard_NC", "t4", ("4as_T4_v3", 4, 28, 1), ("8as_T4_v3", 8, 56, 1), ("64as_T4_v3", 64, 440, 4)),
    *_family("Standard_NV", "a10", ("36ads_A10_v5", 36, 440, 1), ("72ads_A10_v5", 72, 880, 2)),
    *_family(
        "Standard_NC", "a100-80", ("24ads_A100_v4", 24, 220, 1), ("48ads_A100_v4", 48, 440, 2),
        ("96ads_A100_v4", 96, 880, 4),
    ),
    InstanceType("Standard_ND96asr_v4", 96, 900, "a100-40", 8),
    InstanceType("Standard_ND96amsr_A100_v4", 96, 1900, "a100-80", 8),
    *_family("Standard_NC", "h100-nvl", ("40ads_H100_v5", 40, 320, 1), ("80adis_H100_v5", 80, 640, 2)),
    InstanceType("Standard_ND96isr_H100_v5", 96, 1900, "h100", 8),
    InstanceType("Standard_ND96isr_H200_v5", 96, 1850, "h200", 8),
    InstanceType("Standard_ND96isr_MI300X_v5", 96, 1850, "mi300x", 8),
    *(InstanceType(f"Standard_F{cores}s_v2", cores, 2 * cores) for cores in (4, 8, 16, 32, 48, 64, 72)),
    *(InstanceType(f"Standard_E{cores}s_v3", cores, 8 * cores) for cores in (4, 8, 16, 32, 48)),
)  # fmt: skip


def choose(types: tuple[InstanceType, ...], one: Deployment, plan: Plan, given: str) -> InstanceType:
    """Return the type with the name `given`, else the smallest type that holds the deployment. A given type that the
    table lacks has no known size. Raise Refused if the deployment exceeds the given type, or every type."""
    model = gpu_by_cuda_name(plan.machine.gpus[0].name) if one.gpus else None
    gpu = model.name if model is not None else ""
    if one.amd and all(each.gpu != gpu for each in types):
        _refuse(f"this platform has no {plan.machine.gpus[0].name}; plan for another GPU with --hardware")
    if given:
        found = next((each for each in types if each.name == given), InstanceType(given, 0, 0, gpu, one.gpus))
        if found.cores and not _holds(found, one, gpu):
            _refuse(f"{given} does not hold the deployment, which requires {_required(one, gpu)}")
        return found
    if one.gpus and not gpu:
        _refuse(f"no type is known for {plan.machine.gpus[0].name}; give one")
    fitting = [each for each in types if _holds(each, one, gpu)]
    if not fitting:
        _refuse(f"no known type holds the deployment, which requires {_required(one, gpu)}; give one")
    return min(fitting, key=lambda each: (each.gpus, each.cores, each.memory))


def _holds(each: InstanceType, one: Deployment, gpu: str) -> bool:
    fits = each.gpu == gpu and each.gpus >= one.gpus and each.memory * GIB >= one.memory
    # Engines on GPUs compute nothing on the CPU, so cores count only without GPUs.
    return fits and (one.gpus > 0 or each.cores >= one.cpus)


def _required(one: Deployment, gpu: str) -> str:
    devices = f"{one.gpus} {gpu}" if one.gpus else f"{one.cpus} cores"
    return f"{devices} and {gibibytes(one.memory)} GiB of memory"


def _refuse(message: str) -> None:
    raise Refused([Problem(Place("--instance-type"), "", message)])
