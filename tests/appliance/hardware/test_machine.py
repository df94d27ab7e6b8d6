"""Machine facts from files in the kernel's format, prepared in a folder."""

from pathlib import Path

import pytest
import torch

from appliance.hardware.cuda_build import BUILT_FOR, Build, installed_build, parse_build, unusable
from appliance.hardware.machine import available_memory, count_cores, cpu_quota, find_gpus, free_memory, parse_gpus

GIB = 2**30
MEMINFO = "MemTotal:       16000000 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\nCached: 5 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path: str = "/app", **files: str) -> dict[str, str]:
    names = {name.replace("__", "."): text for name, text in files.items()}
    return {"proc/self/cgroup": f"0::{path}\n", "proc/meminfo": MEMINFO} | {
        f"sys/fs/cgroup{path}/{name}": text for name, text in names.items()
    }


def test_free_memory_without_a_limit_is_memavailable(tmp_path: Path) -> None:
    root = tree(tmp_path, v2(memory__max="max\n", memory__current="123\n", memory__stat=""))
    assert free_memory(root) == (8 * GIB, "MemAvailable")


def test_a_cgroup_limit_counts_page_cache_as_free_but_not_shared_memory(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\nactive_file {GIB // 2}\ninactive_file {3 * GIB // 2}\n"
    root = tree(tmp_path, v2(memory__max=f"{6 * GIB}\n", memory__current=f"{4 * GIB}\n", memory__stat=stat))
    assert free_memory(root) == (4 * GIB, "cgroup limit")


def test_limit_of_a_parent_cgroup_counts(tmp_path: Path) -> None:
    files = v2("/pod/app", memory__max="max", memory__current="1", memory__stat="")
    above = {"memory.max": str(2 * GIB), "memory.current": str(GIB), "memory.stat": "active_file 0\n"}
    files |= {f"sys/fs/cgroup/pod/{name}": text for name, text in above.items()}
    assert free_memory(tree(tmp_path, files)) == (GIB, "cgroup limit")


def test_a_cgroup_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/kubepods/pod1/abc\n", "proc/meminfo": MEMINFO}
    files |= {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": "0", "sys/fs/cgroup/cpu.max": "max"}
    assert free_memory(tree(tmp_path, files)) == (GIB, "cgroup limit")


def test_cgroup_v1_limits_are_read(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n", "proc/meminfo": MEMINFO}
    memory = "sys/fs/cgroup/memory"
    files |= {f"{memory}/memory.limit_in_bytes": "9223372036854771712", f"{memory}/memory.usage_in_bytes": "5"}
    files |= {f"{memory}/a/memory.limit_in_bytes": str(3 * GIB), f"{memory}/a/memory.usage_in_bytes": str(2 * GIB)}
    files |= {f"{memory}/a/memory.stat": f"active_file 7\ntotal_active_file {GIB}\ntotal_inactive_file 0\n"}
    files |= {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000"}
    files |= {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "50000"}
    root = tree(tmp_path, files)
    assert free_memory(root) == (2 * GIB, "cgroup limit")
    assert count_cores(root, 8) == (3, "cgroup quota")


def test_usage_above_the_limit_leaves_zero(tmp_path: Path) -> None:
    root = tree(tmp_path, v2(memory__max="100", memory__current="150", memory__stat=""))
    assert free_memory(root)[0] == 0


@pytest.mark.parametrize(
    ("quota", "allowed", "cores"),
    [("max 100000", 5, 5), ("250000 100000", 8, 2), ("50000 100000", 8, 1), ("400000 100000", 3, 3), ("700000", 9, 7)],
)
def test_cores_are_the_minimum_of_affinity_and_quota(tmp_path: Path, quota: str, allowed: int, cores: int) -> None:
    assert count_cores(tree(tmp_path, v2(cpu__max=quota)), allowed)[0] == cores


def test_missing_cgroup_files_mean_no_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": MEMINFO})
    assert (count_cores(root, 3), free_memory(root)) == ((3, "affinity"), (8 * GIB, "MemAvailable"))
    assert cpu_quota(tmp_path) is None and available_memory("") == 0


def test_gpus_are_not_probed_without_a_driver(tmp_path: Path) -> None:
    assert find_gpus(tmp_path) == ((), "no NVIDIA driver is loaded")


def test_unusable_driver_returns_the_reason(tmp_path: Path) -> None:
    """This runs the real probe; a test machine without libcuda answers why, one with GPUs answers with them."""
    gpus, reason = find_gpus(tree(tmp_path, {"dev/nvidiactl": ""}))
    assert bool(gpus) != bool(reason)


H100 = '{"gpus": [{"name": "H100", "memory": 85, "free": 80, "major": 9, "minor": 0}], "error": "", "version": 12040}'


def test_driver_output_is_parsed() -> None:
    gpus, reason = parse_gpus(H100, Build("2.11.0+cu126", "12.6"))
    assert (gpus[0].name, gpus[0].free, gpus[0].capability, reason) == ("H100", 80, (9, 0), "")
    none = '{"gpus": [], "error": "", "version": null}'
    assert parse_gpus(none, None) == ((), "CUDA reports no device for this process")
    told = '{"gpus": [], "error": "cuInit: no device (100)", "version": 12040}'
    assert parse_gpus(told, None) == ((), "cuInit: no device (100)")


def test_gpus_that_torch_cannot_use_are_ignored_with_a_reason() -> None:
    assert parse_gpus(H100, Build("2.13.0+cpu", None)) == (
        (),
        "torch 2.13.0+cpu is built without CUDA; install a CUDA build",
    )
    assert parse_gpus(H100, Build("2.11.0+cu130", "13.0"))[1] == (
        "torch 2.11.0+cu130 is built with CUDA 13.0, but the driver supports only 12.4; update the driver, or install "
        "a torch for CUDA 12"
    )
    assert parse_gpus(H100.replace("12040", "13010"), Build("2.11.0+cu130", "13.0"))[1] == ""
    assert parse_gpus(H100, None)[1] == parse_gpus(H100.replace("12040", "null"), Build("2", "13.0"))[1] == ""


@pytest.mark.parametrize(
    ("capability", "toolkits"),
    [
        ((6, 1), ["12.6"]),
        ((7, 0), ["12.6", "12.8", "12.9"]),
        ((7, 5), ["12.6", "12.8", "12.9", "13.0"]),
        ((8, 9), ["12.6", "12.8", "12.9", "13.0"]),  # by the code for 8.6
        ((10, 3), ["12.8", "12.9", "13.0"]),  # by the code for 10.0
        ((12, 1), ["12.8", "12.9", "13.0"]),
        ((11, 0), []),
    ],
)
def test_each_toolkit_has_code_for_its_architectures(capability: tuple[int, int], toolkits: list[str]) -> None:
    reasons = {toolkit: unusable(Build("2", toolkit), (99, 0), [("it", capability)]) for toolkit in BUILT_FOR}
    assert [toolkit for toolkit, reason in reasons.items() if not reason] == toolkits
    instead = f"install a torch for CUDA {' or '.join(toolkits)}" if toolkits else "no known build supports it"
    words = f"torch 2 has no code for it (compute capability {capability[0]}.{capability[1]}): {instead}"
    assert {reason for reason in reasons.values() if reason} <= {words}
    assert unusable(Build("2", "14.2"), (99, 0), [("it", capability)]) == "", "what is not known is no reason"


def test_torch_build_is_read_without_importing_torch() -> None:
    found = installed_build()
    assert found is not None and (found.version, found.toolkit) == (torch.__version__, torch.version.cuda)
    text = "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    assert parse_build(text) == Build("2.11.0+cu130", "13.0")
    assert parse_build(text.replace("hip: Optional[str] = None", "hip: Optional[str] = '6.4'")) == Build(
        "2.11.0+cu130", "13.0", "6.4"
    )
    assert parse_build("nothing") is None
