"""Tests that the worker sets torch's float32 matmul precision from the configuration when it starts."""

import warnings
from collections.abc import Iterator

import msgspec
import pytest
import torch

from engine.worker.build import build_worker
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
        made = build_worker(msgspec.structs.replace(config, matmul_precision=wanted), silent)
    made.close()
    assert torch.get_float32_matmul_precision() == wanted


def test_default_matmul_precision_is_highest(config):  # noqa: F811
    torch.set_float32_matmul_precision("medium")
    build_worker(config, silent).close()
    assert torch.get_float32_matmul_precision() == "highest"
