"""Architectures of GGUF files: the logits equal transformers' for the model that the file was written from."""

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from appliance.lockfile.files import read_names
from engine.api.errors import CheckpointError
from engine.llm import LLM, Params
from engine.models.checkpoint import check_tensors, checkpoint_root, read_checkpoint
from engine.models.gguf_families import FAMILIES, made_config
from kernels.cpu.library import best
from tests.engine.gguf_writer import Kind, write_gguf
from tests.engine.layers.conftest import QWEN3_NEXT
from tests.engine.layers.families import CASES as CHECKPOINTS
from tests.engine.layers.families import (
    CONFIGURATIONS,
    DEFAULT,
    EAGER,
    LLAMA3,
    LLAMA4,
    MLA,
    MOE,
    SIZES,
    YARN,
    random_family,
    save_family,
)
from tests.engine.translators import write as write_translator

MSCALE = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}
PARTIAL = {**DEFAULT, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 18}
EXPERT_KEYS = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 18}
ROUTED_KEYS = {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 22, "expert_shared_count": 1,
               "expert_weights_scale": 1.5, "leading_dense_block_count": 1}  # fmt: skip
LATENT_KEYS = {"rope.dimension_count": 6, "attention.q_lora_rank": 20, "attention.kv_lora_rank": 24,
               "attention.key_length": 30, "attention.key_length_mla": 14, "attention.value_length_mla": 10,
               "attention.head_count_kv": 1, "rope.scaling.yarn_log_multiplier": 0.08}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
GROUPS = {**MOE, "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GROUP_KEYS = {**ROUTED_KEYS, **LATENT_KEYS, "expert_group_count": 2, "expert_group_used_count": 1}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0}
GRANITE_KEYS = {"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 2.0}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOW_KEYS = {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False, True]}

# kind of file -> configuration class of transformers, settings besides SIZES, keys that only this kind has
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2},
              {"expert_count": 5, "expert_used_count": 2}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 30},
                 {**EXPERT_KEYS, "expert_shared_feed_forward_length": 30}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}, EXPERT_KEYS),
    "gemma": ("Gemma", {"head_dim": 16}, {}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
               {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 6}),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}, "sliding_attention": DEFAULT}},
        {"attention.sliding_window": 6, "rope.freq_base_swa": 1e4}),
    "phi2": ("Phi", {"rope_parameters": PARTIAL}, {"rope.dimension_count": 4}),
    "phi3": ("Phi3", {"sliding_window": 9, "rope_parameters": PARTIAL},
             {"attention.sliding_window": 9, "rope.dimension_count": 4}),
    "granite": ("Granite", GRANITE, GRANITE_KEYS),
    "granitemoe": ("GraniteMoeShared", {**GRANITE, "intermediate_size": 22, "num_local_experts": 4,
                                        "num_experts_per_tok": 2, "shared_intermediate_size": 26},
                   {**GRANITE_KEYS, "expert_count": 4, "expert_used_count": 2,
                    "expert_shared_feed_forward_length": 26}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 2,
                           "sliding_window": 5, "rope_parameters": {**YARN, "truncate": False}},
                {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 22,
                 "attention.sliding_window": 5}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True, "rope_parameters": PARTIAL},
             {"rope.dimension_count": 8}),
    "glm4moe": ("Glm4Moe", {**MOE, "head_dim": 16, "use_qk_norm": True, "rope_parameters": PARTIAL},
                {**ROUTED_KEYS, "rope.dimension_count": 8, "expert_weights_norm": True}),
    "dots1": ("Dots1", {**MOE, "first_k_dense_replace": 1}, ROUTED_KEYS),
    "command-r": ("Cohere", {"logit_scale": 0.25, "use_qk_norm": True}, {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "logit_scale": 0.25, "sliding_window": 4},
                {"logit_scale": 0.25, "attention.sliding_window": 4}),
    "olmo": ("Olmo", {}, {"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": ("Olmo3", {**WINDOWS, "rope_parameters": {"full_attention": YARN, "sliding_attention": {
        **DEFAULT, "rope_theta": 500.0}}}, {**WINDOW_KEYS, "rope.freq_base_swa": 500.0}),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}, {"expert_count": 5, "expert_used_count": 2}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "rope_parameters": PARTIAL},
                 {"rope.dimension_count": 4, "use_parallel_residual": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}, {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}, {}),
    "exaone4": ("Exaone4", WINDOWS, WINDOW_KEYS),
    "exaone-moe": ("ExaoneMoe", {**WINDOWS, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22},
                   {**ROUTED_KEYS, **WINDOW_KEYS, "expert_weights_scale": 2.5, "expert_weights_norm": True}),
    "seed_oss": ("SeedOss", {"head_dim": 16}, {}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}, {}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {"moe_intermediate_size": 22, "moe_num_experts": 6, "moe_k": 3},
                     {**ROUTED_KEYS, "expert_shared_count": 2}),
    "arcee": ("Arcee", {}, {}),
    "nemotron": ("Nemotron", {"mlp_bias": True, "rope_parameters": PARTIAL}, {"rope.dimension_count": 4}),
    "mistral3": ("Ministral3", {"head_dim": 16, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.6}},
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.6}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 16}, {}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
             {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}),
    "lfm2moe": ("Lfm2Moe", {k: v for k, v in CHECKPOINTS["lfm2-moe"][1].items() if k not in SIZES} | {
        "routed_scaling_factor": 1.0}, {
        "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "expert_count": 6, "expert_used_count": 3,
        "expert_feed_forward_length": 22, "leading_dense_block_count": 1}),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 5, "moe_topk": 2},
                    {"expert_count": 5, "expert_used_count": 2}),
    "phimoe": ("Phimoe", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
                          "attention_bias": True, "lm_head_bias": True},
               {"expert_count": 5, "expert_used_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}),
    "falcon-h1": ("FalconH1", {k: v for k, v in CHECKPOINTS["falcon-h1"][1].items() if "multiplier" not in k} | {
        "mamba_rms_norm": True}, {
        "ssm.conv_kernel": 4, "ssm.inner_size": 72, "ssm.state_size": 10, "ssm.time_step_rank": 12,
        "ssm.group_count": 2}),
    "nemotron_h": ("NemotronH", CHECKPOINTS["nemotron-h"][1], {
        "feed_forward_length": [0, 66, 0], "attention.head_count_kv": [0, 0, 2], "ssm.conv_kernel": 4,
        "ssm.inner_size": 96, "ssm.state_size": 10, "ssm.time_step_rank": 12, "ssm.group_count": 3}),
    "nemotron_h_moe": ("NemotronH", CHECKPOINTS["nemotron-h-moe"][1], {
        "feed_forward_length": [0, 22, 0], "attention.head_count_kv": [0, 0, 2], "ssm.conv_kernel": 4,
        "ssm.inner_size": 96, "ssm.state_size": 10, "ssm.time_step_rank": 12, "ssm.group_count": 1,
        "expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 22,
        "expert_shared_feed_forward_length": 30, "expert_shared_count": 1, "expert_weights_norm": True,
        "expert_weights_scale": 1.5, "expert_group_count": 2, "expert_group_used_count": 1}),
    "deepseek2": ("DeepseekV3", {**MLA, **GROUPS, "rope_parameters": MSCALE},
                  {**GROUP_KEYS, "expert_weights_norm": True}),
    "llama4": ("Llama4", {**LLAMA4, "head_dim": 16, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
                          "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
               {"feed_forward_length": 66, "expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 22,
                "interleave_moe_layer_step": 2}),
    "minimax-m2": ("MiniMaxM2", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3,
                                 "intermediate_size": 22, "rotary_dim": 8},
                   {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 22,
                    "rope.dimension_count": 8}),
    "mamba": ("Mamba", CHECKPOINTS["mamba"][1], {
        "ssm.conv_kernel": 3, "ssm.inner_size": 96, "ssm.state_size": 10, "ssm.time_step_rank": 3}),
    "mamba2": ("Mamba2", CHECKPOINTS["mamba2"][1], {
        "ssm.conv_kernel": 3, "ssm.inner_size": 96, "ssm.state_size": 10, "ssm.time_step_rank": 12,
        "ssm.group_count": 4}),
    "jamba": ("Jamba", CHECKPOINTS["jamba"][1], {
        "ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 9, "ssm.time_step_rank": 3,
        "attention.head_count_kv": [0, 2, 0], "expert_count": 5, "expert_used_count": 2}),
    "granitehybrid": ("GraniteMoeHybrid", CHECKPOINTS["granite-hybrid"][1], {
        **GRANITE_KEYS, "attention.head_count_kv": [0, 2, 0], "expert_count": 6, "expert_used_count": 3,
        "expert_shared_feed_forward_length": 30, "ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 10,
        "ssm.time_step_rank": 12, "ssm.group_count": 2, "rope.scaling.finetuned": False}),
    "qwen3next": ("Qwen3Next", {**QWEN3_NEXT, "head_dim": 16, "mlp_only_layers": []}, {
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 22,
        "expert_shared_feed_forward_length": 30, "rope.dimension_count": 4, "ssm.conv_kernel": 4,
        "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 72}),
    "internlm2": ("Llama", {}, {}),
    "qwen2vl": ("Qwen2", {}, {}),
    "qwen3vl": ("Qwen3", {"head_dim": 16}, {}),
    "qwen3vlmoe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}, EXPERT_KEYS),
    "gpt2": ("GPT2", CHECKPOINTS["gpt2"][1], {}),
    "starcoder": ("GPTBigCode", CHECKPOINTS["starcoder"][1], {"attention.head_count_kv": 1}),
    "gptneox": ("GPTNeoX", CHECKPOINTS["neox"][1], {"rope.dimension_count": 4, "use_parallel_residual": True}),
    "falcon": ("Falcon", CHECKPOINTS["falcon"][1], {"attention.head_count_kv": 2, "feed_forward_length": 192}),
    "bloom": ("Bloom", CHECKPOINTS["bloom"][1], {}),
    "mpt": ("Mpt", CHECKPOINTS["mpt"][1], {"attention.max_alibi_bias": 8.0}),
}  # fmt: skip
DELTA_KEYS = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6,
              "ssm.inner_size": 72, "rope.dimension_count": 4}  # fmt: skip
KIMI_KEYS = {**ROUTED_KEYS, "leading_dense_block_count": 2, "expert_weights_scale": 2.446,
             "attention.head_count_kv": [0, 1, 0], "rope.dimension_count": 6, "attention.kv_lora_rank": 24,
             "attention.key_length": 30, "attention.key_length_mla": 14, "attention.value_length_mla": 10,
             "ssm.conv_kernel": 4, "kda.head_dim": 10}  # fmt: skip
STEP_ROPES = {"full_attention": {**LLAMA3, "partial_rotary_factor": 0.5},
              "sliding_attention": {**DEFAULT, "rope_theta": 100.0}}  # fmt: skip
SPARSITY = [float(torch.special.ndtri(torch.tensor(share))) for share in (0.6, 0.0, 0.9, 0.0)]

# kind of file -> case of families.py, whose original checkpoint is converted, further settings, keys of this kind
ORIGINALS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen35": ("qwen3_5", {}, DELTA_KEYS),
    "qwen35moe": ("qwen3_5-moe-heads", {}, {
        **DELTA_KEYS, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 22,
        "expert_shared_feed_forward_length": 30}),
    "apertus": ("apertus", {"rope_parameters": DEFAULT}, {}),
    "kimi-linear": ("kimi_linear", {}, KIMI_KEYS),
    "qwen": ("qwen1", {}, {"feed_forward_length": 132}),
    "baichuan": ("baichuan", {}, {}),
    "bailingmoe": ("bailing", {}, {
        "feed_forward_length": 22, "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 22,
        "expert_shared_count": 2, "expert_weights_scale": 1.0, "expert_weights_norm": True,
        "leading_dense_block_count": 0}),
    "bailingmoe2": ("bailing2", {}, {
        **ROUTED_KEYS, "expert_count": 12, "expert_group_count": 4, "expert_group_used_count": 2,
        "expert_weights_norm": True, "rope.dimension_count": 8}),
    "afmoe": ("afmoe", {}, {
        **ROUTED_KEYS, "expert_shared_count": 2, "expert_weights_scale": 1.7, "attention.sliding_window": 5,
        "attention.sliding_window_pattern": [True, False, True]}),
    "arctic": ("arctic", {}, {"expert_count": 5, "expert_used_count": 2}),
    "minicpm3": ("minicpm3", {"dim_model_base": 256, "rope_parameters": DEFAULT}, {
        "rope.dimension_count": 6, "attention.q_lora_rank": 20, "attention.kv_lora_rank": 24,
        "attention.key_length": 14}),
    "mimo2": ("mimo-v2", {}, {
        **ROUTED_KEYS, "expert_shared_count": 0, "expert_weights_norm": True, "rope.dimension_count": 8,
        "attention.head_count_kv": [2, 4, 4, 4],
        "attention.sliding_window": 5, "attention.sliding_window_pattern": [0, 1, 1, 1],
        "attention.value_length": 7, "attention.value_scale": 0.707, "rope.freq_base_swa": 1e4}),
    "glm-dsa": ("glm-moe-dsa", {}, {
        **ROUTED_KEYS, **LATENT_KEYS, "leading_dense_block_count": 3, "expert_weights_norm": True,
        "attention.indexer.head_count": 9, "attention.indexer.key_length": 10, "attention.indexer.top_k": 6}),
    "step35": ("step3p5", {"rope_parameters": STEP_ROPES}, {
        **ROUTED_KEYS, "expert_shared_feed_forward_length": 30, "expert_weights_norm": True,
        "attention.head_count": [4, 6, 4], "attention.head_count_kv": [2, 2, 2], "attention.sliding_window": 5,
        "attention.sliding_window_pattern": [True, False, True], "rope.freq_base_swa": 100.0,
        "swiglu_clamp_exp": [0.0, 0.05, 0.0], "swiglu_clamp_shexp": [0.1, 0.0, 0.2]}),
    "gemma3n": ("gemma3n", {}, {
        "attention.sliding_window": 5, "attention.sliding_window_pattern": [True, False] * 2,
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 10, "altup.num_inputs": 4,
        "altup.active_idx": 0, "activation_sparsity_scale": SPARSITY, "final_logit_softcapping": 30.0}),
    "gemma4": ("gemma4", {}, {
        "attention.sliding_window": 5, "attention.sliding_window_pattern": [True, False] * 2,
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 10, "attention.key_length": 16,
        "attention.key_length_swa": 8, "feed_forward_length": [66, 66, 132, 132], "rope.freq_base_swa": 1e4}),
}  # fmt: skip
ELSEWHERE = {"qwen2", "qwen3", "exaone", "minicpm", "t5", "t5encoder", "bert", "nomic-bert", "modern-bert", "eurobert",
             "jina-bert-v2", "jina-bert-v3", "gemma-embedding", "nomic-bert-moe"}  # fmt: skip
"""Kinds with tests in test_gguf.py or in a test of their own, or whose models transformers does not have."""


def made(name: str) -> Any:
    kind, settings, _ = CASES[name]
    config = getattr(transformers, CONFIGURATIONS.get(kind, f"{kind}Config"))(
        **{**({} if "vocab_size" in settings else SIZES), **settings}
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.5 if "conv" in parameter_name else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.ndim == 1 else 0))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.15)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_model_in_the_file(name, tmp_path, driver, ids):
    model, prompt = made(name), ids(30, 4)
    path = write_gguf(tmp_path / "m.gguf", model, Kind(name, CASES[name][2]))
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(driver(path).run(prompt, 7), want, atol=2e-4, rtol=0)
    if name in ("deepseek2", "gpt-oss"):
        torch.testing.assert_close(driver(path, kernels=best()).run(prompt, 7), want, atol=2e-4, rtol=0)


def written_original(name, folder, case=""):
    """Return the model of a case of families.py, and a file that was converted from its original checkpoint."""
    own, settings, keys = ORIGINALS[name]
    case = case or own
    model = random_family(case, settings)
    save_family(case, model, folder / "original")
    tensors = {}
    for part in sorted((folder / "original").glob("*.safetensors")):
        tensors |= load_file(part)
    return model, write_gguf(folder / "m.gguf", model, Kind(name, keys), source=tensors)


@pytest.mark.parametrize("name", ORIGINALS)
def test_logits_equal_those_of_the_original_checkpoint(name, tmp_path, driver, ids):
    (model, path), prompt = written_original(name, tmp_path), ids(30, 4)
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    for kernels in ({}, {"kernels": best()}):
        torch.testing.assert_close(driver(path, **kernels).run(prompt, 7), want, atol=2e-4, rtol=0)


def test_experts_of_gemma_4_have_gates_and_ups_in_one_tensor(tmp_path, driver, ids, monkeypatch):
    keys = {**ORIGINALS["gemma4"][2], "attention.sliding_window_pattern": [False, True] * 2 + [False],
            "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0, "feed_forward_length": 66,
            "attention.head_count_kv": [1, 4, 1, 4, 1], "final_logit_softcapping": 5.0, "expert_count": 6,
            "expert_used_count": 3, "expert_feed_forward_length": 22}  # fmt: skip
    monkeypatch.setitem(ORIGINALS, "gemma4", ("gemma4-moe", {}, keys))
    (model, path), prompt = written_original("gemma4", tmp_path), ids(20, 4)
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(driver(path).run(prompt, 7), want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["t5", "flan-t5", "umt5"])
def test_encoder_decoder_models_equal_their_original(family, tmp_path):
    """Tables of biases reach the default distance, because a file does not state another."""
    more = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 128}
    made = write_translator(tmp_path, family, **more)
    config = made.model.config
    keys = {
        "attention.relative_buckets_count": 12,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "decoder_block_count": config.num_decoder_layers,
        "decoder_start_token_id": 0,
        "feed_forward_length": config.d_ff,
        "context_length": config.n_positions,
        "tokenizer.ggml.eos_token_id": 1,
    }
    path = write_gguf(tmp_path / "m.gguf", made.model, Kind("t5", keys))
    params, prompts = Params(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1), [[5, 6, 7, 8, 9], [11]]
    small = {"block_tokens": 4, "kv_bytes": 1 << 20, "threads": 1, "kernels": "torch"}
    replies = []
    for source in (path, made.path):
        with LLM(source, **small) as llm:
            replies.append(
                [(one.ids, [found.logprob for found in one.logprobs]) for one in llm.generate(prompts, params)]
            )
    for (ids, logprobs), (want_ids, want) in zip(*replies, strict=True):
        assert ids == want_ids and logprobs == pytest.approx(want, abs=1e-5)


def test_large_models_of_baichuan_have_alibi(tmp_path):
    """A file does not state it; llama.cpp's loader knows them by their number of layers."""
    path = write_gguf(tmp_path / "m.gguf", made("smollm3"), Kind("baichuan", {"block_count": 40}))
    assert "max_position_embeddings" not in (found := made_config(path)) and found["model_max_length"] == 64


def test_sinks_have_a_name_with_weight(tmp_path):
    """llama.cpp's converter adds it."""
    path = write_gguf(tmp_path / "m.gguf", made("gpt-oss"), Kind("gpt-oss", CASES["gpt-oss"][2]))
    assert b"blk.0.attn_sinks.weight" in path.read_bytes()
    assert "model.layers.0.self_attn.sinks" in read_checkpoint(path).tensors


def test_every_kind_has_a_case():
    assert {*CASES, *ORIGINALS, *ELSEWHERE} >= {*FAMILIES}


def test_a_split_file_equals_the_whole_one(tmp_path, driver, ids):
    model, prompt, kind = made("qwen3moe"), ids(20, 1), Kind("qwen3moe", CASES["qwen3moe"][2])
    whole = driver(write_gguf(tmp_path / "whole.gguf", model, kind)).run(prompt, 7)
    folder = tmp_path / "parts"
    folder.mkdir()
    first = write_gguf(folder / "m.gguf", model, kind, parts=3)
    assert first.name == "m-00001-of-00003.gguf"
    second = first.with_name("m-00002-of-00003.gguf")
    for path in (folder, first, second):
        assert torch.equal(driver(path).run(prompt, 7), whole)
    assert {info.file.name for info in read_checkpoint(folder).tensors.values()} == {
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    }
    third = first.with_name("m-00003-of-00003.gguf")
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: is part 2 of 3, .* its name says part 1 of 3"):
        read_checkpoint(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: cannot be read: No such file"):
        read_checkpoint(folder)


def test_a_tensor_that_is_not_declared_is_refused(tmp_path):
    model = made("smollm3")
    path = write_gguf(tmp_path / "m.gguf", model, Kind("smollm3"))
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_norm", b"blk.1.attn_form"))
    with pytest.raises(CheckpointError, match=r"m\.gguf: has the tensor blk\.1\.attn_form\.weight, which the declared"):
        read_checkpoint(path)


def test_a_name_without_a_layer_is_refused(tmp_path):
    model = made("smollm3")
    path = write_gguf(tmp_path / "m.gguf", model, Kind("smollm3"))
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_norm", b"blk.x.attn_norm"))
    with pytest.raises(CheckpointError, match=r"m\.gguf: has the tensor blk\.x\.attn_norm\.weight, which the declared"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("gemma3", "block_count", 2**32 - 1, "gemma3.block_count is 4294967295; it must be at most 4,096"),
        ("gemma3", "block_count", float("inf"), "gemma3.block_count is inf; it must be finite"),
        ("gemma3", "nextn_predict_layers", "x", r"m\.gguf: its keys have values that no gemma3 model has \(invalid"),
        ("exaone-moe", "leading_dense_block_count", "x", "its keys have values that no exaone-moe model has"),
        ("exaone-moe", "leading_dense_block_count", 2**31, "tensor blk.1.ffn_gate_exps.weight, which the declared"),
        ("qwen3moe", "expert_count", 8, r"ffn_gate_exps.weight has shape \[5, 18, 48\], without expert 5; convert"),
    ],
)
def test_keys_with_absurd_values_are_refused(kind, key, value, words, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", made(kind), Kind(kind, {**CASES[kind][2], key: value}))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(path)


def test_first_files_of_gemma2_have_the_settings_of_that_model(tmp_path):
    """Its converter did not write them at first, and llama.cpp's loader has these values for such files."""
    read = read_checkpoint(write_gguf(tmp_path / "m.gguf", made("gemma2"), Kind("gemma2"))).config
    assert (read["attn_logit_softcapping"], read["final_logit_softcapping"], read["sliding_window"]) == (50, 30, 4096)
    assert read["layer_types"][:2] == ["sliding_attention", "full_attention"]


def test_a_matrix_that_is_turned_is_refused(tmp_path):
    model = made("smollm3")
    matrix = model.model.layers[0].mlp.gate_proj.weight
    matrix.data = matrix.data.T.contiguous()
    read = read_checkpoint(write_gguf(tmp_path / "m.gguf", model, Kind("smollm3")))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.gate_proj\.weight has shape \[48, 66\], but config\.json"
    ):
        check_tensors(read.model, read.tensors, read.quantization)


def test_a_tower_beside_a_split_file_is_no_model(tmp_path):
    """The folder is the checkpoint, so that a lock has its other files too."""
    first = write_gguf(tmp_path / "m.gguf", made("smollm3"), Kind("smollm3"), parts=2)
    second = tmp_path / "m-00002-of-00002.gguf"
    (tmp_path / "mmproj-m.gguf").write_bytes(second.read_bytes())
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, first, second):
        assert checkpoint_root(path) == tmp_path
    names = ("generation_config.json", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "tokenizer.json")
    assert read_names(checkpoint_root(second)) == names
