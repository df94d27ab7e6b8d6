"""Random weights in the format of a checkpoint, for compiled kernels."""

import math

import pytest
import torch

from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.linear import LinearLayer
from engine.layers.model import TextModel
from engine.models.checkpoint import read_checkpoint
from engine.weights.quantized import random_weights
from engine.weights.random import RandomWeights
from kernels.cpu.library import best
from kernels.cpu.program import Team
from kernels.ggml_layout import LAYOUTS
from tests.engine.layers.test_mxfp4 import Written


@pytest.mark.parametrize("kind", LAYOUTS)
def test_products_of_blocks_are_of_order_one(kind):
    made = RandomWeights({}, torch.float32, torch.device("cpu")).blocks("m", 64, 512, kind).restored()
    assert made.shape == (64, 512)
    assert 0.7 < made.square().mean().sqrt() * math.sqrt(512) < 1.5


def test_experts_in_mxfp4_are_drawn_as_blocks(tmp_path):
    checkpoint, team = read_checkpoint(Written(tmp_path / "m").path), Team(best(), 1)
    form = layout(checkpoint.model, block_tokens=16, element_bytes=4, ranks=1)
    model = TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu", team)
    model.fill(random_weights(checkpoint.model, checkpoint.quantization, torch.float32, torch.device("cpu")))
    experts = [
        layer
        for path, layer in model.weights.by_name.items()
        if ".experts." in str(path) and isinstance(layer, LinearLayer)
    ]
    assert experts and {layer.weight.form for layer in experts} == {"blocks_mxfp4"}
    team.close()
