"""Adapters in a manifest: problems with the key, planned bytes, the lock file, a warning about another base model."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from appliance.checkpoints.lockfile import as_yaml, read_lock
from appliance.cli.main import main
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.hardware.described import hardware
from appliance.lockfile.write import differences, make_lock
from appliance.planning.memory import planned_parts
from appliance.planning.validate import validate
from engine.worker.build import build_worker
from kernels.cpu.library import best
from tests.engine.adapters import random_pairs, write_adapter

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
HEAD = "apiVersion: slipway/v2\nmodel: {source: {path: demo}, max_context: 64}\nhardware: {device: cpu}\n"
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint and two adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(ROOT / "manifests" / "demo", folder / "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "demo", dtype=torch.float32)
    write_adapter(folder / "one", random_pairs(model, TARGETS), base_model_name_or_path="org/Demo")
    few = random_pairs(model, ("down_proj",), 7, seed=1)
    write_adapter(folder / "two", few, rank=7, base_model_name_or_path="org/other-7b")
    return folder


@pytest.fixture
def manifest(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(adapters: str, more: str = "") -> Path:
        path = folder / f"{tmp_path.name}.yaml"
        path.write_text(f"{HEAD}adapters: {adapters}\n{more}")
        return path

    return write


BOTH = "[{name: one, path: one}, {name: two, path: two}]"


def problems(path: Path) -> dict[str, str]:
    with pytest.raises(Refused) as refused:
        validate(Given(path))
    return {problem.key: problem.message for problem in refused.value.problems}


@pytest.mark.parametrize("kernels", ["torch", best()])
def test_planned_bytes_are_those_of_the_engine(kernels: str, manifest: Write):
    given = Given(
        manifest(BOTH),
        (Option("--set", "hardware.kernels", kernels), Option("--set", "hardware.kv_cache_memory", "1MiB")),
    )
    plan = validate(given)
    engine = plan.engines[0]
    assert [(one.name, Path(one.path).name) for one in engine.adapters] == [("one", "one"), ("two", "two")]
    worker = build_worker(engine, lambda phase, fraction: None)
    try:
        planned, found = planned_parts(plan.memory)[0], worker.memory_usage
        assert found["adapters"] == planned["adapters"] > 0
        assert found == {name: planned[name] for name in found}
    finally:
        worker.close()


def test_each_adapter_that_cannot_be_served_is_a_problem_of_its_key(manifest: Write, folder: Path):
    found = problems(manifest("[{name: one, path: none}, {name: two, path: two}, {name: three, path: demo}]"))
    assert list(found) == ["adapters[0].path", "adapters[2].path"]
    assert f"{folder / 'none'}: no such directory; adapter one must be a directory" in found["adapters[0].path"]
    assert "no adapter_config.json" in found["adapters[2].path"]


@pytest.mark.parametrize(
    ("adapters", "more", "what"),
    [
        ("[{name: a, path: one}, {name: a, path: two}]", "", "the name a is also that of another adapter"),
        ("[{name: served, path: one}]", "", "the name served is also that of model.names"),
        ("[{name: a b, path: one}]", "", "adapters"),
        ("[{name: a}]", "", "path"),
        ("[{name: a, path: one, rank: 3}]", "", "rank"),
    ],
)
def test_wrong_entries_are_refused(adapters: str, more: str, what: str, manifest: Write):
    path = manifest(adapters, more)
    path.write_text(path.read_text().replace("max_context: 64", "max_context: 64, names: [served]"))
    found = problems(path)
    assert any(re.search(what, f"{key} {message}") for key, message in found.items()), found


def test_an_adapter_may_not_have_the_default_name_of_the_model(manifest: Write):
    found = problems(manifest("[{name: demo, path: one}]"))
    assert "demo is the name of the model" in found["adapters"]


def test_a_gpu_serves_adapters_with_triton_kernels(manifest: Write):
    """A described GPU. The plan counts the adapter of each request, and x A of the widest projection: 16 columns."""
    gpu, plans = hardware("h100x1"), []
    for adapters in ("[]", BOTH):
        text = manifest(adapters)
        text.write_text(text.read_text().replace("device: cpu", "device: cuda"))
        plans.append(validate(Given(text), gpu))
    assert [plan.engines[0].hardware.kernels for plan in plans] == ["triton", "triton"]
    accounts = (next(one for one in plan.memory.accounts if one.key == "workspace") for plan in plans)
    base, adapted = ({step.name: step.value for step in account.steps} for account in accounts)
    assert adapted.keys() - base.keys() >= {"adapters (requests)", "products of adapters (tokens × width)"}
    scheduling = plans[1].engines[0].scheduling
    assert adapted["products of adapters (tokens × width)"] == scheduling.max_step_tokens * 16 * 4


def test_another_base_model_is_a_warning(manifest: Write):
    notices = [one for one in validate(Given(manifest(BOTH))).notices if one.code == "other-base"]
    assert [one.key for one in notices] == ["adapters[1].path"]
    assert "adapter two was trained for org/other-7b" in notices[0].message


def test_relative_paths_start_at_the_file_that_contains_them(manifest: Write, tmp_path: Path):
    upper = tmp_path / "upper.yaml"
    upper.write_text(f"extends: {manifest(BOTH)}\n")
    assert {Path(one.path).parent.name for one in validate(Given(upper)).engines[0].adapters} == {
        manifest(BOTH).parent.name
    }


def test_a_changed_adapter_changes_the_hash_of_outputs_by_its_name(manifest: Write):
    one, other = (validate(Given(manifest(text))).gateway.outputs_sha256 for text in (BOTH, "[{name: one, path: one}]"))
    assert one != other


def test_the_lock_names_the_files_of_adapters_and_refuses_a_changed_one(manifest: Write, folder: Path, tmp_path: Path):
    path = manifest(BOTH)
    settings, plan = load(Given(path)), validate(Given(path))
    lock = make_lock(plan, settings)
    assert sorted(lock.adapters) == [
        f"{name}/adapter_{file}" for name in ("one", "two") for file in ("config.json", "model.safetensors")
    ]
    written = path.with_suffix(".lock")
    written.write_text(as_yaml(lock, "m.yaml"))
    assert read_lock(written).adapters == lock.adapters
    try:
        for contents in (True, False):
            assert differences(settings, lock, folder / "demo", hash_contents=contents)[0] == []
        weights = folder / "two" / "adapter_model.safetensors"
        before = weights.read_bytes()
        weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert [one.name for one in differences(settings, lock, folder / "demo", hash_contents=True)[0]] == [
            "two/adapter_model.safetensors"
        ]
        assert main(["lock", str(path), "--check"]) == exits.INTEGRITY.number
        weights.write_bytes(before)
        more = load(Given(manifest("[{name: new, path: one}]")))
        names = [one.name for one in differences(more, lock, folder / "demo", hash_contents=True)[0]]
        assert "new/adapter_config.json" in names
    finally:
        written.unlink()


def test_diff_reports_the_new_adapters(manifest: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old = manifest("[{name: one, path: one}]").rename(tmp_path.parent / f"{tmp_path.name}-old.yaml")
    old.write_text(old.read_text().replace("path: demo", f"path: {manifest(BOTH).parent / 'demo'}").replace(
        "path: one", f"path: {manifest(BOTH).parent / 'one'}"))  # fmt: skip
    arguments: list[Any] = ["diff", str(old), str(manifest(BOTH))]
    main(arguments)
    assert "adapters" in capsys.readouterr().out
