"""Tests of the CPU affinity of a running appliance's threads, read from /proc."""

import os
from pathlib import Path

import pytest

from appliance.supervisor.supervise import NICE
from kernels.cpu.library import usable

ALLOWED = sorted(os.sched_getaffinity(0))
ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}

pytestmark = [
    pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU has no other to be kept away from"),
    pytest.mark.skipif(not usable(), reason="only threads of compiled kernels are pinned one by one"),
]


def threads(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


def test_threads_have_a_cpu_each_and_the_others_keep_away_and_yield(launch):
    engines, others = ALLOWED[:1], set(ALLOWED[1:])
    appliance = launch(SLIPWAY__HARDWARE__CPUS=str(engines[0]))
    appliance.wait_ready()
    assert appliance.client.post("/v1/completions", json=ASK).status_code == 200
    pids = appliance.pids()
    found = threads(pids["engine-0"])
    assert found.count({engines[0]}) == 1  # the worker; its team has no other thread
    assert all(cpus == {engines[0]} or cpus >= {engines[0]} for cpus in found) and len(found) > 1
    beside = [pid for pid in appliance.processes() if pid != pids["engine-0"]]
    assert len(beside) >= 4  # slipway serve, supervisord, gateway, monitor
    assert all(cpus == others for pid in beside for cpus in threads(pid))
    assert os.getpriority(os.PRIO_PROCESS, pids["gateway"]) == NICE
    assert os.getpriority(os.PRIO_PROCESS, pids["engine-0"]) == 0


@pytest.mark.nightly("tests/e2e/test_cpus.py::test_threads_have_a_cpu_each_and_the_others_keep_away_and_yield")
def test_a_team_is_pinned_thread_by_thread(launch):
    appliance = launch(SLIPWAY__HARDWARE__CPUS=f"{ALLOWED[0]},{ALLOWED[1]}")
    appliance.wait_ready()
    found = threads(appliance.pids()["engine-0"])
    assert found.count({ALLOWED[0]}) == found.count({ALLOWED[1]}) == 1
    assert all(cpus == set(ALLOWED[:2]) for cpus in threads(appliance.pids()["gateway"])) or len(ALLOWED) > 2
