"""Buckets: S3 as moto plays it on a socket, Google's as far as its client asks a fake; and what names an extra."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from source_servers import Files

from appliance.checkpoints import download_spec
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.gs import Gs
from appliance.checkpoints.progress import Progress
from appliance.checkpoints.remote import Policy, SourceError
from appliance.checkpoints.s3 import S3
from appliance.checkpoints.small_file import MAX_BYTES, read_small_file
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given
from appliance.hardware.machine import Machine
from appliance.planning.plan import resolved_values
from appliance.planning.validate import download_missing, validate

MACHINE = Machine(cores=2, cores_from="affinity", memory_free=2**34, memory_from="MemAvailable", no_gpu="no driver")
QUICK = Policy(stall_s=1.0, attempts=2, total_s=20.0, min_free=1, pause_s=0.01)


def given(tmp_path: Path, source: str, **environ: str) -> Given:
    path = tmp_path / "m.yaml"
    download = "{attempts: 2, stall_timeout: 1s, min_free: 1}"
    path.write_text(f"apiVersion: slipway/v2\nmodel:\n  source: {source}\n  download: {download}\n")
    return Given(path, (), {"HOME": str(tmp_path), **environ})


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch, checkpoint_files: dict[str, bytes]) -> Iterator[Any]:
    names = {"AWS_ENDPOINT_URL_S3": moto, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    for name, value in (names | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    for name, data in checkpoint_files.items():
        client.put_object(Bucket="models", Key=f"team/demo/{name}", Body=data)
    client.put_object(Bucket="models", Key="team/demo-2/config.json", Body=b"{}")
    yield client
    for one in client.list_objects_v2(Bucket="models").get("Contents", ()):
        client.delete_object(Bucket="models", Key=one["Key"])
    client.delete_bucket(Bucket="models")
    client.close()


def test_a_folder_of_s3_is_planned_from_headers_and_fetched(
    s3: Any, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    asked = given(tmp_path, "{s3: {uri: 's3://models/team/demo/'}}")
    plan = validate(asked, MACHINE)
    folder = Path(plan.engines[0].model.path)
    assert plan.job is not None and plan.gateway.names == ("demo",) and (folder / "tokenizer.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert folder.is_relative_to(tmp_path / ".cache/slipway/models/s3/models")
    assert download_missing(asked) == folder
    assert (folder / "model.safetensors").read_bytes() == checkpoint_files["model.safetensors"]
    assert validate(asked, MACHINE).job is None
    s3.put_object(Bucket="models", Key="team/demo/generation_config.json", Body=b"{ }")
    assert validate(asked, MACHINE).engines[0].model.path != str(folder), "another content is another folder"


def test_a_manifest_is_read_from_a_bucket_and_its_checksum_is_compared(
    s3: Any, checkpoint_files: dict[str, bytes]
) -> None:
    content = checkpoint_files["config.json"]
    location = "s3://models/team/demo/config.json"
    assert read_small_file(location, hashlib.sha256(content).hexdigest()) == content
    for wrong, words in ((location, "SHA-256"), ("s3://models/absent", "S3 answered 404")):
        with pytest.raises(SourceError, match=words):
            read_small_file(wrong, "00")
    s3.put_object(Bucket="models", Key="big", Body=bytes(MAX_BYTES + 1))
    with pytest.raises(SourceError, match="larger than"):
        read_small_file("s3://models/big")


def test_replaced_object_is_never_mixed_with_the_old_one(
    s3: Any, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    store = S3("models", "team/demo", tmp_path, 1.0)
    listing = store.listing()
    file = next(file for file in listing.files if file.name == "model.safetensors")
    cache_directory = store.cache_directory(listing)
    cache_directory.folder.mkdir(parents=True)
    cache_directory.part(file).write_bytes(checkpoint_files["model.safetensors"][:1000])
    s3.put_object(Bucket="models", Key="team/demo/model.safetensors", Body=bytes(file.size or 0))
    with pytest.raises(Exception, match="the object changed while it was read"):
        fetch(store, listing, cache_directory, QUICK, Progress(listing.bytes))
    assert not cache_directory.has(file)


def test_s3_resumes_at_the_last_received_byte(s3: Any, tmp_path: Path, checkpoint_files: dict[str, bytes]) -> None:
    store = S3("models", "team/demo", tmp_path, 1.0)
    listing = store.listing()
    file, data = next((f, checkpoint_files[f.name]) for f in listing.files if f.name == "model.safetensors")
    store.cache_directory(listing).folder.mkdir(parents=True)
    store.cache_directory(listing).part(file).write_bytes(b"\0" * 1000)  # differs from the bytes that the server sends
    fetch(store, listing, store.cache_directory(listing), QUICK, Progress(listing.bytes))
    assert (store.cache_directory(listing).folder / file.name).read_bytes() == bytes(1000) + data[1000:]


@pytest.mark.parametrize(
    ("uri", "words"), [("s3://nowhere/x", "404"), ("s3://models/team/none", "has no weights: .* no files")]
)
def test_a_missing_bucket_or_folder_is_reported(s3: Any, uri: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=words) as caught:
        validate(given(tmp_path, f"{{s3: {{uri: '{uri}'}}}}"), MACHINE)
    assert caught.value.cause is exits.SOURCE and ":3:22: model.source.s3.uri: " in str(caught.value)


def bucket(server: Files, files: dict[str, bytes], name: str = "models") -> None:
    """Objects as the JSON API of Google Cloud Storage lists and gives them."""
    items = [
        {"kind": "storage#object", "name": key, "bucket": name, "size": str(len(data)), "generation": "7"}
        for key, data in files.items()
    ]
    server.answers[f"/storage/v1/b/{name}/o"] = lambda: json.dumps({"items": items}).encode()
    for key, data in files.items():
        server.files[f"/download/storage/v1/b/{name}/o/{key}"] = data
        server.answers[f"/storage/v1/b/{name}/o/{key}"] = lambda key=key: json.dumps(
            next(item for item in items if item["name"] == key)
        ).encode()


@pytest.fixture
def gs(server: Callable[[], Files], monkeypatch: pytest.MonkeyPatch, checkpoint_files: dict[str, bytes]) -> Files:
    found = server()
    bucket(found, {f"team/demo/{name}": data for name, data in checkpoint_files.items()})
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", found.url)
    return found


@pytest.mark.parametrize("source", ["{gs: {uri: 'gs://models/team/demo'}}", "{vertex: {}}"])
def test_a_folder_of_gs_is_planned_from_headers_and_fetched(
    source: str, gs: Files, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    environ = {"STORAGE_EMULATOR_HOST": gs.url, "AIP_STORAGE_URI": "gs://models/team/demo"}
    asked = given(tmp_path, source, **environ)
    plan = validate(asked, MACHINE)
    folder = Path(plan.engines[0].model.path)
    assert plan.job is not None and plan.gateway.names == ("demo",)
    assert folder.is_relative_to(tmp_path / ".cache/slipway/models/gs/models")
    assert download_missing(asked) == folder
    assert (folder / "model.safetensors").read_bytes() == checkpoint_files["model.safetensors"]
    assert validate(asked, MACHINE).job is None


def test_gs_resumes_after_a_broken_connection(gs: Files, tmp_path: Path, checkpoint_files: dict[str, bytes]) -> None:
    store = Gs("models", "team/demo", tmp_path, 1.0, emulated=True)
    listing = store.listing()
    path = "/download/storage/v1/b/models/o/team/demo/model.safetensors"
    file = next(file for file in listing.files if file.name == "model.safetensors")
    store.cache_directory(listing).folder.mkdir(parents=True)
    store.cache_directory(listing).part(file).write_bytes(checkpoint_files[file.name][:1000])
    gs.faults[path] = [("cut", 5000)]
    fetch(store, listing, store.cache_directory(listing), QUICK, Progress(listing.bytes))
    assert (store.cache_directory(listing).folder / file.name).read_bytes() == checkpoint_files[file.name]
    assert all(asked.startswith("bytes=1000-") for asked in gs.gets(path)[:2])


def test_refusal_of_gs_shows_the_fix(gs: Files, tmp_path: Path) -> None:
    gs.faults["/storage/v1/b/models/o"] = [403]
    with pytest.raises(Refused, match="the store answered 403; grant the identity of this machine"):
        validate(given(tmp_path, "{gs: {uri: 'gs://models/team/demo'}}", STORAGE_EMULATOR_HOST=gs.url), MACHINE)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_missing_client_package_is_reported_with_its_extra(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(download_spec.EXTRAS, kind, "no_such_client.storage")
    with pytest.raises(Refused) as caught:
        validate(given(tmp_path, f"{{{kind}: {{uri: '{kind}://models/x'}}}}"), MACHINE)
    place, _, message = str(caught.value).partition(f"model.source.{kind}.uri: ")
    assert place.endswith(":3:22: ") and f"pip install 'slipway-serve[{kind}]'" in message


@pytest.fixture
def sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "opt-ml-model"
    folder.mkdir()
    monkeypatch.setattr(download_spec, "SAGEMAKER_MODEL", folder)
    return folder


@pytest.mark.parametrize("inside", ["", "checkpoint"])
def test_checkpoint_mounted_by_sagemaker_is_used(
    inside: str, sagemaker: Path, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    folder = sagemaker / inside
    folder.mkdir(exist_ok=True)
    for name, data in checkpoint_files.items():
        (folder / name).write_bytes(data)
    plan = validate(given(tmp_path, "{sagemaker: {}}", HF_MODEL_ID="org/other"), MACHINE)
    assert plan.engines[0].model.path == str(folder) and plan.job is None
    row = next(one for one in plan.effective if one.key == "model.source.sagemaker")
    assert row.resolved == str(folder) and row.origin.endswith("m.yaml:3:23") and str(sagemaker) in row.reason
    assert resolved_values(plan.effective)["model.source.path"] == str(folder), (
        "the hash of outputs follows what is served"
    )


def test_sagemaker_without_data_uses_hf_model_id(sagemaker: Path, tmp_path: Path) -> None:
    from appliance.config.settings import load

    asked = given(tmp_path, "{sagemaker: {}}", HF_MODEL_ID="org/demo", HF_MODEL_REVISION="v1", HF_HOME="/h")
    found = download_spec.find(load(asked), asked.environ)
    assert isinstance(found, download_spec.DownloadSpec)
    assert (found.kind, found.what, found.revision, found.cache) == ("huggingface", "org/demo", "v1", "/h/hub")


@pytest.mark.parametrize(
    ("files", "environ", "words"),
    [
        ([], {}, "is empty, and HF_MODEL_ID is not set"),
        (["readme"], {}, "has readme but no checkpoint, and HF_MODEL_ID is not set"),
        (["model.tar.gz"], {"HF_MODEL_ID": "a/b"}, "contains model.tar.gz, which SageMaker did not unpack"),
    ],
)
def test_sagemaker_without_a_checkpoint_is_refused(
    files: list[str], environ: dict[str, str], words: str, sagemaker: Path, tmp_path: Path
) -> None:
    for name in files:
        (sagemaker / name).touch()
    with pytest.raises(Refused, match=re.escape(words)) as caught:
        validate(given(tmp_path, "{sagemaker: {}}", **environ), MACHINE)
    assert caught.value.cause is exits.SOURCE and "m.yaml:3:23: model.source.sagemaker: " in str(caught.value)


def test_vertex_requires_its_variable_and_accepts_a_folder(tmp_path: Path, checkpoint_files: dict[str, bytes]) -> None:
    with pytest.raises(Refused, match=r"3:20: model.source.vertex: AIP_STORAGE_URI is not set"):
        validate(given(tmp_path, "{vertex: {}}"), MACHINE)
    for name, data in checkpoint_files.items():
        (tmp_path / name).write_bytes(data)
    plan = validate(given(tmp_path, "{vertex: {}}", AIP_STORAGE_URI=str(tmp_path)), MACHINE)
    assert plan.engines[0].model.path == str(tmp_path)


def test_credentials_without_effect_are_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("x")
    asked = given(tmp_path, "{s3: {uri: 's3://models/x'}}\n  credentials: k")
    asked.manifest.write_text(asked.manifest.read_text() + "secrets: {k: {file: key}}\n")
    with pytest.raises(Refused, match=r"4:16: model.credentials: has no effect with model.source.s3: boto3 uses"):
        validate(asked, MACHINE)
