"""Tests that the worker applies the matmul precision of its configuration when it starts."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from engine.api.errors import ConfigError
from engine.worker.build import build_worker
from tests.engine.configs import with_arguments
from tests.engine.worker.test_worker import config, model, silent  # noqa: F401  (fixtures)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
def test_worker_sets_the_configured_precision(config, wanted):  # noqa: F811
    torch.set_float32_matmul_precision("high" if wanted != "high" else "medium")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = build_worker(with_arguments(config, matmul_precision=wanted), silent)
    made.close()
    assert torch.get_float32_matmul_precision() == wanted


def test_default_matmul_precision_is_highest(config):  # noqa: F811
    torch.set_float32_matmul_precision("medium")
    build_worker(config, silent).close()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("kernels", ["torch", "base"])
def test_kernels_without_bfloat16_arithmetic_refuse_it(config, kernels):  # noqa: F811
    wanted = with_arguments(config, kernels=kernels, matmul_precision="bfloat16")
    with pytest.raises(ConfigError, match=f"supported only by amx and avx512bf16 kernels, not by {kernels}"):
        build_worker(wanted, silent)
