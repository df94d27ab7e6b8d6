"""Digests of golden prompts compared: bit for bit, within a band, and where a reply may part from the expected one."""

import math

import msgspec
import numpy as np
import pytest

from engine.api.golden import (
    BANDS,
    REPLY_TOKENS,
    ROOM_TOKENS,
    Arithmetic,
    Band,
    Golden,
    Prompt,
    Recorded,
    band_between,
    difference,
    distance,
    prompts,
)
from engine.worker.logit_fingerprint import TOP, logit_fingerprint

PLAIN = Arithmetic(device="a", kernels="amx", dtype="float32", kv_dtype="float32", weights="stored", exact=True)
EXACT, WIDE = Band(0.0, ""), Band(0.01, "")


def logits(seed=1, vocab=1009):
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def golden(*rows):
    return Golden(Prompt("p", (1, 2)), tuple(int(row.argmax()) for row in rows), tuple(map(logit_fingerprint, rows)))


def changed(row, **arguments):
    return msgspec.structs.replace(row, **arguments)


def test_fingerprint_equals_numpy():
    row = logits()
    found, wide = logit_fingerprint(row), row.astype(np.float64)
    assert found.ids == tuple(np.argsort(-wide, kind="stable")[:TOP])
    assert found.values == pytest.approx(wide[list(found.ids)], rel=1e-7)
    assert found.logsumexp == pytest.approx(np.logaddexp.reduce(wide), rel=1e-7)
    assert found.spread == pytest.approx(wide.std(), rel=1e-7)


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 1009])
def test_fingerprint_is_reproducible_for_any_vocabulary_size(vocab):
    assert logit_fingerprint(logits(vocab=vocab)) == logit_fingerprint(logits(vocab=vocab))
    assert len(logit_fingerprint(logits(vocab=vocab)).ids) == min(TOP, vocab)


def test_flipped_bit_of_a_small_logit_changes_the_checksum():
    row, other = logits(), logits()
    least = int(row.argmin())
    other.view(np.int32)[least] ^= 1
    assert difference(golden(row), golden(row), EXACT) == ""
    said = difference(golden(row), golden(other), EXACT)
    assert "golden prompt p (2 tokens), token 1" in said and "bit for bit" in said
    assert logit_fingerprint(row).bits in said and logit_fingerprint(other).bits in said
    assert difference(golden(row), golden(other), WIDE) == ""


def test_random_sign_sums_estimate_the_difference():
    """A change that touches neither the largest logits nor their sum: only the sums under signs show it"""
    row = logits()
    low = np.argsort(row)[:500]
    for seed in range(20):
        other = row.copy()
        noise = np.random.default_rng(seed).standard_normal(500).astype(np.float32)
        other[low] += 0.2 * noise
        rms = np.sqrt(np.mean((other.astype(np.float64) - row) ** 2)) / row.std()
        assert 0.3 * rms < distance(logit_fingerprint(row), logit_fingerprint(other)) < 4 * rms
        assert difference(golden(row), golden(other), Band(rms / 4, "")) != ""


def test_each_field_of_a_fingerprint_is_compared():
    made = golden(logits())
    one = made.fingerprints[0]
    for field, value in (
        ("logsumexp", one.logsumexp + 0.1 * one.spread),
        ("values", (one.values[0] + 0.1 * one.spread, *one.values[1:])),
        ("ids", (*one.ids[:-1], 0 if one.ids[-1] else 1)),
        ("sign_sums", (*one.sign_sums[:-1], one.sign_sums[-1] + 0.1 * one.spread)),
    ):
        assert (distance(one, changed(one, **{field: value})) > 0) is (field != "ids"), field
    lost = changed(one, ids=(*one.ids[1:], one.ids[0] + 1), values=(*one.values[1:], one.values[-1]))
    assert distance(one, lost) == pytest.approx((one.values[0] - one.values[-1]) / one.spread)


def test_only_differences_above_the_band_fail():
    row = logits()
    for share, passes in ((0.001, True), (0.05, False)):
        other = row + np.float32(share * row.std()) * np.sign(logits(seed=2))
        assert (difference(golden(row), golden(other.astype(np.float32)), WIDE) == "") is passes


def test_nonfinite_fingerprint_is_outside_every_band():
    row, other = logits(), logits()
    other[5] = np.nan
    with np.errstate(invalid="ignore"):
        assert math.isinf(distance(logit_fingerprint(row), logit_fingerprint(other)))
        assert "not finite" in difference(golden(row), golden(other), Band(1.0, ""))
        assert difference(golden(other), golden(other), EXACT) == "", "as broken as it was"
        assert distance(logit_fingerprint(other), logit_fingerprint(other)) == 0


def test_reply_may_diverge_at_a_near_tie():
    row = logits()
    first, second = np.argsort(-row)[:2]
    row[second] = row[first] - np.float32(1e-5)
    other = row.copy()
    other[first], other[second] = row[second], row[first]
    assert difference(golden(row, logits(2)), golden(other, logits(3)), WIDE) == ""
    assert difference(golden(row, logits(2)), golden(row, logits(3)), WIDE) != "", "the same text has to go on alike"


def test_clearly_best_token_must_be_sampled():
    """Logits that agree and a token that does not: sampling is wrong, not the model"""
    made = golden(logits())
    wrong = changed(made, reply=(int(made.fingerprints[0].ids[3]),))
    for band in (EXACT, WIDE):
        assert "expected" in difference(made, wrong, band)


def test_band_depends_on_the_coarser_format():
    assert band_between(PLAIN, PLAIN) == Band(0.0, "the same arithmetic")
    for field, value in (("device", "b"), ("kernels", "avx2"), ("release", "2"), ("library", "torch 3"), ("ranks", 2)):
        band = band_between(PLAIN, changed(PLAIN, **{field: value}))
        assert band is not None and band.width == BANDS["float32"] and field in band.why
    assert band_between(PLAIN, changed(PLAIN, kv_dtype="float16")).width == BANDS["half"]
    assert band_between(PLAIN, changed(PLAIN, kv_dtype="int8")).width == BANDS["rounded"]
    assert band_between(PLAIN, changed(PLAIN, kernels="avx2"), 0.3).width == 0.3
    assert band_between(PLAIN, PLAIN, 0.3).width == 0.0, "a tolerance is for unlike engines"


def test_inexact_kernels_have_a_band_with_themselves():
    torch = changed(PLAIN, kernels="torch", exact=False)
    assert band_between(torch, torch).width == BANDS["float32"]


def test_differently_quantized_weights_are_not_compared():
    assert band_between(PLAIN, changed(PLAIN, weights="int8")) is None


@pytest.mark.parametrize("vocab", [2, 97, 1257, 151_936])
@pytest.mark.parametrize("block_tokens", [1, 16, 64, 1024])
@pytest.mark.parametrize("longest", [2, 5, 9, 40, 4096])
def test_golden_prompts_fit_and_have_valid_ids(vocab, block_tokens, longest):
    texts = (Prompt("text", tuple(range(200))),)
    for count in (0, 1, 2, 3, 7, 16):
        found = prompts(count, vocab=vocab, block_tokens=block_tokens, longest=longest, texts=texts)
        assert len(found) == (count if longest > REPLY_TOKENS else 0)
        assert len({one.name for one in found}) == len(found)
        for one in found:
            assert 1 <= len(one.ids) <= min(longest, ROOM_TOKENS) - REPLY_TOKENS
            assert one.name == "text" or all(0 <= id < vocab for id in one.ids)


def test_golden_prompts_cover_the_vocabulary_and_more_than_a_block():
    short, long, *others = prompts(8, vocab=50_000, block_tokens=16, longest=4096, texts=())
    assert len(short.ids) < 16 < len(long.ids)
    every = [id for one in (short, long, *others) for id in one.ids]
    assert len(set(every)) == len(every), "each prompt looks up other rows of the embedding"
    counts = np.histogram(every, bins=10, range=(0, 50_000))[0]
    assert counts.min() > len(every) / 20


def test_recorded_outputs_round_trip():
    recorded = Recorded(PLAIN, (golden(logits(), logits(2)),))
    assert msgspec.json.decode(msgspec.json.encode(recorded), type=Recorded) == recorded
