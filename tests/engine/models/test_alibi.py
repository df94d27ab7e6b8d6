"""ALiBi slopes against the functions of transformers, for every number of heads."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from engine.models.parts import Alibi


@pytest.mark.parametrize("heads", [*range(1, 41), 56, 64, 71, 112, 127, 128])
def test_slopes_equal_those_of_bloom_for_every_number_of_heads(heads):
    want = _get_alibi_slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(torch.tensor(Alibi().slopes(heads)), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("max_bias", [1, 3, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 12, 16, 24, 40, 64, 71, 112])
def test_slopes_equal_those_of_mpt_for_every_maximum(heads, max_bias):
    want = build_mpt_alibi_tensor(heads, 2, alibi_bias_max=max_bias)[:, 0]  # biases of distances -1 and 0
    got = torch.tensor(Alibi(max_bias=max_bias).slopes(heads))
    torch.testing.assert_close(torch.stack((-got, torch.zeros(heads)), 1), want, rtol=2e-6, atol=0)


def test_factor_multiplies_all_slopes():
    assert Alibi(factor=0.25).slopes(5) == tuple(0.25 * slope for slope in Alibi().slopes(5))
