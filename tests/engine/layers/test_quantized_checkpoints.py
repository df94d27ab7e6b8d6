"""Checkpoints in gptq, awq and compressed-tensors: the numbers they mean, by torch and by compiled kernels."""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from engine.api.errors import CheckpointError
from engine.layers.linear import LinearLayer
from engine.lowering.footprint import part_bytes
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.ranks import tensor_problem
from engine.models.sources import linear_paths, projections, sources
from engine.weights.files import Weights
from engine.weights.quantized import QuantizedWeights
from engine.weights.slot import fused, slots
from kernels.cpu import program
from kernels.cpu.library import best
from kernels.cpu.packing import pack
from kernels.cpu.program import Program, StepData
from kernels.quantisation import activation_block, outlier_ratio, rounded_rows
from tests.engine.layers.planned import predicted
from tests.engine.quantized_writers import KINDS, write


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
    return lambda kind: write(tmp_path, KINDS[kind])


def linears(model):
    return [layer for layer in model.weights.by_name.values() if isinstance(layer, LinearLayer)]


def restored(plain, layer):
    """The matrix of a layer out of the plain checkpoint's tensors."""
    sources = list(dict.fromkeys(row.source for row in layer.part.rows))
    return torch.cat([plain[f"{layer.path}.{source}.weight"] for source in sources])


@pytest.mark.parametrize("kind", KINDS)
def test_torch_runs_the_restored_weights_as_transformers_does(kind, written, driver, ids):
    made, prompt = written(kind), ids(17, 1)
    got = driver(made.path).run(prompt, 5)
    torch.testing.assert_close(got, made.logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 32}),
        ("Phi3", {}),
        ("Llama", {"mlp_bias": True}),
        ("Qwen3Moe", {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    ],
)
def test_other_architectures_biases_and_sources_of_several_rows(architecture, more, tmp_path, driver, ids):
    made, prompt = write(tmp_path, KINDS["awq-64"], architecture, **more), ids(11, 2)
    got = driver(made.path).run(prompt, 4)
    want = made.logits(prompt)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert near(driver(made.path, kernels=best()).run(prompt, 4), want)


@pytest.mark.parametrize("kind", KINDS)
def test_every_compiled_projection_multiplies_by_the_restored_weights(kind, written, compiled, driver):
    """Activations rounded block by block, as those kernels do; the weights are not rounded again."""
    made = written(kind)
    engine, plain = driver(made.path, kernels=compiled), load_file(made.plain / "model.safetensors")
    for layer in linears(engine.model):
        weight = restored(plain, layer)
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
        y = torch.empty(3, len(weight))
        op = program.linear(layer.weight, None, x, y)
        engine.model.target.team.run(Program([op], (x, y)), StepData(3))
        if layer.weight.form != "tiles_f32":
            order = layer.weight.order
            columns = x if order is None else x[:, order.long()]
            group, bits = layer.weight.group, 4 if layer.weight.form == "tiles_int4" else 8
            values, scales, outliers = rounded_rows(columns, activation_block(group), outlier_ratio(bits))
            x = values.double() * scales.double() + outliers.double()
            weight = weight if order is None else weight[:, order.long()]
        want = x.double() @ weight.double().T
        assert (y.double() - want).abs().max() / want.abs().max() < 2e-6, layer.name


def near(got, want):
    """Compare within 4 %: 8-bit activations cause an error of 1 to 2 % in these models."""
    return (got - want).norm() / want.norm() < 0.04


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_stays_near_transformers(kind, written, driver, ids):
    made, prompt = written(kind), ids(17, 1)
    assert near(driver(made.path, kernels=best()).run(prompt, 5), made.logits(prompt))


@pytest.mark.parametrize("kind", KINDS)
def test_projections_are_held_in_their_own_bits(kind, written, driver):
    """Layers that the checkpoint stores in float32 are excluded."""
    made = written(kind)
    engine = driver(made.path, kernels=best())
    left_out = KINDS[kind].settings.get("ignore", ())
    forms = {layer.weight.form for layer in linears(engine.model) if layer.name not in left_out}
    assert forms == {f"tiles_int{KINDS[kind].bits}"}
    assert {layer.weight.form for layer in linears(engine.model) if layer.name in left_out} <= {"tiles_f32"}


@pytest.mark.parametrize("kind", ["gptq-64-ordered", "w8a8"])
def test_each_matrix_is_packed_once_and_at_load(kind, written, driver, ids, monkeypatch):
    packed = []
    monkeypatch.setattr("engine.layers.linear.pack_for", lambda weight, *more: packed.append(1) or pack(weight, *more))
    engine = driver(written(kind).path, kernels=best())
    assert len(packed) == len(list(linears(engine.model))) + 1  # and the head
    engine.run(ids(17, 1), 5)
    assert len(packed) == len(list(linears(engine.model))) + 1


@pytest.mark.parametrize("rows", [1, 257])
def test_eight_bits_multiply_like_a_whole_number_product(rows, written, compiled, driver):
    made = written("w8a8")
    engine, tensors = driver(made.path, kernels=compiled), made.tensors()
    layer = next(iter(linears(engine.model)))
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    weight = torch.cat([tensors[f"{name}.weight"] for name in names]).long()
    scales = torch.cat([tensors[f"{name}.weight_scale"] for name in names])[:, 0].double()
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(1))
    y = torch.empty(rows, len(weight))
    engine.model.target.team.run(Program([program.linear(layer.weight, None, x, y)], (x, y)), StepData(rows))
    values, x_scales, outliers = rounded_rows(x, 64, outlier_ratio(8))
    want = (values.double() * x_scales.double() + outliers.double()) @ weight.T.double() * scales
    # Blocks are added in float32: if they cancel, the error is relative to the largest block.
    assert (y.double() - want).abs().max() < 1e-6 * want.abs().max()


def test_a_row_is_the_same_whatever_stands_beside_it(written, compiled, driver, ids):
    for kind in ("gptq-64-ordered", "int8-groups"):
        path, prompt = written(kind).path, ids(29, 9)
        want = driver(path, kernels=compiled).run(prompt, len(prompt))
        company = driver(path, kernels=compiled, threads=1, block_tokens=3, seed=4)
        request, other = company.add(prompt), company.add(ids(40, 40))
        company.step([(other, 20), (request, 11)])
        company.step([(request, 18), (other, 20)])
        assert torch.equal(request.result, want)


def whole_zeros(*shape):
    return torch.zeros(shape, dtype=torch.int32)


Q = "model__layers__1__mlp__up_proj"


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("gptq-128", f"{Q}__qweight", None, r"lacks model\.layers\.1\.mlp\.up_proj\.qweight"),
        (
            "gptq-128",
            f"{Q}__qweight",
            torch.zeros(3, 256, dtype=torch.int32),
            r"qweight has shape \[3, 256\], .* \[16, 256\]",
        ),
        ("gptq-128", f"{Q}__qzeros", torch.zeros(1, 32), "qzeros is of type F32; supported are I32"),
        ("gptq-128", f"{Q}__scales", torch.zeros(2, 256), r"scales has shape \[2, 256\], .* \[1, 256\]"),
        ("gptq-64-ordered", f"{Q}__g_idx", None, r"lacks .*up_proj\.g_idx"),
        ("awq-64", f"{Q}__qzeros", whole_zeros(1, 32), r"qzeros has shape \[1, 32\], .* \[2, 32\]"),
        ("packed-32-zeros", f"{Q}__weight_zero_point", None, r"lacks .*up_proj\.weight_zero_point"),
        ("w8a8", f"{Q}__weight", torch.zeros(256, 128), "weight is of type F32; supported are I8"),
        ("awq-64", f"{Q}__weight", torch.zeros(256, 128), r"has .*up_proj\.weight, which the declared model"),
    ],
)
def test_tensors_that_do_not_fit_are_found_without_reading_weights(own, kind, name, tensor, message):
    made = own(kind)
    made.change(**{name: tensor})
    read = read_checkpoint(made.path)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(read.model, read.tensors, read.quantization)


WRONG = torch.arange(128, dtype=torch.int32) // 64


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("gptq-64-ordered", f"{Q}__g_idx", whole_zeros(128), "does not put 64 inputs in each group"),
        ("gptq-32-zeros", f"{Q}__g_idx", WRONG.flip(0), "does not put 32 inputs in each group"),
        ("gptq-8-bits", f"{Q}__qzeros", whole_zeros(4, 64), "zero points other than 128"),
        ("gptq-128", f"{Q}__bias", torch.ones(256), "without a bias"),
        (
            "packed-128",
            f"{Q}__weight_shape",
            torch.tensor([128, 256]),
            r"weight_shape is \[128, 256\], .* \[256, 128\]",
        ),
    ],
)
def test_numbers_that_contradict_the_settings_are_refused_as_they_are_read(own, driver, kind, name, tensor, message):
    made = own(kind)
    made.change(**{name: tensor})
    with pytest.raises(CheckpointError, match=message):
        driver(made.path)


def test_an_order_that_the_settings_deny_is_refused(own, driver):
    made = own("gptq-64-ordered")
    made.configure(desc_act=False)
    with pytest.raises(CheckpointError, match="has groups that are not contiguous, but .* desc_act: false"):
        driver(made.path)


def test_projections_of_different_orders_are_restored_by_torch_and_refused_by_compiled_kernels(own, driver, ids):
    made, prompt = own("gptq-64-ordered"), ids(9, 3)
    tensors = made.tensors()
    flipped = tensors["model.layers.1.mlp.up_proj.g_idx"].flip(0).contiguous()
    made.change(**{f"{Q}__g_idx": flipped})
    assert driver(made.path).run(prompt, 9).isfinite().all()
    with pytest.raises(CheckpointError, match=r"gate_proj, .*up_proj group the same .* set hardware\.kernels to torch"):
        driver(made.path, kernels=best())


def test_zero_biases_that_exporters_add_change_nothing(own, driver, ids):
    made, prompt = own("gptq-128"), ids(9, 3)
    want = driver(made.path).run(prompt, 9)
    made.change(**{f"{Q}__bias": torch.zeros(256, dtype=torch.float16)})
    assert torch.equal(driver(made.path).run(prompt, 9), want)


def test_a_symmetric_checkpoint_with_other_zero_points_keeps_them(own, driver, ids):
    """The stored zero points are used, even if the settings say that the checkpoint is symmetric."""
    made, prompt = own("gptq-32-zeros"), ids(9, 3)
    made.configure(sym=True)
    torch.testing.assert_close(driver(made.path).run(prompt, 9), made.logits(prompt), atol=1e-4, rtol=0)
    assert near(driver(made.path, kernels=best()).run(prompt, 9), made.logits(prompt))


def test_sources_of_different_forms_are_restored_together(own, driver, ids):
    made, prompt = own("packed-128"), ids(9, 3)
    plain = load_file(made.plain / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj"
    made.configure(ignore=["lm_head", "model.layers.1.mlp.down_proj", name])
    gone = [f"{name}.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_shape")]
    made.change(**{one.replace(".", "__"): None for one in gone}, **{f"{name}.weight": plain[f"{name}.weight"]})
    engine = driver(made.path, kernels=best())
    assert near(engine.run(prompt, 9), made.logits(prompt))
    forms = [layer.weight.form for layer in linears(engine.model)]
    assert forms == ["tiles_int4", "tiles_int4", "tiles_f32", *["tiles_int4"] * 4, "tiles_f32"]
    assert part_bytes(predicted(engine.checkpoint, best())) == engine.model.memory_usage.parts


def test_a_head_may_be_quantized_too(tmp_path, driver, ids):
    kind = KINDS["gptq-32-zeros"]
    made = write(tmp_path, kind)
    one = kind.quantize(made.tensors()["lm_head.weight"])
    made.configure(lm_head=True)
    own = {f"lm_head__{suffix}": tensor for suffix, tensor in kind.write(one).items()}
    made.change(lm_head__weight=None, **own)
    prompt = ids(9, 3)
    torch_engine, compiled_engine = driver(made.path), driver(made.path, kernels=best())
    assert compiled_engine.model.vocabulary.head.form == "tiles_int4"
    got = torch_engine.run(prompt, 9)
    torch.testing.assert_close(torch_engine.model.vocabulary.head.float(), one.restored())
    assert near(compiled_engine.run(prompt, 9), got)


def test_all_projections_of_the_kinds_are_quantized_but_for_those_left_out(written):
    for kind in KINDS:
        read = read_checkpoint(written(kind).path)
        left_out = set(KINDS[kind].settings.get("ignore", ())) | {"lm_head"}
        assert set(read.quantization.formats) == set(linear_paths(read.model)) - left_out


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_their_share_of_the_whole_numbers(kind, size, written):
    """Each rank's weights are slices of the whole weights. Sizes that cannot be split are rejected before loading."""
    checkpoint = read_checkpoint(written(kind).path)
    model, own = checkpoint.model, checkpoint.quantization
    weights = QuantizedWeights(Weights(checkpoint.tensors, lambda done: None), own, sources(model))
    refused = 0
    for path, part in projections(model):
        for rank in range(size):
            share = slots(part, Fixed(rank, size))
            try:
                numbers = weights.native(path, share, "compiled", torch.device("cpu"))
            except CheckpointError as error:
                assert part.split == "inputs" and "lower parallelism.tensor" in str(error)
                refused += 1
                continue
            want = fused(weights.read, path, "weight", share, torch.float32, torch.device("cpu"))
            if numbers is not None:
                assert torch.equal(numbers.restored(), want), path
    problem = tensor_problem(model, own, size, "compiled")
    assert (problem is not None) == (refused > 0), problem
    assert tensor_problem(model, own, size) is None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_ranks_stay_as_near_to_transformers_as_one_does(kind, size, written, driver, ids, on_ranks):
    made, prompt = written(kind), ids(17, 1)
    checkpoint = read_checkpoint(made.path)

    def work(world):
        return driver(made.path, kernels=best(), world=world, threads=1).run(prompt, 5)

    if tensor_problem(checkpoint.model, checkpoint.quantization, size, "compiled") is not None:
        with pytest.raises(CheckpointError, match="set hardware.kernels to torch"):
            on_ranks(size, work, best())
        return
    for got in on_ranks(size, work, best()):
        assert near(got, made.logits(prompt))


@dataclass(frozen=True)
class Fixed:
    """A world without communication."""

    rank: int
    size: int
