"""hardware.matmul_precision: a choice only where torch multiplies float32 matrices."""

from pathlib import Path

import pytest

from tests.appliance.planning.test_plan import GPU_HOST, planned, refused

KEY = "hardware.matmul_precision"


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
def test_it_reaches_the_engine_where_torch_multiplies_float32(tmp_path: Path, wanted: str) -> None:
    assert planned(tmp_path, f"{KEY}={wanted}", "hardware.kernels=torch").engines[0].matmul_precision == wanted
    on_gpu = planned(tmp_path, f"{KEY}={wanted}", "model.dtype=float32", machine=GPU_HOST)
    assert on_gpu.engines[0].matmul_precision == wanted


def test_highest_is_the_default() -> None:
    from engine.api.config import EngineConfig

    assert EngineConfig(model="m", kv_bytes=1, max_context=2).matmul_precision == "highest"


def test_where_it_would_change_nothing_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.appliance.planning.test_plan import CPU

    assert "float32" in str(refused(tmp_path, f"{KEY}=high", machine=GPU_HOST))
    compiled = str(refused(tmp_path, f"{KEY}=high", machine=replace(CPU, kernels=("avx2",))))
    assert "avx2 kernels multiply, exactly" in compiled and compiled.endswith("use highest")
    triton = replace(GPU_HOST, triton=True)
    sets = ("model.dtype=float32", "hardware.batch_invariant=true")
    assert "batch_invariant" in str(refused(tmp_path, f"{KEY}=medium", *sets, machine=triton))
