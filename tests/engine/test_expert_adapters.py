"""LoRA adapters of routed experts, stacked in one parameter and as modules of single experts: equal to merged
weights."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.llm import LLM, Params
from kernels.cpu.library import best
from tests.engine.adapters import (
    Pairs,
    expert_modules,
    merge,
    merge_experts,
    merge_single_experts,
    of_each_expert,
    random_pairs,
    stacked_pairs,
    write_adapter,
    write_stacked,
)
from tests.engine.test_adapters import ENGINE, PROMPTS, Family, found, save, sized
from tests.tiers import NIGHTLY, paired

EXPERTS = 8
MOE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
FAMILIES = {
    "qwen3": Family(sized("Qwen3Moe", **MOE), ("q_proj", "o_proj")),
    "mixtral": Family(
        sized("Mixtral", num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2), ("q_proj", "o_proj")
    ),
    "gpt-oss": Family(
        sized("GptOss", num_key_value_heads=2, head_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=2),
        ("q_proj",),
    ),
}
# Weights of the experts multiply their inputs. The parameters are [experts, inputs, outputs], which PEFT does not know.
LLAMA4: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    **{
        "intermediate_size": 12,
        "intermediate_size_mlp": 44,
        "interleave_moe_layer_step": 1,
        "attn_temperature_tuning": False,
    },
    **{"attention_chunk_size": 32, "max_position_embeddings": 128, "vocab_size": 101, "hidden_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None},
}
FAMILIES["llama4"] = Family(
    lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**LLAMA4)), ("q_proj", "o_proj")
)
FAMILIES["qwen3 with 64 experts"] = Family(sized("Qwen3Moe", **{**MOE, "num_experts": 64}), ("q_proj",))
NAMES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def merged(model: transformers.PreTrainedModel, experts: Pairs, others: Pairs, ids: Sequence[int]) -> torch.Tensor:
    """Return log probabilities [positions, vocab] of the model with merged weights."""
    changed = copy.deepcopy(model)
    merge_experts(changed, experts)
    merge(changed, others)
    with torch.no_grad():
        return changed(torch.tensor([ids])).logits.double().log_softmax(-1)[0]


def scored(adapter: str) -> Params:
    return Params(temperature=0.0, max_tokens=1, prompt_logprobs=-1, adapter=adapter)


def check(llm: LLM, model: transformers.PreTrainedModel, wanted: dict[str, tuple[Pairs, Pairs]]) -> None:
    """Compare rows of a batch with merged weights, rows without an adapter among them."""
    rows = [*wanted, ""]
    found_rows = llm.generate(PROMPTS[: len(rows)], [scored(name) for name in rows])
    for name, ids, generation in zip(rows, PROMPTS, found_rows, strict=False):
        right = merged(model, *wanted.get(name, ({}, {})), ids)
        torch.testing.assert_close(found(generation), right[: len(ids) - 1], atol=1e-4, rtol=0)
        assert generation.ids[0] == int(right[-1].argmax())
    changed = merged(model, *next(iter(wanted.values())), PROMPTS[0]) - merged(model, {}, {}, PROMPTS[0])
    assert changed.abs().max() > 0.05


@pytest.mark.parametrize(("name", "kernels"), paired(FAMILIES, [*dict.fromkeys(("torch", best()))]))
def test_stacked_experts_equal_merged_weights(name: str, kernels: str, tmp_path: Path):
    """One adapter changes experts and attention, the other one only the last projection of the experts."""
    model = save(tmp_path / "base", FAMILIES[name])
    both, down = stacked_pairs(model, 4, seed=1), stacked_pairs(model, 2, seed=2, parameters=("down_proj",))
    others = random_pairs(model, FAMILIES[name].targets, 4, seed=3)
    experts = write_stacked(tmp_path / "both", both, rank=4)
    written = write_adapter(tmp_path / "others", others, rank=4)
    one = write_stacked(tmp_path / "down", down, rank=2, lora_alpha=4)
    folders = {"both": experts, "down": one, "others": written}
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, threads=2, adapters=folders) as llm:
        check(llm, model, {"both": (both, {}), "down": (down, {}), "others": ({}, others)})


@pytest.mark.parametrize("kernels", ["torch", best(), "triton"])
def test_modules_of_single_experts_equal_merged_weights_in_slots(kernels: str, tmp_path: Path):
    """An adapter whose experts are modules, and the same change stacked, one after the other in the same slot."""
    if kernels == "triton":
        pytest.importorskip("triton")
    model = save(tmp_path / "base", Family(sized("Qwen3Moe", **MOE, num_hidden_layers=1), ()))
    pairs = stacked_pairs(model, 3, seed=4)
    each = of_each_expert(pairs, EXPERTS, NAMES)
    each = {name: (a.roll(len(name), 0), b) for name, (a, b) in each.items()}  # gate and up have different A
    some = {name: pair for name, pair in each.items() if ".experts.5." in name}
    write_adapter(tmp_path / "each", each, rank=3, lora_alpha=6)
    write_adapter(tmp_path / "some", some, rank=3, lora_alpha=6, target_modules=[])
    write_stacked(tmp_path / "stacked", pairs, rank=3, lora_alpha=6)
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, threads=2, max_active=1, max_rank=4) as llm:
        for name, single, stacked in (("each", each, {}), ("some", some, {}), ("stacked", {}, pairs)):
            llm.load_adapter(name, tmp_path / name)
            (generation,) = llm.generate([PROMPTS[2]], scored(name))
            changed = copy.deepcopy(model)
            merge_single_experts(changed, single, NAMES, 2.0)
            expected = merged(changed, stacked, {}, PROMPTS[2])
            torch.testing.assert_close(found(generation), expected[:-1], atol=1e-4, rtol=0)


LONGCAT: dict[str, Any] = {
    **{"num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 44, "expert_ffn_hidden_size": 12, "head_dim": 4},
    **{"n_routed_experts": EXPERTS, "zero_expert_num": 2 * EXPERTS, "moe_topk": 6},
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}


@pytest.mark.parametrize("kernels", ["torch", best(), pytest.param("triton", marks=NIGHTLY)])
def test_adapters_change_no_output_of_zero_computation_experts(kernels: str, tmp_path: Path):
    if kernels == "triton":
        pytest.importorskip("triton")
    model, file = (
        save(tmp_path / "base", Family(sized("LongcatFlash", **LONGCAT), ())),
        tmp_path / "base/model.safetensors",
    )
    # transformers has gate and up of the zero-computation experts too, which it does not use.
    unused = tuple(f"model.layers.0.mlp.experts.{expert}." for expert in range(EXPERTS, 3 * EXPERTS))
    save_file(
        {name: one for name, one in load_file(file).items() if not name.startswith(unused)}, file, {"format": "pt"}
    )
    wanted = {}
    for name, seed in (("a", 6), ("b", 7)):
        made = torch.Generator().manual_seed(seed)
        wanted[name] = {
            f"model.layers.0.mlp.experts.{expert}.{own}": (
                torch.randn(3, inputs, generator=made) * 0.2,
                torch.randn(outputs, 3, generator=made) * 0.2,
            )
            for expert in range(EXPERTS)
            for own, outputs, inputs in (("gate_proj", 12, 32), ("up_proj", 12, 32), ("down_proj", 32, 12))
        }
        write_adapter(tmp_path / name, wanted[name], rank=3, lora_alpha=6, target_modules=[])
    folders = {name: tmp_path / name for name in wanted}
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, threads=2, adapters=folders) as llm:
        rows = llm.generate(PROMPTS[:2], [scored(name) for name in wanted])
    for (name, pairs), ids, row in zip(wanted.items(), PROMPTS, rows, strict=False):
        changed = copy.deepcopy(model)
        merge_single_experts(changed, pairs, NAMES, 2.0)
        right = merged(changed, {}, {}, ids)
        assert (right - merged(model, {}, {}, ids)).abs().max() > 0.01
        torch.testing.assert_close(found(row), right[: len(ids) - 1], atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("kernels", ["torch", best()])
@pytest.mark.sampled(2)
def test_two_ranks_add_their_shares_of_experts(kernels: str, tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["qwen3"])
    pairs = stacked_pairs(model, 4, seed=5)
    folder = write_stacked(tmp_path / "a", pairs, rank=4)
    with LLM(tmp_path / "base", **ENGINE, kernels=kernels, threads=1, tensor=2, adapters={"a": folder}) as llm:
        check(llm, model, {"a": (pairs, {})})


def test_a_mixed_batch_of_experts_equals_solo_runs_bit_for_bit(tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["qwen3"])
    ranks = {"a": 1, "b": 5, "c": 3}
    folders = {
        name: write_stacked(tmp_path / name, stacked_pairs(model, rank, seed=rank), rank=rank)
        for name, rank in ranks.items()
    }
    rows = ["a", "", "b", "c", "a", "b"]
    prompts = [[(7 * row + 3 * at) % 101 for at in range(3 + 5 * row % 7)] for row in range(len(rows))]
    params = [Params(temperature=0.0, max_tokens=6, logprobs=5, adapter=one) for one in rows]
    with LLM(tmp_path / "base", **ENGINE, kernels=best(), threads=2, adapters=folders) as llm:
        together = llm.generate(prompts, params)
        for prompt, one, whole in zip(prompts, params, together, strict=True):
            (alone,) = llm.generate([prompt], one)
            assert whole.ids == alone.ids
            assert [step.top_logprobs for step in whole.logprobs] == [step.top_logprobs for step in alone.logprobs]


def test_an_older_release_of_peft_has_swapped_matrices(tmp_path: Path):
    """It took the outputs of a parameter [experts, outputs, inputs] for its inputs."""
    model = save(tmp_path / "base", FAMILIES["qwen3"])
    pairs = stacked_pairs(model, 4, seed=6)
    swapped = {}
    for name, (a, b) in pairs.items():
        each_a, each_b = a.reshape(EXPERTS, 4, -1), b.reshape(len(b), 4, EXPERTS)
        swapped[name] = (
            each_b.permute(2, 1, 0).reshape(EXPERTS * 4, -1),
            each_a.permute(2, 1, 0).reshape(-1, 4 * EXPERTS),
        )
    folder = write_stacked(tmp_path / "a", swapped, rank=4)
    with LLM(tmp_path / "base", **ENGINE, kernels="torch", adapters={"a": folder}) as llm:
        check(llm, model, {"a": (pairs, {})})


def test_adapters_of_other_experts_are_refused(tmp_path: Path):
    model = save(tmp_path / "base", FAMILIES["qwen3"])
    pairs = stacked_pairs(model, 4)
    name, (a, b) = next(iter(pairs.items()))
    half = {name: (a[: 4 * 4], b[:, : 4 * 4])}
    each = of_each_expert(pairs, EXPERTS, NAMES)
    (first,) = (module for module in expert_modules(model) if ".0." in module)
    cases: list[tuple[Pairs, dict[str, Any], str]] = [
        (half, {}, "the model's matrix is \\[12, 32\\]; is the adapter of another model"),
        ({f"{first}.gate_up_proj": (a[:, 1:], b)}, {}, "the model's matrix is \\[12, 32\\]"),
        ({f"{first}.9.up_proj": (a[:4], b[:12, :4])}, {}, "has no such projection"),
        (each, {"target_modules": ["up_proj"]}, ""),
        (
            {one: each[one] for one in [*each][:-1]},
            {"target_modules": ["down_proj"]},
            "lacks the tensors of .*down_proj",
        ),
    ]
    for number, (wrong, config, why) in enumerate(cases):
        folder = tmp_path / f"a{number}"
        stacked = any(one.endswith("gate_up_proj") for one in wrong)
        (write_stacked if stacked else write_adapter)(folder, wrong, rank=4, **config)
        if not why:
            with LLM(tmp_path / "base", **ENGINE, kernels="torch", adapters={"a": folder}):
                continue
        with pytest.raises(CheckpointError, match=why):
            LLM(tmp_path / "base", **ENGINE, kernels="torch", adapters={"a": folder})
    write_adapter(tmp_path / "other", {f"{first}": (a, b)}, rank=4, target_parameters=["experts.bias"])
    with pytest.raises(CheckpointError, match="target_parameters has bias of .*supported are gate_up_proj"):
        LLM(tmp_path / "base", **ENGINE, kernels="torch", adapters={"a": tmp_path / "other"})
