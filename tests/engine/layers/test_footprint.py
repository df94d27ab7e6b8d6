"""Tests that planned bytes equal allocated bytes for every architecture, format and kind of kernels."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.model import TextModel
from engine.lowering.footprint import mapped_bytes, part_bytes
from engine.lowering.operations import ExpertLinear, Linear
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.ranks import rows_of, share_of, tensor_problem
from engine.weights.packed import PackedFile
from kernels.cpu.library import BF16_VARIANTS, tiling, usable
from kernels.cpu.program import Team
from kernels.fp8 import Fp8Products
from tests.engine.fp8_writers import FP8_KINDS, write_experts
from tests.engine.layers import test_gguf
from tests.engine.layers.conftest import CASES
from tests.engine.layers.planned import predicted
from tests.engine.quantized_writers import KINDS, write
from tests.tiers import paired

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class FakeWorld:
    """One of several ranks that never talks to the others."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("loading needs no other rank")

    all_gather = all_reduce


class PackingTeam:
    """Packs weights for bf16 arithmetic of a variant that this CPU need not run."""

    def __init__(self, kernels: str) -> None:
        self.tiling = tiling(kernels, bf16=True)


def loaded(
    checkpoint: Checkpoint,
    kernels: str,
    dtype: str = "float32",
    bits: str = "stored",
    world: Any = SINGLE,
    *,
    bf16: bool = False,
):
    form = layout(checkpoint.model, block_tokens=16, element_bytes=4, ranks=world.size)
    fused = kernels == "triton"
    team: Any = None
    if not fused and kernels != "torch":
        team = PackingTeam(kernels) if bf16 else Team(kernels, 1)
    fp8 = Fp8Products() if fused else None
    model = TextModel(checkpoint.model, form, world, DTYPES[dtype], "cpu", team, bits, stacked=fused, fp8=fp8)
    model.load(checkpoint)
    return model


def compare(checkpoint: Checkpoint, kernels: str, **more: Any) -> None:
    model, wanted = loaded(checkpoint, kernels, **more), predicted(checkpoint, kernels, **more)
    assert part_bytes(wanted) == model.memory_usage.parts
    assert mapped_bytes(wanted) == model.memory_usage.mapped
    assert model.weight_bytes > 0


KERNELS = ("torch", *usable())


@pytest.mark.parametrize("by", KERNELS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_every_architecture_holds_what_was_planned_to_the_byte(checkpoint, name, by, shows):
    compare(read_checkpoint(checkpoint(name).path), by)
    shows(checkpoint(name).path, "loads", "planned bytes = loaded bytes")


@pytest.mark.parametrize("by", KERNELS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "cohere-qk-norm", "gemma3", "olmo2", "starcoder2", "qwen2-moe"])
def test_a_bf16_checkpoint_too(bf16_checkpoint, name, by):
    compare(read_checkpoint(bf16_checkpoint(name).path), by)


@pytest.mark.parametrize("by", BF16_VARIANTS)
@pytest.mark.parametrize("name", ["llama", "llama-odd-heads-biases", "qwen2", "starcoder2", "qwen2-moe"])
def test_weights_for_bf16_arithmetic_too(checkpoint, bf16_checkpoint, name, by):
    for path in (checkpoint(name).path, bf16_checkpoint(name).path):
        compare(read_checkpoint(path), by, bf16=True)


@pytest.mark.parametrize("by", BF16_VARIANTS)
def test_routers_are_exempt_from_bf16_arithmetic(checkpoint, by):
    """A rounded router would select other experts."""
    model = loaded(read_checkpoint(checkpoint("qwen2-moe").path), by, bf16=True)
    ops, matrix = model.program.ops, model.weights.matrix
    routers = [matrix(op.weight) for op in ops if isinstance(op, Linear) and op.fp32]
    experts = [matrix(one) for op in ops if isinstance(op, ExpertLinear) for one in op.matrices]
    assert routers and {router.weight.form for router in routers} == {"tiles_f32"}
    assert experts and {one.weight.form for one in experts} == {"pairs_bf16"}
    assert model.vocabulary.head.form == "pairs_bf16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "llama-odd-heads-biases", "qwen2", "starcoder2", "qwen3-moe"])
def test_other_types_of_activations_too(checkpoint, bf16_checkpoint, name, dtype):
    for path in (checkpoint(name).path, bf16_checkpoint(name).path):
        compare(read_checkpoint(path), "torch", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_stacked_experts_too(bf16_checkpoint, name, dtype):
    """Check stacked experts, the layout of the fused kernels."""
    checkpoint = read_checkpoint(bf16_checkpoint(name).path)
    form = layout(checkpoint.model, block_tokens=16, element_bytes=4)
    model = TextModel(checkpoint.model, form, SINGLE, DTYPES[dtype], "cpu", stacked=True)
    model.load(checkpoint)
    assert part_bytes(predicted(checkpoint, "torch", dtype)) == model.memory_usage.parts


@pytest.mark.parametrize("bits", ["int8", "int6", "int4"])
@pytest.mark.parametrize("by", usable())
@pytest.mark.parametrize("name", ["llama", "llama-odd-heads-biases", "qwen3", "phi3", "cohere", "mixtral", "qwen2-moe"])
@pytest.mark.sampled(5)
def test_weights_rounded_at_load_too(bf16_checkpoint, name, by, bits):
    compare(read_checkpoint(bf16_checkpoint(name).path), by, bits=bits)


@pytest.mark.parametrize(("kind", "by"), paired(KINDS, ("triton", *KERNELS)))
def test_quantized_checkpoints_too(tmp_path, kind, by):
    compare(read_checkpoint(write(tmp_path, KINDS[kind]).path), by)


@pytest.mark.parametrize(("kind", "by"), paired(FP8_KINDS, ("triton", *KERNELS)))
def test_fp8_checkpoints_too(tmp_path, kind, by):
    compare(read_checkpoint(write(tmp_path, FP8_KINDS[kind]).path), by)


@pytest.mark.parametrize("kind", ["blocks", "channel-dynamic", "autofp8-static"])
def test_a_matrix_of_which_one_source_is_plain_too(tmp_path, kind):
    made = write(tmp_path, FP8_KINDS[kind])
    made.leave_out("model.layers.0.self_attn.k_proj")
    made.leave_out("model.layers.1.mlp.gate_proj")
    for by in ("triton", "torch"):
        compare(read_checkpoint(made.path), by)


@pytest.mark.parametrize("architecture", ["Llama", "Phi3"])
@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8_of_each_rank_too(tmp_path, kind, architecture):
    """Pieces of a fused matrix begin within a block; of Phi3 they come from one source."""
    more = {"hidden_size": 192, "head_dim": 48, "intermediate_size": 512} if architecture == "Llama" else {}
    checkpoint = read_checkpoint(write(tmp_path, FP8_KINDS[kind], architecture, **more).path)
    if architecture == "Phi3":
        compare(checkpoint, "triton")
        return
    for rank in range(2):
        if tensor_problem(checkpoint.model, checkpoint.quantization, 2, "triton") is None:
            compare(checkpoint, "triton", world=FakeWorld(rank, 2))


@pytest.mark.parametrize("kind", ["blocks", "channel-dynamic"])
def test_experts_in_fp8_too(tmp_path, kind):
    """With fused kernels they stay in fp8, as all else."""
    checkpoint = read_checkpoint(write_experts(tmp_path, kind).path)
    compare(checkpoint, "triton", dtype="float16")
    compare(checkpoint, "torch")


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma2", "starcoder2", "qwen2-moe"])
def test_weights_rounded_to_fp8_too(bf16_checkpoint, name):
    compare(read_checkpoint(bf16_checkpoint(name).path), "triton", dtype="float16", bits="fp8")


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama-odd-heads-biases", "qwen2", "cohere", "qwen2-moe"])
def test_weights_rounded_for_triton_kernels_too(bf16_checkpoint, name, bits):
    compare(read_checkpoint(bf16_checkpoint(name).path), "triton", dtype="float16", bits=bits)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
        ("Olmo2", {}),
        ("Cohere", {"use_qk_norm": True}),
        ("Starcoder2", {}),
        ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    ],
)
def test_each_rank_holds_its_planned_share(tmp_path, name, more, size):
    """Four KV heads a rank of two, and two KV heads that four ranks hold twice; 97 rows of a vocabulary."""
    import transformers

    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2 if name != "Cohere" else 4}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    for rank in range(size):
        compare(checkpoint, "torch", world=FakeWorld(rank, size))


def test_cached_quantized_weights_are_stored_once(bf16_checkpoint, tmp_path):
    checkpoint = read_checkpoint(bf16_checkpoint("llama").path)
    form = layout(checkpoint.model, block_tokens=16, element_bytes=4)
    files = {info.file for info in checkpoint.tensors.values()}
    for _ in ("made", "found"):
        team = Team("base", 1)
        known = PackedFile(tmp_path, files, "int8", team.tiling)
        model = TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu", team, "int8")
        model.load(checkpoint, known=known)
        known.close()
        assert part_bytes(predicted(checkpoint, "base", bits="int8")) == model.memory_usage.parts


@pytest.mark.parametrize("by", usable())
def test_declared_tilings_are_those_of_the_compiled_kernels(by):
    assert tiling(by) == Team(by, 1).tiling


def test_shares_are_even_or_refused_and_cover_everything():
    assert [share_of(8, rank, 4) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [share_of(2, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert share_of(6, 0, 4) is None and share_of(3, 0, 4) is None
    assert sum(rows_of(97, rank, 4)[1] for rank in range(4)) == 97 and rows_of(97, 3, 4) == (72, 25)


@pytest.mark.parametrize("by", KERNELS)
@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q4_0", "Q8_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
@pytest.mark.sampled(5)
def test_a_gguf_file_too(tmp_path, architecture, kind, by):
    """Its embedding in the type of the others, and the norms in F32."""
    path = test_gguf.write(tmp_path / "made", {"": test_gguf.Type[kind]}, architecture)
    compare(read_checkpoint(path), by)
