"""Output encodings of vectors, compared with torch's conversions; and chunked texts, compared with plain means."""

import base64
import math
import struct
from array import array

import numpy as np
import pytest
import torch

from appliance.server.pooling.chunks import averaged
from appliance.server.pooling.scores import SIMILARITIES, cosine, max_similarity
from appliance.server.pooling.vectors import base64_text, encoded, floats, nested
from engine.api.messages import Pooled

TORCH = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def pooled(values, shape=None) -> Pooled:
    values = np.asarray(values, "<f4")
    return Pooled(tuple(shape or values.shape), values.tobytes())


def hard_numbers() -> np.ndarray:
    """Return random numbers of all magnitudes, and every midpoint between two neighbours of the 8-bit types."""
    generator = np.random.default_rng(1)
    spread = generator.standard_normal(20000) * 10.0 ** generator.uniform(-9, 6, 20000)
    ends = [0.0, -0.0, 448, 464, 465, -464, 57344, 61439, 61440, -61440, 1e30, 65504, 65520, 1e-8, math.inf, -math.inf]
    exact = []
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        known = torch.arange(256, dtype=torch.uint8).view(kind).float()
        known = known[known.isfinite()].sort().values.double()
        exact += [known, (known[1:] + known[:-1]) / 2]
    return np.concatenate([spread, ends, torch.cat(exact).numpy()]).astype(np.float32)


@pytest.mark.parametrize("dtype", TORCH)
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    numbers = hard_numbers()
    data = encoded(pooled(numbers), dtype, "little")
    ours = torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).float()
    theirs = torch.from_numpy(numbers).to(TORCH[dtype]).float()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    assert same.all(), numbers[~same.numpy()][:5]


@pytest.mark.parametrize("dtype", TORCH)
def test_what_is_no_number_stays_none(dtype):
    data = encoded(pooled([math.nan, 1.0]), dtype, "little")
    values = torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).float()
    assert values.isnan().tolist() == [True, False] and values[1] == 1


@pytest.mark.parametrize(("dtype", "letter"), [("float32", "f"), ("float16", "e")])
def test_bytes_come_in_the_order_that_is_asked_for(dtype, letter):
    numbers = [1.5, -2.25, 3.0]
    for order, sign in (("little", "<"), ("big", ">"), ("native", "=")):
        assert encoded(pooled(numbers), dtype, order) == struct.pack(f"{sign}3{letter}", *numbers)
    assert encoded(pooled(numbers), "fp8_e4m3", "big") == encoded(pooled(numbers), "fp8_e4m3", "little")


def test_floats_are_the_very_numbers_of_base64():
    """EM-01 float and base64"""
    numbers = pooled(np.random.default_rng(2).standard_normal(384))
    assert array("f", base64.b64decode(base64_text(numbers))).tolist() == floats(numbers)


def test_a_matrix_is_written_row_by_row():
    assert nested(pooled(range(6), (3, 2))) == [[0, 1], [2, 3], [4, 5]]


def test_similarities_match_torch():
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    left, right = first.tolist(), second.tolist()
    assert SIMILARITIES["cosine"](left, right) == pytest.approx(torch.cosine_similarity(first, second, dim=0).item())
    assert SIMILARITIES["dot"](left, right) == pytest.approx((first @ second).item())
    assert SIMILARITIES["euclidean"](left, right) == pytest.approx(-(first - second).norm().item())
    assert SIMILARITIES["manhattan"](left, right) == pytest.approx(-(first - second).abs().sum().item())
    assert cosine([0.0, 0.0], [1.0, 0.0]) == 0.0


def test_late_interaction_sums_the_closest_token_of_each():
    query, document = np.random.default_rng(4).standard_normal((2, 5, 8)).astype("f4")
    document = document[:3]
    brute = sum(max(float(np.dot(one, other)) for other in document) for one in query)
    assert max_similarity(pooled(query), pooled(document)) == pytest.approx(brute, rel=1e-5)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_parts_are_means_of_their_tokens(size, unit):
    rows = np.random.default_rng(5).standard_normal((7, 4)).astype("f4")
    means = [torch.from_numpy(rows[at : at + size]).mean(dim=0) for at in range(0, 7, size)]
    wanted = torch.stack([mean / mean.norm() for mean in means] if unit else means)
    given = averaged(pooled(rows), size=size, unit=unit)
    assert given.shape == tuple(wanted.shape)
    assert torch.allclose(torch.tensor(nested(given)), wanted, atol=1e-6)
