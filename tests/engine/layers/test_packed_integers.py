"""Weights of 4 and 8 bits that stay packed for Triton kernels: checkpoints and weights quantized at load."""

import pytest
import torch
from safetensors.torch import load_file

from engine.layers.linear import LinearLayer
from kernels.integers import IntegerWeight
from kernels.jit import installed
from kernels.quantisation import to_int4, to_int8
from tests.engine.quantized_writers import KINDS, write
from tests.tiers import thinned

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
QUANTIZE = {"int8": to_int8, "int4": to_int4}


def linears(model):
    return {layer.name: layer for layer in model.weights.by_name.values() if isinstance(layer, LinearLayer)}


@pytest.mark.parametrize("kind", thinned(KINDS, ["gptq-32-zeros", "gptq-64-ordered", "packed-channel", "int8-groups"]))
def test_triton_runs_a_quantized_checkpoint_as_transformers_does(kind, tmp_path, driver, ids):
    """Activations are not rounded, so results equal those of the dequantized weights."""
    made, prompt = write(tmp_path, KINDS[kind]), ids(17, 1)
    engine = driver(made.path, kernels="triton")
    torch.testing.assert_close(engine.run(prompt, 7), made.logits(prompt), atol=1e-4, rtol=0)
    left_out = KINDS[kind].settings.get("ignore", ())
    plain = load_file(made.plain / "model.safetensors")
    for name, layer in linears(engine.model).items():
        if name in left_out:
            assert isinstance(layer.weight, torch.Tensor)
            continue
        assert isinstance(layer.weight, IntegerWeight) and layer.weight.bits == KINDS[kind].bits, name
        sources = list(dict.fromkeys(row.source for row in layer.part.rows))
        wanted = torch.cat([plain[f"{layer.path}.{source}.weight"] for source in sources])
        torch.testing.assert_close(layer.weight.restored(), wanted, atol=0, rtol=2e-6)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Phi3", {}),
        ("Qwen3Moe", {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    ],
)
def test_biases_sources_of_several_rows_and_experts(architecture, more, tmp_path, driver, ids):
    made, prompt = write(tmp_path, KINDS["awq-64"], architecture, **more), ids(11, 2)
    engine = driver(made.path, kernels="triton")
    torch.testing.assert_close(engine.run(prompt, 4), made.logits(prompt), atol=1e-4, rtol=0)
    stacks = engine.model.weights.stacks.values()
    assert bool(stacks) == (architecture == "Qwen3Moe") and all(
        isinstance(one.integers, IntegerWeight) for one in stacks
    )


@pytest.mark.parametrize(("name", "bits"), [("qwen2", "int8"), ("qwen2", "int4"), ("qwen2-moe", "int4")])
def test_weights_and_head_are_quantized_at_load(name, bits, checkpoint, driver, ids):
    saved, prompt = checkpoint(name), ids(9, 1)
    engine, plain = driver(saved.path, kernels="triton", bits=bits), driver(saved.path, kernels="triton")
    stored = linears(plain.model)
    for name, layer in linears(engine.model).items():
        if layer.target.exact:
            continue  # a router
        assert isinstance(layer.weight, IntegerWeight), name
        wanted = QUANTIZE[bits](stored[name].weight, layer.target.group).restored()
        torch.testing.assert_close(layer.weight.restored(), wanted, atol=0, rtol=0)
        if stored[name]._stack_slice is None:
            stored[name].weight = wanted
        else:
            with torch.inference_mode():
                stored[name].weight.copy_(wanted)
    head = engine.model.vocabulary.head
    assert isinstance(head, IntegerWeight) and head.bits == 8
    plain.model.vocabulary.head = head.restored()
    torch.testing.assert_close(engine.run(prompt, 5), plain.run(prompt, 5), atol=1e-5, rtol=0)


def test_a_row_is_identical_beside_others(tmp_path, driver, ids):
    made, prompts = write(tmp_path, KINDS["gptq-32-zeros"]), [ids(length, length) for length in (6, 8)]
    together = driver(made.path, kernels="triton", seed=1)
    rows = [together.add(prompt) for prompt in prompts]
    for counts in ((5, 4), (1, 4)):
        together.step(list(zip(rows, counts, strict=True)))
    for prompt, row, counts in zip(prompts, rows, ((5, 1), (4, 4)), strict=True):
        alone = driver(made.path, kernels="triton", seed=2)
        request = alone.add(prompt)
        for count in counts:
            alone.step([(request, count)])
        assert torch.equal(row.result, request.result)
