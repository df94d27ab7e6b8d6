"""Sparse attention of DeepSeek-V3.2 and GLM-5 in every body, with fewer selected keys than there are tokens: steps of
all kinds against transformers, rows bit for bit, and dense attention where all keys are selected."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.errors import CheckpointError
from engine.kv.layout import layout
from engine.lowering.lower import lower
from engine.lowering.measures import attention_operations
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import usable
from kernels.jit import installed
from tests.engine.layers.families import CASES, random_family
from tests.tiers import NIGHTLY

TRITON = pytest.param("triton", marks=pytest.mark.skipif(not installed(), reason="no Triton"))
DENSE_MLPS = {"mlp_layer_types": ["dense"] * 3, "num_hidden_layers": 3}  # no experts, which are slow in the interpreter
SHARED = {**DENSE_MLPS, "indexer_types": ["full", "shared", "full"]}
WIDE = {**DENSE_MLPS, "num_hidden_layers": 1, "mlp_layer_types": ["dense"], "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints, and their logits by transformers."""
    found = {}

    def get(name, more):
        key = name, json.dumps(more)
        if key not in found:
            path, model = tmp_path_factory.mktemp("sparse"), random_family(name, more)
            model.save_pretrained(path)
            found[key] = path, model
        path, model = found[key]

        def logits(ids):
            with torch.no_grad():
                return model(torch.tensor([ids])).logits[0]

        return path, logits

    return get


@pytest.mark.parametrize(
    ("name", "more", "body"),
    [
        *(("deepseek-v32", DENSE_MLPS, body) for body in ("torch", *usable())),
        pytest.param("deepseek-v32", DENSE_MLPS, "triton", marks=[*TRITON.marks, NIGHTLY]),
        *(("glm-moe-dsa", SHARED, body) for body in ("torch", *usable())),
        pytest.param("glm-moe-dsa", SHARED, "triton", marks=TRITON.marks),  # a layer without an indexer too
    ],
)
def test_sparse_attention_equals_transformers_in_steps_of_all_kinds(name, more, body, saved, driver, ids):
    """Prompts in chunks, decode steps, and several tokens of a row after cached ones."""
    path, logits = saved(name, more)
    engine = driver(path, kernels=body)
    long, short = engine.add(ids(29, 1)), engine.add(ids(12, 2))
    engine.step([(long, 20), (short, 1)])
    engine.step([(short, 7), (long, 1)])
    engine.step([(long, 8), (short, 4)])
    for request in (long, short):
        torch.testing.assert_close(request.result, logits(request.ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("body", ["torch", *usable(), pytest.param("triton", marks=[*TRITON.marks, NIGHTLY])])
def test_all_keys_selected_equals_dense_attention(body, saved, driver, ids, tmp_path):
    """Bit for bit on compiled kernels, in prompts, decode steps and both together."""
    path, _ = saved("deepseek-v32", {**DENSE_MLPS, "index_topk": 40})
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if ".indexer." not in name}, tmp_path / "model.safetensors")
    results = []
    for folder in (path, tmp_path):
        engine = driver(folder, kernels=body)
        rows = [engine.add(ids(length, length)) for length in (31, 9)]
        engine.step([(rows[0], 23)])
        engine.step([(rows[0], 1), (rows[1], 8)])
        engine.step([(rows[0], 1), (rows[1], 1)])
        engine.step([(rows[0], 6)])
        results.append([row.result for row in rows])
    for sparse, dense in zip(*results, strict=True):
        if body in usable():
            assert torch.equal(sparse, dense)
        else:
            torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize("body", usable())
def test_compiled_sparse_row_is_identical_in_any_chunk_and_batch(body, saved, driver, ids):
    """The prompt and the selection are both longer than a split of 512 keys."""
    path, logits = saved("deepseek-v32-odd", {**WIDE, "index_topk": 520})
    prompt, options = ids(545, 9), {"kernels": body, "blocks": 400}
    want = driver(path, **options).run(prompt, len(prompt))
    torch.testing.assert_close(want, logits(prompt), atol=1e-4, rtol=0)
    one_by_one = driver(path, threads=1, **options)
    request = one_by_one.add(prompt)
    one_by_one.step([(request, 510)])
    for _ in range(35):
        one_by_one.step([(request, 1)])
    assert torch.equal(request.result, want)
    company = driver(path, block_tokens=7, seed=4, **options)
    request, others = company.add(prompt), [company.add(ids(length, length)) for length in (1, 40)]
    company.step([(others[0], 1), (request, 80), (others[1], 20)])
    company.step([(request, 1)])
    company.step([(others[1], 1), (request, 464)])
    assert torch.equal(request.result, want)


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("body", ["torch", usable()[-1]])
def test_pages_in_16_bits_round_latents_and_keys_of_the_indexer(body, pages, saved, driver, ids):
    path, prompt = saved("deepseek-v32", {**DENSE_MLPS, "index_topk": 40})[0], ids(40, 3)
    exact = driver(path, kernels=body).run(prompt, 11)
    rounded = driver(path, kernels=body, page_dtype=pages).run(prompt, 11)
    assert 0 < (rounded - exact).abs().max() < 1e-1


def test_state_of_a_token_is_its_latent_and_the_key_of_each_indexer(saved):
    """Every rank has them whole. Layers that share a selection have no key."""
    for name, more, keys in (("deepseek-v32", DENSE_MLPS, 3), ("glm-moe-dsa", SHARED, 2)):
        model = read_checkpoint(saved(name, more)[0]).model
        for ranks in (1, 2):
            found = layout(model, block_tokens=16, element_bytes=2, ranks=ranks)
            assert found.token_bytes == (3 * (24 + 6) + keys * 10) * 2
            assert {shape[1:] for shape in found.shapes} == {(1, 30), (1, 10)}


def test_operations_count_the_selected_keys_and_all_keys_of_the_indexer(saved):
    model = read_checkpoint(saved("glm-moe-dsa", SHARED)[0]).model
    attention, indexer = 2 * 6 * (30 + 24), 2 * 9 * 10
    ops = lower(model).ops
    assert attention_operations(ops, 5) == 3 * 5 * attention + 2 * 5 * indexer
    assert attention_operations(ops, 50) == 3 * 6 * attention + 2 * 50 * indexer


@pytest.mark.parametrize(
    ("more", "full"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, [1, 0, 1, 0]),
        ({"index_topk_pattern": "FFSS"}, [1, 1, 0, 0]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, [1, 1, 0, 1]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [1, 0, 0, 1]),
        ({}, [1, 1, 1, 1]),
    ],
)
def test_layers_with_an_indexer_are_those_of_transformers(more, full, tmp_path):
    """By each of the keys that declare them."""
    settings = {key: value for key, value in CASES["glm-moe-dsa"][1].items() if key != "indexer_types"}
    (tmp_path / "config.json").write_text(
        json.dumps({**settings, "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4, **more})
    )
    bodies = [block[0].body for block in read_checkpoint(tmp_path, weights=False).model.blocks]
    assert [part.indexer is not None for part in bodies] == list(map(bool, full))
    assert [part.shares_selection for part in bodies] == [not one for one in full]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types must name full or shared for each of"),
        ({"indexer_types": ["full"]}, "for each of the 4 layers"),
        ({"index_head_dim": 4}, "index_head_dim 4 and qk_rope_head_dim 6; an indexer needs"),
        ({"q_lora_rank": None}, "q_lora_rank is None, index_head_dim 10"),
        ({"index_topk": 0}, "index_topk is 0; it must be a whole number of at least 1"),
    ],
)
def test_impossible_indexer_is_refused(more, words, tmp_path):
    config = {**CASES["glm-moe-dsa"][1], "architectures": ["GlmMoeDsaForCausalLM"], **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(tmp_path, weights=False)


def test_a_shared_selection_without_an_indexer_is_an_error_of_the_declaration(saved):
    model = read_checkpoint(saved("glm-moe-dsa", SHARED)[0]).model
    with pytest.raises(AssertionError, match="an indexer precedes attention"):
        lower(replace(model, blocks=model.blocks[1:]))
