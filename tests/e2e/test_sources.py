"""The demo served from elsewhere: an archive of a web server, a repository of a hub, through connections that break."""

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest

from appliance.cli.main import main
from appliance.config import exits

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "manifests" / "demo"
sys.path.insert(0, str(ROOT / "tests" / "appliance" / "checkpoints"))
from source_servers import COMMIT, publish, serving  # noqa: E402

ASK = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
WEIGHTS = f"/org/demo/resolve/{COMMIT}/model.safetensors"
BIG = 3_000_000  # bytes, about half of the demo's weights


@pytest.fixture
def server():
    with serving() as found:
        yield found


@pytest.fixture
def hub(server):
    publish(server, "org/demo", {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()})
    return server


def manifest(folder: Path, source: str, download: str = "") -> Path:
    path = folder / "m.yaml"
    cache = f"cache: {folder / 'cache'}, min_free: 1{download}"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {source}, download: {{{cache}}}, names: [demo]}}\n")
    return path


def test_an_archive_is_served_whole_in_spite_of_a_cut_and_from_the_cache_the_second_time(
    launch, demo, server, tmp_path, capsys
):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        archive.add(DEMO, "demo")
    data = packed.getvalue()
    server.files["/demo.tar.gz"], server.faults["/demo.tar.gz"] = data, [("cut", 100_000)]
    sha256 = hashlib.sha256(data).hexdigest()
    path = manifest(tmp_path, f"{{http: {{url: '{server.url}/demo.tar.gz', sha256: {sha256}}}}}")
    appliance = launch(path)
    appliance.wait_ready()
    told = appliance.client.post("/v1/completions", json=ASK).json()["choices"]
    assert told == demo.client.post("/v1/completions", json=ASK).json()["choices"]
    assert "attempt 2 of 5 follows" in appliance.output()
    assert appliance.stop() == 0
    # `check` reads the model from the cache, as the next start does.
    assert main(["check", str(path)]) == 0
    assert "attempt" not in capsys.readouterr().err
    assert server.gets("/demo.tar.gz") == ["", "bytes=100000-"]


@pytest.mark.nightly("tests/e2e/test_sources.py::test_a_start_tells_how_far_a_download_is_and_a_stalled_one_goes_on")
def test_an_archive_that_stalls_is_told_by_who_answers_meanwhile(launch, server, tmp_path, eventually):
    """The gateway cannot run before the model is known; the placeholder server still answers probes."""
    server.files["/demo.zip"], server.faults["/demo.zip"] = bytes(BIG), [("stall", BIG // 2)]
    appliance = launch(manifest(tmp_path, f"{{http: {{url: '{server.url}/demo.zip'}}}}"))

    def stalled() -> bool:
        return appliance.status("/ready") == 503 and "no data for" in appliance.client.get("/ready").json()["detail"]

    eventually("a download that says it gets nothing", stalled)
    said = appliance.client.get("/ready").json()
    assert (said["status"], said["phase"], said["progress"]) == ("loading", "downloading", 0.5)
    assert said["detail"].startswith("1.5 of 3.0 MB, no data for ")
    assert appliance.status("/live") == 200 and appliance.status("/ping") == 503
    refused = appliance.client.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    assert refused.json()["error"]["message"].startswith("The model is being downloaded: 1.5 of 3.0 MB")
    assert appliance.stop() == 0 and "stays in the cache" in appliance.output()
    assert [path.stat().st_size for path in (tmp_path / "cache").rglob("*.part")] == [BIG // 2]


def test_a_start_tells_how_far_a_download_is_and_a_stalled_one_goes_on(launch, hub, tmp_path, eventually):
    """The gateway answers during the download."""
    hub.faults[WEIGHTS] = [None, ("stall", BIG)]  # the first GET reads the header for the plan
    hub.token = "hunter2"
    path = manifest(tmp_path, "{huggingface: {repo: org/demo}}", ", stall_timeout: 6s")
    path.write_text(path.read_text().replace("names:", "credentials: hub, names:") + "secrets: {hub: {env: HUB}}\n")
    appliance = launch(path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HUB="hunter2")
    seen: list[dict] = []

    def stalled() -> bool:
        if appliance.status("/live") == 200:
            seen.append(appliance.client.get("/ready").json())
        return bool(seen) and "no data for" in seen[-1]["engines"][0].get("detail", "")

    eventually("a download that says it gets nothing", stalled)
    engine = seen[-1]["engines"][0]
    assert engine["phase"] == "downloading" and 0.4 < engine["progress"] < 0.6
    assert engine["detail"].startswith("3.1 of 6.") or engine["detail"].startswith("3.0 of 6."), engine
    refused = appliance.client.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    appliance.wait_ready()
    assert appliance.client.post("/v1/completions", json=ASK).status_code == 200
    assert b"hunter2" not in Path(f"/proc/{appliance.pids()['engine-0']}/environ").read_bytes()
    output = appliance.output()
    assert "hunter2" not in output
    assert "model.safetensors: " in output and "no data for 6 s; attempt 2 of 5 follows" in output
    assert "hung" not in output and appliance.metric("slipway_engine_restarts_total") == 0
    assert f"bytes={BIG}-" in hub.gets(WEIGHTS)
    assert appliance.stop() == 0


@pytest.mark.nightly(
    "tests/appliance/checkpoints/test_download_program.py::test_permanent_failure_is_printed_and_sent_to_the_gateway"
)
def test_a_download_that_is_refused_ends_the_start_with_its_reason(refused, hub, tmp_path, monkeypatch):
    hub.faults[WEIGHTS] = [None, 403]
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    code, said = refused(manifest(tmp_path, "{huggingface: {repo: org/demo}}"))
    assert code == exits.SOURCE.number
    assert "model.safetensors: the server answered 403" in said and "model.credentials" in said
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
