"""Logprobs against log-softmax in float64 (LP-01, LP-02, SMP-04)."""

import math

import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.sampling.logprobs import logprobs

VOCAB = 101


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(4).normal(0, 2, (6, VOCAB)).astype(np.float32)


def test_logprobs_none_zero_and_some(logits, bench, request_of):
    requests = [request_of(Sampling(logprobs=top)) for top in (None, 0, 1, 5, -1, 500)]
    found = bench(VOCAB).sample(logits, requests).logprobs
    assert set(found) == {1, 2, 3, 4, 5}
    assert [len(found[row].top_ids) for row in range(1, 6)] == [0, 1, 5, VOCAB, VOCAB]
    assert all(len(f.top_ids) == len(f.top_logprobs) for f in found.values())


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_raw_logprobs_ignore_sampling_options(temperature, logits, bench, request_of):
    sampling = Sampling(
        temperature=temperature, logprobs=-1, top_k=2, logit_bias={3: 5.0}, bad_words=((4,),), repetition_penalty=1.5
    )
    sampled = bench(VOCAB).sample(logits, [request_of(sampling)] * 6)
    for row, found in sampled.logprobs.items():
        expected = log_softmax(logits[row])
        assert found.token == sampled.ids[row]
        np.testing.assert_allclose(found.top_logprobs, expected[list(found.top_ids)], atol=1e-5)
        assert found.logprob == pytest.approx(expected[found.token], abs=1e-5)
        assert abs(np.exp(found.top_logprobs).sum() - 1) < 1e-3
        assert found.rank == 1 + (expected > expected[found.token]).sum()


def test_processed_logprobs_depend_on_the_temperature(logits, bench, request_of):
    for temperature in (0.5, 2.0):
        sampling = Sampling(temperature=temperature, logprobs=3, logprobs_mode="processed")
        sampled = bench(VOCAB).sample(logits, [request_of(sampling)] * 6)
        for row, found in sampled.logprobs.items():
            assert found.logprob == pytest.approx(log_softmax(logits[row] / temperature)[found.token], abs=1e-5)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_requested_tokens_replace_the_top_logprobs(mode, logits, bench, request_of):
    """Logprobs of chosen tokens keep the requested order and duplicates, and equal the values of logprobs=-1."""
    wanted = (99, 3, 50, 3, 0)
    given = {"temperature": 0.5, "top_k": 40, "logit_bias": {3: 2.0}, "seed": 5, "logprobs_mode": mode}
    named, all_of_them = (
        bench(VOCAB).sample(logits, [request_of(Sampling(**given, logprobs=top, logprob_ids=ids))] * 6).logprobs
        for top, ids in ((2, wanted), (-1, ()))
    )
    for row, found in named.items():
        whole = dict(zip(all_of_them[row].top_ids, all_of_them[row].top_logprobs, strict=True))
        assert found.top_ids == wanted
        np.testing.assert_allclose(found.top_logprobs, [whole[token] for token in wanted], atol=1e-6)
        assert (found.token, found.rank) == (all_of_them[row].token, all_of_them[row].rank)
        if mode == "raw":
            np.testing.assert_allclose(found.top_logprobs, log_softmax(logits[row])[list(wanted)], atol=1e-5)
    mixed = [request_of(Sampling(**given, logprobs=2, logprob_ids=wanted if row % 2 else ())) for row in range(6)]
    found = bench(VOCAB).sample(logits, mixed).logprobs
    assert [len(found[row].top_ids) for row in range(6)] == [2, 5] * 3
    assert all(found[row] == named[row] for row in (1, 3, 5))


def test_raw_logprobs_include_the_grammars_mask(logits, bench, request_of):
    mask = np.zeros(VOCAB, bool)
    mask[[3, 99]] = True
    found = bench(VOCAB).sample(logits[:1], [request_of(Sampling(logprobs=3), mask=mask)]).logprobs[0]
    assert set(found.top_ids[:2]) == {3, 99} and found.top_logprobs[2] == -math.inf
    assert np.exp(found.top_logprobs[:2]).sum() == pytest.approx(1, abs=1e-6)


def test_a_tokens_logprob_is_the_same_float_in_the_list_of_the_most_likely(logits, bench, request_of):
    requests = [request_of(Sampling(logprobs=VOCAB, seed=seed)) for seed in range(6)]
    for found in bench(VOCAB).sample(logits, requests).logprobs.values():
        assert found.top_logprobs[found.top_ids.index(found.token)] == found.logprob
        assert found.rank == found.top_ids.index(found.token) + 1


def test_the_most_likely_tokens_come_in_descending_order_and_equal_ones_by_id():
    logits = torch.zeros(1, 9)
    logits[0, [7, 2, 5]] = torch.tensor([3.0, 1.0, 3.0])
    found = logprobs(logits, torch.tensor([2]), [3])[0]
    assert found.top_ids == (5, 7, 2) and found.rank == 3


def test_rows_may_request_different_numbers_of_logprobs():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    together = logprobs(logits, torch.tensor([1, 2, 3, 4]), [0, 7, -1, 2])
    alone = [logprobs(logits[i : i + 1], torch.tensor([i + 1]), [top])[0] for i, top in enumerate([0, 7, -1, 2])]
    assert together == alone


def test_only_requesting_rows_get_logprobs(logits, bench, request_of):
    requests = [
        request_of(Sampling()),
        request_of(Sampling(logprobs=2, logprobs_mode="processed")),
        request_of(Sampling()),
    ]
    assert set(bench(VOCAB).sample(logits[:3], requests).logprobs) == {1}
