"""A Llama whose attention has sinks, in every body, against transformers with gpt-oss's attention in its layers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama import modeling_llama

from engine.api.errors import CheckpointError
from engine.layers.loaded import Sinks
from engine.models import families, llama
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import Attention
from kernels.cpu.library import usable
from kernels.jit import installed

NAME = "SinkLlamaForCausalLM"
HEADS, LAYERS = 6, 3
BODIES = ["torch", *usable(), pytest.param("triton", marks=pytest.mark.skipif(not installed(), reason="no Triton"))]


def declare(config):
    model = llama.declare({**config, "architectures": ["LlamaForCausalLM"]})
    return replace(
        model,
        blocks=tuple(
            tuple(
                replace(branch, body=replace(branch.body, sinks=True)) if isinstance(branch.body, Attention) else branch
                for branch in block
            )
            for block in model.blocks
        ),
    )


@pytest.fixture
def sunk(own_checkpoint, monkeypatch):
    """The checkpoint with sinks, and its logits by transformers."""
    saved = own_checkpoint("llama")
    reference = saved.transformers()
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    monkeypatch.setitem(families.ARCHITECTURES, NAME, declare)
    draw = torch.Generator().manual_seed(5)
    file = saved.path / "model.safetensors"
    tensors = load_file(file)
    for number, layer in enumerate(reference.model.layers):
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(HEADS, generator=draw) * 2)
        tensors[f"model.layers.{number}.self_attn.sinks"] = layer.self_attn.sinks.detach().clone()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((saved.path / "config.json").read_text())
    saved.rewrite({**config, "architectures": [NAME]})

    def logits(ids):
        with torch.no_grad():
            return reference(torch.tensor([ids])).logits[0]

    return saved.path, logits


@pytest.mark.parametrize("body", BODIES)
def test_sinks_equal_transformers_in_steps_of_all_kinds(body, sunk, driver, ids):
    path, logits = sunk
    engine = driver(path, kernels=body)
    long, short = engine.add(ids(29, 1)), engine.add(ids(12, 2))
    engine.step([(long, 20), (short, 1)])
    engine.step([(short, 7), (long, 1)])
    engine.step([(long, 8), (short, 4)])
    for request in (long, short):
        torch.testing.assert_close(request.result, logits(request.ids), atol=1e-4, rtol=0)


def test_sinks_matter(sunk, driver, ids):
    """Otherwise the test above would say nothing."""
    path, logits = sunk
    prompt = ids(29, 1)
    engine = driver(path)
    for layer in engine.model.weights.by_name.values():
        if isinstance(layer, Sinks):
            layer.logits = torch.full((HEADS,), -1e9)
    assert (logits(prompt) - engine.run(prompt, 29)).abs().max() > 0.1


def test_a_checkpoint_without_its_sinks_is_refused(sunk, driver):
    path, _ = sunk
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.sinks"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model.layers.1.self_attn.sinks"):
        driver(path)


def test_ranks_share_the_sinks_of_their_heads(sunk, driver, ids, on_ranks):
    path, logits = sunk
    assert read_checkpoint(path).model.blocks[0][0].body.sinks
    prompt = ids(15, 3)
    for result in on_ranks(2, lambda world: driver(path, world=world).run(prompt, 6)):
        torch.testing.assert_close(result, logits(prompt), atol=1e-4, rtol=0)
