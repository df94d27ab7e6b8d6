"""Multi-head latent attention in every body: steps of all kinds against transformers, which expands all keys and
values, and rows bit for bit."""

import pytest
import torch

from engine.kv.layout import layout
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import usable
from tests.engine.layers.families import random_family, save_family

BODIES = ["torch", *usable()]
CASES = ("deepseek-v2", "deepseek-v3-odd")  # with queries of low rank and without


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
    path, prompt, options = saved("deepseek-v2")[0], ids(530, 9), {"kernels": body, "page_dtype": pages}
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


@pytest.mark.parametrize("body", ["torch", usable()[-1]])
def test_pages_in_16_bits_round_only_latents(body, saved, driver, ids):
    path, prompt = saved("deepseek-v2")[0], ids(40, 3)
    exact = driver(path, kernels=body).run(prompt, 11)
    rounded = driver(path, kernels=body, page_dtype=torch.float16).run(prompt, 11)
    assert 0 < (rounded - exact).abs().max() < 2e-2


def test_state_of_a_token_is_its_latent_and_key(saved):
    model = read_checkpoint(saved("deepseek-v2")[0]).model
    for ranks in (1, 2, 3):
        found = layout(model, block_tokens=16, element_bytes=2, ranks=ranks)
        assert found.token_bytes == 3 * (24 + 6) * 2
