"""AMD GPUs from files as the amdgpu driver writes them, in a prepared folder; plans for them; and why torch cannot use
them."""

from pathlib import Path

import pytest

from appliance.hardware import machine, rocm
from appliance.hardware.cuda_build import Build, unusable, unusable_rocm
from appliance.hardware.described import UnknownHardware, hardware
from appliance.hardware.devices import CONTEXT_BYTES
from appliance.hardware.machine import find_gpus
from appliance.hardware.rocm import AmdGpu, read_gpus, select
from tests.appliance.hardware.test_machine import tree

MIB = 2**20
ROCM = Build("2.11.0+rocm6.4", None, "6.4")
CPU_NODE = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\nunique_id 0\n"


def node(version: int = 90402, minor: int = 128, unique_id: int = 0x4B2C1A9F784BA87C) -> str:
    return (
        f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nvendor_id 4098\n"
        f"drm_render_minor {minor}\nunique_id {unique_id}\n"
    )


def host(root: Path) -> Path:
    """Write a host with a CPU, an MI300X in use, a GPU that is hidden from the container, and a GPU of gfx90a."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    device = "sys/class/drm/renderD128/device"
    return tree(
        root,
        {
            "dev/kfd": "",
            f"{nodes}/0/properties": CPU_NODE,
            f"{nodes}/1/properties": node(),
            f"{device}/mem_info_vram_total": f"{196592 * MIB}\n",
            f"{device}/mem_info_vram_used": f"{1000 * MIB}\n",
            f"{nodes}/2/gpu_id": "7",
            f"{nodes}/10/properties": node(90010, 129, 1),
            f"{nodes}/10/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {64 * 1024 * MIB}\nflags 0\n",
        },
    )


def test_gpus_are_read_in_the_order_of_the_driver(tmp_path: Path) -> None:
    first, second = read_gpus(host(tmp_path))
    assert (first.name, first.arch, first.capability) == ("AMD Instinct MI300X", "gfx942", (9, 4))
    assert (first.memory, first.free) == (196592 * MIB, 195592 * MIB - CONTEXT_BYTES)
    assert (second.name, second.arch, second.capability) == ("AMD gfx90a", "gfx90a", (9, 0))
    assert second.memory == 64 * 1024 * MIB
    assert read_gpus(tmp_path / "absent") == ()


@pytest.mark.parametrize(("version", "arch", "capability"), [(110000, "gfx1100", (11, 0)), (90500, "gfx950", (9, 5))])
def test_architectures_have_their_names(tmp_path: Path, version: int, arch: str, capability: tuple[int, int]) -> None:
    (gpu,) = read_gpus(tree(tmp_path, {"sys/class/kfd/kfd/topology/nodes/1/properties": node(version)}))
    assert (gpu.arch, gpu.capability) == (arch, capability)


GPUS = tuple(AmdGpu(f"GPU {number}", "gfx942", 1, 1, number + 10) for number in range(4))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000000c,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, [0]),
        ({"HIP_VISIBLE_DEVICES": "1,1,0"}, [1, 0]),
        ({"HIP_VISIBLE_DEVICES": ""}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_variables_select_gpus(variables: dict[str, str], expected: list[int]) -> None:
    assert [int(gpu.name[4:]) for gpu in select(GPUS, variables)] == expected


def test_equal_gpus_without_an_identifier_are_counted() -> None:
    several = tuple(AmdGpu("GPU", "gfx942", 1, 1, 0) for _ in range(2))
    assert len(select(several, {"HIP_VISIBLE_DEVICES": "0,1,0"})) == 2


def test_a_machine_has_the_gpus_if_torch_is_built_for_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rocm.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    root = host(tmp_path)
    monkeypatch.setattr(machine, "installed_build", lambda: ROCM)
    gpus, reason = find_gpus(root)
    assert [(gpu.name, gpu.arch, gpu.has_fp8) for gpu in gpus] == [
        ("AMD Instinct MI300X", "gfx942", False),
        ("AMD gfx90a", "gfx90a", False),
    ]
    assert reason == ""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert find_gpus(root)[1].startswith("AMD's driver shows no GPU to this process")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setattr(machine, "installed_build", lambda: Build("2.11.0+cpu", None))
    assert find_gpus(root) == (
        (),
        "AMD Instinct MI300X: torch 2.11.0+cpu is built without ROCm; install a ROCm build",
    )


def test_builds_for_the_other_vendor_are_refused() -> None:
    assert unusable(ROCM, (12, 8), [("H100", (9, 0))]) == "torch 2.11.0+rocm6.4 is built for ROCm; install a CUDA build"
    assert "built for CUDA; install a ROCm build" in unusable_rocm(Build("2.11.0+cu130", "13.0"), "MI300X")
    assert unusable_rocm(ROCM, "MI300X") == unusable_rocm(None, "MI300X") == ""


def test_a_gpu_of_intel_is_named_as_unsupported(tmp_path: Path) -> None:
    root = tree(tmp_path, {"sys/class/drm/renderD128/device/vendor": "0x8086\n"})
    assert find_gpus(root) == ((), "no NVIDIA driver is loaded; the Intel GPU is not supported")
    with pytest.raises(UnknownHardware, match="max1550: an Intel GPU is not supported"):
        hardware("max1550")


def test_a_described_gpu_has_its_architecture() -> None:
    gpus = hardware("mi300xx8").gpus
    assert len(gpus) == 8 and {(gpu.name, gpu.arch, gpu.capability) for gpu in gpus} == {
        ("AMD Instinct MI300X", "gfx942", (9, 4))
    }
    assert not gpus[0].has_fp8 and hardware("h100").gpus[0].has_fp8
