"""The container from outside: its start as SageMaker starts it, adapters, stop signals, crashes and reasons.

The entry point runs as in the image, with the platform's variables. Each test names its lines of docs/platforms.md.
"""

import base64
import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.config import exits
from tests.appliance.deployment.manifests import write_random_adapter
from tests.e2e.conftest import PATIENCE_S, ROOT, Appliance, free_port, until

DEMO = ROOT / "manifests" / "demo"
PROMPT = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
SESSION = "X-Amzn-SageMaker-Session-Id"
LONG = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
PART = 1024
"""Bytes of a variable on SageMaker."""


@dataclass
class Container(Appliance):
    """A running entry point. `environ`: its variables."""

    environ: dict[str, str] = field(default_factory=dict)
    pings: list[tuple[int, int]] = field(default_factory=list)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the entry point again with the same variables, like `docker exec`."""
        command = ["sh", str(ROOT / "entrypoint.sh"), *words]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S)

    @property
    def reason(self) -> dict[str, Any]:
        """The content of the termination log."""
        data = Path(self.environ["SLIPWAY_TERMINATION_LOG"]).read_bytes()
        assert 0 < len(data) <= 4096
        found: dict[str, Any] = json.loads(data)
        return found


@contextmanager
def started(
    folder: Path, *words: str, before: Sequence[str] = (), port_in: str = "SAGEMAKER_BIND_TO_PORT", **environ: str
) -> Iterator[Container]:
    """Start the entry point as process 1 of a container.

    before: words of a command that runs it. port_in: the variable that has its port.
    """
    runtime = tempfile.TemporaryDirectory(prefix="slipway-")  # a short path, because it gets sockets
    (folder / "slipway").write_text(f'#!/bin/sh\nexec {sys.executable} -m appliance "$@"\n')
    (folder / "slipway").chmod(0o755)
    (folder / "reason").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLIPWAY_", "SM_", "AIP_"))}
    port, marker = free_port(), f"slipway-container-{folder.name}-{os.getpid()}"
    environ = {
        **kept,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLIPWAY__ENDPOINTS__HOST": "0.0.0.0",  # as ENV of the image
        "SLIPWAY__HARDWARE__THREADS": "1",  # see tests/e2e/conftest.py
        "SLIPWAY_TERMINATION_LOG": str(folder / "reason"),
        port_in: str(port),
        "LC_TEST_MARKER": marker,
        "XDG_RUNTIME_DIR": runtime.name,
        **environ,
    }
    command = [*before, "sh", str(ROOT / "entrypoint.sh"), *words]
    with (folder / "log").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environ, cwd=folder)
    one = Container(process, f"http://127.0.0.1:{port}", folder / "log", marker, environ)
    try:
        yield one
    finally:
        one.client.close()
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        runtime.cleanup()


def in_parts(manifest: str) -> dict[str, str]:
    """Return the variables of a manifest that SageMaker's limit divides."""
    text = base64.b64encode(gzip.compress(manifest.encode())).decode()
    return {f"SLIPWAY_MANIFEST_B64_{at:02}": text[PART * at : PART * (at + 1)] for at in range(len(text) // PART + 1)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters `one` and `two`, and `packed.tar.gz`."""
    folder = tmp_path_factory.mktemp("store")
    for name in ("one", "two"):
        write_random_adapter(DEMO, folder / name)
    with tarfile.open(folder / "packed.tar.gz", "w:gz") as archive:
        archive.add(folder / "two", "two")
    return folder


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[Container]:
    """A container of SageMaker, whose health was asked from its first moment on."""
    comment = "".join(f"# {number} {os.urandom(24).hex()}\n" for number in range(60))  # several parts
    manifest = (
        f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}, names: [base]}}\nhardware: {{device: cpu}}\n"
        "lifecycle: {self_test: {prompts: 0}}\n"
        f"adapter_loading: {{max_active: 1, folders: [{store}]}}\n{comment}"
    )
    parts = in_parts(manifest)
    assert len(parts) > 1
    variables = {"SLIPWAY_GRACE": "30", "SM_VLLM_MAX_MODEL_LEN": "700"}
    with started(tmp_path_factory.mktemp("sagemaker"), "serve", **variables, **parts) as one:
        one.pings = pings_until_ready(one)
        yield one


def pings_until_ready(one: Container) -> list[tuple[int, int]]:
    """Ask /ping and /live in turns until the service is ready. Return their statuses, 0 for a refused connection."""
    found: list[tuple[int, int]] = []

    def healthy() -> bool:
        assert one.process.poll() is None, one.output()
        found.append((one.status("/ping"), one.status("/live")))
        return found[-1][0] == 200

    until(f"/ping of {one.url}", healthy)
    return found


def test_sm_01_sm_12_sm_30_k8_02_k8_09_serve_starts_a_manifest_in_parts_and_ping_fails_until_it_serves(container):
    """Also VX-04: the port is open and the process alive before the model is loaded."""
    assert container.pings[-1] == (200, 200)
    assert (503, 200) in container.pings and {ping for ping, _ in container.pings} <= {0, 503, 200}
    (model,) = container.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("base", 700)


def test_sm_05_sm_06_the_port_of_the_platform_is_open_on_all_addresses(container):
    port = int(container.url.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = {line.split()[1] for line in lines if line.split()[3] == "0A"}
    assert f"00000000:{port:04X}" in listening


def test_dk_05_dk_06_the_health_check_needs_no_other_program(container):
    assert container.call("healthcheck", container.url).returncode == 0
    assert container.call("healthcheck", f"http://127.0.0.1:{free_port()}").returncode == 1


def test_az_01_the_routes_of_azure_ml(container):
    assert container.status("/live") == container.status("/ready") == 200
    assert container.client.post("/invocations", json=PROMPT).json()["object"] == "text_completion"


def test_mh_30_sessions_are_off_by_default(container):
    for headers, body in (({}, {"requestType": "NEW_SESSION"}), ({SESSION: "x" * 36}, PROMPT)):
        reply = container.client.post("/invocations", json=body, headers=headers)
        assert reply.status_code == 400 and "sessions" in reply.json()["error"]["message"]


def test_mh_22_mh_40_mh_41_mh_42_sm_35_adapters_are_registered_selected_and_removed(container):
    client = container.client
    reply = client.post("/adapters", json={"name": "a", "src": "one", "preload": True})
    assert (reply.status_code, reply.text) == (200, "Adapter a registered")
    assert client.post("/invocations", json=PROMPT, headers={ADAPTER: "a"}).json()["model"] == "a"
    assert client.post("/invocations", json={**PROMPT, "model": "a"}).json()["model"] == "a"
    assert {"name": "a"} in client.get("/adapters").json()["adapters"]
    assert client.post("/adapters?name=b&src=packed.tar.gz").status_code == 200
    for wrong in ({"name": "a"}, {"src": "one"}, {"name": "", "src": "one"}):
        assert client.post("/adapters", json=wrong).status_code == 400
    assert [client.delete(f"/adapters/{name}").status_code for name in ("a", "b", "a")] == [200, 200, 404]
    assert client.post("/invocations", json=PROMPT, headers={ADAPTER: "a"}).status_code == 404


def test_sm_40_sm_41_sm_42_sm_43_sm_44_sm_45_a_multi_model_endpoint(container):
    client, body = container.client, {"model_name": "m", "url": "packed.tar.gz"}
    assert [client.post("/models", json=body).status_code for _ in range(2)] == [200, 409]
    page = client.get("/models", params={"limit": 1}).json()
    assert len(page["models"]) == 1 and page["nextPageToken"]
    assert client.get("/models/m").json()["modelUrl"] == "packed.tar.gz"
    target = {"X-Amzn-SageMaker-Target-Model": "packed.tar.gz"}
    assert client.post("/models/m/invoke", json=PROMPT, headers=target).json()["model"] == "m"
    assert client.post("/models/absent/invoke", json=PROMPT).status_code == 404
    assert client.get("/ping").status_code == 200
    assert [client.delete("/models/m").status_code for _ in range(2)] == [200, 404]
    assert client.get("/models/m").status_code == 404


def test_ks_15_the_repository_loads_and_unloads(container):
    client = container.client
    assert client.post("/v2/repository/models/one/load").json() == {"name": "one", "load": True}
    assert client.post("/v2/repository/models/one/unload").json() == {"name": "one", "unload": True}
    assert client.post("/v2/repository/models/absent/load").status_code == 404


def test_k8_01_k8_08_health_is_answered_within_a_second_under_load(container):
    def stream(_: int) -> int:
        return container.client.post("/v1/completions", json=LONG).status_code

    with ThreadPoolExecutor(8) as clients:
        streams = clients.map(stream, range(8))
        for path in ("/live", "/ready", "/ping") * 3:
            assert httpx.get(f"{container.url}{path}", timeout=1).status_code == 200
        assert set(streams) == {200}


# The last test of this container: it stops it.
def test_sm_02_mh_05_mh_06_k8_04_dk_01_sigterm_completes_streams_and_ends_with_0(container):
    with container.client.stream("POST", "/v1/completions", json=LONG) as reply:
        lines = reply.iter_lines()
        next(lines)
        container.process.send_signal(signal.SIGTERM)
        until("the stop", lambda: container.status("/ready") != 200)
        assert list(filter(None, lines))[-1] == "data: [DONE]"
    assert container.process.wait(timeout=30) == 0
    assert not container.processes(), "DK-03: processes are left"


MANIFEST = (
    f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}}}\nhardware: {{device: cpu}}\n"
    "endpoints: {sessions: {keep: 1s}}\n"
)


def test_mh_01_to_mh_04_dk_04_sv_05_k8_06_k8_11_a_crash_loop_ends_the_container_with_code_and_reason(tmp_path):
    """The user has no entry in /etc/passwd. Also MH-34: an expired session is unknown at once."""
    manifest = MANIFEST + "lifecycle: {self_test: {prompts: 0}, restart: {max: 0}}\n"
    user = {"before": ["unshare", "--user", "--map-user=12345"], "USER": "", "LOGNAME": "", "HOME": str(tmp_path)}
    with started(tmp_path, **user, **in_parts(manifest)) as one:
        one.wait_ready()
        opened = one.client.post("/invocations", json={"requestType": "NEW_SESSION"})
        session = {SESSION: opened.headers["X-Amzn-SageMaker-New-Session-Id"].partition(";")[0]}
        expired_s = time.monotonic() + 2
        until("the end of the session", lambda: time.monotonic() > expired_s)
        for _ in range(2):
            assert one.client.post("/invocations", json=PROMPT, headers=session).status_code == 400
        os.kill(one.pids()["engine-0"], signal.SIGKILL)
        assert one.process.wait(timeout=PATIENCE_S) == exits.RESTARTS.number
        assert (one.reason["exit"], one.reason["program"]) == ("restarts", "engine-0")
        assert not one.processes(), "DK-03, SV-10: processes are left"


@pytest.mark.nightly("tests/e2e/test_ranks.py::test_halted_appliance_reports_the_reason_and_never_becomes_ready")
def test_dk_07_a_halted_container_stays_alive_and_is_not_ready(tmp_path):
    manifest = MANIFEST + "lifecycle: {self_test: {prompts: 0}, restart: {max: 0, exhausted: halt}}\n"
    with started(tmp_path, **in_parts(manifest)) as one:
        one.wait_ready()
        os.kill(one.pids()["engine-0"], signal.SIGKILL)
        until("the halt", lambda: "failed" in one.client.get("/ready").text)
        assert [one.status(path) for path in ("/ready", "/ping", "/live")] == [503, 503, 200]
        assert one.stop() == exits.RESTARTS.number


@pytest.mark.parametrize(
    ("variable", "value", "code", "words"),
    [
        ("SM_SLIPWAY_MODEL_MAX_CONTXT", "7", 2, "did you mean SM_SLIPWAY_MODEL_MAX_CONTEXT?"),
        ("SM_VLLM_MODEL", "/models/absent", 10, "/models/absent"),
    ],
)
def test_k8_06_sm_32_a_start_that_cannot_work_has_a_reason(tmp_path, variable, value, code, words):
    with started(tmp_path, **{variable: value}) as one:
        assert one.process.wait(timeout=PATIENCE_S) == code, one.output()
        assert words in json.dumps(one.reason) and words in one.output()


def test_mh_07_sv_08_characters_of_arguments_arrive_unchanged(tmp_path):
    with started(tmp_path, "plan", str(DEMO), "--model.names", '["50% ; {x} é"]') as one:
        assert one.process.wait(timeout=PATIENCE_S) == 0, one.output()
        assert "50% ; {x} é" in one.output()


MOUNT = """mount -t tmpfs none "$1" && mkdir -p "$2" && mount --bind -o ro "$3" "$2" && shift 3 && exec "$@" """
PLATFORMS = {
    "SageMaker": ("/opt", "/opt/ml/model", {}),
    "KServe": ("/mnt", "/mnt/models", {}),
    "Azure ML": ("", "", {"AZUREML_MODEL_DIR": str(DEMO)}),
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_sm_03_sm_31_ks_18_az_04_dk_02_mh_08_a_mounted_model_is_found_and_sigterm_ends_the_start(tmp_path, platform):
    """The model is mounted read-only."""
    top, at, environ = PLATFORMS[platform]
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    before = [*namespace, "sh", "-c", MOUNT, "sh", top, at, str(DEMO)] if at else []
    with started(tmp_path, before=before, port_in="SLIPWAY__ENDPOINTS__PORT", **environ) as one:
        until("the model", lambda: f"{platform} detected" in one.output() or one.process.poll() is not None)
        assert f"{platform} detected" in one.output() and (at or str(DEMO)) in one.output()
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(timeout=PATIENCE_S) == 0, one.output()
