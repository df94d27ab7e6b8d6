"""BLOOM with 12 heads, not a power of two, in every body: steps of all kinds against transformers, rows bit for bit."""

import pytest
import torch

from engine.layers.loaded import Slopes
from engine.models.checkpoint import read_checkpoint
from kernels.cpu.library import usable
from kernels.jit import installed
from tests.engine.layers.families import random_family, save_family

TRITON = pytest.param("triton", marks=pytest.mark.skipif(not installed(), reason="no Triton"))
BODIES = ["torch", *usable(), TRITON]
BLOOM = "bloom-wide"  # heads of 8, as Triton needs


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    """The checkpoint, and its logits by transformers."""
    path, model = tmp_path_factory.mktemp("alibi") / "bloom", random_family(BLOOM)
    save_family(BLOOM, model, path)

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return path, logits


@pytest.mark.parametrize("body", BODIES)
def test_alibi_equals_transformers_in_steps_of_all_kinds(body, bloom, driver, ids):
    path, logits = bloom
    engine = driver(path, kernels=body)
    long, short = engine.add(ids(29, 1)), engine.add(ids(12, 2))
    engine.step([(long, 20), (short, 1)])
    engine.step([(short, 7), (long, 1)])
    engine.step([(long, 8), (short, 4)])
    for request in (long, short):
        torch.testing.assert_close(request.result, logits(request.ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("body", usable())
def test_compiled_row_is_identical_in_any_chunk_and_batch(body, pages, bloom, driver, ids):
    """Bit for bit: in one step, token by token with another number of threads, and among other rows."""
    path, prompt, options = bloom[0], ids(150, 9), {"kernels": body, "page_dtype": pages}
    want = driver(path, **options).run(prompt, len(prompt))
    assert torch.equal(driver(path, threads=1, **options).run(prompt, 1), want)
    company = driver(path, block_tokens=3, seed=4, **options)
    request, others = company.add(prompt), [company.add(ids(length, length)) for length in (1, 40, 17)]
    company.step([(others[0], 1), (request, 80), (others[1], 20)])
    company.step([(request, 1), (others[2], 17)])
    company.step([(others[1], 1), (request, 69)])
    assert torch.equal(request.result, want)


@pytest.mark.nightly("tests/kernels/test_attention.py::test_decode_row_is_identical_in_any_step")
def test_triton_row_is_identical_beside_others(bloom, driver, ids):
    together, alone = (driver(bloom[0], kernels="triton", seed=seed) for seed in (1, 2))
    rows = [together.add(ids(length, length)) for length in (6, 11)]
    same = alone.add(rows[1].ids)
    for counts in ((5, 3), (1, 7), (0, 1)):
        together.step([(row, count) for row, count in zip(rows, counts, strict=True) if count])
        alone.step([(same, counts[1])])
    assert torch.equal(rows[1].result, same.result)


@pytest.mark.parametrize("body", ["torch", *usable()])
def test_ranks_have_the_slopes_of_their_heads(body, bloom, driver, ids, on_ranks):
    path, logits = bloom
    prompt = ids(11, 3)

    def work(world):
        engine = driver(path, world=world, kernels=body, threads=1)
        (own,) = (layer for layer in engine.model.weights.by_name.values() if isinstance(layer, Slopes))
        return own.slopes, engine.run(prompt, 6)

    slopes, results = zip(*on_ranks(3, work, body), strict=True)
    torch.testing.assert_close(torch.cat(slopes), torch.tensor(_alibi(path).slopes(12)))
    for result in results:
        torch.testing.assert_close(result, logits(prompt), atol=1e-4, rtol=0)


def test_layers_share_the_slopes(bloom, driver):
    """The bias is not negligible either, so the tests above depend on it."""
    layers = driver(bloom[0]).model.weights.by_name.values()
    (slopes,) = (layer.slopes for layer in layers if isinstance(layer, Slopes))
    assert slopes.shape == (12,) and slopes.max() > 0.5


def _alibi(path):
    return read_checkpoint(path, weights=False).model.blocks[0][0].body.alibi
