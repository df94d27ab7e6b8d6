"""Weights of 4 and 8 bits that stay packed for Triton kernels: checkpoints and weights quantized at load."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.layers.linear import LinearLayer
from engine.lowering.footprint import part_bytes
from kernels.integers import IntegerWeight
from kernels.jit import installed
from kernels.quantisation import to_int4, to_int8
from tests.engine.layers.planned import predicted
from tests.engine.quantized_writers import KINDS, write
from tests.tiers import NIGHTLY, thinned

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
QUANTIZE = {"int8": to_int8, "int4": to_int4}


def linears(model):
    return {layer.name: layer for layer in model.weights.by_name.values() if isinstance(layer, LinearLayer)}


UNROUNDED = [kind for kind in KINDS if kind != "w8a8"]


@pytest.mark.parametrize("kind", thinned(UNROUNDED, ["gptq-64-ordered", "packed-channel", "int8-groups"]))
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
        pytest.param("Phi3", {}, marks=NIGHTLY),
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


@pytest.mark.parametrize(
    ("name", "bits"), [("qwen2", "int8"), pytest.param("qwen2", "int4", marks=NIGHTLY), ("qwen2-moe", "int4")]
)
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


@pytest.mark.nightly("tests/kernels/test_ops.py::test_row_does_not_depend_on_other_rows")
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


STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
SCALES = {"q_proj": 0.031, "k_proj": 0.043, "v_proj": 0.027, "o_proj": 0.02, "gate_proj": 0.05, "up_proj": 0.04}
FUSED = {"q_proj": 0.043, "k_proj": 0.043, "v_proj": 0.043, "gate_proj": 0.05, "up_proj": 0.05}


def rounded_inputs(scale):
    """Return a hook that rounds the inputs of a projection to int8, by a scale or by the largest number of a token."""

    def hook(module, inputs):
        x = inputs[0]
        step = x.abs().amax(-1, keepdim=True) / 127 if scale is None else scale
        return (x / step).round().clamp(-127, 127) * step

    return hook


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_w8a8_multiplies_int8_activations_by_int8_weights(static, tmp_path, driver, ids):
    """The reference is transformers with rounded inputs. Sources that are fused share the largest of their scales."""
    made, prompt = write(tmp_path, KINDS["w8a8"]), ids(17, 1)
    left_out = KINDS["w8a8"].left_out
    if static:
        groups = KINDS["w8a8"].settings["config_groups"]["group_0"]
        made.configure(config_groups={"group_0": {**groups, "input_activations": STATIC}})
        names = [name.removesuffix(".weight_scale") for name in made.tensors() if name.endswith(".weight_scale")]
        scales = {name: SCALES.get(name.rpartition(".")[2], 0.03) for name in names}
        own = made.tensors() | {f"{name}.input_scale": torch.tensor([scale]) for name, scale in scales.items()}
        save_file(own, made.path / "model.safetensors")
    engine = driver(made.path, kernels="triton")
    layers = {name: layer for name, layer in linears(engine.model).items() if name not in left_out}
    assert all(layer.weight.rounds and layer.weight.values.dtype == torch.int8 for layer in layers.values())
    assert all((layer.weight.static_scale is not None) == static for layer in layers.values())
    model = made.model()
    with torch.no_grad():
        exact = model(torch.tensor([prompt])).logits[0]
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name not in left_out:
                last = name.rpartition(".")[2]
                scale = FUSED.get(last, SCALES.get(last, 0.03)) if static else None
                module.register_forward_pre_hook(rounded_inputs(scale))
        wanted = model(torch.tensor([prompt])).logits[0]
    found = engine.run(prompt, 7)
    difference = (found - wanted).norm()
    # A number halfway between two steps may be rounded otherwise.
    assert difference < 2e-3 * wanted.norm() and difference < 0.2 * (exact - wanted).norm()


def test_w8a8_experts_multiply_int8(tmp_path, driver, ids):
    more = {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    made, prompt = write(tmp_path, KINDS["w8a8"], "Qwen3Moe", **more), ids(11, 2)
    made.configure(ignore=[*KINDS["w8a8"].left_out, r"re:.*mlp\.gate$"])
    engine = driver(made.path, kernels="triton")
    stacks = list(engine.model.weights.stacks.values())
    assert stacks and all(one.integers.rounds and one.integers.values.dtype == torch.int8 for one in stacks)
    found, wanted = engine.run(prompt, 4), made.logits(prompt)
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.04
    planned, taken = part_bytes(predicted(engine.checkpoint, "triton")), engine.model.memory_usage.parts
    assert all(planned[part] == taken[part] > 0 for part in ("attention", "experts"))
