"""LoRA adapters: equal to merged weights in transformers, rows of a batch with different adapters, prefix cache."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.errors import CheckpointError, ConfigError, RequestError
from engine.api.messages import Pooling
from engine.llm import LLM, Generation, Params
from kernels.cpu.library import best
from kernels.jit import installed
from tests.engine.adapters import Pairs, merge, random_pairs, rslora_scale, write_adapter
from tests.tiers import paired, thinned

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
KERNELS = ("torch", best())
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENGINE: dict[str, Any] = {"kv_bytes": 1 << 20, "block_tokens": 4, "max_running": 16, "max_step_tokens": 24}
PROMPTS = [[*range(3, 20)], [*range(40, 47)], [9, 8, 7, 6, 5], [*range(3, 20)]]


@dataclass(frozen=True)
class Family:
    make: Callable[[], transformers.PreTrainedModel]
    targets: Sequence[str]


def sized(name: str, **more: Any) -> Callable[[], transformers.PreTrainedModel]:
    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    return lambda: model(config(**{**SIZES, **more}))


def gpt2() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "llama": Family(sized("Llama", num_key_value_heads=2), (*ATTENTION, *MLP)),
    "qwen2 with biases": Family(sized("Qwen2", num_key_value_heads=2), (*ATTENTION, "down_proj")),
    "qwen3 with norms of heads": Family(sized("Qwen3", num_key_value_heads=2, head_dim=12), ("q_proj", "v_proj")),
    "gemma2 with norms after blocks": Family(
        sized("Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=8), (*ATTENTION, *MLP)
    ),
    "phi3 with fused projections": Family(
        sized("Phi3", num_key_value_heads=2, pad_token_id=0), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    ),
    "falcon with grouped rows": Family(
        sized("Falcon", num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=44),
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "gpt2 with transposed weights": Family(gpt2, ("c_attn", "c_proj", "c_fc")),
    "latent attention": Family(
        sized("MiniCPM3", **LATENT) if hasattr(transformers, "MiniCPM3ForCausalLM") else sized("Youtu", **LATENT),
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"),
    ),
    "mixture of experts, attention only": Family(
        sized("Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2), ATTENTION
    ),
    "mamba2": Family(
        lambda: transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                vocab_size=101,
                hidden_size=32,
                num_hidden_layers=2,
                num_heads=8,
                head_dim=8,
                state_size=8,
                n_groups=2,
                expand=2,
                chunk_size=8,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        ),
        ("in_proj", "out_proj"),
    ),
}


def save(folder: Path, family: Family) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = family.make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def expected(model: transformers.PreTrainedModel, pairs: Pairs, ids: Sequence[int], **scale: Any) -> torch.Tensor:
    """Return log probabilities [positions, vocab] of the model with merged weights."""
    merged = copy.deepcopy(model)
    merge(merged, pairs, **scale)
    with torch.no_grad():
        return merged(torch.tensor([ids])).logits.double().log_softmax(-1)[0]


def found(generation: Generation) -> torch.Tensor:
    assert generation.prompt_logprobs is not None
    rows = [dict(zip(one.top_ids, one.top_logprobs, strict=True)) for one in generation.prompt_logprobs if one]
    return torch.tensor([[row[token] for token in range(len(row))] for row in rows], dtype=torch.float64)


def scored(adapter: str, **more: Any) -> Params:
    return Params(temperature=0.0, max_tokens=4, prompt_logprobs=-1, adapter=adapter, **more)


@pytest.mark.parametrize(("name", "kernels"), paired(FAMILIES, KERNELS))
def test_rows_of_a_batch_equal_models_with_merged_weights(name: str, kernels: str, tmp_path: Path):
    family = FAMILIES[name]
    model = save(tmp_path / "base", family)
    pairs = {
        "all": random_pairs(model, family.targets, 4, seed=1),
        "one": random_pairs(model, family.targets[-1:], 3, seed=2),
        "none": {},
    }
    folders = {key: write_adapter(tmp_path / key, pairs[key], rank=rank) for key, rank in (("all", 4), ("one", 3))}
    scales = {"all": 2.0, "one": 8 / 3, "none": 1.0}
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, threads=2, adapters=folders) as llm:
        chosen = ["all", "one", "none", "all"]
        params = [scored("" if one == "none" else one) for one in chosen]
        for generation, one, ids in zip(llm.generate(PROMPTS, params), chosen, PROMPTS, strict=True):
            right = expected(model, pairs[one], ids, scale=scales[one])
            torch.testing.assert_close(found(generation), right[: len(ids) - 1], atol=1e-4, rtol=0)
            assert generation.ids[0] == int(right[-1].argmax())
        differing = expected(model, pairs["all"], PROMPTS[0]) - expected(model, {}, PROMPTS[0])
        assert differing.abs().max() > 0.05  # the adapter changes the model


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    thinned(["phi3 with fused projections", "falcon with grouped rows", "mamba2"], ["phi3 with fused projections"]),
)
def test_triton_kernels_equal_models_with_merged_weights(name: str, tmp_path: Path):
    """Prompts and single tokens, padded steps among them."""
    family = FAMILIES[name]
    model = save(tmp_path / "base", family)
    ranks, prompts = {"all": 4, "one": 3}, [PROMPTS[1], PROMPTS[2], PROMPTS[2][:2]]
    pairs = {
        "all": random_pairs(model, family.targets, 4, seed=1),
        "one": random_pairs(model, family.targets[-1:], 3, seed=2),
        "": {},
    }
    folders = {key: write_adapter(tmp_path / key, pairs[key], rank=rank) for key, rank in ranks.items()}
    with LLM(tmp_path / "base", **ENGINE, kernels="triton", adapters=folders) as llm:
        params = [Params(temperature=0.0, max_tokens=3, logprobs=2, adapter=one) for one in ("one", "all", "")]
        generations = llm.generate(prompts, params)
    for generation, one, ids in zip(generations, ("one", "all", ""), prompts, strict=True):
        right = expected(model, pairs[one], [*ids, *generation.ids], scale=2.0 if one == "all" else 8 / 3)
        for at, (token, step) in enumerate(zip(generation.ids, generation.logprobs, strict=True), len(ids) - 1):
            assert token == int(right[at].argmax())
            assert step.logprob == pytest.approx(float(right[at, token]), abs=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rank_pattern_alpha_pattern_and_rslora_give_each_module_its_own_scale(kernels: str, tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["llama"])
    ranks = {"q_proj": 7, "down_proj": 2}

    def rank(name: str) -> int:
        return ranks.get(name.rpartition(".")[2], 5)

    def alpha(name: str) -> float:
        return 3.0 if name.startswith("model.layers.1.") and name.endswith("v_proj") else 6.0

    pairs = random_pairs(model, (*ATTENTION, *MLP), rank, seed=3)
    folder = write_adapter(
        tmp_path / "a",
        pairs,
        rank=5,
        lora_alpha=6,
        use_rslora=True,
        rank_pattern={"q_proj": 7, "mlp.down_proj": 2},
        alpha_pattern={r"layers\.1\.self_attn\.v_proj": 3.0},
    )
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, adapters={"a": folder}) as llm:
        (generation,) = llm.generate([PROMPTS[0]], scored("a"))
    right = expected(model, pairs, PROMPTS[0], scale=lambda name: rslora_scale(alpha(name), rank(name)))
    torch.testing.assert_close(found(generation), right[:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_may_change_some_layers(kernels: str, tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["llama"])
    pairs = random_pairs(model, ("q_proj", "up_proj"), chosen=lambda name: ".layers.1." in name)
    folder = write_adapter(tmp_path / "a", pairs, layers_to_transform=[1], dtype=torch.float32)
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, adapters={"a": folder}) as llm:
        (generation,) = llm.generate([PROMPTS[0]], scored("a"))
    torch.testing.assert_close(found(generation), expected(model, pairs, PROMPTS[0])[:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_may_be_stored_in_16_bits(dtype: torch.dtype, tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["llama"])
    pairs = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in random_pairs(model, ATTENTION).items()}
    folder = write_adapter(tmp_path / "a", pairs, dtype=dtype)
    with LLM(tmp_path / "base", **ENGINE, adapters={"a": folder}) as llm:
        (generation,) = llm.generate([PROMPTS[0]], scored("a"))
    torch.testing.assert_close(found(generation), expected(model, pairs, PROMPTS[0])[:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("weights", "tolerance"), [("int8", 0.01), ("int4", 0.035)])
def test_adapters_are_added_to_quantized_products(weights: str, tolerance: float, tmp_path: Path):
    """The reference is the base model as this engine rounds it, plus the change that the adapter makes in transformers.
    Both effects are small here, so their product is below the tolerance."""
    family = Family(sized("Llama", num_key_value_heads=2, hidden_size=64, intermediate_size=128), (*ATTENTION, *MLP))
    model = save(tmp_path / "base", family)
    small = random_pairs(model, family.targets, seed=4, size=0.03)
    folder = write_adapter(tmp_path / "a", small)
    options = {**ENGINE, "weights": weights, "head": "stored", "kv_dtype": "float32"}
    with LLM(tmp_path / "base", **options, adapters={"a": folder}) as llm:
        base, adapted = llm.generate([PROMPTS[0]] * 2, [scored(""), scored("a")])
    right = expected(model, small, PROMPTS[0]) - expected(model, {}, PROMPTS[0])
    assert right.abs().max() > 4 * tolerance
    torch.testing.assert_close(found(adapted) - found(base), right[:-1], atol=tolerance, rtol=0)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_adapters_multiply_the_rows_before_they_are_quantized(tmp_path: Path):
    """fp8 weights, whose rows are quantized by the norm in front of the projection if there are no adapters."""
    sizes = {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = save(tmp_path / "base", Family(sized("Llama", **sizes), ()))
    small = random_pairs(model, ("q_proj", "down_proj"), seed=4, size=0.1)
    folder = write_adapter(tmp_path / "a", small)
    options = {**ENGINE, "weights": "fp8", "head": "stored", "kernels": "triton"}
    with LLM(tmp_path / "base", **options, adapters={"a": folder}) as llm:
        base, adapted = llm.generate([PROMPTS[2]] * 2, [scored(""), scored("a")])
    right = expected(model, small, PROMPTS[2]) - expected(model, {}, PROMPTS[2])
    assert right.abs().max() > 0.12
    torch.testing.assert_close(found(adapted) - found(base), right[:-1], atol=0.03, rtol=0)


# A batch


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Eight adapters of several ranks and targets, on the compiled kernels."""
    root = tmp_path_factory.mktemp("eight")
    model = save(root / "base", FAMILIES["llama"])
    targets = (*ATTENTION, *MLP)
    folders = {}
    for number in range(8):
        rank = (1, 3, 4, 8, 16, 17, 5, 2)[number]
        pairs = random_pairs(model, targets[number % 4 :], rank, seed=number)
        folders[f"a{number}"] = write_adapter(root / f"a{number}", pairs, rank=rank)
    with LLM(root / "base", **{**ENGINE, "max_step_tokens": 64}, threads=2, kernels=best(), adapters=folders) as llm:
        yield llm


def logprobs(generation: Generation) -> tuple[list[int], torch.Tensor, list[tuple[float, ...]]]:
    return generation.ids, found(generation), [one.top_logprobs for one in generation.logprobs]


def test_a_mixed_batch_equals_solo_runs_bit_for_bit(eight: LLM):
    names = [*(f"a{number}" for number in range(8)), "", "a3", "a3", ""]
    prompts = [[(7 * row + 3 * at) % 101 for at in range(1 + 5 * row % 23)] for row in range(len(names))]
    params = [Params(temperature=0.0, max_tokens=12, logprobs=5, prompt_logprobs=-1, adapter=one) for one in names]
    together = eight.generate(prompts, params)
    for prompt, one, whole in zip(prompts, params, together, strict=True):
        (alone,) = eight.generate([prompt], one)
        ids, scores, sampled = logprobs(whole)
        own_ids, own_scores, own_sampled = logprobs(alone)
        assert ids == own_ids
        assert torch.equal(scores, own_scores)
        assert sampled == own_sampled


def test_no_adapter_reads_cached_pages_of_another(eight: LLM):
    prompt = [*range(30, 70)]

    def run(adapter: str) -> Generation:
        return eight.generate([prompt], Params(temperature=0.0, max_tokens=3, logprobs=3, adapter=adapter))[0]

    def cached(generation: Generation) -> int:
        assert generation.timing is not None
        return generation.timing.cached_tokens

    first = {name: run(name) for name in ("", "a1", "a2")}
    again = {name: run(name) for name in ("", "a1", "a2")}
    assert [cached(one) for one in first.values()] == [0, 0, 0]
    assert all(cached(one) >= len(prompt) - 4 for one in again.values())
    assert len({one.logprobs[0].logprob for one in first.values()}) == 3
    for name in first:
        assert [one.top_logprobs for one in first[name].logprobs] == [one.top_logprobs for one in again[name].logprobs]


def test_adapters_that_are_not_loaded_are_refused(eight: LLM):
    with pytest.raises(RequestError, match="adapter 'b': not loaded; loaded are a0, a1") as raised:
        eight.generate([[1, 2]], Params(adapter="b"))
    assert raised.value.param == "model"


# Ranks, pooling


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sampled(2)
def test_two_ranks_add_their_shares(kernels: str, tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["llama"])
    pairs = random_pairs(model, (*ATTENTION, *MLP), seed=5)
    folder = write_adapter(tmp_path / "a", pairs)
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, threads=1, tensor=2, adapters={"a": folder}) as llm:
        base, adapted = llm.generate([PROMPTS[0]] * 2, [scored(""), scored("a")])
    torch.testing.assert_close(found(base), expected(model, {}, PROMPTS[0])[:-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(found(adapted), expected(model, pairs, PROMPTS[0])[:-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_vectors_of_an_encoder_use_the_adapter(kernels: str, tmp_path: Path):
    torch.manual_seed(1)
    sizes = {key: value for key, value in SIZES.items() if not key.endswith("token_id")}
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path / "base")
    pairs = random_pairs(model, ("query", "value", "dense"), seed=6)
    folder = write_adapter(tmp_path / "a", pairs, task_type="FEATURE_EXTRACTION")
    with LLM(tmp_path / "base", kernels=kernels, adapters={"a": folder}) as llm:
        (vector,) = llm.pool([[5, 6, 7]], Pooling("token_embed", activate=False), adapter="a")
        (plain,) = llm.pool([[5, 6, 7]], Pooling("token_embed", activate=False))
    merge(model, pairs)
    with torch.no_grad():
        right = model(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    torch.testing.assert_close(torch.tensor(vector), right, atol=1e-4, rtol=0)
    assert (torch.tensor(plain) - right).abs().max() > 0.01


# Refused


def test_modules_that_cannot_be_adapted_are_refused(tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["llama"])
    pairs = random_pairs(model, ("q_proj",))
    inputs = torch.zeros(4, 32)

    def refused(name: str, wrong: Pairs, **config: Any) -> str:
        folder = write_adapter(tmp_path / name, wrong, **config)
        with pytest.raises(CheckpointError) as raised:
            LLM(tmp_path / "base", **ENGINE, adapters={name: folder})
        return str(raised.value)

    head = refused("head", {**pairs, "lm_head": (inputs, torch.zeros(101, 4))})
    assert "changes lm_head; adapters of the head are not supported" in head
    tower = refused("tower", {"vision_tower.layers.0.self_attn.q_proj": (inputs, torch.zeros(32, 4))})
    assert "only the text decoder is served" in tower
    other = refused("other", {"model.layers.0.self_attn.qkv": (inputs, torch.zeros(32, 4))})
    assert "the model has no such projection; is the adapter of another model?" in other
    narrow = refused("narrow", {"model.layers.0.self_attn.q_proj": (torch.zeros(4, 31), torch.zeros(32, 4))})
    assert "lora_A [4, 31]" in narrow
    assert "[32, 32]; is the adapter of another model?" in narrow
    low = refused("low", {"model.layers.0.self_attn.q_proj": (inputs, torch.zeros(33, 4))})
    assert "lora_B [33, 4]" in low
    missing = refused("missing", dict(list(pairs.items())[:1]))
    assert "lacks the tensors of model.layers.1.self_attn.q_proj, which target_modules names" in missing


def test_routers_are_refused(tmp_path: Path):
    save(tmp_path / "base", FAMILIES["mixture of experts, attention only"])
    router = {"model.layers.0.block_sparse_moe.gate": (torch.zeros(4, 32), torch.zeros(4, 4))}
    folder = write_adapter(tmp_path / "a", router)
    with pytest.raises(CheckpointError, match="it is a router of experts"):
        LLM(tmp_path / "base", **ENGINE, adapters={"a": folder})


def test_encoder_decoders_have_no_adapters(tmp_path: Path):
    folder = write_adapter(tmp_path / "a", random_pairs(save(tmp_path / "base", FAMILIES["llama"]), ("q_proj",)))
    sizes = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}  # fmt: skip
    transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).save_pretrained(tmp_path / "bart")
    with pytest.raises(ConfigError, match="adapters: encoder-decoder models are served without adapters"):
        LLM(tmp_path / "bart", adapters={"a": folder})


def test_adapters_must_be_a_mapping(tmp_path: Path):
    save(tmp_path / "base", FAMILIES["llama"])
    with pytest.raises(ConfigError, match="must be a mapping of names to folders"):
        LLM(tmp_path / "base", **ENGINE, adapters=["a"])
