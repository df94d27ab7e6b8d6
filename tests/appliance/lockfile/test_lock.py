"""The lock: the files that it names, the refusal of a start that names a changed file, and the cached hashes."""

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from appliance import __version__
from appliance.checkpoints.digest import BUFFER_BYTES, digests
from appliance.checkpoints.lockfile import drift, lock_path, read_lock
from appliance.cli.main import main
from appliance.config import exits
from appliance.config.settings import Given, load
from appliance.lockfile.files import read_names, revision
from appliance.lockfile.write import differences, make_lock
from appliance.planning.validate import validate
from tests.engine.layers.test_lone_gguf import complete

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "manifests" / "demo"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's checkpoint in three shards, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder)
    cut(folder, 3)
    path = tmp_path / "m.yaml"
    path.write_text("apiVersion: slipway/v2\nmodel: {source: {path: demo}}\nhardware: {device: cpu}\n")
    return path


def cut(folder: Path, count: int) -> None:
    """Split model.safetensors into `count` shards with an index, according to the format's specification."""
    single = folder / "model.safetensors"
    raw = single.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    shards: list[dict[str, bytes]] = [{} for _ in range(count)]
    for number, (name, entry) in enumerate(header.items()):
        begin, end = entry["data_offsets"]
        shards[number % count][name] = data[begin:end]
    places = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        own, at = {}, 0
        for name, content in tensors.items():
            own[name] = header[name] | {"data_offsets": [at, at + len(content)]}
            at += len(content)
            places[name] = file
        text = json.dumps(own).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    single.unlink()


def flip(path: Path) -> None:
    """One bit in the middle, with size and times as they were."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def serving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the actions of a start after its checks."""
    done: list[str] = []
    monkeypatch.setattr("appliance.supervisor.launch.serve", lambda plan, given: done.append("serve") or 0)
    return done


def untouchable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the machine's devices nor the checkpoint may be looked at."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("was touched before the lock was compared")

    monkeypatch.setattr("appliance.planning.validate.read_machine", fail)
    monkeypatch.setattr("appliance.planning.validate.read_checkpoint", fail)


def test_unchanged_files_are_served(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = serving(monkeypatch)
    assert main(["lock", str(manifest)]) == 0
    assert main(["serve", str(manifest)]) == 0
    assert done == ["serve"]


def test_a_modified_shard_is_refused_by_name_before_anything_is_touched(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", str(manifest)]) == 0
    shard = manifest.parent / "demo" / SHARD
    before = sha256(shard)
    flip(shard)
    done = serving(monkeypatch)
    untouchable(monkeypatch)
    capsys.readouterr()
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number
    told = capsys.readouterr().err
    line = next(n for n, text in enumerate(lock_path(manifest).read_text().splitlines(), 1) if SHARD in text)
    assert told.startswith(f"{lock_path(manifest)}:{line}:5: {SHARD}: changed; ")
    assert f"expected sha256 {before}, found {sha256(shard)}" in told
    assert [name for name in read_names(shard.parent) if f" {name}: " in told] == [SHARD]
    assert f'sha256: "{before}"}}' in told, "the line of the lock is shown, and a digest is no secret"
    assert done == []
    assert main(["serve", str(manifest), "--format", "json"]) == exits.INTEGRITY.number
    (problem,) = json.loads(capsys.readouterr().err)
    assert (problem["code"], problem["key"], problem["line"]) == ("not-as-locked", SHARD, line)


def test_refused_start_runs_no_program_and_leaves_no_file(manifest: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    assert main(["lock", str(manifest)]) == 0
    flip(manifest.parent / "demo" / SHARD)
    command = [sys.executable, "-m", "appliance", "serve", str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == exits.INTEGRITY.number and SHARD in done.stderr and done.stdout == ""
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (lambda folder: (folder / SHARD).unlink(), SHARD, "missing; expected"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json", "missing; expected"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{{ 1 }}"),
            "chat_template.jinja",
            "is read at a start and is not in the lock; found sha256",
        ),
        (
            lambda folder: ((folder / "additional_chat_templates").mkdir(), _write(folder)),
            "additional_chat_templates/rag.jinja",
            "is read at a start and is not in the lock; found sha256",
        ),
        (
            lambda folder: _append(folder / "config.json"),
            "config.json",
            "changed (locked: 676 bytes, found: 677)",
        ),
    ],
    ids=["shard gone", "tokenizer gone", "new template", "new named template", "one byte more"],
)
def test_changed_files_in_the_folder_are_refused_by_name(
    manifest: Path,
    change: Callable[[Path], None],
    name: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["lock", str(manifest)]) == 0
    change(manifest.parent / "demo")
    for command in (["serve"], ["check"], ["lock", "--check"]):
        capsys.readouterr()
        assert main([*command, str(manifest)]) == exits.INTEGRITY.number
        assert f"{name}: {message}" in capsys.readouterr().err


def _write(folder: Path) -> None:
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ 1 }}")


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def test_files_that_a_start_does_not_read_may_change(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["lock", str(manifest)]) == 0
    (manifest.parent / "demo" / "README.md").write_text("changed")
    (manifest.parent / "demo" / "training_args.bin").write_bytes(b"x")
    serving(monkeypatch)
    assert main(["serve", str(manifest)]) == 0


def test_changed_code_of_the_checkpoint_is_not_run(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, marker = manifest.parent / "demo", manifest.parent / "ran"
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    code = folder / "slipway_model.py"
    code.write_text("from engine.models.qwen3 import declare\nARCHITECTURES = ('OwnForCausalLM',)\n")
    manifest.write_text(manifest.read_text().replace("{path: demo}}", "{path: demo}, trust_remote_code: true}"))
    assert main(["lock", str(manifest)]) == 0, capsys.readouterr().err
    code.write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n" + code.read_text())
    for command in ("serve", "check"):
        assert main([command, str(manifest)]) == exits.INTEGRITY.number
    assert "slipway_model.py: changed" in capsys.readouterr().err
    assert not marker.exists()
    assert main(["check", str(manifest), "--model.lock", "off"]) == 0
    assert marker.exists(), "the code would have told"


def test_chat_template_of_the_manifest_is_locked(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = manifest.parent / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    manifest.write_text(manifest.read_text().replace("{path: demo}}", "{path: demo}, chat_template: chat.jinja}"))
    assert main(["lock", str(manifest)]) == 0
    assert read_lock(lock_path(manifest)).template.sha256 == sha256(template)  # type: ignore[union-attr]
    template.write_text("{{ messages[-1].content }}")
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number
    assert "chat.jinja: changed; expected sha256" in capsys.readouterr().err


def test_every_file_that_a_start_opens_is_in_the_lock(manifest: Path) -> None:
    """The oracle is Python's own audit of opened files, of a process that proves, reads text and loads the engine."""
    folder = manifest.parent / "demo"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    _write(folder)
    (folder / "notes.txt").write_text("nobody reads this")
    script = f"""
import os, sys
seen = set()
def hook(event, given):
    if event == "open" and isinstance(given[0], (str, bytes, os.PathLike)):
        seen.add(os.path.realpath(os.fsdecode(given[0])))
sys.addaudithook(hook)
import torch
original = torch.from_file
def from_file(name, **options):
    seen.add(os.path.realpath(name))
    return original(name, **options)
torch.from_file = from_file
from appliance.config.settings import Given
from appliance.planning.validate import validate
from engine import LLM, Params
from pathlib import Path
validate(Given(Path({str(manifest)!r})))
with LLM({str(folder)!r}) as llm:
    llm.generate(["Hello"], Params(max_tokens=1))
print("\\n".join(sorted(seen)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    inside = {str(Path(path).relative_to(folder)) for path in done.stdout.split() if path.startswith(f"{folder}/")}
    files = {name for name in inside if (folder / name).is_file()}
    assert {"config.json", "tokenizer.json", SHARD} <= files, "the audit saw too little"
    assert files <= set(read_names(folder))


def test_check_uses_cached_digests_and_a_start_does_not(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bit is flipped with size, time and inode kept: only reading the bytes can tell."""
    assert main(["lock", str(manifest)]) == 0
    flip(manifest.parent / "demo" / SHARD)
    capsys.readouterr()
    assert main(["check", str(manifest)]) == 0
    assert "8 files match the lock (cached digests" in capsys.readouterr().out
    assert main(["lock", "--check", str(manifest)]) == exits.INTEGRITY.number
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number


def test_check_reports_files_that_it_did_not_read(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", str(manifest)]) == 0
    os.utime(manifest.parent / "demo" / SHARD, (1, 1))
    capsys.readouterr()
    assert main(["check", str(manifest)]) == 0
    told = capsys.readouterr().out
    assert "8 files with the locked names and sizes; contents of 1 were not compared (`slipway lock" in told
    shutil.rmtree(manifest.parent / "cache")
    assert main(["check", str(manifest)]) == 0
    assert "8 files with the locked names and sizes; contents were not compared" in capsys.readouterr().out
    for form in ("json", "sarif"):
        assert main(["check", "--format", form, str(manifest)]) == 0
        assert "contents were not compared" in capsys.readouterr().err


def _mode(manifest: Path, mode: str) -> None:
    text = manifest.read_text()
    manifest.write_text(re.sub(r"model: \{source.*\}", f"model: {{source: {{path: demo}}, lock: {mode}}}", text))


def test_each_mode_of_model_lock(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = serving(monkeypatch)
    assert main(["serve", str(manifest)]) == 0, "auto needs no lock"
    _mode(manifest, "require")
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number
    assert (
        f"{manifest}:2:37: model.lock: {lock_path(manifest)} does not exist; create it with" in capsys.readouterr().err
    )
    _mode(manifest, "auto")
    assert main(["lock", str(manifest)]) == 0
    flip(manifest.parent / "demo" / SHARD)
    for mode, code in (("require", 17), ("auto", 17), ("warn", 0), ("off", 0)):
        _mode(manifest, mode)
        capsys.readouterr()
        assert main(["serve", str(manifest)]) == code, mode
        assert (f"{SHARD}: changed" in capsys.readouterr().err) == (mode != "off")
    assert done == ["serve"] * 3


def test_lock_is_reproducible_and_plain_yaml(manifest: Path) -> None:
    assert main(["lock", str(manifest)]) == 0
    text = lock_path(manifest).read_text()
    assert main(["lock", str(manifest), "--hardware.kv-cache-memory", "64MiB"]) == 0
    assert main(["lock", str(manifest)]) == 0
    folder, found = manifest.parent / "demo", yaml.safe_load(lock_path(manifest).read_text())
    # Values that depend on the memory that is free at this moment.
    measured = ("hardware.kv_cache_memory", "kv_blocks", "cache_tokens", "workspace_bytes", "outputs_sha256")
    steady = [line for line in text.splitlines() if not line.strip().startswith(measured)]
    assert steady == [
        line for line in lock_path(manifest).read_text().splitlines() if not line.strip().startswith(measured)
    ]
    assert found["model"]["files"] == {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in read_names(folder)
    }
    assert list(found["model"]["files"]) == sorted(found["model"]["files"])
    assert (found["plan"]["model.dtype"], found["plan"]["parallelism.data"]) == ("float32", 1)
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert found["template"]["sha256"] == hashlib.sha256(template.encode()).hexdigest()


def test_a_lock_has_the_fingerprints_of_the_plan(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--hardware.kv-cache-memory", "64MiB")
    assert main(["lock", str(manifest), *fixed]) == 0
    found, told = yaml.safe_load(lock_path(manifest).read_text()), capsys.readouterr().out
    assert main(["plan", str(manifest), *fixed, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert found["outputs_sha256"] == planned["outputs_sha256"] and found["graphs_sha256"] == planned["graphs_sha256"]
    assert f"system_fingerprint slipway-{__version__}-{found['outputs_sha256'][:8]}" in told


def test_locking_again_reports_the_changes(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", str(manifest)]) == 0
    flip(manifest.parent / "demo" / SHARD)
    capsys.readouterr()
    assert main(["lock", str(manifest)]) == 0
    assert f"  {SHARD}: changed; expected sha256" in capsys.readouterr().out
    assert main(["lock", str(manifest), "--check"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("lock: 1", "lock: 2", "is not a lock file of this version"),
        ("model:", "modle:", "is not a lock file of this version"),
        ("sha256: ", "sha256: x", "is not a lock file of this version"),
        ("plan:", "plan: [", "is not a lock file of this version"),
    ],
)
def test_a_damaged_lock_is_refused(
    manifest: Path, old: str, new: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", str(manifest)]) == 0
    path = lock_path(manifest)
    path.write_text(path.read_text().replace(old, new))
    assert main(["serve", str(manifest)]) == exits.INTEGRITY.number
    assert told in capsys.readouterr().err


def test_checking_without_a_lock_is_refused(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lock", "--check", str(manifest)]) == exits.INTEGRITY.number
    assert "does not exist" in capsys.readouterr().err
    assert not lock_path(manifest).exists()


def test_changed_plan_is_a_note_and_not_a_refusal(
    manifest: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lock", str(manifest)]) == 0
    path = lock_path(manifest)
    path.write_text(re.sub(r"hardware.threads: \d+", "hardware.threads: 77", path.read_text()))
    serving(monkeypatch)
    capsys.readouterr()
    assert main(["serve", str(manifest), "--limits.max-stop", "3"]) == 0
    told = capsys.readouterr().err
    assert re.search(r"^  hardware\.threads is \d+, locked as 77$", told, re.MULTILINE)
    assert "limits.max_stop" not in told, "what somebody asks for is no news at a start"
    assert main(["lock", "--check", str(manifest), "--limits.max-stop", "3"]) == 0
    assert "limits.max_stop is 3, locked as 16" in capsys.readouterr().err


def test_small_changes_of_memory_values_are_not_drift() -> None:
    locked = {"kv_blocks": 1000, "model.dtype": "float32", "weight_bytes": 1000}
    assert list(drift(locked, locked | {"kv_blocks": 951})) == []
    assert list(drift(locked, locked | {"kv_blocks": 949})) == ["kv_blocks is 949, locked as 1000"]
    assert list(drift(locked, locked | {"weight_bytes": 1001})) == ["weight_bytes is 1001, locked as 1000"]


def test_drift_reports_where_replies_may_differ() -> None:
    locked = {"model.dtype": "float32", "hardware.threads": 4}
    assert list(drift(locked, {"model.dtype": "bfloat16", "hardware.threads": 8})) == [
        "model.dtype is bfloat16, locked as float32; replies may differ",
        "hardware.threads is 8, locked as 4",
    ]


@pytest.mark.parametrize("size", [0, 1, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 17])
def test_digests_are_those_of_sha256sum(tmp_path: Path, size: int) -> None:
    path, told = tmp_path / "file", []
    path.write_bytes((b"slipway" * (size // 7 + 1))[:size])
    found = digests([path], told.append)[path]
    expected = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert (found.sha256, found.size, sum(told)) == (expected, size, size)


def test_revision_is_read_from_the_download_metadata(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--a--b" / "snapshots" / commit
    plain = tmp_path / "plain"
    notes = plain / ".cache" / "huggingface" / "download"
    cached.mkdir(parents=True)
    notes.mkdir(parents=True)
    assert (revision(cached), revision(plain), revision(tmp_path)) == (commit, None, None)
    (notes / "config.json.metadata").write_text(f"{commit}\netag\n1700000000.0\n")
    assert revision(plain) == commit


def test_named_gguf_file_is_locked_alone(tmp_path: Path) -> None:
    file, _ = complete(tmp_path / "m")
    for name in ("other.gguf", "model.safetensors", "chat_template.jinja"):
        (tmp_path / "m" / name).write_bytes(b"of another model")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {file}}}}}\n")
    plan, settings = validate(Given(manifest)), load(Given(manifest))
    lock = make_lock(plan, settings)
    assert list(lock.model.files) == ["model.gguf"]
    assert lock.template is not None and lock.template.file == "model.gguf"
    assert differences(settings, lock, file, hash_contents=True) == ([], [])
    file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
    ((changed,), _) = differences(settings, lock, file, hash_contents=True)
    assert changed.name == "model.gguf" and "sha256" in changed.message


def test_gguf_file_is_locked_and_preferred_weights_count_as_new(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_names(tmp_path) == ("m.gguf", "tokenizer.json")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_names(tmp_path) == ("model.safetensors", "tokenizer.json")
