"""LoRA adapters from the hub and from an archive, through `plan`, `fetch` and the lock file."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from packed_archives import tar
from source_servers import Files, publish

from appliance.cli.main import main
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given
from appliance.hardware.machine import Machine
from appliance.planning.validate import NotPlanned, download_missing, validate
from tests.engine.adapters import random_pairs, write_adapter

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "manifests" / "demo"
MACHINE = Machine(cores=2, cores_from="affinity", memory_free=2**34, memory_from="MemAvailable", no_gpu="no driver")


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    """huggingface_hub keeps its connections for the whole process."""
    yield
    from huggingface_hub.utils import close_session

    close_session()


@pytest.fixture(scope="module")
def adapter_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    write_adapter(folder / "own", random_pairs(model, ("q_proj",)))
    return {path.name: path.read_bytes() for path in (folder / "own").iterdir()}


def given(web: Files, tmp_path: Path, *adapters: str) -> Given:
    path = tmp_path / "m.yaml"
    path.write_text(
        f"apiVersion: slipway/v2\nmodel: {{source: {{path: {DEMO}}}, max_context: 64, "
        "download: {stall_timeout: 500ms, attempts: 2, min_free: 1}}\n"
        f"hardware: {{device: cpu}}\nadapters: [{', '.join(adapters)}]\n"
    )
    return Given(path, (), {"HF_ENDPOINT": web.url, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)})


def refused(given: Given) -> Refused:
    with pytest.raises(Refused) as caught:
        validate(given, MACHINE)
    return caught.value


def test_adapters_of_the_hub_and_of_an_archive_are_downloaded_once(
    server: Callable[[], Files], tmp_path: Path, adapter_files: dict[str, bytes]
):
    web = server()
    publish(web, "org/sql-lora", {**adapter_files, "README.md": b"text", "optimizer.bin": b"large"})
    web.files["/a/support.tar.gz"] = data = tar({f"support/{name}": one for name, one in adapter_files.items()})
    digest = hashlib.sha256(data).hexdigest()
    wanted = given(
        web,
        tmp_path,
        "{name: sql, uri: 'hf://org/sql-lora@main'}",
        f"{{name: support, uri: '{web.url}/a/support.tar.gz#sha256={digest}'}}",
    )
    missing = refused(wanted)
    assert isinstance(missing, NotPlanned) and missing.problems[0].key == "adapters[0].uri"
    assert "not in the cache; run `slipway fetch MANIFEST`" in missing.problems[0].message
    assert download_missing(wanted) == DEMO
    plan = validate(wanted, MACHINE)
    assert [one.name for one in plan.engines[0].adapters] == ["sql", "support"]
    for one in plan.engines[0].adapters:
        found = {path.name: path.read_bytes() for path in Path(one.path).iterdir()}
        assert found == adapter_files, "only the files of an adapter are downloaded"
    (shown,) = (one.resolved for one in plan.effective if one.key == "adapters")
    assert [entry.get("uri", "").partition("://")[0] for entry in shown] == ["hf", "http"]
    before = len(web.gets("/a/support.tar.gz"))
    download_missing(wanted)
    assert len(web.gets("/a/support.tar.gz")) == before == 1


def test_an_archive_with_another_digest_is_refused(
    server: Callable[[], Files], tmp_path: Path, adapter_files: dict[str, bytes]
):
    web = server()
    web.files["/x.tar.gz"] = tar(adapter_files)
    wanted = given(web, tmp_path, f"{{name: x, uri: '{web.url}/x.tar.gz#sha256={'0' * 64}'}}")
    with pytest.raises(Refused) as caught:
        download_missing(wanted)
    assert caught.value.problems[0].key == "adapters[0].uri" and "is expected" in caught.value.problems[0].message
    assert caught.value.cause == exits.SOURCE


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("{name: x}", "takes exactly one of path and uri"),
        ("{name: x, path: a, uri: 'hf://org/x'}", "takes exactly one of path and uri"),
        ("{name: x, uri: 'ftp://host/x.tar'}", "must be text that matches"),
        ("{name: x, uri: 'hf://org'}", "must be text that matches"),
        ("{name: x, uri: 'https://host/x.bin'}", "must be text that matches"),
    ],
)
def test_wrong_sources_are_refused(adapter: str, message: str, server: Callable[[], Files], tmp_path: Path):
    assert message in str(refused(given(server(), tmp_path, adapter)).problems[0].message)


def test_a_downloaded_adapter_is_locked(
    server: Callable[[], Files],
    tmp_path: Path,
    adapter_files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    web = server()
    publish(web, "org/sql-lora", adapter_files)
    wanted = given(web, tmp_path, "{name: sql, uri: 'hf://org/sql-lora'}")
    for name, value in wanted.environ.items():
        monkeypatch.setenv(name, value)
    download_missing(wanted)
    assert main(["lock", str(wanted.manifest)]) == 0
    assert '"sql/adapter_model.safetensors"' in (tmp_path / "m.lock").read_text()
    assert main(["lock", "--check", str(wanted.manifest)]) == 0
    (weights,) = (Path(one.path) / "adapter_model.safetensors" for one in validate(wanted, MACHINE).engines[0].adapters)
    content = bytearray(weights.resolve().read_bytes())
    content[-1] ^= 1
    weights.resolve().write_bytes(content)
    capsys.readouterr()
    assert main(["lock", "--check", str(wanted.manifest)]) == exits.INTEGRITY.number
    found = capsys.readouterr()
    assert "sql/adapter_model.safetensors: changed" in found.out + found.err
