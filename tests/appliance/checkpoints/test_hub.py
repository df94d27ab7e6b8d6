"""Repositories of a fake hub, asked by the real huggingface_hub, through `check`, `plan` and `fetch`."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_servers import COMMIT, Files, publish

from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.machine import Machine
from appliance.planning.plan import Plan
from appliance.planning.validate import download_missing, validate

MACHINE = Machine(cores=2, cores_from="affinity", memory_free=2**34, memory_from="MemAvailable", no_gpu="no driver")
DOWNLOAD = "{stall_timeout: 500ms, attempts: 2, min_free: 1}"
WEIGHTS = f"/org/demo/resolve/{COMMIT}/model.safetensors"


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    """huggingface_hub keeps its connections for the whole process."""
    yield
    from huggingface_hub.utils import close_session

    close_session()


@pytest.fixture
def hub(server: Callable[[], Files], checkpoint_files: dict[str, bytes]) -> Files:
    found = server()
    publish(found, "org/demo", checkpoint_files)
    return found


def given(hub: Files, tmp_path: Path, *sets: str, more: str = "", **environ: str) -> Given:
    path = tmp_path / "m.yaml"
    source = f"{{huggingface: {{repo: org/demo}}}}, download: {DOWNLOAD}{more and ', '}{more}"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {source}}}\nsecrets: {{hf: {{env: OUR_TOKEN}}}}\n")
    options = tuple(Option(f"--set {one.partition('=')[0]}", *one.split("=", 1)) for one in sets)
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path), "OUR_TOKEN": "hunter2"}
    return Given(path, options, home | environ)


def refused(given: Given) -> Refused:
    with pytest.raises(Refused) as caught:
        validate(given, MACHINE)
    return caught.value


def value(plan: Plan, key: str) -> tuple[object, str]:
    return next((one.resolved, one.reason) for one in plan.effective if one.key == key)


def test_plan_needs_only_the_headers_of_the_weights(
    hub: Files, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    plan = validate(given(hub, tmp_path), MACHINE)
    local = tmp_path / "local.yaml"
    folder = Path(__file__).resolve().parents[3] / "manifests" / "demo"
    local.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {folder}}}}}\n")
    assert plan.memory == validate(Given(local), MACHINE).memory
    assert hub.sent[WEIGHTS] <= 65536 < len(checkpoint_files["model.safetensors"])
    snapshot = tmp_path / "hf/hub/models--org--demo/snapshots" / COMMIT
    assert plan.engines[0].model.path == plan.gateway.model == str(snapshot)
    assert (snapshot / "tokenizer.json").read_bytes() == checkpoint_files["tokenizer.json"]
    assert not (snapshot / "model.safetensors").exists() and plan.job is not None
    assert value(plan, "model.source.huggingface.revision") == (COMMIT, "the commit of main")
    reason = plan.origin
    assert str(snapshot) in reason
    size = len(checkpoint_files["model.safetensors"]) / 1e6
    assert f"{size:.1f} of 6." in reason and f"; at least {size / 2.7:.1f} kB/s for model.download" in reason
    assert plan.gateway.names == ("demo",)


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_downloaded(
    server: Callable[[], Files], tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    hub, files = server(), dict(checkpoint_files)
    config = json.loads(files["config.json"])
    factor = 4000
    header_length = struct.unpack("<Q", files["model.safetensors"][:8])[0]
    header = json.loads(files["model.safetensors"][8 : 8 + header_length])
    name = next(name for name in header if "embed" in name)
    vocab, width = header[name]["shape"]
    config["vocab_size"], at = vocab * factor, 0
    for key, entry in header.items():
        if key != "__metadata__":
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            entry["shape"] = [vocab * factor, width] if key in (name, "lm_head.weight") else entry["shape"]
            size *= factor if key in (name, "lm_head.weight") else 1
            entry["data_offsets"], at = [at, at + size], at + size
    text = json.dumps(header).encode()
    files |= {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": struct.pack("<Q", len(text)) + text + bytes(70_000),
    }
    publish(hub, "org/demo", files)
    info = json.loads(hub.answers["/api/models/org/demo/revision/main"]())
    for one in info["siblings"]:
        if "lfs" in one:
            one["size"] = one["lfs"]["size"] = 8 + len(text) + at
    hub.answers["/api/models/org/demo/revision/main"] = lambda: json.dumps(info).encode()
    small = Machine(cores=2, cores_from="affinity", memory_free=2**30, memory_from="MemAvailable", no_gpu="")
    with pytest.raises(Refused) as caught:
        validate(given(hub, tmp_path), small)
    assert caught.value.cause is exits.MEMORY, caught.value
    assert at > 2**30 and hub.sent[WEIGHTS] < 80_000


def test_fetch_uses_the_cache_layout_of_the_hub_client(
    hub: Files, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    from huggingface_hub import snapshot_download

    folder = download_missing(given(hub, tmp_path))
    found = snapshot_download("org/demo", cache_dir=tmp_path / "hf/hub", local_files_only=True)
    assert Path(found) == folder
    assert (folder / "model.safetensors").read_bytes() == checkpoint_files["model.safetensors"]
    blob = (folder / "model.safetensors").resolve()
    assert blob.name == hashlib.sha256(checkpoint_files["model.safetensors"]).hexdigest()
    assert validate(given(hub, tmp_path), MACHINE).job is None


def test_files_downloaded_by_another_client_are_served_offline(hub: Files, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    cache = tmp_path / "hf/hub"
    snapshot_download("org/demo", cache_dir=cache, endpoint=hub.url, token=False)
    before = len(hub.seen)
    plan = validate(given(hub, tmp_path, HF_HUB_OFFLINE="1"), MACHINE)
    assert plan.job is None and len(hub.seen) == before
    assert "offline" in value(plan, "model.source.huggingface.revision")[1]


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "download.offline"])
def test_uncached_checkpoint_is_refused_offline(how: str, hub: Files, tmp_path: Path) -> None:
    if how == "HF_HUB_OFFLINE":
        found = refused(given(hub, tmp_path, HF_HUB_OFFLINE="1"))
    else:
        found = refused(given(hub, tmp_path, "model.download.offline=true"))
    assert found.cause is exits.SOURCE and not hub.seen
    words = str(found)
    assert "model.source.huggingface.repo: huggingface org/demo: is not in the cache" in words and ":2:" in words


def test_partial_download_of_another_client_is_completed(hub: Files, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    for name in ("config.json", "model.safetensors"):
        hf_hub_download("org/demo", name, revision=COMMIT, cache_dir=tmp_path / "hf/hub", endpoint=hub.url, token=False)
    before = len(hub.gets(WEIGHTS))
    folder = download_missing(
        given(hub, tmp_path, f"model.source={{huggingface: {{repo: org/demo, revision: {COMMIT}}}}}")
    )
    assert (folder / "tokenizer.json").exists() and len(hub.gets(WEIGHTS)) == before


def test_a_cached_commit_needs_no_network_request(hub: Files, tmp_path: Path) -> None:
    pinned = given(hub, tmp_path, f"model.source.huggingface={{repo: org/demo, revision: {COMMIT}}}")
    download_missing(pinned)
    before = len(hub.seen)
    assert validate(pinned, MACHINE).job is None and len(hub.seen) == before


def test_unreachable_hub_uses_the_cached_branch_and_reports_it(hub: Files, tmp_path: Path) -> None:
    download_missing(given(hub, tmp_path))
    plan = validate(given(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9"), MACHINE)
    assert plan.job is None and "the cached version is used: " in value(plan, "model.source.huggingface.revision")[1]


def test_moved_branch_is_downloaded_again(hub: Files, tmp_path: Path, checkpoint_files: dict[str, bytes]) -> None:
    first = download_missing(given(hub, tmp_path))
    publish(hub, "org/demo", checkpoint_files | {"generation_config.json": b"{}"}, commit="f" * 40)
    second = download_missing(given(hub, tmp_path))
    assert (second.name, first.name) == ("f" * 40, COMMIT)
    weights = [path for _, path, _ in hub.seen if path.endswith("model.safetensors")]
    assert weights == [WEIGHTS], "the same content is not downloaded again"
    assert (second / "model.safetensors").resolve() == (first / "model.safetensors").resolve()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "the repository does not exist, or it is private; declare a token"),
        (404, "RepoNotFound", "the repository does not exist, or it is private"),
        (404, "RevisionNotFound", "has no revision 'main'; use a commit, tag or branch"),
        (403, "GatedRepo", "access requires the approval of its owner"),
        (400, "", "answered 400"),
    ],
)
def test_a_refusal_of_the_hub_is_reported_at_the_key(
    status: int, code: str, words: str, hub: Files, tmp_path: Path
) -> None:
    api = "/api/models/org/demo/revision/main"
    hub.faults[api] = [status] * 9
    hub.status_headers = {"X-Error-Code": code, "X-Error-Message": "no"} if code else {}
    found = refused(given(hub, tmp_path))
    assert found.cause is exits.SOURCE and words in str(found), found
    assert len(hub.gets(api)) == 1
    assert str(found).startswith(f"{tmp_path / 'm.yaml'}:2:38: model.source.huggingface.repo: ")


def test_temporary_hub_failure_is_retried(hub: Files, tmp_path: Path) -> None:
    hub.faults["/api/models/org/demo/revision/main"] = [503]
    assert validate(given(hub, tmp_path), MACHINE).job is not None


def test_credentials_are_sent_and_never_printed(hub: Files, tmp_path: Path) -> None:
    from appliance.planning.report import as_json, as_text

    hub.token = "hunter2"
    assert "model.credentials" in str(refused(given(hub, tmp_path)))
    plan = validate(given(hub, tmp_path, more="credentials: hf"), MACHINE)
    assert "hunter2" not in as_text(plan) + as_json(plan) + repr(plan)
    download_missing(given(hub, tmp_path, more="credentials: hf"))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size < 10_000]
    assert written and not any(b"hunter2" in text for text in written)


def test_code_of_a_repository_runs_only_with_the_flag(
    server: Callable[[], Files], tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    hub, trace = server(), tmp_path / "it-ran"
    config = json.loads(checkpoint_files["config.json"])
    known = config["architectures"][0]
    code = f"""
open({str(trace)!r}, "w").close()
from engine.models.families import ARCHITECTURES as ALL
ARCHITECTURES = ("OwnForCausalLM",)
declare = ALL[{known!r}]
"""
    files = checkpoint_files | {"slipway_model.py": code.encode()}
    publish(
        hub, "org/demo", files | {"config.json": json.dumps(config | {"architectures": ["OwnForCausalLM"]}).encode()}
    )
    found = refused(given(hub, tmp_path))
    assert found.cause is exits.CHECKPOINT and not trace.exists()
    assert "its code is not run unless model.trust_remote_code is true" in str(found)
    assert "huggingface org/demo@0123456789ab/config.json" in str(found)
    plan = validate(given(hub, tmp_path, "model.trust_remote_code=true"), MACHINE)
    assert trace.exists() and plan.architecture == "OwnForCausalLM" and plan.engines[0].model.trust_remote_code


def test_damaged_header_is_reported_with_its_file(hub: Files, tmp_path: Path) -> None:
    hub.files[WEIGHTS] = b"\xff" * len(hub.files[WEIGHTS])
    assert "model.safetensors is not a safetensors file" in str(refused(given(hub, tmp_path)))


def test_a_file_with_wrong_hub_metadata_is_refused(hub: Files, tmp_path: Path) -> None:
    data = hub.files[WEIGHTS]
    hub.files[WEIGHTS] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(Refused, match="model.safetensors: has SHA-256"):
        download_missing(given(hub, tmp_path))
