"""Parts that the compiled kernels do not have: torch computes them between two programs, and the plan names them."""

import json
from collections import Counter

import pytest
import torch

from engine.api.errors import CheckpointError
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.compiled.build import Region, TorchOp
from engine.layers.model import TextModel
from engine.lowering.measures import torch_parts
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import ACTIVATIONS, usable
from kernels.cpu.program import Team

REMOTE = """
from dataclasses import replace
from engine.models import llama
ARCHITECTURES = ("HouseForCausalLM",)
def declare(config):
    model = llama.declare({**config, "architectures": ["LlamaForCausalLM"]})
    blocks = [tuple(other(branch, number) for branch in block) for number, block in enumerate(model.blocks)]
    return replace(model, blocks=tuple(blocks))
def other(branch, number):
    act = ACTS[number % len(ACTS)]
    return replace(branch, body=replace(branch.body, act=act)) if hasattr(branch.body, "act") else branch
ACTS = """


def configured(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def house(own_checkpoint):
    """A checkpoint that brings its own declaration, with these activations in turn."""

    def make(*acts):
        folder = own_checkpoint("llama").path
        configured(folder, architectures=["HouseForCausalLM"])
        (folder / "slipway_model.py").write_text(REMOTE + repr(acts))
        return folder

    return make


def loaded(folder, variant):
    checkpoint = read_checkpoint(folder, trust_remote_code=True)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    team = None if variant == "torch" else Team(variant, 2)
    model = TextModel(checkpoint.model, form, SINGLE, torch.float32, torch.device("cpu"), team)
    model.load(checkpoint)
    return model


def test_an_activation_without_compiled_body_equals_transformers(own_checkpoint, driver, ids, compiled):
    saved, prompt = own_checkpoint("llama"), ids(21)
    configured(saved.path, hidden_act="relu2")
    wanted = saved.logits(prompt)
    for chunk in (21, 5, 1):
        given = driver(saved.path, kernels=compiled).run(prompt, chunk)
        torch.testing.assert_close(given, wanted, atol=2e-5, rtol=1e-4)
    together = driver(saved.path, kernels=compiled)
    one, two = together.add(prompt), together.add(ids(9, 4))
    together.step([(two, 9), (one, 21)])
    assert torch.equal(one.result, driver(saved.path, kernels=compiled).run(prompt, 1))


@pytest.mark.parametrize("acts", [("relu2",), ("silu", "relu2"), ("gelu", "silu")])
def test_torch_computes_the_parts_named_in_the_plan(house, acts, compiled):
    model = loaded(house(*acts), compiled)
    assert model.compiled is not None
    regions = model.compiled.regions
    others = [region for region in regions if isinstance(region, TorchOp)]
    wanted = Counter(acts[number % len(acts)] for number in range(len(model.model.blocks)))["relu2"]
    named = torch_parts(model.program, ACTIVATIONS)
    assert named == ((f"activation relu2 of {wanted} MLPs",) if wanted else ())
    assert len(others) == wanted and len(regions) == 2 * wanted + 1
    assert all(isinstance(region, Region) for region in regions[::2])


def test_unknown_activation_is_rejected_before_loading(house):
    known = "gelu, gelu_tanh, quick_gelu, relu, relu2, silu"
    with pytest.raises(CheckpointError, match=rf"an MLP with act='mish'; there are {known}"):
        read_checkpoint(house("mish"), trust_remote_code=True)


@pytest.mark.parametrize("variant", usable())
def test_every_activation_of_the_list_has_a_body(variant, house):
    regions = loaded(house(*ACTIVATIONS), variant).compiled.regions
    assert len(regions) == 1
