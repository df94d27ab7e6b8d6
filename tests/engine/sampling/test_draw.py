"""Tests of the distribution of sampled tokens and of their reproducibility (SA-04, SA-05, SA-08, SA-10, SA-11)."""

import math

import msgspec
import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.core.plan import Row, StepPlan
from engine.sampling.columns import Columns
from engine.sampling.noise import Noise, row_keys
from engine.sampling.pipeline import Prepared
from engine.sampling.rows import Rows
from engine.worker.rows import plan_rows, step_result

VOCAB = 41


def chi_square_limit(freedom: int, deviations: float = 3.9) -> float:
    """Wilson and Hilferty: exceeded by chance about once in 20,000 tests."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + deviations * math.sqrt(part)) ** 3


def assert_drawn_from(counts: np.ndarray, expected: np.ndarray) -> None:
    assert counts[expected == 0].sum() == 0, "drawn outside the distribution"
    draws, likely = counts.sum(), expected * counts.sum() >= 5
    rest = max(draws * expected[~likely].sum(), 1e-9)
    statistic = ((counts[likely] - draws * expected[likely]) ** 2 / (draws * expected[likely])).sum()
    statistic += (counts[~likely].sum() - rest) ** 2 / rest if rest > 5 else 0
    assert statistic < chi_square_limit(int(likely.sum()))


KINDS = {
    "plain": Sampling(),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=7),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.05, temperature=1.4),
    "all": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.sampled(5)
def test_tokens_are_drawn_from_the_processed_distribution(kind, vary, bench, request_of, oracle, softmax):
    logits = np.random.default_rng(1).normal(0, 1.5, VOCAB).astype(np.float32)
    counts, (rows, batches) = np.zeros(VOCAB), (600, 36)
    table = bench(VOCAB, slots=rows)
    # the repetition penalty sees the same set of tokens at every length
    requests = [request_of(KINDS[kind], (1, 2), (3,) * batches)] * rows
    drawing = table.rows(requests)
    for batch in range(batches):
        table.columns.seed[:] = np.arange(rows) + (batch * rows if vary == "seed" else 0)
        lengths = np.full(rows, 3 + (batch if vary == "position" else 0))
        step = Rows(drawing.slots, lengths, table.columns, table.tokens)
        sampled = Prepared(step, table.noise).finish(torch.from_numpy(np.tile(logits, (rows, 1))))
        counts += np.bincount(sampled.ids, minlength=VOCAB)
    assert counts.sum() >= 20_000
    assert_drawn_from(counts, softmax(oracle(logits, requests[0]).processed))


def random_requests(request_of, rng: np.random.Generator, count: int) -> list:
    made = []
    for _ in range(count):
        sampling = Sampling(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_k=int(rng.choice([0, 0, 1, 5, 300])),
            top_p=float(rng.choice([1.0, 1.0, 0.5, 0.95])),
            min_p=float(rng.choice([0.0, 0.0, 0.1])),
            seed=int(rng.integers(1 << 62)),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            logit_bias={3: 1.0} if rng.random() < 0.3 else {},
        )
        made.append(request_of(sampling, (1, 2), tuple(map(int, rng.integers(0, VOCAB, rng.integers(0, 20))))))
    return made


@pytest.mark.parametrize("vocab", [VOCAB, 1009])
def test_sampled_token_does_not_depend_on_the_batch(vocab, bench, request_of):
    rng = np.random.default_rng(vocab)
    requests = random_requests(request_of, rng, 40)
    logits = rng.normal(0, 2, (40, vocab)).astype(np.float32)
    together = bench(vocab).sample(logits, requests).ids
    alone = [bench(vocab).sample(logits[i : i + 1], requests[i : i + 1], [17]).ids[0] for i in range(40)]
    order = rng.permutation(40)
    shuffled = bench(vocab).sample(logits[order], [requests[i] for i in order], rng.permutation(64)[:40]).ids
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_seeds_and_positions_give_different_noise(bench, request_of):
    keys = row_keys(np.repeat(np.arange(50, dtype=np.uint64), 50), np.tile(np.arange(50), 50))
    assert len(np.unique(keys, axis=0)) == 2500
    logits = np.zeros((30, 1009))
    by_seed = bench(1009).sample(logits, [request_of(Sampling(seed=i)) for i in range(30)]).ids
    by_position = bench(1009).sample(logits, [request_of(Sampling(seed=1), (1,), (2,) * i) for i in range(30)]).ids
    assert len(set(by_seed)) > 25 and len(set(by_position)) > 25


def test_negative_and_large_seeds_are_accepted(bench, request_of):
    logits = np.zeros((3, 1009))
    ids = bench(1009).sample(logits, [request_of(Sampling(seed=s)) for s in (-1, -(2**63), 2**63 - 1)]).ids
    assert len(set(ids)) == 3


def test_noise_is_finite_and_has_the_moments_of_gumbel():
    noise = Noise(50_021, torch.device("cpu"))
    keys = torch.from_numpy(row_keys(np.arange(20, dtype=np.uint64), np.zeros(20)))
    values = noise.all_tokens(keys).double()
    assert values.isfinite().all()
    assert abs(values.mean() - 0.5772) < 0.01
    assert abs(values.var() - math.pi**2 / 6) < 0.02
    # the largest of n has the mode ln n: a coarse uniform would cut this tail off
    assert abs(values.amax(1).mean() - (math.log(50_021) + 0.5772)) < 1.0
    rows = np.corrcoef(values.numpy())
    assert np.abs(rows - np.eye(20)).max() < 0.03


def test_noise_of_some_tokens_is_the_noise_of_all():
    noise = Noise(1009, torch.device("cpu"))
    keys = torch.from_numpy(row_keys(np.array([1, 2], np.uint64), np.array([5, 6])))
    ids = torch.tensor([[0, 1008, 5], [7, 7, 900]])
    torch.testing.assert_close(noise.some_tokens(keys, ids), noise.all_tokens(keys).gather(1, ids), rtol=0, atol=2e-6)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(min_p=1.0, top_k=1)])
def test_narrowest_truncation_equals_greedy(sampling, bench, request_of):
    logits = np.round(np.random.default_rng(2).normal(0, 1, (50, 2000)))  # the largest value is there many times
    assert bench(2000).sample(logits, [request_of(sampling)] * 50).ids == logits.argmax(1).tolist()


def test_top_k_past_the_vocabulary_changes_nothing(bench, request_of):
    logits = np.random.default_rng(2).normal(0, 1, (40, VOCAB))
    ids = [
        bench(VOCAB).sample(logits, [request_of(Sampling(seed=i, top_k=k)) for i in range(40)]).ids
        for k in (0, VOCAB, VOCAB + 1, 10**6)
    ]
    assert ids[0] == ids[1] == ids[2] == ids[3]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.97),  # reaches past the candidates that are sorted at first
        Sampling(top_k=257),
        Sampling(top_k=1024, top_p=0.999),
        Sampling(top_k=1500, top_p=0.5),
        Sampling(min_p=0.05),
        Sampling(min_p=0.05, top_k=2000, top_p=0.95),
        Sampling(min_p=0.4, top_p=0.95),
    ],
)
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("ties", [False, True])
def test_truncation_is_exact_for_any_number_of_tokens(sampling, spread, ties, bench, request_of, oracle):
    rng = np.random.default_rng(8)
    logits = rng.normal(0, spread, (3, 3001)).astype(np.float32)
    if ties:
        logits = np.round(logits * 8) / 8
    sampling = msgspec.structs.replace(sampling, logprobs=-1, logprobs_mode="processed")
    narrow = msgspec.structs.replace(sampling, top_k=3)
    requests = [request_of(sampling), request_of(narrow), request_of(sampling)]
    sampled = bench(3001).sample(logits, requests)
    for row, request in enumerate(requests):
        found = sampled.logprobs[row]
        kept = {i for i, p in zip(found.top_ids, found.top_logprobs, strict=True) if p > -math.inf}
        assert kept == set(np.flatnonzero(np.isfinite(oracle(logits[row], request).processed)).tolist())


def test_a_temperature_of_a_thousandth_behaves_as_a_hundredth(bench, request_of):
    logits = np.random.default_rng(2).normal(0, 0.01, (40, VOCAB))
    cold, colder = (
        bench(VOCAB).sample(logits, [request_of(Sampling(seed=i, temperature=t)) for i in range(40)]).ids
        for t in (0.01, 0.001)
    )
    assert cold == colder


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=3), Sampling(top_p=0.5)])
def test_nonfinite_row_fails_alone(bad, sampling, bench, request_of):
    logits = np.random.default_rng(2).normal(0, 1, (3, 700))
    fine = bench(700).sample(logits, [request_of(sampling)] * 3)
    logits[1, 13] = bad
    sampled = bench(700).sample(logits, [request_of(sampling)] * 3)
    assert set(sampled.failed) == {1} and "not finite" in sampled.failed[1]
    assert [sampled.ids[0], sampled.ids[2]] == [fine.ids[0], fine.ids[2]]
    assert fine.failed == {}


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1)])
def test_a_row_without_a_possible_token_fails_with_the_reason(sampling, bench, request_of):
    requests = [request_of(sampling, mask=np.zeros(VOCAB, bool)), request_of(sampling)]
    sampled = bench(VOCAB).sample(np.zeros((2, VOCAB)), requests)
    assert set(sampled.failed) == {0} and "no token is possible" in sampled.failed[0]


def test_no_rows_give_no_tokens(bench):
    assert bench(VOCAB).sample(np.zeros((0, VOCAB)), []).ids == []


DRAFTS = {
    "right": lambda draw, logits, count: np.tile(logits.argmax(1), (count, 1)),
    "random": lambda draw, logits, count: draw.integers(0, logits.shape[1], (count, len(logits))),
    "forced": lambda draw, logits, count: np.full((count, len(logits)), 3),
}
"""Draft tokens of `count` rows at each position, as a lookup that is often right, an unrelated one and a grammar."""


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("kind", DRAFTS)
def test_tokens_that_drafts_verify_are_drawn_from_the_distribution(kind, temperature, softmax):
    """Draw 20,000 rows with a draft of two tokens, and count the tokens at each position that the rows return."""
    vocab, rows, batches, length = 6, 500, 40, 3
    draw = np.random.default_rng(5)
    logits = draw.normal(0, 1.5, (length, vocab)).astype(np.float32)
    expected = np.array([softmax(each.astype(np.float64) / temperature) for each in logits])
    table, noise = Columns(rows, vocab), Noise(vocab, torch.device("cpu"), None)
    for slot in range(rows):
        table.write(slot, Sampling(temperature=temperature), prompt_tokens=2, stop_ids=())
    counts, pairs = np.zeros((length, vocab)), np.zeros((vocab, vocab))
    for batch in range(batches):
        table.seed[:] = np.arange(rows) + batch * rows
        drafts = DRAFTS[kind](draw, logits[:-1], rows)
        step = StepPlan(
            1, (), (), tuple(Row(slot, 1, length, True, ((),), tuple(one)) for slot, one in enumerate(drafts.tolist()))
        )
        columns = plan_rows(step)
        sampling = Rows(columns.slots[columns.sampling], columns.positions, table, np.zeros((rows, 9), np.int32))
        sampled = Prepared(sampling, noise).finish(torch.from_numpy(np.tile(logits, (rows, 1))))
        result = step_result(step, columns, sampled, {}, {}, [])
        for row, draft in enumerate(drafts.tolist()):
            tokens = result.tokens(row)
            accepted = next((at for at, one in enumerate(tokens) if at == len(draft) or one != draft[at]), 0)
            assert len(tokens) == accepted + 1, "the row ends with the first token that differs from its draft"
            for position, token in enumerate(tokens):
                counts[position, token] += 1
            if len(tokens) > 1:
                pairs[tokens[0], tokens[1]] += 1
    assert counts[0].sum() == rows * batches == 20_000
    for position in range(length):
        assert counts[position].sum() > 100
        assert_drawn_from(counts[position], expected[position])
    first = pairs.sum(1).argmax()
    assert_drawn_from(pairs[first], expected[1])  # does not depend on the accepted token before it
