"""Ranks of tensor parallelism that load a checkpoint of `slipway convert` from several files."""

import pytest
import torch

from engine.convert import Job, convert
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best
from tests.engine.quantized_writers import random_model


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_ranks_read_their_share_of_each_file(weights, tmp_path, driver, ids, on_ranks):
    source, made, prompt = tmp_path / "source", tmp_path / "made", ids(17, 1)
    random_model("Qwen3").save_pretrained(source)
    job = Job(source=str(source), target=str(made), weights=weights, group_size=32, shard_bytes=100_000)
    convert(job)
    assert len({info.file for info in read_checkpoint(made).tensors.values()}) > 2

    def work(world):
        return driver(made, kernels=best(), world=world, threads=1).run(prompt, 5)

    alone = driver(made, kernels=best()).run(prompt, 5)
    for got in on_ranks(2, work, best()):
        torch.testing.assert_close(got, alone, atol=2e-2 * float(alone.abs().max()), rtol=0)
    assert float((driver(source).run(prompt, 5) - alone).abs().max()) > 0
