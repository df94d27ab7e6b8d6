"""Tests of `slipway chaos` on a running demo: every scenario that works without special hardware, and its errors.

Chaos is a process of its own only where it is killed: each process imports for a second of CPU time."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.chaos.faults import SCENARIOS
from appliance.cli.main import main
from tests.appliance.certificates import write_certificate
from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[2]
SLIPWAY = [sys.executable, "-m", "appliance"]
MANIFEST = """\
apiVersion: slipway/v2
model: {source: {path: demo}, names: [demo]}
endpoints: {api_keys: clients, tls: {certificate: a.crt, key: a.key}}
limits: {max_waiting: 150}
health: {stalled_busy: 3s, stalled_idle: 3s, stalled_gateway: 3s}
lifecycle: {chaos: allowed, restart: {max: 20}, crash_bundles: {folder: crashes}}
secrets: {clients: {file: keys}}
"""


QUICK = ("--clients", "1", "--within", "300")  # the machine may be busy


@pytest.fixture
def chaos(capfd):
    """Run `slipway chaos`; return the exit code, the output and the messages. Standard input is no terminal."""

    def run(*arguments):
        capfd.readouterr()
        code = main(["chaos", *arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def service(launch, tmp_path_factory):
    """Its folder, and the appliance, ready. With TLS everything uses it: the start, the health check, chaos."""
    folder = tmp_path_factory.mktemp("chaos")
    shutil.copytree(ROOT / "manifests" / "demo", folder / "demo")
    (folder / "keys").write_text("one-key\n")
    write_certificate(folder, "a")
    manifest = folder / "m.yaml"
    manifest.write_text(MANIFEST)
    assert main(["lock", str(manifest)]) == 0
    appliance = launch(manifest, scheme="https", threads="")
    appliance.wait_ready()
    return folder, appliance


def files(folder):
    """Return the contents of all files in the folder except crash reports."""
    found = [path for path in folder.rglob("*") if path.is_file() and "crashes" not in path.parts]
    return {path: path.read_bytes() for path in found}


@pytest.fixture
def run(chaos):
    """Run scenarios; return the exit code and the reports by name."""

    def inject(appliance, *names):
        appliance.wait_ready()  # an engine may still be restarting after the fault of another test
        words = ("--scenario", ",".join(names), "--yes", "--json", "--duration", "1", *QUICK)
        code, output, messages = chaos(appliance.url, *words)
        assert output, messages
        return code, {report["scenario"]: report for report in json.loads(output)}

    return inject


TOGETHER = ("crash", "dead-rank", "exit", "bad-certificate")
RANKS = "dead-rank"  # of an engine with several ranks
ALONE = [each.name for each in SCENARIOS if each.name not in TOGETHER]


@pytest.mark.parametrize("name", thinned(ALONE, ["gateway-crash"]))
def test_promises_are_kept_and_files_are_unchanged(service, run, name):
    folder, appliance = service
    before = files(folder)
    code, told = run(appliance, name)
    report = told[name]
    if name == "oom" and report["outcome"] == "not made":
        assert "cgroup" in report["reason"] or "memory" in report["reason"]  # none that we may divide
    else:
        said = f"{json.dumps(report, indent=1)}\n{appliance.output()[-3000:]}"
        assert code == 0 and report["outcome"] == "as promised" and len(report["findings"]) >= 4, said
    assert files(folder) == before


def test_several_scenarios_run_in_sequence_and_unavailable_ones_are_reported(service, run):
    """Deaths that chaos caused count for no restart limit"""
    folder, appliance = service
    before = files(folder)
    checked = subprocess.run([*SLIPWAY, "healthcheck", appliance.url], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    code, told = run(appliance, *TOGETHER)
    assert code == 0 and tuple(told) == TOGETHER, json.dumps(told, indent=1)
    assert told[RANKS]["reason"] == "parallelism.tensor is 1: an engine has no ranks"
    assert {told[name]["outcome"] for name in TOGETHER if name != RANKS} == {"as promised"}
    assert files(folder) == before and appliance.status("/ready") == 200
    restarts = [line for line in appliance.output().splitlines() if "; restart " in line]
    assert len(restarts) >= 2 and all("; restart 1 of 20 " in line for line in restarts)


@pytest.mark.nightly(
    "tests/e2e/test_ranks.py::test_an_engine_that_lost_a_rank_is_restarted_whole_and_its_stream_goes_on"
)
def test_engine_with_a_killed_rank_restarts_completely(launch, chaos, tmp_path):
    path = tmp_path / "m.yaml"
    demo = f"source: {{path: {ROOT / 'manifests' / 'demo'}}}"
    bundles = f"crash_bundles: {{folder: {tmp_path / 'crashes'}}}"
    path.write_text(
        f"apiVersion: slipway/v2\nmodel: {{{demo}}}\nparallelism: {{tensor: 2}}\n"
        f"lifecycle: {{chaos: allowed, {bundles}}}\n"
    )
    appliance = launch(path)
    appliance.wait_ready()
    code, output, _ = chaos(appliance.url, "--scenario", "dead-rank", "--yes", "--json", *QUICK)
    (report,) = json.loads(output)
    assert code == 0 and report["outcome"] == "as promised", report
    appliance.stop()


def test_fault_is_rolled_back_when_chaos_is_killed(service, eventually):
    """Kill chaos with SIGKILL, which it cannot handle."""
    folder, appliance = service
    shard = folder / "demo" / "model.safetensors"
    whole = shard.read_bytes()
    command = [*SLIPWAY, "chaos", appliance.url, "--scenario", "bad-shard", "--yes", "--duration", "600"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        eventually("the fault", lambda: shard.read_bytes() != whole)
        running.kill()
    eventually("the file as it was", lambda: shard.read_bytes() == whole)
    assert sorted(path.name for path in shard.parent.glob(".*")) == []


def test_ctrl_c_rolls_back_and_exits(service, chaos, eventually):
    folder, appliance = service
    shard = folder / "demo" / "model.safetensors"
    whole = shard.read_bytes()
    command = [*SLIPWAY, "chaos", appliance.url, "--scenario", "bad-shard", "--yes", "--duration", "600"]

    def as_in_a_terminal() -> None:  # a background job of a shell ignores SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def chaos_with_fault() -> subprocess.Popen:
        # The engine may still be restarting after the previous fault; chaos then exits without injecting anything.
        for _ in range(10):
            appliance.wait_ready()
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running = subprocess.Popen(command, **quiet, preexec_fn=as_in_a_terminal)
            eventually("the fault", lambda: running.poll() is not None or shard.read_bytes() != whole)  # noqa: B023
            if running.poll() is None:
                return running
        raise AssertionError("chaos injects no fault")

    with chaos_with_fault() as running:
        code, _, messages = chaos(appliance.url, "--scenario", "crash", "--yes")
        assert code == 2 and "another `slipway chaos` is running" in messages
        running.send_signal(signal.SIGINT)
        assert running.wait(100) == 130
    assert shard.read_bytes() == whole


def test_no_fault_is_injected_without_confirmation(service, chaos):
    _, appliance = service
    appliance.wait_ready()  # as in `run`
    before = appliance.pids()
    code, output, messages = chaos(appliance.url, "--scenario", "crash")
    assert code == 2 and "no fault was injected" in messages
    assert "crash: sends SIGKILL to engine-0" in output and "promised:" in output
    assert appliance.pids() == before


def test_unknown_scenario_is_reported_with_the_known_ones(service, chaos):
    code, _, messages = chaos(service[1].url, "--scenario", "crash,crush", "--yes")
    assert code == 2 and "crush" in messages and "slow-disk" in messages


def test_list_shows_the_promises(service, chaos):
    code, output, _ = chaos(service[1].url, "--list", "--scenario", "all")
    assert code == 0 and output.count("promised: ") >= len(SCENARIOS) - 1


def test_broken_promise_is_reported(service, run):
    """One whose crash bundles cannot be written"""
    folder, appliance = service
    shutil.rmtree(folder / "crashes", ignore_errors=True)
    (folder / "crashes").touch()  # no folder
    code, told = run(appliance, "crash")
    assert code == 1 and told["crash"]["outcome"] == "not as promised"
    assert [each["name"] for each in told["crash"]["findings"] if not each["kept"]] == ["cause"]
