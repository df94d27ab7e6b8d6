"""Machine facts from files as the kernel writes them, laid out in a folder."""

from pathlib import Path

import pytest

from appliance.plan.machine import available_memory, count_cores, cpu_quota, find_gpus, free_memory, parse_gpus

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


def test_without_a_limit_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    root = tree(tmp_path, v2(memory__max="max\n", memory__current="123\n", memory__stat=""))
    assert free_memory(root) == (8 * GIB, "MemAvailable")


def test_a_cgroup_limit_counts_page_cache_as_free_but_not_shared_memory(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\nactive_file {GIB // 2}\ninactive_file {3 * GIB // 2}\n"
    root = tree(tmp_path, v2(memory__max=f"{6 * GIB}\n", memory__current=f"{4 * GIB}\n", memory__stat=stat))
    assert free_memory(root) == (4 * GIB, "cgroup limit")


def test_a_limit_of_a_cgroup_above_counts(tmp_path: Path) -> None:
    files = v2("/pod/app", memory__max="max", memory__current="1", memory__stat="")
    above = {"memory.max": str(2 * GIB), "memory.current": str(GIB), "memory.stat": "active_file 0\n"}
    files |= {f"sys/fs/cgroup/pod/{name}": text for name, text in above.items()}
    assert free_memory(tree(tmp_path, files)) == (GIB, "cgroup limit")


def test_a_cgroup_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/kubepods/pod1/abc\n", "proc/meminfo": MEMINFO}
    files |= {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": "0", "sys/fs/cgroup/cpu.max": "max"}
    assert free_memory(tree(tmp_path, files)) == (GIB, "cgroup limit")


def test_version_1_limits_are_read_and_its_no_limit_is_none(tmp_path: Path) -> None:
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


def test_use_beyond_the_limit_leaves_nothing_not_less(tmp_path: Path) -> None:
    root = tree(tmp_path, v2(memory__max="100", memory__current="150", memory__stat=""))
    assert free_memory(root)[0] == 0


@pytest.mark.parametrize(
    ("quota", "allowed", "cores"),
    [("max 100000", 5, 5), ("250000 100000", 8, 2), ("50000 100000", 8, 1), ("400000 100000", 3, 3), ("700000", 9, 7)],
)
def test_cores_are_those_of_affinity_and_quota_whichever_is_less(
    tmp_path: Path, quota: str, allowed: int, cores: int
) -> None:
    assert count_cores(tree(tmp_path, v2(cpu__max=quota)), allowed)[0] == cores


def test_without_cgroup_files_nothing_is_limited(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": MEMINFO})
    assert (count_cores(root, 3), free_memory(root)) == ((3, "affinity"), (8 * GIB, "MemAvailable"))
    assert cpu_quota(tmp_path) is None and available_memory("") == 0


def test_a_host_without_a_driver_is_not_asked_for_gpus(tmp_path: Path) -> None:
    assert find_gpus(tmp_path) == ((), "no NVIDIA driver is loaded")


def test_a_driver_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    """This runs the real probe; a test machine without libcuda answers why, one with GPUs answers with them."""
    gpus, reason = find_gpus(tree(tmp_path, {"dev/nvidiactl": ""}))
    assert bool(gpus) != bool(reason)


def test_the_answer_of_the_driver_becomes_gpus() -> None:
    text = '{"gpus": [{"name": "H100", "memory": 85, "free": 80, "major": 9, "minor": 0}], "error": ""}'
    gpus, reason = parse_gpus(text)
    assert (gpus[0].name, gpus[0].free, gpus[0].capability, reason) == ("H100", 80, (9, 0), "")
    assert parse_gpus('{"gpus": [], "error": ""}') == ((), "CUDA shows no device to this process")
    assert parse_gpus('{"gpus": [], "error": "cuInit: no device (100)"}') == ((), "cuInit: no device (100)")
