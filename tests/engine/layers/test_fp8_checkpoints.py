"""Tests of fp8 checkpoints.

With torch, weights are dequantized and results equal transformers. Triton kernels keep weights in fp8; results are
close to transformers with activations rounded as the checkpoint specifies."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.model import TextModel
from engine.layers.rounded import rounding_of
from engine.lowering.operations import ExpertLinear
from engine.models.checkpoint import read_checkpoint
from engine.models.ranks import tensor_problem
from kernels.cpu.library import best
from kernels.fp8 import ALIGNED, Fp8Experts, Fp8Products, Fp8Weight, products_of
from kernels.fp8_matmul import library_product
from kernels.jit import installed
from tests.engine.fp8_writers import E4M3, FP8_KINDS, write_experts
from tests.engine.layers.test_footprint import FakeWorld
from tests.engine.layers.test_quantized_checkpoints import linears, restored
from tests.engine.quantized_writers import write
from tests.tiers import NIGHTLY, thinned

needs_triton = pytest.mark.skipif(not installed(), reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
RAGGED = {"hidden_size": 160, "head_dim": 40, "intermediate_size": 200, "num_key_value_heads": 1}
WIDENED = Fp8Products(rounded=False)

QKV = "model.layers.0.self_attn.q_proj+k_proj+v_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of a kind, made once. Do not change it."""
    made = {}

    def get(kind, architecture="Llama", **more):
        key = (kind, architecture, tuple(more))
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp(kind), FP8_KINDS[kind], architecture, **more)
        return made[key]

    return get


@pytest.fixture
def own(tmp_path):
    """A checkpoint that the test may change."""
    return lambda kind, **more: write(tmp_path, FP8_KINDS[kind], **more)


# Restored


@pytest.mark.parametrize("more", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.sampled(3)
def test_torch_runs_the_restored_weights_as_transformers_does(kind, more, written, driver, ids):
    made, prompt = written(kind, **more), ids(17, 1)
    torch.testing.assert_close(driver(made.path).run(prompt, 5), made.logits(prompt), atol=1e-4, rtol=0)


def test_scales_of_a_kv_cache_and_modelopts_own_file_change_no_logit(own, driver, ids):
    made, prompt = own("modelopt"), ids(17, 1)
    wanted = made.logits(prompt)
    config = json.loads((made.path / "config.json").read_text())
    settings = config.pop("quantization_config")
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": settings["ignore"]}
    (made.path / "config.json").write_text(json.dumps(config))
    (made.path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    names = [f"model__layers__{n}__self_attn__{one}_proj__{one}_scale" for n in (0, 1) for one in "kv"]
    made.change(**{name: torch.tensor(0.02) for name in names})
    torch.testing.assert_close(driver(made.path).run(prompt, 5), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["blocks", "autofp8-static", "channel-dynamic"])
def test_compiled_kernels_multiply_by_the_restored_weights(kind, written, driver, ids):
    made, prompt = written(kind), ids(17, 1)
    torch.testing.assert_close(driver(made.path, kernels=best()).run(prompt, 5), made.logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Phi3", {}),
        ("Qwen3Moe", {}),
    ],
)
@pytest.mark.parametrize("kind", ["blocks", "autofp8-static", "channel-dynamic"])
@pytest.mark.sampled(2)
def test_other_architectures_biases_experts_and_sources_of_several_rows(
    kind, architecture, more, tmp_path, driver, ids
):
    made = write_experts(tmp_path, kind) if architecture == "Qwen3Moe" else None
    made, prompt = made or write(tmp_path, FP8_KINDS[kind], architecture, **more), ids(11, 2)
    torch.testing.assert_close(driver(made.path).run(prompt, 4), made.logits(prompt), atol=1e-4, rtol=0)


def test_every_code_is_what_torch_reads_and_NaN_is_NaN(own):
    made, name = own("autofp8-dynamic"), "model.layers.0.self_attn.q_proj"
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).repeat(64).reshape(128, 128)
    made.change(**{f"{name.replace('.', '__')}__weight": codes})
    checkpoint = read_checkpoint(made.path)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    model = TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu")
    model.load(checkpoint)
    scale = made.tensors()[f"{name}.weight_scale"]
    got = next(iter(linears(model))).weight[:128]
    torch.testing.assert_close(got, codes.float() * scale, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) == 2 * 64


# Weights kept in fp8


# One kind for each form of scales of weights and activations, and a partly quantized model. The others differ in the
# names and types of their tensors, which the tests of the restored weights and of each projection cover.
EACH_FORM = (
    *("tensor-static", "channel-dynamic", "channel-weights-only", "blocks"),
    "modelopt",
)


@needs_triton
@pytest.mark.parametrize("more", thinned([{}, RAGGED], kept=[RAGGED]), ids=["whole", "ragged"])
@pytest.mark.parametrize("kind", thinned(FP8_KINDS, EACH_FORM))
def test_triton_runs_them_as_transformers_with_activations_rounded(kind, more, written, driver, ids):
    """Values on the boundary between two codes may differ, because the last bit decides their rounding."""
    made, prompt = written(kind, **more), ids(9, 1)
    model = made.model()
    stored = made.tensors()
    for name, module in model.named_modules():
        if stored.get(f"{name}.weight", torch.zeros(0)).dtype == E4M3:
            module.register_forward_pre_hook(lambda _, read: (FP8_KINDS[kind].rounded(read[0]),))
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    got = driver(made.path, kernels="triton").run(prompt, 7)
    assert (got - want).norm() / want.norm() < 5e-3
    plain = made.logits(prompt)
    assert (got - plain).norm() / plain.norm() < 0.1


@needs_triton
@pytest.mark.parametrize("kind", thinned(["blocks", "tensor-static", "channel-weights-only"], ["blocks"]))
def test_widened_weights_give_the_logits_of_restored_ones(kind, written, driver, ids):
    """Activations are not rounded if the matmul does not use e4m3."""
    made, prompt = written(kind, **RAGGED), ids(9, 3)
    got = driver(made.path, kernels="triton", fp8=WIDENED).run(prompt, 4)
    torch.testing.assert_close(got, made.logits(prompt), atol=1e-4, rtol=0)


@needs_triton
@pytest.mark.parametrize("kind", thinned(["blocks", "channel-dynamic"], ["blocks"]))
def test_experts_stay_in_fp8(kind, tmp_path, driver, ids):
    made, prompt = write_experts(tmp_path, kind), ids(9, 4)
    engine = driver(made.path, kernels="triton", fp8=WIDENED)
    torch.testing.assert_close(engine.run(prompt, 4), made.logits(prompt), atol=1e-4, rtol=0)
    matrices = [op.matrices for op in engine.model.program.ops if isinstance(op, ExpertLinear)]
    assert matrices and isinstance(engine.model.weights.by_name[QKV].weight, Fp8Weight)
    experts = [engine.model.weights.matrix(matrix) for of in matrices for matrix in of]
    assert all(isinstance(expert.weight, Fp8Weight) for expert in experts)
    stacks = engine.model.weights.stacks.values()
    assert all(stack.whole is None and stack.fp8.values.dtype == E4M3 for stack in stacks)
    got, plain = driver(made.path, kernels="triton").run(prompt, 4), made.logits(prompt)
    assert 0 < (got - plain).norm() / plain.norm() < 0.1


def test_static_scale_of_experts_is_the_largest():
    def matrix(static):
        weight = torch.randn(24, 32).to(E4M3)
        return Fp8Weight(weight, torch.rand(24, 1), static_scale=torch.tensor([static]))

    given = [matrix(static) for static in (0.5, 2.0, 1.0)]
    experts = Fp8Experts.empty(3, given[0])
    placed = [experts.put(number, one) for number, one in enumerate(given)]
    assert [one.static_scale.item() for one in placed] == [0.5, 2.0, 1.0] and experts.static_scale.item() == 2.0
    assert all(torch.equal(one.restored(), wanted.restored()) for one, wanted in zip(placed, given, strict=True))
    assert experts.put(0, replace(given[0], static_scale=None)) is None, "stored differently"


@needs_triton
@pytest.mark.parametrize("more", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("kind", FP8_KINDS)
@pytest.mark.sampled(3)
def test_each_projection_multiplies_by_its_own_scales(kind, more, written, driver):
    made, kind_ = written(kind, **more), FP8_KINDS[kind]
    engine, plain = driver(made.path, kernels="triton"), load_file(made.plain / "model.safetensors")
    seen = 0
    for layer in linears(engine.model):
        weight = restored(plain, layer)
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1)) * 5
        if isinstance(layer.weight, Fp8Weight):
            seen += 1
            torch.testing.assert_close(layer.weight.restored(), weight, rtol=1e-6, atol=0)
            x = kind_.rounded(x)
            assert layer.weight.values.nbytes == weight.numel()
        got = engine.model.target.multiply(x, layer.weight) if kind_.inputs is None else layer(x)
        want = x.double() @ weight.double().T
        assert (got - want).abs().max() / want.abs().max() < 2e-3, layer.name
    assert seen == 8 - (2 if kind == "modelopt" else 0 if kind.startswith("autofp8") else 1)


@needs_triton
@pytest.mark.parametrize("kind", ["tensor-static", "autofp8-static"])
def test_largest_static_scale_of_a_matrix_is_used(kind, own, driver):
    """Activations that saturate with a smaller scale do not with the largest; the MLP keeps its own scale."""
    made = own(kind)
    scales = {"q": 0.01, "k": 0.08, "v": 0.02}
    for name, scale in scales.items():
        path = f"model__layers__0__self_attn__{name}_proj__input_scale"
        made.change(**{path: torch.full_like(made.tensors()[path.replace("__", ".")], scale)})
    engine = driver(made.path, kernels="triton")
    first, _, up, *_ = linears(engine.model)
    assert first.weight.static_scale.item() == pytest.approx(
        0.08, rel=4e-3
    ) and up.weight.static_scale.item() == pytest.approx(0.02, rel=4e-3)
    x = torch.tensor([0.01, 30.0, -30.0, 100.0]).repeat(1, 32)
    taken = (x / first.weight.static_scale).clamp(-448, 448).to(E4M3).float() * first.weight.static_scale
    want = taken @ first.weight.restored().T
    assert (first(x) - want).abs().max() <= 1e-5 * want.abs().max()


@needs_triton
@pytest.mark.parametrize("kind", thinned(["blocks", "channel-dynamic"], ["blocks"]))
def test_a_row_is_the_same_beside_others_bit_for_bit(kind, written, driver, ids):
    """Prompts in pieces and single tokens together in one step."""
    made = written(kind)
    prompts = [ids(length, seed=length) for length in (6, 8)]
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


@needs_triton
@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        pytest.param("Phi3", {}, marks=NIGHTLY),
        pytest.param("Cohere", {"use_qk_norm": False}, marks=NIGHTLY),
        pytest.param("Olmo2", {}, marks=NIGHTLY),
        pytest.param("Starcoder2", {}, marks=NIGHTLY),
        ("Gemma2", {"head_dim": 32}),
    ],
)
def test_every_block_type_reads_rows_in_its_format(architecture, more, tmp_path, driver, ids):
    """Cases: biases; one tensor with several slices; two sub-layers after one LayerNorm; no norm before a sub-layer;
    LayerNorm and an MLP without a gate; norms after sub-layers."""
    made, prompt = write(tmp_path, FP8_KINDS["autofp8-dynamic"], architecture, **more), ids(5, 2)
    plain = made.logits(prompt)
    widened = driver(made.path, kernels="triton", fp8=WIDENED).run(prompt, 4)
    assert (widened - plain).abs().max() <= 1e-4 * plain.abs().max().clamp(min=1.0)
    got = driver(made.path, kernels="triton").run(prompt, 4)
    assert (got - plain).norm() / plain.norm() < 0.12
    assert not torch.equal(got, widened)


def test_rows_are_quantized_once_if_all_bodies_share_the_format(written, driver, own):
    def readers(made):
        """The first matrices of the attention and of the MLP."""
        loaded = driver(made.path, kernels="triton").model.weights.by_name
        return loaded[QKV], loaded["model.layers.0.mlp.gate_proj+up_proj"]

    attention, mlp = readers(written("channel-dynamic"))
    blocks, _ = readers(written("blocks"))
    static, static_mlp = readers(written("autofp8-static"))
    plain_made = own("channel-dynamic")
    plain_made.leave_out("model.layers.0.self_attn.q_proj")
    plain, _ = readers(plain_made)
    both = rounding_of((attention, mlp))
    assert (both.group, both.static_scale) == (128, None)
    assert rounding_of((plain,)) is None
    assert rounding_of((attention, plain)) is None and rounding_of((plain, attention)) is None
    narrow = written("channel-dynamic", **RAGGED)
    assert rounding_of((attention, readers(narrow)[0])) is None
    assert rounding_of((blocks,)).group == 128
    assert rounding_of((static,)).static_scale is static.weight.static_scale
    assert rounding_of((static, static_mlp)) is None


@needs_triton
def test_a_matrix_of_which_one_source_is_plain_is_restored(own, driver, ids):
    made, prompt = own("blocks"), ids(5, 1)
    made.leave_out("model.layers.0.self_attn.k_proj")
    made.leave_out("model.layers.1.mlp.gate_proj")
    engine = driver(made.path, kernels="triton", fp8=WIDENED)
    torch.testing.assert_close(engine.run(prompt, 4), made.logits(prompt), atol=1e-4, rtol=0)
    held = [isinstance(layer.weight, Fp8Weight) for layer in linears(engine.model)]
    assert held == [False, True, True, True, True, False, False, True]  # the sixth is in no checkpoint's fp8


@needs_triton
def test_norms_and_activations_round_where_all_their_readers_are_in_fp8(written, driver, ids, monkeypatch):
    """A layer excluded from quantization reads unrounded inputs: here the down projection of layer 1."""
    from engine.layers import fused_rows
    from engine.layers.fused import rows
    from kernels import fp8

    called = []

    def counted(name, op):
        return lambda *args: called.append(name) or op(*args)

    monkeypatch.setattr(rows, "RMS_NORM_QUANTIZED", counted("norm", rows.RMS_NORM_QUANTIZED))
    monkeypatch.setattr(rows, "ACTIVATION_QUANTIZED", counted("activation", rows.ACTIVATION_QUANTIZED))
    monkeypatch.setattr(fused_rows, "ACTIVATION", counted("plain activation", fused_rows.ACTIVATION))
    monkeypatch.setattr(fp8, "QUANTIZE_ROWS", counted("rows", fp8.QUANTIZE_ROWS))
    driver(written("channel-dynamic").path, kernels="triton").run(ids(3, 1), 3)
    first = ["norm", "rows", "norm", "activation"]
    assert called == [*first, "norm", "rows", "norm", "plain activation"]


@pytest.mark.parametrize("bias", [False, True])
def test_library_product_gives_the_same_logits(bias):
    """torch has it for a CPU too, with the arguments that a GPU gets."""
    draw = torch.Generator().manual_seed(1)
    weight = Fp8Weight(torch.randn(3 * ALIGNED, 64, generator=draw).to(E4M3), torch.rand(48, 1, generator=draw) + 0.1)
    x, added = torch.randn(5, 64, generator=draw), torch.randn(48, generator=draw).bfloat16() if bias else None
    got = Fp8Products(library=True).multiply(x, weight, added, torch.bfloat16)
    want = x @ weight.restored().T + (0 if added is None else added.float())
    assert got.dtype == torch.bfloat16 and (got.float() - want).norm() / want.norm() < 0.05
    own = Fp8Products().multiply(x, weight, added, torch.float32)
    assert (got.float() - own).abs().max() <= own.abs().max() / 128


def test_library_is_used_for_supported_products(monkeypatch):
    from kernels import fp8

    asked = []
    monkeypatch.setattr(fp8, "library_product", lambda *args: asked.append(1) or library_product(*args))
    x = torch.randn(2, 256)

    def multiplied(weight, dtype=torch.bfloat16, capability=(9, 0), invariant=False):
        asked.clear()
        products = products_of(capability, invariant=invariant)
        products.multiply(x[:, : weight.values.shape[1]], weight, None, dtype)
        return bool(asked)

    def made(outputs=32, inputs=256, **more):
        return Fp8Weight(torch.randn(outputs, inputs).to(E4M3), torch.ones(outputs, 1), **more)

    assert multiplied(made())
    assert not multiplied(made(), torch.float16)
    assert not multiplied(made(outputs=24)) and not multiplied(made(inputs=72))
    assert not multiplied(Fp8Weight(made().values, torch.ones(1, 2), unit=128))
    assert not multiplied(made(rounds=False))
    assert not multiplied(made(), invariant=True) and multiplied(made(), capability=(10, 0))
    assert not multiplied(made(), capability=(8, 9)) and not multiplied(made(), capability=(12, 0))


def test_devices_without_e4m3_products_widen_weights():
    assert products_of((8, 0), invariant=False) == products_of(None, invariant=False) == Fp8Products(rounded=False)
    assert products_of((8, 9), invariant=False).rounded and products_of((10, 0), invariant=True).rounded


# Rounded at load


@needs_triton
@pytest.mark.parametrize("name", thinned(["llama", "qwen3", "gemma2"], ["gemma2"]))
def test_a_plain_checkpoint_is_rounded_by_output_and_stays_near(name, bf16_checkpoint, driver, ids):
    saved, prompt = bf16_checkpoint(name), ids(9)
    want = saved.logits(prompt)
    made = driver(saved.path, kernels="triton", bits="fp8")
    got = made.run(prompt, 5)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    stored = load_all(saved.path)
    for layer in linears(made.model):
        weight = restored(stored, layer).float()
        assert isinstance(layer.weight, Fp8Weight) and layer.weight.values.shape == weight.shape
        scales = weight.abs().amax(1, keepdim=True) / 448
        torch.testing.assert_close(layer.weight.scales, scales, rtol=1e-6, atol=0)
        own = (weight / scales).clamp(-448, 448).to(E4M3)
        assert (own.float() == layer.weight.values.float()).float().mean() > 0.999
    assert made.model.vocabulary.head.dtype == torch.float32


@needs_triton
def test_experts_of_a_plain_checkpoint_are_rounded_too(bf16_checkpoint, driver, ids):
    saved, prompt = bf16_checkpoint("mixtral"), ids(9)
    made = driver(saved.path, kernels="triton", bits="fp8")
    similarity = torch.nn.functional.cosine_similarity(
        made.run(prompt, 5).flatten(), saved.logits(prompt).flatten(), dim=0
    )
    assert similarity > 0.95
    stacks = made.model.weights.stacks.values()
    assert stacks and all(stack.fp8 is not None and stack.whole is None for stack in stacks)


def load_all(folder):
    """The tensors of all files of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_only_kernels_with_fp8_products_quantize_to_fp8(bf16_checkpoint):
    checkpoint = read_checkpoint(bf16_checkpoint("llama").path)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    with pytest.raises(ValueError, match="torch cannot multiply by fp8 weights"):
        TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu", bits="fp8")


# Several ranks


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_each_rank_holds_its_rows_and_inputs_with_their_scales(kind, written):
    """The concatenated matrices of all ranks equal those of a single rank."""
    made = written(kind, hidden_size=256, head_dim=64)
    checkpoint = read_checkpoint(made.path)
    assert tensor_problem(checkpoint.model, checkpoint.quantization, 2, "triton") is None

    def loaded(world):
        form = layout(checkpoint.model, block_tokens=4, element_bytes=4, ranks=world.size)
        model = TextModel(checkpoint.model, form, world, torch.float32, "cpu", fp8=Fp8Products())
        model.load(checkpoint)
        return list(linears(model))

    whole, ranks = loaded(SINGLE), [loaded(FakeWorld(rank, 2)) for rank in range(2)]
    for layer, *shares in zip(whole, *ranks, strict=True):
        full, parts = _numbers(layer), [_numbers(share) for share in shares]
        if layer.part.split == "inputs":
            torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=0)
            continue
        heights = [row.units * row.width for row in layer.part.rows]
        pieces = [part.split([height // 2 for height in heights]) for part in parts]
        again = torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair])
        torch.testing.assert_close(again, full, rtol=0, atol=0)


@pytest.mark.parametrize("groups", [1, 4])
def test_ranks_share_mamba_mixers_in_fp8(groups, tmp_path, driver, ids, on_ranks):
    """Each rank has the states of a single group, and its share of several."""
    sizes = {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": groups, "chunk_size": 8}
    made = write(tmp_path, FP8_KINDS["channel-dynamic"], "Mamba2", **sizes)
    prompt = ids(19, 3)
    want = made.logits(prompt)
    torch.testing.assert_close(driver(made.path).run(prompt, 7), want, atol=1e-4, rtol=0)
    for got in on_ranks(2, lambda world: driver(made.path, world=world).run(prompt, 7)):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def _numbers(layer):
    return layer.weight.restored() if isinstance(layer.weight, Fp8Weight) else layer.weight


# Errors


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("tensor-static", "input_scale"),
        ("channel-dynamic", "weight_scale"),
        ("blocks", "weight_scale_inv"),
        ("transformers-tensor", "activation_scale"),
        ("autofp8-static", "weight_scale"),
    ],
)
def test_a_missing_scale_is_named(kind, missing, own):
    made, name = own(kind), f"model.layers.1.mlp.up_proj.{missing}"
    made.change(**{name.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale_inv": torch.ones(1, 1)}, r"has shape \[1, 1\], but config.json implies \[2, 1\]"),
        ({"weight_scale_inv": torch.ones(2, 1).to(torch.float8_e5m2)}, "is of type F8_E5M2; supported are F16"),
        ({"weight": torch.ones(256, 128).to(torch.float8_e5m2)}, "weight is of type F8_E5M2; supported are F8_E4M3"),
        ({"weight": torch.ones(256, 128)}, "weight is of type F32; supported are F8_E4M3"),
        ({"input_scale": torch.ones(1)}, "has model.layers.1.mlp.up_proj.input_scale, which the declared model"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_settings_are_named(change, message, own):
    made = own("blocks")
    made.change(**{f"model__layers__1__mlp__up_proj__{name}": tensor for name, tensor in change.items()})
    with pytest.raises(CheckpointError, match=message):
        load(made)


def test_an_fp8_tensor_without_settings_is_refused(own):
    made = own("blocks")
    config = json.loads((made.path / "config.json").read_text())
    del config["quantization_config"]
    (made.path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for name, tensor in made.tensors().items() if not name.endswith("_scale_inv")}
    save_file(tensors, made.path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is of type F8_E4M3; supported are F32"):
        load(made)


def test_ranks_that_cut_blocks_are_refused_where_fp8_is_multiplied(own):
    checkpoint = read_checkpoint(own("blocks").path)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4, ranks=2)
    model = TextModel(checkpoint.model, form, FakeWorld(0, 2), torch.float32, "cpu", fp8=Fp8Products())
    problem = "model.layers.0.self_attn.o_proj has blocks of 128 inputs, and 2 ranks would get 64 of 128 each"
    assert tensor_problem(checkpoint.model, checkpoint.quantization, 2, "triton") == problem
    with pytest.raises(CheckpointError, match=rf"^{problem}; lower parallelism.tensor \(possible: 1\), or"):
        model.load(checkpoint)
    restoring = TextModel(checkpoint.model, form, FakeWorld(0, 2), torch.float32, "cpu")
    restoring.load(checkpoint)


def load(made):
    checkpoint = read_checkpoint(made.path)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu").load(checkpoint)
