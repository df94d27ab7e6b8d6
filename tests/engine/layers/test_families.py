"""Families that need no new kernel, against transformers in float32, on torch and on the best compiled kernels.

Each case runs through the whole engine: prompts in chunks, several requests in a step, cached prefixes and windows that
free blocks.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.kv.layout import layout
from engine.llm import LLM, Generation, Params
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import attentions, recurrents
from kernels.cpu.library import best
from kernels.jit import installed
from tests.engine.layers.families import CASES, LOOSE, VOCAB, random_family, save_family
from tests.engine.layers.test_footprint import compare
from tests.tiers import NIGHTLY, paired, thinned

TOLERANCE = 1e-4  # of a logprob
TIE = 1e-5  # two logprobs that differ by less may be exchanged by rounding
KERNELS = ("torch", best())
DENSE = ("neox", "opt-no-affine", "mpt-odd", "gemma4")
EXPERTS = ("glm4-moe-groups", "ernie4_5-moe", "gpt-oss", "llama4-odd", "longcat")


STEPPED = ("llama4", "llama4-odd", "minimax", "recurrent-gemma", "zamba2")
RESUMED = ("minimax", "gemma3n", "mimo-v2", "zamba2", "gemma4", "opt-350m", "recurrent-gemma")
IN_STEPS = ((29,), (9, 9, 9, 1, 1), (1,) * 16 + (13,))  # tokens of a prompt of 29 in each step


class Family:
    """A saved checkpoint and its reference."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._model = random_family(name)
        save_family(name, self._model, path)

    def logits(self, ids: list[int]) -> torch.Tensor:
        model = random_family(self.name) if self.name in LOOSE else self._model
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp("family") / name)
        return made[name]

    return get


def prompts() -> list[tuple[int, ...]]:
    """Return prompts around the sizes of blocks and steps, two with a shared beginning. Ids 0…2 are special."""
    draw = random.Random(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCAB) for _ in range(count))

    shared = ids(13)
    return [ids(1), ids(7), shared + ids(1), shared + ids(9), ids(29)]


def engine(path: Path, kernels: str, **more: Any) -> LLM:
    small = {"block_tokens": 4, "max_context": 48, "kv_bytes": 1 << 20, "threads": 1, "max_step_tokens": 7}
    return LLM(path, **{**small, "max_running": 4, "kernels": kernels, **more})


def assert_same(family: Family, made: Generation, count: int = 9) -> None:
    """Check that each token is the most probable one, and its three best logprobs."""
    expected = family.logits([*made.prompt_ids, *made.ids])[len(made.prompt_ids) - 1 : -1].log_softmax(-1)
    assert len(made.ids) == count
    for token, found, row in zip(made.ids, made.logprobs, expected, strict=True):
        assert row.max() - row[token] < TIE, f"prompt of {len(made.prompt_ids)}: {token} instead of {row.argmax()}"
        assert found.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


# Cases that run nightly, because other cases execute the same lines and branches of `engine` and have the same parts of
# models (features.py). For each architecture, the others also notice nearly all keys of config.json that are ignored or
# have another value: 1,530 of 1,610 such faults.
REPEATED = (
    "arctic-odd", "bailing2-odd", "cwm", "glm-odd", "gpt2-odd", "starcoder", "gptj-odd", "codegen", "opt",
    "opt-350m-odd", "phi", "stablelm-qk-norm", "falcon-heads", "falcon-alibi-odd", "bloom-odd", "bloom-wide", "mpt",
    "nemotron-odd", "cohere2-odd", "smollm3", "seed-oss", "ernie4_5-odd", "helium-odd", "olmo", "olmo3-odd",
    "arcee-odd", "internlm3-odd", "internlm2-odd", "baichuan", "baichuan-odd", "baichuan13b-odd", "qwen1-odd",
    "minicpm-odd", "exaone3", "solar-open-odd", "exaone-moe-odd", "ernie4_5-moe-odd", "minimax-odd",
    "minimax-m2-odd", "granite-moe-shared-odd", "gpt-oss", "llama4-odd", "flex-olmo-odd", "deepseek-v3-odd",
    "deepseek-v32-odd", "glm-moe-dsa-odd", "youtu-odd", "minicpm3-odd", "lfm2-moe-odd", "qwen3_5-moe-heads",
)  # fmt: skip
# Each of the others runs once: with torch every fifth one, because it has the same layers and kernels/test_ops.py
# compares the operations of both, and the rest with compiled kernels.
RUNS = [
    pytest.param(name, by, marks=NIGHTLY if name in REPEATED or (by == "torch") is (number % 5 > 0) else ())
    for by in KERNELS
    for number, name in enumerate(CASES)
]


@pytest.mark.parametrize(("name", "by"), RUNS)
def test_greedy_tokens_and_logprobs_equal_transformers(name, by, family, shows):
    one = family(name)
    params = Params(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3)
    with engine(one.path, by) as llm:
        for made in llm.generate(prompts(), params):
            assert_same(one, made)
    shows(one.path, *(("equals transformers", "chunked prefill") if by == "torch" else ("compiled CPU",)))


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *(pytest.param(name, KERNELS[at % 2], marks=() if at < 4 else NIGHTLY) for at, name in enumerate(RESUMED)),
        *(pytest.param(name, KERNELS[(at + 1) % 2], marks=NIGHTLY) for at, name in enumerate(RESUMED)),
        *(pytest.param(name, by, marks=NIGHTLY) for name in CASES if name not in RESUMED for by in KERNELS),
    ],
)
def test_cached_prefixes_and_preemption_change_nothing(name, by, family, shows):
    """The second engine has room for one request of full length. A request whose layers all have windows needs no more
    blocks than it was admitted with, and is not preempted; one without attention needs none."""
    one = family(name)
    params = Params(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3)
    with engine(one.path, by) as llm:
        llm.generate(prompts(), params)
        again = llm.generate(prompts(), params)
    model = read_checkpoint(one.path).model
    pages = layout(model, block_tokens=4, element_bytes=4)
    tight = (pages.blocks_for(48, 7) + 1) * pages.block_bytes
    with engine(one.path, by, kv_bytes=tight, overlap=False, prefix_cache=False) as llm:
        alone = llm.generate([*prompts(), *prompts()], params)
    assert max(made.timing.cached_tokens for made in again) >= 8
    grows = not any(part.window or part.chunk for part in attentions(model)) and attentions(model)
    assert sum(made.timing.preemptions for made in alone) > 0 or not grows
    for made in (*again, *alone):
        assert_same(one, made)
    shows(one.path, "prefix hit", *["preempted"][: sum(made.timing.preemptions for made in alone)])


SHARED = [
    *(("gpt2", 2), ("starcoder", 3), ("neox", 3), ("codegen", 2), ("falcon", 6), ("falcon-7b", 5)),
    *(("bloom-odd", 4), ("mpt", 3), ("falcon-alibi", 2), ("baichuan13b-odd", 5)),
    *(("granite-moe-shared", 2), ("minimax-m2", 2), ("ernie4_5-moe", 2), ("gpt-oss", 2), ("llama4", 2)),
    *(("hunyuan", 2), ("afmoe", 2), ("persimmon", 3), ("phimoe", 2), ("gemma4", 2), ("gemma4-moe", 2)),
    *(("gemma3n", 2), ("mimo-v2", 2), ("opt-350m", 2)),
    *(("deepseek-v2", 2), ("youtu-odd", 5), ("jamba", 2), ("falcon-h1", 2), ("kimi_linear", 2)),
    *(("mamba2-odd", 5), ("nemotron-h-moe", 2), ("minimax", 2), ("recurrent-gemma", 2), ("zamba2", 2)),
    *(("deepseek-v32", 2), ("longcat", 2), ("step3p5", 2)),
    *(("stablelm-qk-norm", 2), ("stablelm-parallel", 5), ("opt-no-affine", 2), ("internlm2", 2), ("baichuan2", 3)),
]  # families and numbers of ranks
UNEVEN = ("starcoder-heads", "opt-after", "stablelm-parallel", "falcon-one-norm", "falcon-7b", "exaone4-no-windows",
          "smollm3-windows", "hunyuan-moe", "glm4-moe-groups", "falcon-h1-norm", "granite-hybrid-dense", "nemotron-h",
          "lfm2-bias", "qwen3_5-moe")  # fmt: skip
EVEN = [name for name in CASES if "-odd" not in name and name not in UNEVEN]  # two ranks can share their heads


@pytest.mark.parametrize(
    ("shared", "by"),
    [
        *paired(SHARED, KERNELS),
        *(pytest.param((name, 2), by, marks=NIGHTLY) for name in EVEN if (name, 2) not in SHARED for by in KERNELS),
    ],
    ids=lambda one: one if isinstance(one, str) else "{}-{}".format(*one),
)
@pytest.mark.sampled(2)
def test_several_ranks_equal_transformers(shared, by, family, driver, on_ranks, shows):
    """One case for each way to store or to share tensors, and nightly all others. Falcon's two KV heads are on six
    ranks, and the group of Mamba-2's heads on five."""
    name, size = shared
    one, prompt = family(name), [*prompts()[4]]
    for got in on_ranks(size, lambda world: driver(one.path, world=world, kernels=by, threads=1).run(prompt, 7), by):
        torch.testing.assert_close(got, one.logits(prompt), atol=1e-4, rtol=0)
    shows(one.path, *["2 ranks"][: size == 2])


@pytest.mark.parametrize(("name", "by"), RUNS)
@pytest.mark.sampled(3)
def test_loaded_bytes_are_the_planned_bytes(name, by, family, shows):
    compare(read_checkpoint(family(name).path), by)
    shows(family(name).path, "loads", "planned bytes = loaded bytes")


def in_old_keys(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of the first exporters."""
    names = {
        "neox": {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        "stablelm": {"partial_rotary_factor": "rope_pct", "layer_norm_eps": "norm_eps"},
        "nemotron": {"partial_rotary_factor": "rope_percent"},
        "falcon": {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"},
        "bloom": {"hidden_size": "n_embed", "n_head": "num_attention_heads"},
    }[name]
    architectures = {"stablelm": "StableLMEpochForCausalLM", "falcon": "RWForCausalLM"}
    flat = {**config, **config.pop("rope_parameters", {})}
    flat = {key: value for key, value in flat.items() if key not in ("rope_type", "rope_parameters")}
    old = {names.get(key, key): value for key, value in flat.items()}
    return {**old, "architectures": [architectures.get(name, config["architectures"][0])]}


@pytest.mark.parametrize("name", ["neox", "stablelm", "nemotron", "falcon", "bloom"])
def test_keys_of_the_first_exporters_declare_the_same_model(name, family, tmp_path):
    found = family(name)
    config = json.loads((found.path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key != "num_key_value_heads" or name != "falcon"}
    (tmp_path / "config.json").write_text(json.dumps(in_old_keys(name, config)))
    assert read_checkpoint(tmp_path, weights=False).model == read_checkpoint(found.path, weights=False).model


def test_gpt2_without_prefix_and_with_stored_masks_equals_transformers(family, driver, tmp_path):
    """Check the form of the checkpoint openai-community/gpt2."""
    one, prompt = family("gpt2"), [*prompts()[4]]
    tensors = load_file(one.path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{index}.attn.bias": torch.ones(1, 1, 64, 64).tril() for index in range(3)}
    save_file({**bare, **masks}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((one.path / "config.json").read_text())
    torch.testing.assert_close(driver(tmp_path).run(prompt, 7), one.logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "pattern", "windows"),
    [
        ("exaone4", "LG", [7, None, None]),
        ("exaone4", 2, [7, None, 7]),
        ("cohere2", 3, [4, 4, None]),
    ],
)
def test_windows_follow_the_pattern_of_older_configurations(name, pattern, windows, family, tmp_path):
    config = json.loads((family(name).path / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window_pattern": pattern}))
    parts = attentions(read_checkpoint(tmp_path, weights=False).model)
    assert [part.window for part in parts] == windows
    assert [part.rope is None for part in parts] == [window is None for window in windows]


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("baichuan", "max_position_embeddings", None, "model_max_length, for ALiBi"),
        ("bloom", "apply_residual_connection_post_layernorm", True, "apply_residual_connection_post_layernorm is true"),
        ("mpt", "attn_config", {"clip_qkv": 6.0}, "attn_config.clip_qkv is 6.0; supported is null"),
        ("mpt", "attn_config", {"qk_ln": True}, "attn_config.qk_ln is True"),
        ("mpt", "attn_config", {"alibi": False}, "attn_config.alibi is False; supported is True"),
        (
            "mpt",
            "attn_config",
            {"attn_type": "multiquery_attention"},
            "attn_config.attn_type is 'multiquery_attention'",
        ),
        ("mpt", "attn_config", {"prefix_lm": True}, "attn_config.prefix_lm"),
        ("mpt", "attn_config", {"alibi_bias_max": 0}, "attn_config.alibi_bias_max is 0"),
        ("mpt", "attn_config", [], r"attn_config is \[\]; it must be an object"),
        ("mpt", "no_bias", False, "no_bias is False"),
        ("mpt", "norm_type", "rmsnorm", "norm_type is 'rmsnorm'"),
        ("mpt", "logit_scale", 0.5, "logit_scale is 0.5"),
        ("opt", "word_embed_proj_dim", 0, "word_embed_proj_dim is 0; it must be a whole number of at least 1"),
        ("olmo", "clip_qkv", 8.0, "clip_qkv"),
        ("qwen1", "visual", {}, "vision encoder"),
        ("minicpm", "sparse_config", {}, "sparse_config"),
        ("gpt2", "add_cross_attention", True, "add_cross_attention"),
        ("gpt2", "n_embd", 0, "n_embd is 0"),
        ("gptj", "rotary_dim", 5, "rotary_dim is 5"),
        ("codegen", "n_head", 6, "n_head is 6"),
        ("smollm3", "no_rope_layers", [1], "no_rope_layers"),
        (
            "glm4-moe-groups",
            "n_group",
            5,
            "n_group is 5, topk_group 2, num_experts_per_tok 3, and there are 12 experts",
        ),
        ("glm4-moe-groups", "topk_group", 5, "n_group is 4, topk_group 5"),
        ("glm4-moe-groups", "num_experts_per_tok", 7, "enough for a token"),
        ("gpt-oss", "swiglu_alpha", 1.5, "swiglu_alpha is 1.5; supported is 1.702"),
        ("gpt-oss", "swiglu_limit", 0, "swiglu_limit is 0; it must be a number greater than 0"),
        ("llama4", "no_rope_layers", [1, 0], "no_rope_layers is .* for each of the 4 layers"),
        ("llama4", "moe_layers", "all", "moe_layers is 'all'; it must be a list of layers' numbers"),
        ("llama4", "floor_scale", 0, "floor_scale is 0; it must be a whole number of at least 1"),
        ("llama4", "layer_types", ["sliding_attention"], "must name full_attention or chunked_attention for each"),
        ("exaone-moe-odd", "mlp_layer_types", ["sparse"], "mlp_layer_types must name dense or sparse"),
        ("falcon-h1", "attention_bias", True, "attention_bias is true and attention_in_multiplier 0.8; it must be 1"),
        ("falcon-h1", "projectors_bias", True, "projectors_bias and mamba_proj_bias differ"),
        ("falcon-h1", "ssm_multipliers", [1.0], r"ssm_multipliers is \[1.0\]; it must be a list of 5 numbers"),
        ("jamba", "attn_layer_offset", 3, "attn_layer_offset is 3; it must be less than attn_layer_period, 3"),
        ("gemma3n", "altup_active_idx", 1, "altup_active_idx is 1; supported is 0"),
        ("gemma3n", "intermediate_size", [66], "intermediate_size has 1 entries"),
        ("gemma3n", "activation_sparsity_pattern", [0.5, 0.5, 0.5, 1.0], "a number from 0 to less than 1"),
        ("gemma4", "num_kv_shared_layers", 4, "num_kv_shared_layers is 4, and there are 4 layers"),
        ("gemma4", "num_kv_shared_layers", 3, "no layer before the last 3 is of the kind full_attention"),
        ("gemma4", "use_bidirectional_attention", "all", "supported are null and"),
        ("gemma4", "per_layer_config", {"1": {"head_dim": 16}}, "per_layer_config differs between layers"),
        ("mimo-v2", "v_head_dim", 25, "v_head_dim is 25 and head_dim 24"),
        ("mimo-v2", "num_key_value_heads", 8, "the first must be a multiple of twice the second"),
        ("mamba", "hidden_act", "gelu", "hidden_act is gelu; Mamba mixers have silu"),
        ("minimax", "attn_type_list", [1, 2, 0, 1], "attn_type_list is .* 0 or 1 for each of the 4 layers"),
        ("minimax", "hidden_act", "gelu", "hidden_act is gelu; lightning attention has silu"),
        ("minimax", "mlp_alpha_factor", 0.0, "mlp_alpha_factor is 0; it must be a number greater than 0"),
        ("recurrent-gemma", "block_types", ["mamba"], "block_types is .* a list of recurrent and attention"),
        ("recurrent-gemma", "lru_width", 50, "lru_width is 50 and num_attention_heads 6"),
        ("zamba2", "use_long_context", True, "use_long_context is true"),
        ("zamba2", "num_key_value_heads", 2, "num_key_value_heads is 2; .* it must be num_attention_heads, 6"),
        ("zamba2", "num_attention_heads", 5, "num_attention_heads is 5; it must divide twice hidden_size, 96"),
    ],
)
def test_settings_that_would_be_computed_wrongly_are_refused(name, key, value, message, family, tmp_path):
    config = json.loads((family(name).path / "config.json").read_text())
    config = {**config, key: value} if value is not None else {k: v for k, v in config.items() if k != key}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path, weights=False)


DEFAULTS = {
    "FalconH1": transformers.FalconH1Config(num_hidden_layers=2, vocab_size=VOCAB),
    "FalconMamba": transformers.FalconMambaConfig(num_hidden_layers=2, vocab_size=VOCAB),
    "Gemma3n": transformers.Gemma3nTextConfig(num_hidden_layers=20, vocab_size=VOCAB),
    "Gemma4": transformers.Gemma4TextConfig(num_hidden_layers=7, vocab_size=VOCAB),
    "GptOss": transformers.GptOssConfig(num_hidden_layers=3, vocab_size=VOCAB),
    "Jamba": transformers.JambaConfig(num_hidden_layers=6, vocab_size=VOCAB),
    "KimiLinear": transformers.KimiLinearConfig(num_hidden_layers=5, vocab_size=VOCAB),
    "Llama4": transformers.Llama4TextConfig(num_hidden_layers=5, vocab_size=VOCAB),
    "OlmoHybrid": transformers.OlmoHybridConfig(num_hidden_layers=4, vocab_size=VOCAB),
    "MiMoV2Flash": transformers.MiMoV2FlashConfig(num_hidden_layers=8, vocab_size=VOCAB),
    "Mamba": transformers.MambaConfig(num_hidden_layers=2, vocab_size=VOCAB),
    "MiniMax": transformers.MiniMaxConfig(num_hidden_layers=4, vocab_size=VOCAB),
    "RecurrentGemma": transformers.RecurrentGemmaConfig(num_hidden_layers=4, vocab_size=VOCAB),
    "Zamba2": transformers.Zamba2Config(vocab_size=VOCAB),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_missing_keys_have_the_defaults_of_transformers(name, tmp_path):
    whole, declared = DEFAULTS[name].to_dict(), []
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for config in (whole, {key: whole[key] for key in sizes if key in whole}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [f"{name}ForCausalLM"]}))
        declared.append(read_checkpoint(tmp_path, weights=False).model)
    assert declared[0] == declared[1]


@pytest.mark.parametrize(
    ("more", "chunk", "length"),
    [({}, 8, 3), ({"attention_chunk_size": None}, None, 3), ({"attention_chunk_size": 64}, None, 3),
     ({"attn_temperature_tuning": False}, 8, None)],
)  # fmt: skip
def test_llama4_declares_chunks_of_rotated_layers_and_scaled_queries_of_others(more, chunk, length, family, tmp_path):
    config = json.loads((family("llama4").path / "config.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_checkpoint(tmp_path, weights=False).model
    parts = attentions(model)
    assert [part.chunk for part in parts] == [None if part.rope is None else chunk for part in parts]
    assert {part.query_scale and part.query_scale.length for part in parts if part.rope is None} == {length}
    assert {part.query_scale for part in parts if part.rope is not None} == {None}
    assert model.max_context == 64


@pytest.mark.parametrize(
    ("name", "steps", "by"),
    [
        *((name, steps, by) for name in STEPPED for steps in IN_STEPS for by in KERNELS),
        *(
            pytest.param(*one, "triton", marks=NIGHTLY)
            for one in (("llama4", IN_STEPS[0]), *((name, IN_STEPS[1]) for name in STEPPED[1:]))
        ),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, tuple) else value,
)
@pytest.mark.sampled(7)
def test_chunked_attention_and_recurrent_state_equal_transformers_in_any_steps(name, steps, by, family, driver):
    """Chunks of 8 and of 3 tokens with blocks of 4; blocks of earlier chunks are released. Steps of one token take
    their state from the step before."""
    one, prompt = family(name), [*prompts()[4]]
    runner = driver(one.path, kernels=by)
    request = runner.add(prompt)
    for count in steps:
        runner.step([(request, count)])
    torch.testing.assert_close(request.result, one.logits(prompt), atol=1e-4, rtol=0)


def test_original_keys_of_kimi_linear_declare_the_same_model(family, tmp_path):
    found = family("kimi_linear")
    config = json.loads((found.path / "config.json").read_text())
    names = {"conv_kernel_dim": "short_conv_kernel_size", "head_dim": "head_dim", "num_heads": "num_heads"}
    linear = {old: config.pop(f"linear_{new}") for new, old in names.items()}
    del config["layer_types"], config["mlp_layer_types"]
    attention = {**linear, "full_attn_layers": [2], "kda_layers": [1, 3]}
    config |= {"linear_attn_config": attention, "first_k_dense_replace": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(tmp_path, weights=False).model == read_checkpoint(found.path, weights=False).model


def test_original_keys_of_minimax_declare_the_same_layers(family, tmp_path):
    """Original models have the slopes of ALiBi, which differ from those of transformers for 6 heads."""
    found = family("minimax")
    config = json.loads((found.path / "config.json").read_text())
    kinds = {"linear_attn": "linear_attention", "full_attn": "full_attention", "mlp": "mlp"}
    for new, old in kinds.items():
        for one in ("alpha", "beta"):
            config[f"layernorm_{old}_{one}"] = config.pop(f"{new}_{one}_factor")
    config["attn_type_list"] = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    config |= {"architectures": ["MiniMaxText01ForCausalLM"], "postnorm": True, "rotary_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    old, new = (read_checkpoint(path, weights=False).model for path in (tmp_path, found.path))
    assert [part.rope.dim for part in attentions(old)] == [4, 4]
    for ours, theirs in zip(recurrents(old), recurrents(new), strict=True):
        assert ours.slopes.values()[:4] == pytest.approx([ours.slopes.factor * 2.0**-at for at in (2, 4, 6, 8)])
        assert ours.slopes.factor == pytest.approx(theirs.slopes.factor, abs=1e-5)
    for ours, theirs in zip(old.blocks, new.blocks, strict=True):
        assert [(one.factor, one.scale) for one in ours] == [(one.factor, one.scale) for one in theirs]
    config["postnorm"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="postnorm is not true"):
        read_checkpoint(tmp_path, weights=False)


def test_stack_of_another_number_of_experts_is_refused(family, tmp_path):
    source = family("granite-moe").path
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 7}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    shape = r"block_sparse_moe.input_linear.weight has shape \[6, 44, 48\], but config.json implies 7 experts"
    with pytest.raises(CheckpointError, match=shape):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "neox", "internlm2", "baichuan2", "stablelm-qk-norm", "bloom", "granite-moe"])
def test_weights_rounded_at_load_take_the_planned_bytes(name, bits, family):
    compare(read_checkpoint(family(name).path), best(), bits=bits)


@pytest.mark.parametrize("name", ["zamba2", "recurrent-gemma", "longcat", "deepseek-v32"])
def test_weights_rounded_for_triton_kernels_take_the_planned_bytes(name, family):
    """Low-rank updates and matrices of heads among them, and exact weights of an indexer."""
    compare(read_checkpoint(family(name).path), "triton", dtype="float16", bits="int4")


# The driver of the tests has no step without attention, and heads of 10 dims are refused.
NO_TRITON = ("codegen-one-each", "mamba2", "mamba2-odd", "mamba", "mamba-odd", "falcon-mamba", "falcon-mamba-odd")


@pytest.mark.parametrize("name", thinned([one for one in CASES if one not in NO_TRITON], (*DENSE, *EXPERTS)))
def test_triton_kernels_equal_transformers(name, family, driver, shows):
    """A norm for each body, learned positions, norms without weights, ALiBi, recurrent parts and routing, in
    Triton's interpreter."""
    one, prompt = family(name), [*prompts()[1]]
    got = driver(one.path, kernels="triton").run(prompt, 5)
    torch.testing.assert_close(got, one.logits(prompt), atol=1e-4, rtol=0)
    shows(one.path, "Triton interpreted")


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize("name", thinned(("mamba2", "mamba", "falcon-mamba"), ["mamba2"]))
def test_triton_kernels_of_models_without_attention_equal_transformers(name, family, shows):
    """The driver of the test above has no steps without attention, so the engine runs these models."""
    one, params = family(name), Params(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3)
    with engine(one.path, "triton", dtype="float32", max_running=2) as llm:
        for made in llm.generate(prompts()[:2], params):
            assert_same(one, made, 3)
    shows(one.path, "Triton interpreted")
