"""Tensors of GGUF files that are more than one matrix, in quantized types: slices of the experts of a layer, the halves
of a latent projection, and embeddings that are scaled."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import best
from kernels.embedding import embedding
from kernels.jit import installed
from tests.engine.gguf_writer import Kind, write_gguf
from tests.engine.layers.families import CONFIGURATIONS, EAGER, MLA, SIZES
from tests.engine.layers.test_footprint import compare
from tests.engine.layers.test_gguf import near

WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}  # fmt: skip
EXPERT_KEYS = {"expert_count": 3, "expert_used_count": 3, "expert_feed_forward_length": 256}
# Every expert is chosen, because rounded activations may choose others.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3moe": ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 256,
                              "num_hidden_layers": 5, "norm_topk_prob": True}, EXPERT_KEYS),
    "gpt-oss": ("GptOss", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 5},
                {**EXPERT_KEYS, "attention.sliding_window": 5}),
    "gemma": ("Gemma", {}, {}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "tie_word_embeddings": False}, {"embedding_scale": 3.0}),
    "deepseek2": ("DeepseekV3", {**MLA, "head_dim": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
                                 "v_head_dim": 32, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
                                 "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
                  {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 16,
                   "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
                   "leading_dense_block_count": 1, "expert_gating_func": 2, "rope.dimension_count": 6,
                   "attention.q_lora_rank": 20, "attention.kv_lora_rank": 64, "attention.key_length": 70,
                   "attention.key_length_mla": 38, "attention.value_length_mla": 32, "attention.head_count_kv": 1}),
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """Return a function that writes a model twice: with tensors of some types, and with the same values in float32."""

    def write(name, types, **more):
        kind, settings, keys = KINDS[name]
        settings = {**SIZES, **WIDE, **settings, **more}
        config = getattr(transformers, CONFIGURATIONS.get(kind, f"{kind}Config"))(**settings)
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(torch.randn_like(one) * 0.1 + (one if one.ndim == 1 else 0))
        made, plain = Kind(name, keys), tmp_path / "plain.gguf"
        write_gguf(plain, model, made, types=types, restored=True)
        return write_gguf(tmp_path / "m.gguf", model, made, types=types), plain

    return write


def check(driver, prompt, path, plain):
    """Compare the outputs of both files. Return the engine with compiled kernels."""
    want = driver(plain).run(prompt, 7)
    torch.testing.assert_close(driver(path).run(prompt, 7), want, atol=1e-4, rtol=0)
    engine = driver(path, kernels=best())
    assert near(engine.run(prompt, 7), want)
    compare(read_checkpoint(path), best())
    return engine


# Types of gate, up and down of the experts of each layer, and the forms that compiled kernels multiply by.
EXPERTS = {
    "qwen3moe": [
        (Type.Q4_K, Type.Q4_K, Type.Q6_K, {"blocks_q4_k", "blocks_q6_k"}),
        (Type.Q2_K, Type.Q2_K, Type.Q3_K, {"blocks_q2_k", "blocks_q3_k"}),
        (Type.Q5_K, Type.Q5_K, Type.IQ4_XS, {"blocks_q5_k", "blocks_iq4_xs"}),
        (Type.Q5_0, Type.Q5_0, Type.IQ4_NL, {"blocks_q5_0", "blocks_iq4_nl"}),
        (Type.Q4_1, Type.Q5_1, Type.Q5_1, {"tiles_f32", "blocks_q5_1"}),
    ],
    "gpt-oss": [(Type.MXFP4, Type.MXFP4, Type.MXFP4, {"blocks_mxfp4"})],
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_multiplied_as_the_file_has_them(name, files, driver, ids):
    types = {
        f"blk.{layer}.ffn_{part}_exps.": type
        for layer, kinds in enumerate(EXPERTS[name])
        for part, type in zip(("gate", "up", "down"), kinds[:3], strict=True)
    }
    engine = check(driver, ids(30, 4), *files(name, types))
    for layer, (*_, forms) in enumerate(EXPERTS[name]):
        found = [
            matrix.weight.form
            for path, matrix in engine.model.weights.by_name.items()
            if f".layers.{layer}." in str(path) and ".experts." in str(path)
        ]
        assert len(found) == 6 and {*found} == forms


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_keep_the_bits_of_the_file_on_a_gpu(name, files, driver, ids):
    kinds = [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.Q5_0, Type.Q5_0, Type.IQ4_XS)]
    kinds = kinds if name == "qwen3moe" else EXPERTS[name]
    types = {
        f"blk.{layer}.ffn_{part}_exps.": type
        for layer, some in enumerate(kinds)
        for part, type in zip(("gate", "up", "down"), some, strict=False)
    }
    path, plain = files(name, types, num_hidden_layers=len(kinds))
    prompt = ids(9, 4)
    engine = driver(path, kernels="triton")
    torch.testing.assert_close(engine.run(prompt, 9), driver(plain).run(prompt, 9), atol=1e-4, rtol=0)
    found = {stack.blocks.kind for stack in engine.model.weights.stacks.values()}
    assert found == {type.name for type in types.values()}
    compare(read_checkpoint(path), "triton")


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K, Type.Q8_0])
@pytest.mark.parametrize("name", ["gemma", "granite"])
def test_embeddings_are_scaled(name, kind, files, driver, ids):
    """Gemma's head is tied to them."""
    check(driver, ids(30, 4), *files(name, {"token_embd": kind}))


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_the_factor_of_blocks_is_rounded_as_that_of_plain_embeddings(files, driver):
    own = driver(files("gemma", {"token_embd": Type.Q6_K})[0], kernels="triton").model.vocabulary
    own.part, ids = replace(own.part, scale=3.3), torch.arange(20)
    want = embedding(ids, own.blocks.restored(), torch.bfloat16, 3.3)
    assert torch.equal(own.embed(ids, torch.bfloat16), want)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q5_1, Type.IQ4_NL])
def test_halves_of_a_latent_projection_are_restored(kind, files, driver, ids):
    check(driver, ids(30, 4), *files("deepseek2", {"attn_k_b": kind, "attn_v_b": kind}))
