"""Tests of `slipway chaos` on a running demo: every scenario that works without special hardware, and its errors."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from appliance.chaos.faults import SCENARIOS
from tests.appliance.certificates import write_certificate
from tests.tiers import thinned

ROOT = Path(__file__).resolve().parents[2]
SLIPWAY = [sys.executable, "-m", "appliance"]
MANIFEST = """\
apiVersion: slipway/v2
model: {source: {path: demo}, names: [demo]}
endpoints: {api_keys: clients}
limits: {max_waiting: 150}
health: {stalled_busy: 3s, stalled_idle: 3s, stalled_gateway: 3s}
lifecycle: {chaos: allowed, restart: {max: 20}, crash_bundles: {folder: crashes}}
secrets: {clients: {file: keys}}
"""


QUICK = ("--clients", "1", "--within", "300")  # the machine may be busy


def chaos(*arguments, **more):
    return subprocess.run([*SLIPWAY, "chaos", *arguments], capture_output=True, text=True, timeout=600, **more)


@pytest.fixture(scope="module")
def service(launch, tmp_path_factory):
    """Its folder, and the appliance, ready."""
    folder = tmp_path_factory.mktemp("chaos")
    shutil.copytree(ROOT / "manifests" / "demo", folder / "demo")
    (folder / "keys").write_text("one-key\n")
    manifest = folder / "m.yaml"
    manifest.write_text(MANIFEST)
    subprocess.run([*SLIPWAY, "lock", str(manifest)], check=True, capture_output=True)
    appliance = launch(manifest)
    appliance.wait_ready()
    return folder, appliance


def files(folder):
    """Return the contents of all files in the folder except crash reports."""
    found = [path for path in folder.rglob("*") if path.is_file() and "crashes" not in path.parts]
    return {path: path.read_bytes() for path in found}


def run(appliance, *names):
    """The exit code and the reports by name."""
    done = chaos(appliance.url, "--scenario", ",".join(names), "--yes", "--json", "--duration", "1", *QUICK)
    assert done.stdout, done.stderr
    return done.returncode, {report["scenario"]: report for report in json.loads(done.stdout)}


TOGETHER = ("crash", "dead-rank", "exit")


ELSEWHERE = ("dead-rank", "bad-certificate")  # what this service has not


def answered(appliance, url):
    """Return the status, or 0 if nothing listens yet."""
    assert appliance.process.poll() is None, appliance.output()
    try:
        return httpx.get(url, verify=False).status_code
    except httpx.TransportError:
        return 0


def test_bad_certificate_is_refused_and_the_previous_one_stays(launch, tmp_path, eventually):
    """With TLS everything asks through it: the start, the health check, chaos"""
    write_certificate(tmp_path, "a")
    manifest, tls = tmp_path / "m.yaml", f"{{certificate: {tmp_path / 'a.crt'}, key: {tmp_path / 'a.key'}}}"
    manifest.write_text(
        f"apiVersion: slipway/v2\nmodel: {{source: {{path: {ROOT / 'manifests' / 'demo'}}}, names: [demo]}}\n"
        f"endpoints: {{tls: {tls}}}\nlifecycle: {{chaos: allowed}}\n"
    )
    appliance = launch(manifest)
    url = appliance.url.replace("http:", "https:")
    eventually("/ready", lambda: answered(appliance, f"{url}/ready") == 200)
    checked = subprocess.run([*SLIPWAY, "healthcheck", url], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    done = chaos(str(manifest), "--scenario", "bad-certificate", "--yes", "--json", "--duration", "1", *QUICK)
    assert done.returncode == 0 and json.loads(done.stdout)[0]["outcome"] == "as promised", done.stdout + done.stderr
    assert httpx.get(f"{url}/ready", verify=False).status_code == 200
    assert appliance.stop() == 0


ALONE = [each.name for each in SCENARIOS if each.name not in (*TOGETHER, *ELSEWHERE)]


@pytest.mark.parametrize("name", thinned(ALONE, ["gateway-crash"]))
def test_promises_are_kept_and_files_are_unchanged(service, name):
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


def test_several_scenarios_run_in_sequence_and_unavailable_ones_are_reported(service):
    """Deaths that chaos caused count for no restart limit"""
    _, appliance = service
    code, told = run(appliance, *TOGETHER)
    assert code == 0 and tuple(told) == TOGETHER, json.dumps(told, indent=1)
    assert told["dead-rank"]["reason"] == "parallelism.tensor is 1: an engine has no ranks"
    assert {told[name]["outcome"] for name in TOGETHER if name != "dead-rank"} == {"as promised"}
    restarts = [line for line in appliance.output().splitlines() if "; restart " in line]
    assert len(restarts) >= 2 and all("; restart 1 of 20 " in line for line in restarts)


@pytest.mark.nightly(
    "tests/e2e/test_ranks.py::test_an_engine_that_lost_a_rank_is_restarted_whole_and_its_stream_goes_on"
)
def test_engine_with_a_killed_rank_restarts_completely(launch, tmp_path):
    path = tmp_path / "m.yaml"
    demo = f"source: {{path: {ROOT / 'manifests' / 'demo'}}}"
    bundles = f"crash_bundles: {{folder: {tmp_path / 'crashes'}}}"
    path.write_text(
        f"apiVersion: slipway/v2\nmodel: {{{demo}}}\nparallelism: {{tensor: 2}}\n"
        f"lifecycle: {{chaos: allowed, {bundles}}}\n"
    )
    appliance = launch(path)
    appliance.wait_ready()
    done = chaos(appliance.url, "--scenario", "dead-rank", "--yes", "--json", *QUICK)
    (report,) = json.loads(done.stdout)
    assert done.returncode == 0 and report["outcome"] == "as promised", report
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


def test_ctrl_c_rolls_back_and_exits(service, eventually):
    folder, appliance = service
    shard = folder / "demo" / "model.safetensors"
    whole = shard.read_bytes()
    command = [*SLIPWAY, "chaos", appliance.url, "--scenario", "bad-shard", "--yes", "--duration", "600"]

    def as_in_a_terminal() -> None:  # a background job of a shell ignores SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # The engine may still be restarting after the previous fault; chaos then exits without injecting anything.
    eventually(
        "a service that is well",
        lambda: chaos(appliance.url, "--scenario", "bad-keys", "--yes", *QUICK).returncode == 0,
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet, preexec_fn=as_in_a_terminal) as running:
        eventually("the fault", lambda: shard.read_bytes() != whole)
        beside = chaos(appliance.url, "--scenario", "crash", "--yes")
        assert beside.returncode == 2 and "another `slipway chaos` is running" in beside.stderr
        running.send_signal(signal.SIGINT)
        assert running.wait(100) == 130
    assert shard.read_bytes() == whole


def test_no_fault_is_injected_without_confirmation(service):
    _, appliance = service
    before = appliance.pids()
    done = chaos(appliance.url, "--scenario", "crash", stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and "no fault was injected" in done.stderr
    assert "crash: sends SIGKILL to engine-0" in done.stdout and "promised:" in done.stdout
    assert appliance.pids() == before


def test_chaos_is_refused_if_the_manifest_does_not_allow_it(demo):
    before = demo.pids()
    done = chaos(demo.url, "--scenario", "crash", "--yes")
    assert done.returncode == 2 and "lifecycle: {chaos: allowed}" in done.stderr
    assert demo.pids() == before


def test_unknown_scenario_is_reported_with_the_known_ones(demo):
    done = chaos(demo.url, "--scenario", "crash,crush", "--yes")
    assert done.returncode == 2 and "crush" in done.stderr and "slow-disk" in done.stderr


def test_list_shows_the_promises(service):
    _, appliance = service
    done = chaos(appliance.url, "--list", "--scenario", "all")
    assert done.returncode == 0 and done.stdout.count("promised: ") >= len(SCENARIOS) - len(ELSEWHERE)


def test_broken_promise_is_reported(service):
    """One whose crash bundles cannot be written"""
    folder, appliance = service
    shutil.rmtree(folder / "crashes", ignore_errors=True)
    (folder / "crashes").touch()  # no folder
    code, told = run(appliance, "crash")
    assert code == 1 and told["crash"]["outcome"] == "not as promised"
    assert [each["name"] for each in told["crash"]["findings"] if not each["kept"]] == ["cause"]
