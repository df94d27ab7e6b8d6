"""Checkpoints of formats whose weights are dequantized or repacked at load: equal to the dequantized model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.formats.native import GgmlBlocks
from engine.models.checkpoint import assume_checkpoint, check_tensors, read_checkpoint
from engine.models.ranks import tensor_problem
from engine.models.sources import linear_paths, sources
from engine.weights.files import Weights
from engine.weights.quantized import QuantizedWeights
from kernels.cpu.library import best
from tests.engine.float_writers import FLOAT_KINDS
from tests.engine.integer_writers import INTEGER_KINDS
from tests.engine.layers.test_footprint import FakeWorld, compare
from tests.engine.library_writers import LIBRARY_KINDS
from tests.engine.quantized_writers import write
from tests.tiers import thinned

KINDS = FLOAT_KINDS | INTEGER_KINDS | LIBRARY_KINDS
EXPERTS = {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Kinds that compiled kernels multiply as stored, with the bits in memory.
BLOCKS = ("mxfp4", "modelopt-mxfp4", "quark-mxfp4")
NATIVE = {
    **dict.fromkeys(("gptq-5-zeros", "bnb-int8"), 8),
    **dict.fromkeys(BLOCKS, 4),
    **dict.fromkeys(
        ("gptq-2", "gptq-2-zeros", "gptq-3", "gptq-3-zeros", "gptq-3-ordered", "marlin", "marlin-channel"), 4
    ),
    **dict.fromkeys(("awq-gemv-32", "awq-gemv-128", "packed-3-zeros", "packed-2", "auto-round", "auto-round-zeros"), 4),
    **dict.fromkeys(("torchao-int4", "torchao-int4-zeros", "auto-round-awq"), 4),
    **dict.fromkeys(("torchao-int8", "torchao-int8-groups", "quark-int8"), 8),
}
FIRST = [*{(kind.settings["quant_method"], name in NATIVE): name for name, kind in reversed(KINDS.items())}.values()]
"""First kind of each method, once with weights that are multiplied as stored and once without."""
SKIPS = ("modules_to_not_convert", "ignore", "exclude", "skip_modules")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of a kind, made once. Do not change it."""
    made = {}

    def get(kind, architecture="Llama", **more):
        key = (kind, architecture)
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp(kind), KINDS[kind], architecture, **more)
        return made[key]

    return get


@pytest.fixture
def own(tmp_path):
    """A checkpoint that the test may change."""
    return lambda kind, **more: write(tmp_path, KINDS[kind], **more)


def experts(written, kind):
    """A mixture of experts. The router stays plain, as its format lists it."""
    made = written(kind, "Qwen3Moe", **EXPERTS)
    plain_router(made, KINDS[kind])
    return made


def plain_router(made, kind):
    """Exempt the router from quantization in the settings, under the key of the method."""
    key = next((key for key in SKIPS if key in kind.settings), SKIPS[0])
    router = {"compressed-tensors": "re:.*mlp.gate$", "modelopt": "*.mlp.gate", "quark": "*.mlp.gate"}
    listed = [*kind.settings.get(key, []), router.get(kind.settings["quant_method"], "mlp.gate")]
    made.configure(**{"modules_to_not_convert": [], key: listed})


def equal(got, want):
    """Compare logits: only the order of float32 sums differs, which depends on the CPU."""
    return (got - want).abs().max() <= 1e-5 * want.abs().max()


def restored(made):
    """Return the dequantized weights of quantized projections, and the checkpoint."""
    read = read_checkpoint(made.path)
    check_tensors(read.model, read.tensors, read.quantization)
    weights = QuantizedWeights(Weights(read.tensors, lambda done: None), read.quantization, sources(read.model))
    return {path: weights.read(f"{path}.weight") for path in read.quantization.formats}, read


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_weights_are_the_numbers_of_the_definition(kind, written):
    made = written(kind)
    found, read = restored(made)
    plain = load_file(made.plain / "model.safetensors")
    assert set(found) == set(linear_paths(read.model)) - {"lm_head"}
    for path, weight in found.items():
        torch.testing.assert_close(weight, plain[f"{path}.weight"], rtol=1.5e-7, atol=0)


@pytest.mark.parametrize("kind", thinned(KINDS, FIRST))
def test_torch_runs_the_dequantized_weights_as_transformers_does(kind, written, driver, ids):
    made, prompt = written(kind), ids(17, 1)
    assert equal(driver(made.path).run(prompt, 5), made.logits(prompt))


@pytest.mark.parametrize("kind", thinned(KINDS, FIRST))
@pytest.mark.sampled(3)
def test_experts_are_read_too(kind, written, driver, ids):
    made, prompt = experts(written, kind), ids(11, 2)
    found, _ = restored(made)
    assert sum(".experts." in path for path in found) == 2 * 5 * 3
    assert equal(driver(made.path).run(prompt, 4), made.logits(prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_multiply_as_stored_or_exactly(kind, written, driver, ids):
    made, prompt = written(kind), ids(17, 1)
    engine, want = driver(made.path, kernels=best()), made.logits(prompt)
    got = engine.run(prompt, 5)
    if kind in NATIVE:
        assert (got - want).norm() / want.norm() < 0.04  # activations of 8 bits
    else:
        assert equal(got, want)
    forms = {layer.weight.form for layer in linears(engine.model)}
    form = f"tiles_int{NATIVE[kind]}" if kind in NATIVE else "tiles_f32"
    assert forms == {"blocks_mxfp4" if kind in BLOCKS else form}


def linears(model):
    from engine.layers.linear import LinearLayer

    return [layer for layer in model.weights.by_name.values() if isinstance(layer, LinearLayer)]


@pytest.mark.parametrize("by", ["torch", best()])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(2)
def test_loaded_bytes_are_the_planned_bytes(kind, by, written):
    for made in (written(kind), *([experts(written, kind)] if kind in FIRST else [])):
        checkpoint = read_checkpoint(made.path)
        compare(checkpoint, by)
    if by == "torch":
        compare(read_checkpoint(written(kind).path), by, world=FakeWorld(1, 2))


@pytest.mark.parametrize("kind", thinned(KINDS, FIRST))
@pytest.mark.sampled(2)
def test_two_ranks_share_the_matrices(kind, written, driver, ids, on_ranks):
    made, prompt = written(kind), ids(17, 1)
    for got in on_ranks(2, lambda world: driver(made.path, world=world).run(prompt, 5)):
        assert equal(got, made.logits(prompt))
    checkpoint, kernels = read_checkpoint(made.path), best()
    if kind in NATIVE and tensor_problem(checkpoint.model, checkpoint.quantization, 2, "compiled") is None:
        work = lambda world: driver(made.path, world=world, kernels=kernels, threads=1).run(prompt, 5)  # noqa: E731
        for got in on_ranks(2, work, kernels):
            want = made.logits(prompt)
            assert (got - want).norm() / want.norm() < 0.04


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_without_weights_assumes_the_tensors_of_the_file(kind, written, tmp_path):
    made = written(kind)
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    assumed, found = assume_checkpoint(tmp_path), read_checkpoint(made.path)
    listed = {name: one.shape for name, one in assumed.tensors.items() if "proj" in name and "quant_state" not in name}
    shapes = {name: found.tensors[name].shape for name in listed}
    assert {name: [size for size in shape if size > 1] for name, shape in listed.items()} == {
        name: [size for size in shape if size > 1] for name, shape in shapes.items()
    }


Q = "model__layers__1__mlp__up_proj"


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("nvfp4", f"{Q}__weight_global_scale", None, r"lacks .*up_proj\.weight_global_scale"),
        ("nvfp4", f"{Q}__weight_scale", torch.zeros(256, 8), "weight_scale is of type F32; supported are F8_E4M3"),
        ("mxfp4", f"{Q}__weight_packed", torch.zeros(256, 32, dtype=torch.uint8), r"has shape \[256, 32\], .*64\]"),
        ("mxfp8", f"{Q}__weight_scale", torch.zeros(256, 8, dtype=torch.uint8), r"has shape \[256, 8\], .*256, 4\]"),
        ("modelopt-nvfp4", f"{Q}__weight_scale_2", torch.zeros(2), r"weight_scale_2 has shape \[2\], .*\[1\]"),
        ("e5m2", f"{Q}__weight", torch.zeros(256, 128), "weight is of type F32; supported are F8_E5M2"),
        ("modelopt-channels", f"{Q}__weight_scale", torch.zeros(128), r"weight_scale has shape \[128\], .*256, 1\]"),
    ],
)
def test_tensors_that_do_not_fit_are_found_without_reading_weights(own, kind, name, tensor, message):
    made = own(kind)
    made.change(**{name: tensor})
    read = read_checkpoint(made.path)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(read.model, read.tensors, read.quantization)


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_a_scale_that_is_not_a_number_is_refused(kind, own, driver):
    made = own(kind)
    made.change(**{f"{Q}__weight_scale": torch.full((256, 4), 255, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale has the byte 255, which is not a number"):
        driver(made.path)


def test_each_layer_may_have_an_algorithm_of_its_own(own, driver, ids):
    """ModelOpt's mixed precision, with the settings in a file of their own."""
    made, prompt = own("modelopt-nvfp4"), ids(9, 1)
    eight, plain = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"
    values = load_file(made.plain / "model.safetensors")
    one = KINDS["modelopt-mxfp8"].quantize(values[f"{eight}.weight"])
    rest = ("weight_scale", "weight_scale_2", "input_scale")
    for name, tensors in ((eight, one.tensors), (plain, {"weight": values[f"{plain}.weight"]})):
        gone = {f"{name}.{suffix}".replace(".", "__"): None for suffix in rest}
        made.change(**gone | {f"{name}.{key}".replace(".", "__"): tensor for key, tensor in tensors.items()})
    config = json.loads((made.path / "config.json").read_text())
    del config["quantization_config"]
    (made.path / "config.json").write_text(json.dumps(config))
    paths = [path for path in linear_paths(read_checkpoint(made.plain).model) if path not in ("lm_head", plain)]
    layers = {path: {"quant_algo": "NVFP4", "group_size": 16} for path in paths} | {eight: {"quant_algo": "MXFP8"}}
    settings = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    (made.path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    found, read = restored(made)
    assert set(found) == set(paths)
    assert str(read.quantization) == "modelopt (4 bits (e2m1), groups of 16; fp8 (e4m3), groups of 32)"
    torch.testing.assert_close(found[eight], one.values, rtol=0, atol=0)
    model = made.model()
    with torch.no_grad():
        model.get_submodule(eight).weight.copy_(one.values)
        want = model(torch.tensor([prompt])).logits[0]
    assert equal(driver(made.path).run(prompt, 9), want)


Z = "model.layers.1.mlp.up_proj"


def whole_sevens(count):
    return torch.full((count,), 7, dtype=torch.int32)


def test_gptq_has_settings_by_pattern(own, driver, ids):
    """GPTQModel's `dynamic`: other bits for the first pattern that matches, and plain projections."""
    made, prompt = own("gptq-3-zeros"), ids(9, 2)
    values = load_file(made.plain / "model.safetensors")
    two = KINDS["gptq-2"].quantize(values[f"{Z}.weight"])
    plain = "model.layers.0.self_attn.o_proj"
    gone = dict.fromkeys(("qweight", "qzeros", "scales", "g_idx"))
    for name, tensors in ((Z, two.tensors), (plain, gone | {"weight": values[f"{plain}.weight"]})):
        made.change(**{f"{name}.{key}".replace(".", "__"): tensor for key, tensor in tensors.items()})
    made.configure(
        dynamic={r"-:.*layers\.0\..*o_proj": {}, r"+:.*\.1\.mlp\.up": {"bits": 2, "group_size": 32, "sym": True}}
    )
    found, read = restored(made)
    assert plain not in found and "lm_head" not in found
    torch.testing.assert_close(found[Z], two.values, rtol=0, atol=0)
    assert str(read.quantization) == "gptq (3 bits, groups of 32; 2 bits, groups of 32)"
    assert driver(made.path, kernels=best()).run(prompt, 9).isfinite().all()


def test_auto_round_mixes_bits_by_path_and_pattern(own):
    made = own("auto-round")
    values = load_file(made.plain / "model.safetensors")
    eight = KINDS["gptq-8-zeros"].quantize(values[f"{Z}.weight"])
    plain = "model.layers.0.mlp.down_proj"
    eight.tensors["qzeros"] = eight.tensors["qzeros"] - 0x01010101  # zero points minus 1, as auto_gptq has them
    gone = dict.fromkeys(("qweight", "qzeros", "scales", "g_idx"))
    for name, tensors in ((Z, eight.tensors), (plain, gone | {"weight": values[f"{plain}.weight"]})):
        made.change(**{f"{name}.{key}".replace(".", "__"): tensor for key, tensor in tensors.items()})
    made.configure(extra_config={Z: {"bits": 8, "sym": False}, r".*layers\.0.*down_proj$": {"bits": 16}})
    found, read = restored(made)
    assert plain not in found and len(found) == 13
    torch.testing.assert_close(found[Z], eight.values, rtol=1.5e-7, atol=0)
    assert str(read.quantization) == "auto-round (4 bits, groups of 32; 8 bits, groups of 32)"


def test_layers_of_bitsandbytes_without_its_tensors_are_plain(own, driver, ids):
    """transformers skips layers that no list of the settings names."""
    made, prompt = own("bnb-nf4"), ids(9, 2)
    values = load_file(made.plain / "model.safetensors")
    state = "weight.quant_state.bitsandbytes__nf4"
    gone = {f"{Z}.weight.absmax", f"{Z}.weight.quant_map", f"{Z}.{state}"}
    kept = {name: tensor for name, tensor in made.tensors().items() if name not in gone}
    save_file(kept | {f"{Z}.weight": values[f"{Z}.weight"]}, made.path / "model.safetensors")
    found, _ = restored(made)
    assert Z not in found and len(found) == 13
    assert equal(driver(made.path).run(prompt, 9), made.logits(prompt))


def test_matrices_whose_blocks_of_4_bits_cross_rows_are_dequantized(own, driver, ids):
    made, prompt = own("bnb-nf4", intermediate_size=96), ids(9, 2)
    quantization = read_checkpoint(made.path).quantization
    assert quantization.native(("model.layers.0.mlp.down_proj",), "triton") is None
    assert quantization.native(("model.layers.0.mlp.up_proj",), "triton") == GgmlBlocks("NF4")
    engine = driver(made.path, kernels="triton")
    compare(engine.checkpoint, "triton")
    assert equal(engine.run(prompt, 9), made.logits(prompt))


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("bnb-nf4", f"{Z}.weight.absmax", torch.ones(5), "absmax has 5 scales for 32,768 in blocks of 64"),
        ("bnb-nf4", f"{Z}.weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8), "is damaged"),
        (
            "bnb-nf4",
            f"{Z}.weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"blocksize": 64, "shape": [1, 2]}'), dtype=torch.uint8),
            r"says shape \[1, 2\], but config.json implies \[256, 128\]",
        ),
        ("bnb-int8", f"{Z}.weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format is not 0"),
        (
            "gptq-8-ordered-zeros",
            f"{Z}.g_idx",
            torch.full((128,), 7, dtype=torch.int32),
            "has groups outside of 0 to 1",
        ),
    ],
)
def test_numbers_that_contradict_the_settings_are_refused_as_they_are_read(own, driver, kind, name, tensor, message):
    made = own(kind)
    found = made.tensors()
    assert name in found
    save_file(found | {name: tensor}, made.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        driver(made.path)
