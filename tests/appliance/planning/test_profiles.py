"""Matching of profiles and machines, and the machine facts used for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.config.composition.profiles import Profile
from appliance.config.manifest_file import Match
from appliance.config.settings import Given
from appliance.config.yaml_loader import Place, Tree
from appliance.hardware.machine import Gpu, Machine
from appliance.planning import validate as prove_module
from appliance.planning.profiles import first_match, holds, rank
from appliance.planning.report import as_json, as_text
from appliance.planning.validate import validate

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984, 84 * 10**9, (9, 0))  # 79.6 GiB, as reported by CUDA
A10 = Gpu("NVIDIA A10G", 24 * GIB, 23 * GIB, (8, 6))
CPU = Machine(16, "affinity", 64 * GIB, "MemAvailable", no_gpu="no driver", kernels=("avx512", "avx2", "base"))
ONE = replace(CPU, gpus=(H100,), no_gpu="")
TWO = replace(CPU, gpus=(H100, H100), no_gpu="")
MIXED = replace(CPU, gpus=(H100, A10), no_gpu="")


def profile(name: str, **match: Any) -> Profile:
    return Profile(name, Match(**match), Tree(value={}), Place("m"))


@pytest.mark.parametrize(
    ("match", "machine", "reason"),
    [
        ({}, CPU, ""),
        ({}, TWO, ""),
        ({"device": "cpu"}, CPU, ""),
        ({"device": "cpu"}, ONE, "device: cuda (there is a GPU), not cpu"),
        ({"device": "cuda"}, CPU, "device: cpu (no driver), not cuda"),
        ({"device": "cuda"}, ONE, ""),
        ({"gpu": "H100"}, ONE, ""),
        ({"gpu": "h100 80gb"}, ONE, ""),
        ({"gpu": "H200"}, ONE, "gpu: the GPU is NVIDIA H100 80GB HBM3, not H200"),
        ({"gpu": "H100"}, CPU, "gpu: there is no GPU (no driver)"),
        ({"gpu": "H100"}, MIXED, "gpu: GPU 1 is NVIDIA A10G, not H100"),
        ({"gpu": "nvidia", "count": 2}, MIXED, ""),
        ({"count": 1}, ONE, ""),
        ({"count": 1}, TWO, "count: 2 GPUs, not 1"),
        ({"count": ">=2"}, ONE, "count: 1 GPU, not >=2"),
        ({"count": ">=2"}, CPU, "count: 0 GPUs, not >=2"),
        ({"count": "<1"}, CPU, ""),
        ({"count": ">1 <=2"}, TWO, ""),
        ({"memory": ">=80GB"}, ONE, ""),
        ({"memory": ">=80GiB"}, ONE, "memory: the GPU has 79.6 GiB, not >=80GiB"),
        ({"memory": ">=24GiB <25GiB"}, MIXED, "memory: GPU 0 has 79.6 GiB, not >=24GiB <25GiB"),
        ({"memory": ">=1GiB"}, CPU, "memory: there is no GPU (no driver)"),
        ({"compute_capability": ">=9.0"}, ONE, ""),
        ({"compute_capability": 9.0}, ONE, ""),
        ({"compute_capability": 9}, ONE, ""),
        ({"compute_capability": 8.6}, ONE, "compute_capability: the GPU has 9.0, not 8.6"),
        ({"compute_capability": ">8.9 <9"}, ONE, "compute_capability: the GPU has 9.0, not >8.9 <9"),
        ({"compute_capability": ">=9.0"}, MIXED, "compute_capability: GPU 1 has 8.6, not >=9.0"),
        ({"kernels": "avx2"}, CPU, ""),
        ({"kernels": "amx"}, CPU, "kernels: avx512, avx2, base can run here, not amx"),
        ({"kernels": "amx"}, replace(CPU, kernels=()), "kernels: none can run here, not amx"),
        ({"cores": 16}, CPU, ""),
        ({"cores": ">=17"}, CPU, "cores: 16 by affinity, not >=17"),
        ({"cores": ">=16", "device": "cpu", "kernels": "base"}, CPU, ""),
    ],
)
def test_a_profile_matches_when_every_key_does(match: dict[str, Any], machine: Machine, reason: str) -> None:
    assert first_match("auto", (profile("p", **match),), machine) == (reason,)


def test_the_first_that_matches_is_taken_and_no_further_one_looked_at() -> None:
    profiles = (profile("a", gpu="H200"), profile("b", count=2), profile("c"), profile("d"))
    assert first_match("auto", profiles, TWO) == ("gpu: GPU 0 is NVIDIA H100 80GB HBM3, not H200", "")
    assert len(first_match("auto", profiles, ONE)) == 3
    assert first_match("auto", profiles[:2], ONE)[-1] == "count: 1 GPU, not 2"


@pytest.mark.parametrize(
    ("match", "device", "reason"),
    [
        ({"gpu": "H100"}, "cpu", "gpu: hardware.device is cpu"),
        ({"count": ">=1"}, "cpu", "count: 0 GPUs, not >=1"),
        ({"device": "cuda"}, "cpu", "device: cpu (set by hardware.device), not cuda"),
        ({"device": "cpu"}, "cpu", ""),
        ({"device": "cuda"}, "cuda", ""),
        ({"device": "cpu"}, "cuda", "device: cuda (set by hardware.device), not cpu"),
    ],
)
def test_a_manifest_for_cpus_has_no_gpus_whatever_the_machine_has(
    match: dict[str, Any], device: str, reason: str
) -> None:
    assert first_match(device, (profile("p", **match),), ONE) == (reason,)


def test_versions_are_ordered_by_their_parts_and_sizes_by_their_units() -> None:
    versions = ["7.5", "8.0", "8.6", "8.9", "8.10", "9", "9.1", "10.0", "12.1"]
    assert sorted(versions, key=rank) == versions and rank("9.0") == rank("9")
    assert holds(10**9, ">=1GB") and not holds(10**9, ">=1GiB") and holds(10**9, "<0.94GiB >0.93GiB")


DEMO = Path(__file__).resolve().parents[3] / "manifests/demo"
TEXT = f"""\
apiVersion: slipway/v2
model: {{source: {{path: {DEMO}}}}}
hardware:
  profiles:
    - name: large
      match: {{cores: ">=64"}}
      set: {{limits: {{max_waiting: 5000}}}}
    - name: middle
      match: {{cores: ">=8"}}
      set: {{limits: {{max_waiting: 500}}, hardware: {{threads: 3}}}}
"""


def test_a_plan_says_which_profile_was_taken_and_which_values_are_its(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT)
    found = validate(Given(path), CPU)
    assert found.gateway.limits.max_waiting == 500 and found.engines[0].hardware.threads == 3
    text = as_text(found)
    assert f"profile middle ({path}:8:7)" in text
    assert f"not profile large ({path}:5:7): cores: 16 by affinity, not >=64" in text
    (row,) = [line for line in text.splitlines() if line.startswith("limits.max_waiting ")]
    column = TEXT.splitlines()[9].index("500") + 1
    assert row.split() == ["limits.max_waiting", "500", f"{path}:10:{column}", "(profile", "middle)"]
    assert json.loads(as_json(found))["layers"] == list(found.layers)


def test_a_plan_without_a_match_says_why_for_each_profile(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT)
    found = validate(Given(path), replace(CPU, cores=2))
    assert found.gateway.limits.max_waiting == 1024
    assert [line.strip() for line in as_text(found).splitlines()[1:3]] == [
        f"not profile large ({path}:5:7): cores: 2 by affinity, not >=64",
        f"not profile middle ({path}:8:7): cores: 2 by affinity, not >=8",
    ]


@pytest.mark.parametrize(("device", "gpus"), [("auto", True), ("cpu", False)])
@pytest.mark.parametrize("with_profiles", [True, False])
def test_the_machine_is_read_once_and_gpus_only_if_they_could_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: bool, with_profiles: bool
) -> None:
    requested: list[bool] = []

    def read(*, gpus: bool = True) -> Machine:
        requested.append(gpus)
        return CPU

    monkeypatch.setattr(prove_module, "read_machine", read)
    text = TEXT if with_profiles else TEXT.partition("  profiles")[0]
    (tmp_path / "m.yaml").write_text(text.replace("hardware:\n", f"hardware:\n  device: {device}\n"))
    validate(Given(tmp_path / "m.yaml"))
    assert requested == [gpus]
