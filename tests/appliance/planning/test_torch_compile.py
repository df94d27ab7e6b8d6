"""hardware.torch_compile in the plan: covered operations, and settings in which it has no effect."""

from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from appliance.planning import torch_compile
from tests.appliance.planning.test_plan import CPU, GPU_HOST, planned, reason, refused

KEY = "hardware.torch_compile"
ON = f"{KEY}=true"


def test_the_plan_names_the_covered_operations(tmp_path: Path) -> None:
    found = planned(tmp_path, ON, "hardware.kernels=torch")
    value, why = reason(found, KEY)
    assert value is True and "Linear (" in why and "Attend" in why and "uses pages" in why
    assert found.engines[0].hardware.torch_compile and not planned(tmp_path).engines[0].hardware.torch_compile


@pytest.mark.parametrize(
    ("sets", "machine", "because"),
    [
        ((), replace(CPU, kernels=("avx2",)), "avx2 kernels execute all operations"),
        ((), replace(GPU_HOST, triton=True), "every operation of this model has a Triton kernel"),
        (("hardware.batch_invariant=true",), replace(GPU_HOST, triton=True), "depend on the number of tokens"),
        (("hardware.kernels=torch", "parallelism.tensor=2"), CPU, "programs of 2 ranks"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path: Path, sets: tuple[str, ...], machine, because: str) -> None:
    message = str(refused(tmp_path, ON, *sets, machine=machine))
    assert because in message and message.endswith("use false")


def test_an_installation_without_the_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    spec = spec_from_file_location("torch", tmp_path / "torch/__init__.py")
    monkeypatch.setattr(torch_compile, "find_spec", lambda name: spec)
    message = str(refused(tmp_path, ON, "hardware.kernels=torch"))
    assert "torch of this installation has no compiler" in message and message.endswith("use false")
