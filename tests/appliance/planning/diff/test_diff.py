"""`slipway diff`: stated consequences match the configurations that engines and gateway receive, and both plans."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.cli.main import main
from appliance.config.effects import effects
from appliance.config.gateway import GatewayConfig, decode, encode
from appliance.config.keys import Key, leaves, takes
from appliance.config.live_keys import live_fields, mixed
from appliance.config.manifest import API_VERSION
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.machine import Machine
from appliance.planning.diff.clients import limit
from appliance.planning.diff.config_snapshot import read_snapshot
from appliance.planning.diff.diff import Diff, compare
from appliance.planning.diff.numbers import Number
from appliance.planning.diff.text import as_json, as_text, spell_share
from appliance.planning.validate import validate

ROOT = Path(__file__).resolve().parents[4]
MACHINE = Machine(cores=4, cores_from="affinity", memory_free=8 * 2**30, memory_from="MemAvailable", kernels=("avx2",))
CANDIDATES = (True, False, "other", 2, 3, 0.5, 7, 64, "5s", "64MiB", "http://a.example")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "manifests" / "demo", tmp_path / "demo")
    (tmp_path / "a.yaml").write_text(
        f"apiVersion: {API_VERSION}\nmodel:\n  source: {{path: demo}}\n  names: [demo, old]\n"
    )
    (tmp_path / "other").write_text("{{ messages }}")
    return tmp_path


def given(folder: Path, *sets: str, name: str = "a.yaml") -> Given:
    return Given(folder / name, tuple(Option(f"--set {one.split('=')[0]}", *one.split("=", 1)) for one in sets))


def differing(folder: Path, *sets: str, machine: Machine = MACHINE) -> Diff:
    return compare(read_snapshot(given(folder), machine), read_snapshot(given(folder, *sets), machine))


def other_values(key: Key) -> Iterator[str]:
    for value in (*key.choices, *CANDIDATES):
        for candidate in (value, [value]):
            if candidate not in (key.default, API_VERSION) and takes(key.path, candidate):
                yield json.dumps(candidate)


def configs(folder: Path, *sets: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the configurations of engines and gateway, without fingerprints over all values, which always differ."""
    found = validate(given(folder, *sets), MACHINE)
    gateway = {
        name: value for name, value in msgspec.json.decode(encode(found.gateway)).items() if "sha256" not in name
    }
    return [msgspec.to_builtins(engine) for engine in found.engines], gateway


@pytest.mark.parametrize("key", [key for key in leaves() if "*" not in key.path], ids=lambda key: key.name)
@pytest.mark.sampled(7)
def test_programs_restart_if_their_configuration_changes(folder: Path, key: Key) -> None:
    """Plan another value for every key; compare the configurations of engines and gateway with the stated
    consequence."""
    engines, gateway = configs(folder)
    tried = 0
    for value in other_values(key):
        if tried == 3:
            break
        try:
            now = configs(folder, f"{key.name}={value}")
        except Refused:
            continue
        tried += 1
        found = differing(folder, f"{key.name}={value}")
        assert now[0] == engines or "engines" in found.restart, f"{key.name}={value}"
        if "gateway" not in found.restart:
            # A reload of the running gateway gives the same configuration as a start.
            live_keys = [one for one in found.live if one in live_fields()]
            assert live_keys == list(found.live)
            reloaded = mixed(*(decode(encode(each), GatewayConfig) for each in (gateway, now[1])), live_keys)
            assert decode(encode(now[1]), GatewayConfig) == reloaded, f"{key.name}={value}"
        assert [change.key for change in found.changes if change.key == key.name], "the key itself is told"
        acting = [effects()[change.key] for change in found.changes if change.acts]
        marks = [(snapshot.outputs_sha256, snapshot.graphs_sha256) for snapshot in (found.before, found.after)]
        assert (marks[0][0] != marks[1][0]) == any(one.outputs != "no" for one in acting), f"{key.name}={value}"
        assert (marks[0][1] != marks[1][1]) == any(one.graphs for one in acting), f"{key.name}={value}"


def test_most_keys_have_another_value_to_try() -> None:
    keys = [key for key in leaves() if "*" not in key.path]
    assert sum(any(True for _ in other_values(key)) for key in keys) > 0.9 * len(keys)  # apiVersion has none


def test_equal_manifests_have_no_difference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(folder / "a.yaml", folder / "b.yaml")
    (folder / "b.yaml").write_text((folder / "b.yaml").read_text() + "# a comment\n")
    assert main(["diff", str(folder / "a.yaml"), str(folder / "b.yaml")]) == 0
    assert "no difference" in capsys.readouterr().out


def test_a_difference_ends_with_1_and_a_wrong_manifest_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = str(folder / "a.yaml")
    assert main(["diff", a, "--set", "limits.max_stop=3"]) == 1
    (folder / "b.yaml").write_text("apiVersion: slipway/v2\nmodel: {pth: demo}\n")
    assert main(["diff", a, str(folder / "b.yaml")]) == 2
    assert f"{folder / 'b.yaml'}:2:9: model.pth: unknown key" in capsys.readouterr().err
    assert main(["diff", str(folder / "b.yaml"), a]) == 2
    assert main(["diff", a]) == 2
    assert main(["diff", a, str(folder / "c.yaml")]) == 2


def test_both_places_are_shown(folder: Path) -> None:
    (folder / "b.yaml").write_text((folder / "a.yaml").read_text() + "limits:\n  max_stop: 3\n")
    found = compare(read_snapshot(given(folder), MACHINE), read_snapshot(given(folder, name="b.yaml"), MACHINE))
    (change,) = found.changes
    assert change.before is not None and change.after is not None
    assert (change.before.origin, change.after.origin) == ("default", f"{folder / 'b.yaml'}:6:13")
    assert "16 → 3" in as_text(found)


def test_equal_resolved_values_are_shown_without_effects(folder: Path) -> None:
    found = differing(folder, "model.dtype=float32")
    assert [(change.key, change.acts) for change in found.changes] == [("model.dtype", False)]
    assert (found.restart, found.outputs, found.caches) == ((), (), ())
    assert "with the same resolved value" in as_text(found) and "restart   nothing" in as_text(found)


def test_numbers_of_both_plans_are_compared(folder: Path) -> None:
    found = differing(folder, "quantization.kv_cache=int8", "hardware.kv_cache_memory=64MiB")
    before, after = (
        validate(given(folder), MACHINE),
        validate(given(folder, "quantization.kv_cache=int8", "hardware.kv_cache_memory=64MiB"), MACHINE),
    )
    numbers = {one.name: one for one in found.numbers}
    assert (numbers["KV blocks"].before, numbers["KV blocks"].after) == (before.memory.blocks, after.memory.blocks)
    assert (numbers["KV cache"].before, numbers["KV cache"].after) == (before.memory.cache, after.memory.cache)
    assert numbers["weights"].share == 0 and numbers["KV cache"].share == after.memory.cache / before.memory.cache - 1
    assert "quantization.kv_cache" in found.outputs


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (100, 88, "−12 %"),
        (100, 100, ""),
        (0, 5, "new"),
        (1000, 1004, "+0.4 %"),
        (100, 350, "+250 %"),
        (100, 0, "−100 %"),
    ],
)
def test_a_share_is_spelt(before: int, after: int, text: str) -> None:
    assert spell_share(Number("KV", before, after, "count")) == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.names=[demo]", ["requests for old get 404"]),
        ("model.names=[new, demo, old]", ["new can be requested", "`model` in replies is new instead of demo"]),
        ("limits.max_output_tokens=5", ["none → 5, tighter: longer replies are cut"]),
        ("limits.max_logprobs=-1", ["20 → -1, wider"]),
        ("limits.max_logprobs=2", ["20 → 2, tighter: requests for more get 400"]),
        ("limits.max_body=1MiB", ["32MiB → 1MiB, tighter: larger bodies get 413"]),
        ("model.max_context=512", ["2048 → 512, tighter"]),
        ("endpoints.docs=false", ["/docs and /openapi.json get 404"]),
        ("endpoints.port=9000", ["8000 → 9000; the service is reached on another port"]),
        ("engine.sampling.temperature=0.5", ["0.1 → 0.5 for requests without temperature"]),
        ("engine.cache.prefix=false", []),
    ],
)
def test_effects_on_clients_are_listed(folder: Path, change: str, said: list[str]) -> None:
    found = differing(folder, change)
    key = change.partition("=")[0]
    marks = [line for line in found.clients if line.startswith("system_fingerprint of replies: slipway-")]
    assert len(marks) == (effects()[key].outputs != "no")
    assert [line for line in found.clients if not line.startswith(key) and line not in marks] == []
    assert len(found.clients) == len(said) + len(marks)
    assert all(text in line for text, line in zip(said, found.clients, strict=False))


def test_changes_of_api_keys_are_listed_without_their_places(folder: Path) -> None:
    (folder / "keys").write_text("k\n")
    (folder / "more").write_text("k\n")
    text = (folder / "a.yaml").read_text() + "endpoints: {api_keys: team}\nsecrets: {team: {file: keys}}\n"
    (folder / "b.yaml").write_text(text)
    (folder / "c.yaml").write_text(text.replace("file: keys", "file: more"))
    a, b, c = (read_snapshot(given(folder, name=name), MACHINE) for name in ("a.yaml", "b.yaml", "c.yaml"))
    assert compare(a, b).clients == ("endpoints.api_keys: requests without a key get 401",)
    assert compare(b, a).clients == ("endpoints.api_keys: no key is required any more",)
    moved = compare(b, c)
    assert moved.clients == ("endpoints.api_keys: the keys of team are read from another place",)
    assert "more" not in as_text(moved).replace("more keys", "") and "/more" not in as_json(moved)


def test_no_limit_is_above_every_limit() -> None:
    assert limit(None) == limit(-1) > limit(10**12) > limit(0)


def test_the_same_relative_path_in_another_folder_is_another_checkpoint(folder: Path) -> None:
    (folder / "inner").mkdir()
    shutil.copytree(folder / "demo", folder / "inner" / "demo")
    shutil.copy(folder / "a.yaml", folder / "inner" / "a.yaml")
    found = compare(read_snapshot(given(folder), MACHINE), read_snapshot(given(folder / "inner"), MACHINE))
    assert [change.key for change in found.changes] == ["model.source.path"]
    assert "model.source.path" in found.outputs and set(found.restart) == {"gateway", "engines"}


def test_keys_are_compared_where_no_plan_can_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / "demo")
    assert main(["diff", str(folder / "a.yaml"), "--set", "limits.max_stop=3", "--set", "model.max_context=64"]) == 1
    told = capsys.readouterr().out
    assert "limits.max_stop    16 → 3" in told and "auto → 64" in told
    assert "cannot be planned here" in told and "no such directory" in told
    assert "KV blocks" not in told


def test_a_plan_that_only_one_side_has_is_no_difference_of_keys(folder: Path) -> None:
    poor = replace(MACHINE, memory_free=600 * 2**20)
    before = read_snapshot(given(folder), MACHINE)
    after = read_snapshot(given(folder, "hardware.kv_cache_memory=4GiB"), poor)
    assert after.refused is not None
    found = compare(before, after)
    assert [change.key for change in found.changes] == ["hardware.kv_cache_memory"]
    assert found.numbers == ()


def test_ranks_share_the_memory_and_change_sums(folder: Path) -> None:
    found = differing(folder, "parallelism.tensor=2", "hardware.kv_cache_memory=64MiB")
    (plan,) = [snapshot.plan for snapshot in (found.after,) if snapshot.plan]
    numbers = {one.name: one for one in found.numbers}
    assert 0.5 < numbers["weights"].after / numbers["weights"].before < 0.51
    assert numbers["of all processes"].after == 2 * plan.memory.total
    assert numbers["of all processes"].before == numbers["together"].before
    assert (numbers["ranks per engine"].before, numbers["ranks per engine"].after) == (1, 2)
    assert "parallelism.tensor" in found.outputs and set(found.restart) == {"gateway", "engines"}


def test_derived_changes_are_shown_with_their_reason(folder: Path) -> None:
    text = as_text(differing(folder, "parallelism.data=2"))
    (line,) = [line for line in text.splitlines() if line.startswith("hardware.threads")]
    assert line.endswith("follows: 4 cores by affinity for 2 engines")


def test_json_has_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(folder / "a.yaml"), "--format", "json", "--limits.max-stop", "3"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["restart"] == [] and found["live"] == ["limits.max_stop"] and found["outputs"] == []
    (change,) = [one for one in found["changes"] if one["key"] == "limits.max_stop"]
    assert (change["before"]["effective"], change["after"]["effective"], change["after"]["from"]) == (
        *(16, 3),
        "--limits.max-stop",
    )
    assert {one["name"] for one in found["memory"]} >= {"weights", "KV cache", "KV blocks", "context"}


def test_cached_quantized_weights_are_mentioned(folder: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(folder / "cache")}
    before = read_snapshot(replace(given(folder), environ=environ), MACHINE)
    kept = read_snapshot(replace(given(folder, "quantization.weights=int8"), environ=environ), MACHINE)
    assert any(
        line == "quantized weights: they are quantized at the next start, which takes longer, and cached"
        for line in compare(before, kept).caches
    )
    other = read_snapshot(replace(given(folder, "quantization.weights=int4"), environ=environ), MACHINE)
    assert any("the cached file no longer matches" in line for line in compare(kept, other).caches)
    assert not any("quantized weights" in line for line in compare(kept, before).caches)


def test_an_overlay_and_a_profile_have_consequences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "base.yaml").write_text("model: {source: {path: ../demo}, names: [demo, old]}\n")
    (folder / "b.yaml").write_text(
        f"apiVersion: {API_VERSION}\nextends: parts/base.yaml\noverlays: {{public: {{limits: {{max_stop: 2}}}}}}\n"
        "hardware: {profiles: [{name: cpu, match: {device: cpu}, set: {engine: {scheduling: {max_running: 8}}}}]}\n"
    )
    found = compare(read_snapshot(given(folder), MACHINE), read_snapshot(given(folder, name="b.yaml"), MACHINE))
    acting = {change.key: change for change in found.changes if change.acts}
    assert "model.source.path" not in acting, "a path of a file in another folder is the same in effect"
    running = acting["engine.scheduling.max_running"]
    assert running.after is not None and running.after.origin.endswith("(profile cpu)")
    assert main(["diff", str(folder / "b.yaml"), "--overlay", "public"]) == 1
    told = capsys.readouterr().out
    assert "with overlay public: 1 key differs" in told and "16 → 2" in told and "(overlay public)" in told
