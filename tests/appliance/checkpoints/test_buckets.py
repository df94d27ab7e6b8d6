"""Buckets: S3 as moto implements it, all kinds as far as their client asks a fake; credentials; hosting platforms."""

import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from moto.server import ThreadedMotoServer
from obstore.store import S3Store
from source_servers import Files, serving

from appliance.checkpoints import download_spec
from appliance.checkpoints.bucket_clients import OPEN, bucket_region
from appliance.checkpoints.buckets import BucketFolder
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.progress import Progress
from appliance.checkpoints.remote import Policy, RestartFile, SourceError
from appliance.checkpoints.small_file import MAX_BYTES, read_small_file
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given
from appliance.hardware.machine import Machine
from appliance.planning.plan import resolved_values
from appliance.planning.validate import download_missing, validate
from tests.appliance.certificates import write_authority

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
    for wrong, words in ((location, "SHA-256"), ("s3://models/absent", "the store answered 404")):
        with pytest.raises(SourceError, match=words):
            read_small_file(wrong, "00")
    s3.put_object(Bucket="models", Key="big", Body=bytes(MAX_BYTES + 1))
    with pytest.raises(SourceError, match="larger than"):
        read_small_file("s3://models/big")


def test_replaced_object_is_never_mixed_with_the_old_one(
    s3: Any, tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    store = BucketFolder("s3", "models", "team/demo", tmp_path, os.environ, 1.0)
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
    store = BucketFolder("s3", "models", "team/demo", tmp_path, os.environ, 1.0)
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


MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"
BUCKETS = {"s3": "/models", "gs": "/models", "az": "/models"}


def tag(data: bytes) -> str:
    """The entity tag with which `Files` sends the content."""
    return hashlib.sha256(data).hexdigest()[:16]


def listed(kind: str, files: dict[str, bytes]) -> bytes:
    """The list of a bucket: of S3 and of Google's XML API, or of Azure."""
    if kind == "az":
        blobs = (
            f"<Blob><Name>{name}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified><Etag>{tag(data)}</Etag>"
            f"<Content-Length>{len(data)}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
            for name, data in files.items()
        )
        return f"<EnumerationResults><Blobs>{''.join(blobs)}</Blobs><NextMarker /></EnumerationResults>".encode()
    contents = (
        f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>{len(data)}</Size>"
        f"<ETag>&quot;{tag(data)}&quot;</ETag></Contents>"
        for name, data in files.items()
    )
    return f"<ListBucketResult>{''.join(contents)}</ListBucketResult>".encode()


def serve(found: Files, kind: str, files: dict[str, bytes]) -> None:
    """Let a server have these files in the folder team/demo of the bucket models."""
    found.modified = MODIFIED
    objects = {f"team/demo/{name}": data for name, data in files.items()}
    found.answers["/models"] = lambda: listed(kind, objects)
    found.files |= {f"/models/{name}": data for name, data in objects.items()}


@pytest.fixture
def store(
    server: Callable[[], Files], monkeypatch: pytest.MonkeyPatch, checkpoint_files: dict[str, bytes]
) -> Callable[[str], Files]:
    """Starts a store of a kind, which the environment then names, with credentials."""

    def start(kind: str) -> Files:
        found = server()
        serve(found, kind, checkpoint_files)
        for name, value in environment(kind, found.url).items():
            monkeypatch.setenv(name, value)
        return found

    return start


def environment(kind: str, url: str) -> dict[str, str]:
    return {
        "s3": {"AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"},
        "gs": {"STORAGE_EMULATOR_HOST": url},
        "az": {"AZURE_STORAGE_ENDPOINT": url, "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"},
    }[kind]


SOURCES = {
    "gs": "{gs: {uri: 'gs://models/team/demo'}}",
    "vertex": "{vertex: {}}",
    "az": "{az: {uri: 'az://models/team/demo', account: team}}",
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_folder_is_planned_from_headers_and_fetched(
    source: str, store: Callable[[str], Files], tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    kind = "gs" if source == "vertex" else source
    environ = {"STORAGE_EMULATOR_HOST": store(kind).url, "AIP_STORAGE_URI": "gs://models/team/demo"}
    asked = given(tmp_path, SOURCES[source], **environ)
    plan = validate(asked, MACHINE)
    folder = Path(plan.engines[0].model.path)
    assert plan.job is not None and plan.gateway.names == ("demo",)
    assert folder.is_relative_to(tmp_path / ".cache/slipway/models" / kind)
    assert not (folder / "model.safetensors").exists()
    assert download_missing(asked) == folder
    assert (folder / "model.safetensors").read_bytes() == checkpoint_files["model.safetensors"]
    assert validate(asked, MACHINE).job is None


def folder_of(kind: str, cache: Path, **environ: str) -> BucketFolder:
    return BucketFolder(
        kind, "models", "team/demo", cache, {"HOME": str(cache), **environ}, 1.0, "team" * (kind == "az")
    )


@pytest.mark.parametrize("kind", BUCKETS)
def test_a_download_resumes_after_a_broken_connection(
    kind: str, store: Callable[[str], Files], tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    found = store(kind)
    folder = folder_of(kind, tmp_path, **environment(kind, found.url))
    listing = folder.listing()
    path = "/models/team/demo/model.safetensors"
    file = next(file for file in listing.files if file.name == "model.safetensors")
    entry = folder.cache_directory(listing)
    entry.folder.mkdir(parents=True)
    entry.part(file).write_bytes(checkpoint_files[file.name][:1000])
    found.faults[path] = [("cut", 600_000), ("stall", 500_000)]
    fetch(folder, listing, entry, QUICK, Progress(listing.bytes))
    assert (entry.folder / file.name).read_bytes() == checkpoint_files[file.name]
    first, second = found.gets(path)[:2]
    assert first.startswith("bytes=1000-") and not second.startswith("bytes=1000-"), "received blocks are kept"


@pytest.mark.parametrize("kind", BUCKETS)
def test_a_replaced_object_is_never_mixed_with_the_old_one(
    kind: str, store: Callable[[str], Files], tmp_path: Path, checkpoint_files: dict[str, bytes]
) -> None:
    found = store(kind)
    folder = folder_of(kind, tmp_path, **environment(kind, found.url))
    listing = folder.listing()
    file = next(file for file in listing.files if file.name == "model.safetensors")
    found.files["/models/team/demo/model.safetensors"] = bytes(file.size or 0)
    with pytest.raises(RestartFile, match="the object changed while it was read"):
        next(folder.stream(file, 1000))


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize(
    ("status", "words"), [(403, "the store answered 403; grant the identity of this machine"), (404, "answered 404")]
)
def test_a_refusal_shows_the_fix(
    kind: str, status: int, words: str, store: Callable[[str], Files], tmp_path: Path
) -> None:
    found = store(kind)
    found.faults["/models"] = [status]
    with pytest.raises(SourceError, match=words) as caught:
        folder_of(kind, tmp_path, **environment(kind, found.url)).listing()
    assert not caught.value.transient


def test_an_answer_of_an_overloaded_store_is_transient(store: Callable[[str], Files], tmp_path: Path) -> None:
    found = store("gs")
    found.faults["/models"] = [503]
    with pytest.raises(SourceError, match="the store answered 503") as caught:
        folder_of("gs", tmp_path, STORAGE_EMULATOR_HOST=found.url).listing()
    assert caught.value.transient and len(found.gets("/models")) == 1, "the caller counts attempts"


def test_a_bucket_in_another_region_is_read_there(store: Callable[[str], Files], tmp_path: Path) -> None:
    found = store("s3")
    found.headers = lambda path: {"x-amz-bucket-region": "eu-central-1"} if path == "/models" else {}
    found.faults["/models"] = [301]
    listing = folder_of("s3", tmp_path, **environment("s3", found.url)).listing()
    assert listing.files and "/eu-central-1/s3/" in str(found.authorizations[-1])


def attempt(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch, prefix: str = "team/demo", **environ: str) -> None:
    """List a folder with these variables of the machine, and no others of the kind's store."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    BucketFolder(kind, "models", prefix, cache, {"HOME": str(cache), **environ}, 1.0).listing()


def test_an_answer_of_the_metadata_service_is_not_taken_for_the_stores(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("s3")
    found.answers["/latest/api/token"] = lambda: b"t"  # a machine without a role: 404 for the list of roles
    with pytest.raises(SourceError, match="no credentials: .*; grant the identity of this machine") as caught:
        attempt("s3", tmp_path, monkeypatch, AWS_ENDPOINT_URL_S3=found.url, AWS_METADATA_ENDPOINT=found.url)
    assert not caught.value.transient and "the store answered" not in str(caught.value)
    azure = {"AZURE_STORAGE_ENDPOINT": found.url, "AZURE_STORAGE_ACCOUNT_NAME": "team"}
    with pytest.raises(SourceError, match="no credentials: .*; grant the identity of this machine"):
        attempt("az", tmp_path, monkeypatch, AZURE_MSI_ENDPOINT=f"{found.url}/none", **azure)


EMPTY = ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_SKIP_SIGNATURE")


def test_an_empty_variable_is_as_one_that_is_not_set(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("s3")
    keys = {"AWS_ENDPOINT_URL": found.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    attempt("s3", tmp_path, monkeypatch, **keys, **dict.fromkeys(EMPTY, ""))
    sent = str(found.authorizations[-1])
    assert "Credential=x/" in sent and "/us-east-1/s3/" in sent and "security-token" not in sent
    assert [os.environ[name] for name in EMPTY] == [""] * len(EMPTY), "the environment of the process stays"


def test_the_name_of_a_service_account_is_not_read_as_a_file(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("gs")
    attempt("gs", tmp_path, monkeypatch, STORAGE_EMULATOR_HOST=found.url, SERVICE_ACCOUNT="default")
    assert os.environ["SERVICE_ACCOUNT"] == "default"


@pytest.mark.parametrize(
    ("kind", "environ", "words"),
    [
        (
            "s3",
            {"AWS_ENDPOINT_URL_S3": "minio:9000"},
            "AWS_ENDPOINT_URL_S3=minio:9000: must be a URL, such as https://m",
        ),
        ("s3", {"AWS_ENDPOINT_URL": "minio:9000"}, "AWS_ENDPOINT_URL=minio:9000: must be a URL"),
        ("gs", {"STORAGE_EMULATOR_HOST": "localhost:1"}, "STORAGE_EMULATOR_HOST=localhost:1: must be a URL"),
        ("az", {}, "Account must be specified; set AZURE_STORAGE_ACCOUNT_NAME, or model.source.az.account"),
        ("s3", {"AWS_ACCESS_KEY_ID": "x"}, "Missing SecretAccessKey; grant the identity"),
        ("s3", {"AWS_PROFILE": "none"}, "AWS_PROFILE=none: no file of AWS profiles has this profile"),
        ("s3", {"AWS_PROFILE": "half"}, "the AWS profile half has aws_access_key_id, but no aws_secret_access_key"),
    ],
)
def test_settings_of_a_store_that_cannot_work_are_refused_at_once(
    kind: str, environ: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[half]\naws_access_key_id = x\n")
    with pytest.raises(SourceError, match=re.escape(words)) as caught:
        attempt(kind, tmp_path, monkeypatch, **environ)
    assert not caught.value.transient


def test_an_unreachable_store_is_reported_with_the_reason_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match="Connection refused$") as caught:
        attempt("gs", tmp_path, monkeypatch, STORAGE_EMULATOR_HOST="http://127.0.0.1:1")
    assert caught.value.transient


def test_a_prefix_that_no_object_can_have_is_refused_at_once(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match='"a//b" contained empty path segment') as caught:
        attempt("gs", tmp_path, monkeypatch, "a//b", STORAGE_EMULATOR_HOST=store("gs").url)
    assert not caught.value.transient


def test_an_object_with_an_unusable_name_is_named(store: Callable[[str], Files], tmp_path: Path) -> None:
    found = store("gs")
    serve(found, "gs", {"config.json": b"{}", "/config.json": b"{}"})
    with pytest.raises(SourceError, match='"team/demo//config.json" .*; rename or move the object') as caught:
        folder_of("gs", tmp_path, STORAGE_EMULATOR_HOST=found.url).listing()
    assert not caught.value.transient


def test_the_region_of_a_bucket_with_a_dot_is_asked_at_a_host_with_a_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def head(url: str, timeout: float) -> httpx.Response:
        asked.append(url)
        return httpx.Response(301, headers={"x-amz-bucket-region": "eu-central-1"})

    monkeypatch.setattr(httpx, "head", head)
    assert bucket_region("models.team", {}, 1.0) == "eu-central-1"
    assert asked == ["https://s3.amazonaws.com/models.team"]


EXPIRES = "2099-01-01T00:00:00Z"
ROLE = {"AccessKeyId": "ROLE", "SecretAccessKey": "s", "Token": "t", "Expiration": EXPIRES, "Code": "Success"}


def identity(kind: str, found: Files, home: Path) -> dict[str, str]:
    """Set up a kind of identity of a machine. Return its variables."""
    role = "/latest/meta-data/iam/security-credentials"
    match kind:
        case "profile":
            (home / ".aws").mkdir()
            (home / ".aws/credentials").write_text("[team]\naws_access_key_id = ROLE\naws_secret_access_key = s\n")
            (home / ".aws/config").write_text("[profile team]\nregion = eu-west-3\n")
            return {"AWS_PROFILE": "team"}
        case "container":
            found.answers["/role"] = lambda: json.dumps(ROLE).encode()
            (home / "token").write_text("t")
            token = {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(home / "token")}
            return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{found.url}/role", **token}
        case "task":  # at http://169.254.170.2, here through a proxy
            found.answers["/task"] = lambda: json.dumps(ROLE).encode()
            return {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/task", "http_proxy": found.url, "NO_PROXY": "127.0.0.1"}
        case _:
            found.answers |= {"/latest/api/token": lambda: b"t", f"{role}/": lambda: b"machine"}
            found.answers[f"{role}/machine"] = lambda: json.dumps(ROLE).encode()
            return {"AWS_METADATA_ENDPOINT": found.url}


@pytest.mark.parametrize("kind", ["profile", "container", "task", "machine"])
def test_s3_is_read_with_the_identity_of_the_machine(
    kind: str, store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("s3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    environ = {"AWS_ENDPOINT_URL_S3": found.url, **identity(kind, found, tmp_path)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert folder_of("s3", tmp_path, **environ).listing().files
    region = "eu-west-3" if kind == "profile" else "us-east-1"
    assert re.search(rf"Credential=ROLE/\d+/{region}/s3/", str(found.authorizations[-1]))


ASSUMED = f"""<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<SessionToken>t</SessionToken><SecretAccessKey>s</SecretAccessKey><Expiration>{EXPIRES}</Expiration>
<AccessKeyId>ROLE</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


def test_s3_is_read_with_the_role_of_a_kubernetes_service_account(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS's token service is asked by HTTPS only. A profile has less precedence."""
    found = store("s3")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = PROFILE\naws_secret_access_key = y\n")
    authority, certificate, key = write_authority(tmp_path)
    (tmp_path / "token").write_text("of the account")
    with serving((certificate, key)) as sts:
        sts.answers["/"] = ASSUMED.encode
        role = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}
        environ = {"AWS_ENDPOINT_URL_S3": found.url, "AWS_ENDPOINT_URL_STS": sts.url, **role}
        with pytest.raises(SourceError, match="no credentials: .*: its certificate is not trusted; SSL_CERT_FILE"):
            attempt("s3", tmp_path, monkeypatch, **environ)
        attempt("s3", tmp_path, monkeypatch, SSL_CERT_FILE=str(authority), **environ)
        (form,) = sts.forms
        assert form["RoleArn"] == [role["AWS_ROLE_ARN"]] and form["WebIdentityToken"] == ["of the account"]
        sts.faults["/"] = [403]
        with pytest.raises(
            SourceError, match="no credentials: .* 403 .*; grant the identity of this machine"
        ) as caught:
            attempt("s3", tmp_path, monkeypatch, **environ)
        assert not caught.value.transient
    sent = str(found.authorizations[-1])
    assert re.search(r"Credential=ROLE/\d+/us-east-1/s3/", sent) and "x-amz-security-token" in sent


def test_a_profile_may_name_a_compatible_service(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("s3")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = x\naws_secret_access_key = y\n")
    (tmp_path / ".aws/config").write_text(f"[default]\nendpoint_url = {found.url}\n")
    attempt("s3", tmp_path, monkeypatch)
    assert found.gets("/models")


def test_a_profile_with_a_role_uses_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text("[profile team]\ncredential_process = /bin/false\n")
    environ = {"HOME": str(tmp_path), "AWS_PROFILE": "team"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match="profile team: Error when retrieving credentials"):
        BucketFolder("s3", "models", "x", tmp_path, environ).listing()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(SourceError, match=r"profile team has no access key; .*pip install 'slipway-serve\[s3\]'"):
        BucketFolder("s3", "models", "x", tmp_path, environ).listing()


def test_the_message_of_an_expired_login_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 asks for credentials when obstore calls it."""

    def expired() -> Any:
        raise RuntimeError("The SSO session has expired")

    def client(bucket: str, *_: object) -> S3Store:
        return S3Store(bucket, config={"aws_endpoint_url_s3": "http://127.0.0.1:1"}, credential_provider=expired)

    monkeypatch.setitem(OPEN, "s3", client)
    with pytest.raises(SourceError, match="no credentials: .* The SSO session has expired; grant") as caught:
        folder_of("s3", tmp_path).listing()
    assert not caught.value.transient


def test_gs_is_read_with_a_service_account(
    server: Callable[[], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_files: dict[str, bytes]
) -> None:
    found = server()
    serve(found, "gs", checkpoint_files)
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"type": "service_account", "client_email": "me@team", "private_key": pem, "private_key_id": "1"}
    (tmp_path / "key.json").write_text(json.dumps(account | {"gcs_base_url": found.url, "disable_oauth": False}))
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
    monkeypatch.setenv(*next(iter(environ.items())))
    monkeypatch.setenv("GOOGLE_BASE_URL", found.url)
    assert folder_of("gs", tmp_path, **environ).listing().files
    claims = str(found.authorizations[-1]).removeprefix("Bearer ").split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(claims + "=="))["iss"] == "me@team"


def test_gs_is_read_with_the_service_account_of_the_machine(
    server: Callable[[], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_files: dict[str, bytes]
) -> None:
    found = server()
    serve(found, "gs", checkpoint_files)
    token = {"access_token": "machine", "expires_in": 3600, "token_type": "Bearer"}
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    found.answers[path] = lambda: json.dumps(token).encode()
    monkeypatch.setenv("GCE_METADATA_HOST", found.url.removeprefix("http://"))
    monkeypatch.setenv("GOOGLE_BASE_URL", found.url)
    assert folder_of("gs", tmp_path).listing().files
    assert found.authorizations[-1] == "Bearer machine" and found.gets(path)


def test_federated_credentials_of_google_use_google_auth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key.json").write_text('{"type": "external_account"}')
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
    monkeypatch.setenv(*next(iter(environ.items())))
    with pytest.raises(SourceError, match="Failed to load external account credentials"):
        folder_of("gs", tmp_path, **environ).listing()
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    with pytest.raises(SourceError, match=r"need google-auth: pip install 'slipway-serve\[gs\]'"):
        folder_of("gs", tmp_path, **environ).listing()


def test_azure_is_read_with_a_managed_identity(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("az")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    found.answers["/identity"] = lambda: json.dumps({"access_token": "managed", "expires_on": "4102444800"}).encode()
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{found.url}/identity")
    assert folder_of("az", tmp_path).listing().files
    assert found.authorizations[-1] == "Bearer managed"


def test_azure_is_read_with_a_workload_identity(
    store: Callable[[str], Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store("az")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    token = {"access_token": "workload", "expires_in": 3600}
    found.answers["/tenant/oauth2/v2.0/token"] = lambda: json.dumps(token).encode()
    (tmp_path / "token").write_text("of the service account")
    for name, value in {
        "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "token"),
        "AZURE_CLIENT_ID": "client",
        "AZURE_TENANT_ID": "tenant",
        "AZURE_AUTHORITY_HOST": found.url,
    }.items():
        monkeypatch.setenv(name, value)
    assert folder_of("az", tmp_path).listing().files
    assert found.authorizations[-1] == "Bearer workload"


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
    with pytest.raises(Refused, match=r"4:16: model.credentials: has no effect with model.source.s3: buckets are read"):
        validate(asked, MACHINE)
