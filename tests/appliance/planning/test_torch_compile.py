"""hardware.torch_compile in the plan: covered operations, and settings in which it has no effect."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.planning.workspace import COMPILER_BYTES
from engine.models.parts import Foreign
from tests.appliance.planning.test_plan import CPU, GPU_HOST, checkpoint, model, planned, reason, refused

KEY = "hardware.torch_compile"
ON = f"{KEY}=true"


def test_the_plan_names_the_covered_operations(tmp_path: Path) -> None:
    found = planned(tmp_path, ON, "hardware.kernels=torch")
    value, why = reason(found, KEY)
    assert value is True and "Linear (" in why and "Attend" in why and "uses pages" in why
    plain = planned(tmp_path, "hardware.kernels=torch")
    assert found.memory.workspace - plain.memory.workspace == COMPILER_BYTES
    assert found.engines[0].hardware.torch_compile and not planned(tmp_path).engines[0].hardware.torch_compile


def test_the_plan_says_what_is_compiled_of_transformers_code(tmp_path: Path) -> None:
    declared = replace(model(), foreign=Foreign(architecture="XForCausalLM", width=8))
    found = planned(tmp_path, ON, "hardware.kernels=torch", facts=replace(checkpoint(), model=declared))
    assert reason(found, KEY)[1].endswith("compiles modules of transformers' code without keys and values")


@pytest.mark.parametrize(
    ("sets", "machine", "because"),
    [
        ((), replace(CPU, kernels=("avx2",)), "avx2 kernels execute all operations"),
        ((), replace(GPU_HOST, triton=True), "every operation of this model has a Triton kernel"),
        (("hardware.batch_invariant=true",), replace(GPU_HOST, triton=True), "depend on the number of tokens"),
        (("hardware.kernels=torch", "parallelism.tensor=2"), CPU, "programs of 2 ranks"),
        (("hardware.kernels=torch",), replace(CPU, compile_lacks=(("cpu", "sympy"),)), "installation lacks sympy"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path: Path, sets: tuple[str, ...], machine, because: str) -> None:
    message = str(refused(tmp_path, ON, *sets, machine=machine))
    assert because in message and message.endswith("use false")
