"""Golden prompts of the demo model on real workers: what other kernels change, and which faults show."""

import random
from contextlib import contextmanager

import pytest

from benchmarks.golden import PLACES, WIDE, EngineUnderTest, configured, differing, scale, swap
from engine.api.golden import BANDS, Band, Recorded, band_between, distance
from engine.golden import record
from engine.worker.build import build_worker
from engine.worker.ranks import Ranks
from kernels.cpu.library import best, usable
from tests.tiers import NIGHTLY


@contextmanager
def engine(config):
    ranks = Ranks(config) if config.parallelism.tensor > 1 else None
    worker = build_worker(config, lambda phase, fraction: None, ranks=ranks)
    try:
        yield lambda: record(config, worker)
    finally:
        worker.close()


def recorded(**changes) -> Recorded:
    with engine(configured(**changes)) as golden:
        return golden()


@pytest.fixture(scope="module")
def locked() -> Recorded:
    return recorded()


def test_prompts_are_of_ids_and_of_texts(locked):
    assert [one.prompt.name for one in locked.goldens] == ["short", "long", "prose", "code"]
    assert all(one.finite and len(one.reply) == 4 for one in locked.goldens)


@pytest.mark.parametrize(
    "changes",
    [{"threads": 1}, {"max_step_tokens": 7, "max_running": 4}, {"prefix_cache": False, "kv_bytes": 4_000_000}],
    ids=["one thread", "chunks of 7", "a smaller pool"],
)
def test_another_engine_of_the_same_arithmetic_gives_the_same_bits(locked, changes):
    found = recorded(**changes)
    band = band_between(locked.arithmetic, found.arithmetic)
    if best() != "torch":
        assert band.width == 0
    assert differing(locked, found, band) == []


@pytest.mark.parametrize("kernels", [*usable(), "torch"])
def test_every_kind_of_kernels_is_within_its_band_of_the_others(locked, kernels):
    found = recorded(kernels=kernels)
    assert differing(locked, found, band_between(locked.arithmetic, found.arithmetic)) == []
    worst = max(
        distance(a.fingerprints[0], b.fingerprints[0]) for a, b in zip(locked.goldens, found.goldens, strict=True)
    )
    assert worst < BANDS["float32"] / 10, "the band leaves room for deeper models"


def test_other_types_of_the_same_weights_are_within_their_wider_bands(locked):
    for changes in (
        {"kv_dtype": "float16"},
        {"kernels": "torch", "dtype": "bfloat16", "kv_dtype": "bfloat16"},
        *([{"kv_dtype": "int8"}] if best() != "torch" else []),
    ):
        found = recorded(**changes)
        band = band_between(locked.arithmetic, found.arithmetic)
        assert band.width > BANDS["float32"] and differing(locked, found, band) == []
        assert differing(locked, found, WIDE) != [], "and not within that of float32"


@pytest.mark.skipif(best() == "torch", reason="no compiled kernels here")
@pytest.mark.parametrize(("weights", "kernels"), [("int8", "base"), pytest.param("int4", best(), marks=NIGHTLY)])
def test_rounded_weights_agree_with_those_rounded_alike_and_with_no_others(locked, weights, kernels):
    one = recorded(weights=weights, kv_dtype="float16")
    with engine(configured(weights=weights, kv_dtype="float16", kernels=kernels)) as golden:
        other = golden()
    band = band_between(one.arithmetic, other.arithmetic)
    assert band.width == (0 if kernels == best() else BANDS["rounded"])
    assert differing(one, other, band) == []
    assert band_between(one.arithmetic, locked.arithmetic) is None


def test_ranks_that_share_the_model_compute_them_together(locked):
    found = recorded(tensor=2, threads=1)
    assert found.arithmetic.ranks == 2
    assert differing(locked, found, band_between(locked.arithmetic, found.arithmetic)) == []


# Planted faults


@pytest.fixture(scope="module")
def compiled():
    victim = EngineUnderTest(configured())
    yield victim
    victim.worker.close()


@pytest.fixture(scope="module")
def plain():
    victim = EngineUnderTest(configured(kernels="torch"))
    yield victim
    victim.worker.close()


@pytest.mark.skipif(best() == "torch", reason="no compiled kernels here")
@pytest.mark.parametrize("place", PLACES)
def test_any_flipped_weight_bit_is_detected_bit_for_bit(compiled, place):
    rng = random.Random(f"bits {place}")
    for number in range(4):
        with compiled.bit(place, rng):
            assert compiled.seen()[0], f"fault {number}"
    assert compiled.seen() == (False, False), "and what was mended agrees again"


def test_flipped_exponent_bit_is_detected_in_any_band(plain):
    rng = random.Random("band")
    for number in range(4):
        with plain.bit("highest of the exponent", rng):
            assert plain.seen()[1], f"fault {number}"


def test_scaled_and_swapped_rows_are_detected(plain):
    rng = random.Random("rows")
    for change in (scale, swap):
        assert sum(_seen_of(plain, rng, change) for _ in range(4)) >= 3, change.__name__
    assert plain.seen()[1] is False


def _seen_of(victim, rng, change):
    with victim.rows(change, rng):
        return victim.seen()[1]


def test_zeroed_page_is_detected(compiled, plain):
    for victim in (compiled, plain):
        with victim.zeroed_page():
            assert victim.seen() == (True, True)
        assert victim.seen()[1] is False


def test_other_checkpoint_is_detected_in_the_widest_band(locked):
    """A norm scaled by 1.1, a smaller change than any wrong file of the same shape, is detected."""
    victim = EngineUnderTest(configured())
    norm = victim.model.weights.by_name["model.layers.0.input_layernorm"].weight
    with victim.changed(norm, lambda weight: weight.mul_(1.1)):
        assert differing(victim.good, victim.record(), Band(BANDS["half"], "")) != []
    victim.worker.close()
