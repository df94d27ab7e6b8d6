"""Streams of hidden states and sparse activations, against sums written out in float64."""

from statistics import NormalDist

import pytest
import torch

from kernels.streams import collect, correct, predict, sparsify, spread, tanh

TOKENS, HIDDEN, COUNT = 5, 7, 3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_predictions_add_each_stream_times_its_coefficient() -> None:
    streams, c = draw(TOKENS, COUNT * HIDDEN), draw(TOKENS, COUNT * COUNT)
    found = predict(streams, c, COUNT).view(TOKENS, COUNT, HIDDEN)
    s, c = streams.double().view(TOKENS, COUNT, HIDDEN), c.double().view(TOKENS, COUNT, COUNT)
    for j in range(COUNT):
        want = s[:, j] + sum(c[:, j, i, None] * s[:, i] for i in range(COUNT))
        torch.testing.assert_close(found[:, j].double(), want, atol=1e-5, rtol=0)


def test_corrections_add_the_change_of_the_first_prediction() -> None:
    predictions, x, c = draw(TOKENS, COUNT * HIDDEN), draw(TOKENS, HIDDEN), draw(TOKENS, COUNT)
    found, own = correct(predictions, x, c), predictions.view(TOKENS, COUNT, HIDDEN)
    want = torch.stack([own[:, j] + (1 + c[:, j, None]) * (x - own[:, 0]) for j in range(COUNT)], 1)
    torch.testing.assert_close(found, want.flatten(1), atol=1e-5, rtol=0)


def test_streams_have_the_size_of_the_first_and_their_mean_is_the_result() -> None:
    x, others = draw(TOKENS, HIDDEN), draw(TOKENS, (COUNT - 1) * HIDDEN)
    streams = spread(x, others).view(TOKENS, COUNT, HIDDEN)
    assert torch.equal(streams[:, 0], x)
    sizes = streams.square().mean(2).sqrt()
    torch.testing.assert_close(sizes, sizes[:, :1].expand_as(sizes), atol=1e-5, rtol=0)
    torch.testing.assert_close(collect(x, list(others.split(HIDDEN, 1))), streams.mean(1), atol=1e-6, rtol=0)


def test_a_projection_of_nothing_stays_finite() -> None:
    assert spread(draw(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN)).isfinite().all()


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_about_this_share_of_normal_values_becomes_0(share: float) -> None:
    x, multiplier = draw(4, 20_000), NormalDist().inv_cdf(share)
    found = sparsify(x, multiplier, x.shape[1], lambda total: total)
    assert (found == 0).float().mean().item() == pytest.approx(share, abs=0.01)
    cutoff = x.double().mean(1, keepdim=True) + multiplier * x.double().std(1, keepdim=True, correction=0)
    torch.testing.assert_close(found.double(), (x.double() - cutoff).clamp(min=0), atol=1e-5, rtol=0)


def test_ranks_share_mean_and_deviation() -> None:
    x = draw(3, 64)
    whole = sparsify(x, 0.4, 64, lambda total: total)
    sums = iter((x.sum(1, keepdim=True), (x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True)))
    own = sparsify(x[:, :32], 0.4, 64, lambda total: next(sums))
    torch.testing.assert_close(own, whole[:, :32], atol=1e-6, rtol=0)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    x = draw(9, 4)
    assert torch.equal(tanh(x, 0.3), torch.cat([tanh(row, 0.3) for row in x.split(1)]))
