"""Multi-head latent attention in every body: steps of all kinds against transformers, which expands all keys and
values, and rows bit for bit."""

import pytest
import torch

from engine.kv.layout import layout
from engine.models.checkpoint import read_checkpoint
from engine.models.families import ARCHITECTURES
from kernels.cpu.library import usable
from kernels.jit import installed
from tests.engine.layers.families import random_family, save_family

TRITON = pytest.param("triton", marks=pytest.mark.skipif(not installed(), reason="no Triton"))
BODIES = ["torch", *usable(), TRITON]
CASES = ("youtu", "youtu-odd")  # with queries of low rank and without; no experts, which are slow in the interpreter


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoints, and their logits by transformers."""
    found = {}

    def get(name):
        if name not in found:
            path, model = tmp_path_factory.mktemp("latent") / name, random_family(name)
            save_family(name, model, path)
            found[name] = path, model
        path, model = found[name]

        def logits(ids):
            with torch.no_grad():
                return model(torch.tensor([ids])).logits[0]

        return path, logits

    return get


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", CASES)
def test_latent_attention_equals_transformers_in_steps_of_all_kinds(name, body, saved, driver, ids):
    """Prompts in chunks, decode steps, and several tokens of a row after cached ones."""
    path, logits = saved(name)
    engine = driver(path, kernels=body)
    long, short = engine.add(ids(29, 1)), engine.add(ids(12, 2))
    engine.step([(long, 20), (short, 1)])
    engine.step([(short, 7), (long, 1)])
    engine.step([(long, 8), (short, 4)])
    for request in (long, short):
        torch.testing.assert_close(request.result, logits(request.ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("body", usable())
def test_compiled_row_is_identical_in_any_chunk_and_batch(body, pages, saved, driver, ids):
    """Bit for bit: in one step, token by token with another number of threads, and among other rows. The prompt has
    more than one split of keys."""
    path, prompt, options = saved("youtu")[0], ids(530, 9), {"kernels": body, "page_dtype": pages}
    want = driver(path, **options).run(prompt, len(prompt))
    one_by_one = driver(path, threads=1, **options)
    request = one_by_one.add(prompt)
    one_by_one.step([(request, 505)])
    for _ in range(25):
        one_by_one.step([(request, 1)])
    assert torch.equal(request.result, want)
    company = driver(path, block_tokens=7, seed=4, **options)
    request, others = company.add(prompt), [company.add(ids(length, length)) for length in (1, 40, 17)]
    company.step([(others[0], 1), (request, 80), (others[1], 20)])
    company.step([(request, 1), (others[2], 17)])
    company.step([(others[1], 1), (request, 449)])
    assert torch.equal(request.result, want)


def test_triton_row_is_identical_beside_others(saved, driver, ids):
    together, alone = (driver(saved("youtu-odd")[0], kernels="triton", seed=seed) for seed in (1, 2))
    rows = [together.add(ids(length, length)) for length in (6, 11)]
    same = alone.add(rows[1].ids)
    for counts in ((5, 3), (1, 7), (0, 1)):
        together.step([(row, count) for row, count in zip(rows, counts, strict=True) if count])
        alone.step([(same, counts[1])])
    assert torch.equal(rows[1].result, same.result)


@pytest.mark.parametrize("body", ["torch", usable()[-1]])
def test_pages_in_16_bits_round_only_latents(body, saved, driver, ids):
    path, prompt = saved("youtu")[0], ids(40, 3)
    exact = driver(path, kernels=body).run(prompt, 11)
    rounded = driver(path, kernels=body, page_dtype=torch.float16).run(prompt, 11)
    assert 0 < (rounded - exact).abs().max() < 2e-2


def test_state_of_a_token_is_its_latent_and_key(saved):
    model = read_checkpoint(saved("youtu")[0]).model
    for ranks in (1, 2, 3):
        found = layout(model, block_tokens=16, element_bytes=2, ranks=ranks)
        assert found.token_bytes == 3 * (24 + 6) * 2


@pytest.mark.parametrize("name", ["glm4-moe-lite", "minicpm3"])
def test_norms_of_latents_have_an_epsilon_of_their_own(name):
    """It is not rms_norm_eps, which is ten times as large in these families."""
    theirs = random_family(name)
    config = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    part = ARCHITECTURES[type(theirs).__name__](config).blocks[0][0].body
    attention = theirs.model.layers[0].self_attn
    assert part.latent_norm.eps == attention.kv_a_layernorm.variance_epsilon != theirs.config.rms_norm_eps
    assert part.q_norm.eps == attention.q_a_layernorm.variance_epsilon
