"""hardware.matmul_precision: torch's float32 products, and bfloat16 products of compiled kernels."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.planning.precision import BF16_COST
from appliance.planning.report import as_text
from tests.appliance.planning.test_plan import CPU, GPU_HOST, planned, reason, refused

KEY = "hardware.matmul_precision"


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
def test_it_reaches_the_engine_where_torch_multiplies_float32(tmp_path: Path, wanted: str) -> None:
    assert planned(tmp_path, f"{KEY}={wanted}", "hardware.kernels=torch").engines[0].hardware.matmul_precision == wanted
    on_gpu = planned(tmp_path, f"{KEY}={wanted}", "model.dtype=float32", machine=GPU_HOST)
    assert on_gpu.engines[0].hardware.matmul_precision == wanted


def test_highest_is_the_default() -> None:
    from engine.arguments import engine_config

    assert engine_config(model="m", kv_bytes=1, max_context=2).hardware.matmul_precision == "highest"


def test_where_it_would_change_nothing_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert "float32" in str(refused(tmp_path, f"{KEY}=high", machine=GPU_HOST))
    compiled = str(refused(tmp_path, f"{KEY}=high", machine=replace(CPU, kernels=("avx2",))))
    assert "avx2 kernels multiply, exactly" in compiled and compiled.endswith("use highest")
    triton = replace(GPU_HOST, triton=True)
    sets = ("model.dtype=float32", "hardware.batch_invariant=true")
    assert "batch_invariant" in str(refused(tmp_path, f"{KEY}=medium", *sets, machine=triton))


AMX = ("amx", "avx512bf16", "avx512", "avx2", "base")
BF16 = f"{KEY}=bfloat16"


@pytest.mark.parametrize("sets", [(BF16,), (BF16, "hardware.kernels=avx512bf16"), ("model.dtype=bfloat16",)])
def test_bfloat16_is_the_arithmetic_of_kernels_with_its_instructions(tmp_path: Path, sets: tuple[str, ...]) -> None:
    found = planned(tmp_path, *sets, machine=replace(CPU, kernels=AMX))
    engine = found.engines[0]
    assert engine.hardware.kernels == ("avx512bf16" if "hardware.kernels=avx512bf16" in sets else "amx")
    assert (engine.model.dtype, engine.hardware.matmul_precision, engine.quantization.kv_cache) == (
        "float32",
        "bfloat16",
        "bfloat16",
    )
    value, why = reason(found, KEY)
    assert value == "bfloat16" and BF16_COST in why and "of all matrices" in why
    assert why.startswith("model.dtype is bfloat16") == (sets == ("model.dtype=bfloat16",))
    assert "float32, products in bfloat16" in as_text(found)


def test_auto_stays_exact_on_cpus_with_bfloat16(tmp_path: Path) -> None:
    found = planned(tmp_path, machine=replace(CPU, kernels=AMX))
    assert found.engines[0].hardware.matmul_precision == "highest" and reason(found, KEY) == ("highest", "")


def test_bfloat16_changes_the_outputs_and_the_band_of_the_self_test(tmp_path: Path) -> None:
    machine = replace(CPU, kernels=AMX)
    exact, rounded = (
        planned(tmp_path, "quantization.kv_cache=float32", *more, machine=machine) for more in ((), (BF16,))
    )
    assert exact.gateway.outputs_sha256 != rounded.gateway.outputs_sha256
    assert [reason(one, "lifecycle.self_test.tolerance")[0] for one in (exact, rounded)] == [0.001, 0.1]
    assert exact.estimate.roofline and rounded.estimate.roofline
    assert rounded.estimate.roofline.prefill.tokens_s > 1.5 * exact.estimate.roofline.prefill.tokens_s


@pytest.mark.parametrize(
    ("kernels", "sets", "words"),
    [
        (("avx512", "avx2"), (), "avx512 kernels have no bfloat16 instructions, amx and avx512bf16 kernels have"),
        (AMX, ("hardware.kernels=avx2",), "avx2 kernels have no bfloat16 instructions"),
        (AMX, ("hardware.kernels=torch",), "only amx and avx512bf16 kernels of a CPU support it"),
        (AMX, ("quantization.weights=int8",), "all matrices are quantized (int8) and multiplied as integers"),
    ],
)
def test_bfloat16_without_effect_is_refused(
    tmp_path: Path, kernels: tuple[str, ...], sets: tuple[str, ...], words: str
) -> None:
    problem = str(refused(tmp_path, BF16, *sets, machine=replace(CPU, kernels=kernels)))
    assert words in problem and problem.endswith("use highest")


def test_bfloat16_of_an_unquantized_head_has_an_effect(tmp_path: Path) -> None:
    sets = "quantization.weights=int8", "quantization.head=stored"
    found = planned(tmp_path, BF16, *sets, machine=replace(CPU, kernels=AMX))
    assert "of matrices that are not quantized" in reason(found, KEY)[1]


def test_dtype_bfloat16_without_the_instructions_selects_torch(tmp_path: Path) -> None:
    found = planned(tmp_path, "model.dtype=bfloat16", machine=replace(CPU, kernels=("avx512", "avx2")))
    assert (found.engines[0].hardware.kernels, found.engines[0].model.dtype) == ("torch", "bfloat16")
    sets = "model.dtype=bfloat16", "hardware.kernels=avx512"
    assert "amx and avx512bf16" in str(refused(tmp_path, *sets, machine=replace(CPU, kernels=("avx512",))))
