"""Cause of an engine crash, from the reaper's report, the kernel's counters and the last log lines."""

import re
from pathlib import Path

import pytest

from appliance.cli.main import main
from appliance.supervisor import causes
from appliance.supervisor.causes import classify
from appliance.supervisor.exit_status import ExitStatus, increments, memory_counters, read_counters

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
RANK = "slipway engine: rank: rank 2 (process 812) was killed by SIGKILL; the system may have been out of memory"
DRIFT = "slipway engine: drift: golden prompt short (5 tokens), token 1 of its reply"
CUDA = "slipway engine: crash: AcceleratorError: CUDA error: uncorrectable ECC error encountered"


def death(code=0, signal="", oom=0):
    return ExitStatus(pid=1, duration_s=1.0, code=code, signal=signal, memory={"oom_kill": oom} if oom else {"high": 4})


@pytest.mark.parametrize(
    ("seen", "given", "lines", "name"),
    [
        (death(signal="SIGKILL"), {}, [], "signal"),
        (death(signal="SIGKILL", oom=1), {}, [], "oom-kill"),
        (death(signal="SIGKILL", oom=1), {"hung": True}, [], "hang"),
        (death(signal="SIGSEGV", oom=1), {}, [], "signal"),
        (death(code=70), {}, [RANK], "exit-code"),
        (death(code=70, oom=1), {}, [RANK], "oom-kill"),
        (death(code=70, oom=1), {}, ["something"], "exit-code"),
        (death(code=70), {}, [CUDA], "device-error"),
        (death(code=70), {}, [CUDA, "bye"], "device-error"),
        (death(signal="SIGABRT"), {}, ["CUBLAS_STATUS_EXECUTION_FAILED"], "device-error"),
        (death(signal="SIGKILL"), {}, [CUDA], "signal"),
        (death(code=78), {"permanent": True}, ["memory: too little"], "permanent"),
        (death(code=79), {}, [DRIFT], "drift"),
        (death(code=79), {"permanent": True}, [DRIFT], "drift"),
        (death(code=78), {"permanent": True}, ["slipway engine: self_test: golden prompt long"], "drift"),
        (death(code=78), {"permanent": True}, ["somebody's word: drift: is here"], "permanent"),
        (death(signal="SIGKILL"), {}, [DRIFT], "signal"),
        (death(code=0), {}, [], "exit-code"),
        (death(code=255), {}, [], "exit-code"),
        (None, {}, [], "signal"),
    ],
)
def test_exit_status_and_log_lines_determine_the_cause(seen, given, lines, name):
    assert classify(seen, **{"hung": False, "permanent": False, **given}, last_lines=lines).name == name


def test_the_documentation_has_the_same_table():
    page = OPERATIONS.read_text()
    section = page[page.index("## Crash bundles") : page.index("## Requests survive engine crashes")]
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", section, re.MULTILINE)
    known = {one.name for one in causes.CAUSES}
    assert [row for row in rows if row[0] in known] == [(one.name, one.meaning, one.cure) for one in causes.CAUSES]


@pytest.mark.parametrize("one", causes.CAUSES, ids=lambda one: one.name)
def test_each_cause_is_explained(one, capsys):
    assert main(["explain", one.name]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert one.meaning in said and one.cure in said


def test_memory_counters_come_from_the_nearest_cgroup(tmp_path):
    near, far = tmp_path / "a" / "b", tmp_path / "a"
    near.mkdir(parents=True)
    assert memory_counters([near, far], tmp_path / "vmstat") == tmp_path / "vmstat"
    (far / "memory.events").write_text("low 0\nhigh 1\nmax 2\noom 3\noom_kill 3\noom_group_kill 0\n")
    assert memory_counters([near, far]) == far / "memory.events"
    (near / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    assert memory_counters([near, far]) == near / "memory.oom_control"
    assert read_counters(near / "memory.oom_control")["oom_kill"] == 7
    (tmp_path / "vmstat").write_text("nr_free_pages 99\noom_kill 5\n")
    assert read_counters(tmp_path / "vmstat") == {"oom_kill": 5}
    assert read_counters(tmp_path / "none") == {}
    assert increments({"oom_kill": 3, "high": 1}, {"oom_kill": 5, "high": 1, "max": 2}) == {"oom_kill": 2, "max": 2}
