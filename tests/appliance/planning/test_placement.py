"""Assignment of CPUs to engines, gateway and system, on machines described by sysfs files."""

import os
from pathlib import Path

import pytest

from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.hardware.machine import Gpu, Machine, count_cores, read_machine
from appliance.hardware.topology import Topology, format_cpus, parse_cpus, read_topology
from appliance.planning.placement import ThreadPlacement, place


def sysfs(root: Path, nodes: list[str], siblings: list[tuple[int, ...]], online: str | None = None) -> Path:
    """nodes: their CPU lists; siblings: of each core its CPUs."""
    system = root / "sys/devices/system"
    for number, cpus in enumerate(nodes):
        folder = system / f"node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for core in siblings:
        for cpu in core:
            folder = system / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{format_cpus(core)}\n")
    (system / "cpu").mkdir(exist_ok=True, parents=True)
    (system / "cpu/online").write_text(online or format_cpus(cpu for core in siblings for cpu in core))
    return root


def big(root: Path) -> Path:
    """Return two nodes of 4 cores with 2 CPUs each, numbered as on x86 servers: siblings are 8 apart."""
    return sysfs(root, ["0-3,8-11", "4-7,12-15"], [(core, core + 8) for core in range(8)])


def machine(topology: Topology, quota: int | None = None, **more: object) -> Machine:
    cores, told = (len(topology.allowed), "affinity") if quota is None else (quota, "cgroup quota")
    return Machine(cores, told, 1 << 34, "MemAvailable", topology=topology, **more)  # type: ignore[arg-type]


def placed(tmp_path: Path, here: Machine, *sets: str, device: str = "cpu", environment: dict[str, str] | None = None):
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel: {source: {path: /models/tiny}}\n")
    options = tuple(Option(f"--set {one.partition('=')[0]}", *one.split("=", 1)) for one in sets)
    return place(load(Given(path, options, environment or {})), here, device)  # type: ignore[arg-type]


def refusal(tmp_path: Path, here: Machine, *sets: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(Refused) as caught:
        placed(tmp_path, here, *sets, environment=environment)
    return str(caught.value.problems[0])


def whole(places: ThreadPlacement, here: Machine) -> None:
    """Check an invariant of every placement: threads have different allowed CPUs, and no other process uses them."""
    taken = [cpu for own in places.cpus for cpu in own]
    assert len(taken) == len(set(taken)) and set(taken) <= set(here.topology.allowed)
    assert not set(taken) & set(places.others)
    assert all(set(own) <= set(home) for own, home in zip(places.cpus, places.homes, strict=True))
    for number, home in enumerate(places.homes):
        assert not set(home) & {cpu for at, own in enumerate(places.cpus) if at != number for cpu in own}


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("7\n", (7,)), ("", ()), ("5,1-2", (1, 2, 5))])
def test_lists_of_cpus_are_read_and_spelled(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus and parse_cpus(format_cpus(cpus)) == cpus


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-1", "1 2"])
def test_an_invalid_cpu_list_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="nor a range of CPUs"):
        parse_cpus(text)


def test_nodes_and_siblings_are_read(tmp_path: Path) -> None:
    found = read_topology(big(tmp_path), range(16), ())
    assert found.nodes == (((0, 8), (1, 9), (2, 10), (3, 11)), ((4, 12), (5, 13), (6, 14), (7, 15)))


def test_affinity_and_offline_cpus_narrow_the_nodes(tmp_path: Path) -> None:
    root = sysfs(tmp_path, ["0-1", "2-3", "4-5", ""], [(0, 1), (2, 3), (4, 5)], online="0-2,4")
    found = read_topology(root, {1, 2, 3, 4, 5}, ())
    assert found == Topology((1, 2, 4), (((1,),), ((2,),), ((4,),)))
    assert read_topology(root, {2, 3}, ()).nodes == (((2,),),)


@pytest.mark.parametrize("name", ["cpuset.cpus.effective", "cpuset.effective_cpus"])
def test_a_cpuset_narrows_them_too(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cpuset"
    folder.mkdir()
    (folder / name).write_text("4-6,14")
    found = read_topology(big(tmp_path), range(16), [folder])
    assert found == Topology((4, 5, 6, 14), (((4,), (5,), (6, 14)),))


def test_the_cpuset_of_both_cgroup_versions_is_found(tmp_path: Path) -> None:
    for number, (line, at) in enumerate((("0::/a", "a"), ("3:cpuset:/a", "cpuset/a"))):
        root = tmp_path / str(number)
        folder = root / "sys/fs/cgroup" / at
        folder.mkdir(parents=True)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"{line}\n")
        (folder / "cpuset.cpus.effective").write_text("0")
        found = read_machine(gpus=False, root=root)
        assert found.topology.allowed == (0,) and (found.cores, found.cores_from) == (1, "affinity")


def test_without_sysfs_there_are_no_nodes_and_nothing_is_bound(tmp_path: Path) -> None:
    found = read_topology(tmp_path, range(6), ())
    assert found == Topology(tuple(range(6)))
    places = placed(tmp_path, machine(found))
    assert (places.threads.value, places.pinned.value) == (6, "none")
    assert places.cpus == places.homes == ((),) and places.others == ()
    assert "does not report" in places.pinned.reason


def test_without_a_numa_folder_or_siblings_there_is_one_node_of_cores(tmp_path: Path) -> None:
    assert read_topology(sysfs(tmp_path, [], [], online="0-2"), range(8), ()).nodes == (((0,), (1,), (2,)),)


def test_auto_uses_one_thread_per_core(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()))
    places = placed(tmp_path, here)
    whole(places, here)
    assert places.threads.value == 8 and places.cpus == (tuple(range(8)),)
    assert places.others == tuple(range(8, 16))  # no core is idle: only the siblings are left
    assert "over 2 NUMA nodes; parallelism.data: 2" in places.pinned.reason
    assert places.reserved.value == 0 and "8 cores are too few" in places.reserved.reason


def test_above_8_cores_the_first_is_left_to_the_others(tmp_path: Path) -> None:
    here = machine(read_topology(sysfs(tmp_path, ["0-11"], [(cpu,) for cpu in range(12)]), range(12), ()))
    places = placed(tmp_path, here)
    whole(places, here)
    assert places.cpus == (tuple(range(1, 12)),) and places.others == (0,)
    assert places.homes == (tuple(range(12)),)  # the engine's own loop may run there too
    assert places.reserved.value == 1 and "12 cores by affinity less 1 reserved" in places.threads.reason


def test_engines_keep_to_their_nodes(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()))
    two = placed(tmp_path, here, "parallelism.data=2")
    whole(two, here)
    assert two.cpus == ((0, 1, 2, 3), (4, 5, 6, 7)) and "each engine on one NUMA node" in two.pinned.reason
    assert two.homes == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    four = placed(tmp_path, here, "parallelism.data=4")
    whole(four, here)
    assert four.cpus == ((0, 1), (2, 3), (4, 5), (6, 7))
    small = placed(tmp_path, here, "hardware.threads=4")
    assert small.cpus == ((0, 1, 2, 3),) and small.others == (4, 5, 6, 7, 12, 13, 14, 15)


def test_three_engines_on_two_nodes_of_unequal_size(tmp_path: Path) -> None:
    here = machine(read_topology(sysfs(tmp_path, ["0-1", "2-9"], [(c,) for c in range(10)]), range(10), ()))
    places = placed(tmp_path, here, "parallelism.data=3", "hardware.reserved_cores=1")
    whole(places, here)
    assert places.threads.value == 3  # by nodes it would be 1 for the engines on the small one
    assert places.cpus == ((1, 2, 3), (4, 5, 6), (7, 8, 9)) and places.others == (0,)


def test_no_engine_spans_two_nodes_where_a_quarter_of_the_cores_buys_that(tmp_path: Path) -> None:
    here = machine(read_topology(sysfs(tmp_path, ["0-5", "6-11"], [(c,) for c in range(12)]), range(12), ()))
    places = placed(tmp_path, here, "parallelism.data=3", "hardware.reserved_cores=0")
    whole(places, here)
    assert places.cpus == ((0, 1, 2), (3, 4, 5), (6, 7, 8)) and places.others == (9, 10, 11)
    assert places.homes[0] == (0, 1, 2) and places.homes[2] == (6, 7, 8, 9, 10, 11)


def test_more_threads_than_cores_take_the_siblings_second(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()))
    places = placed(tmp_path, here, "hardware.threads=10")
    whole(places, here)
    assert places.cpus == ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9),) and "one thread per CPU" in places.pinned.reason
    over = placed(tmp_path, here, "hardware.threads=10", "parallelism.data=2")
    assert over.pinned.value == "none" and "20 threads on 16 CPUs" in over.pinned.reason


def test_a_quota_shares_cores_and_pins_nothing(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()), quota=3)
    places = placed(tmp_path, here)
    assert (places.threads.value, places.pinned.value, places.reserved.value) == (3, "none", 0)
    assert "quota" in places.pinned.reason and places.others == ()


def test_two_cores_pin_nothing_and_reserve_nothing(tmp_path: Path) -> None:
    """An engine of two threads and a gateway: a pinned thread could not move away from the other process."""
    two = machine(read_topology(sysfs(tmp_path / "a", ["0-1"], [(0,), (1,)]), range(2), ()))
    places = placed(tmp_path, two)
    assert (places.threads.value, places.pinned.value, places.reserved.value) == (2, "none", 0)
    one = machine(read_topology(sysfs(tmp_path / "b", ["0-1"], [(0, 1)]), range(2), ()))
    assert placed(tmp_path, one).threads.value == 2  # a core's two CPUs: so few do not saturate the memory


def test_a_cpu_list_is_used_unchanged_even_under_a_quota(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()), quota=6)
    places = placed(tmp_path, here, "hardware.cpus=2-5,12")
    whole(places, here)
    assert places.cpus == ((2, 3, 4, 5, 12),) and places.threads.value == 5
    assert places.others == (0, 1, 6, 7, 8, 9, 14, 15)
    blind = machine(Topology(tuple(range(4))))
    assert placed(tmp_path, blind, "hardware.cpus=3").cpus == ((3,),)
    assert placed(tmp_path, blind, "hardware.cpus=3").others == (0, 1, 2)


def test_the_environment_overrides_and_an_excess_is_an_error_that_names_both(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()))
    given = {"SLIPWAY__HARDWARE__CPUS": "1-2", "SLIPWAY__PARALLELISM__DATA": "2"}
    assert placed(tmp_path, here, environment=given).cpus == ((1,), (2,))
    given = {"SLIPWAY__HARDWARE__RESERVED_CORES": "3"}
    assert placed(tmp_path, here, environment=given).others == (0, 1, 2, 8, 9, 10)
    excess = refusal(tmp_path, here, environment={"SLIPWAY__HARDWARE__CPUS": "14-17"})
    assert "14-17" in excess and "16-17 not allowed" in excess and "only 0-15" in excess
    assert "SLIPWAY__HARDWARE__CPUS" in excess
    excess = refusal(tmp_path, here, environment={"SLIPWAY__HARDWARE__RESERVED_CORES": "8"})
    assert "8: 8 cores are allowed here" in excess and "at most 7" in excess
    excess = refusal(tmp_path, here, environment={"SLIPWAY__HARDWARE__THREADS": "17"})
    assert "17: 16 CPUs are allowed here (0-15)" in excess


def test_contradicting_placement_keys_are_errors(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()))
    assert "Remove one of the two" in refusal(tmp_path, here, "hardware={cpus: 0-3, reserved_cores: 1}")
    assert "lists 2 CPUs (0-1)" in refusal(tmp_path, here, "hardware={cpus: 0-1, threads: 3}")
    assert "is neither a CPU nor a range" in refusal(tmp_path, here, "hardware={cpus: 3-1}")


def test_none_disables_pinning_but_keeps_reserved_cores(tmp_path: Path) -> None:
    here = machine(read_topology(big(tmp_path), range(16), ()))
    places = placed(tmp_path, here, "hardware={cpus: none, reserved_cores: 2}")
    assert (places.threads.value, places.pinned.value, places.cpus) == (6, "none", ((),))


def test_on_a_gpu_nothing_is_pinned(tmp_path: Path) -> None:
    gpu = Gpu("H100", 80 << 30, 79 << 30, (9, 0))
    here = machine(read_topology(big(tmp_path), range(16), ()), gpus=(gpu,))
    places = placed(tmp_path, here, device="cuda")
    assert places.pinned.value == "none" and places.reserved.value == 0


def test_the_cores_of_this_machine_are_known() -> None:
    found = read_machine(gpus=False)
    assert found.topology.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert found.cores <= count_cores(Path("/"), len(found.topology.allowed))[0]
    assert {cpu for node in found.topology.nodes for core in node for cpu in core} <= set(found.topology.allowed)
