"""Norms, rotation, activations, embedding and linear against plain float64 formulas."""

import math

import pytest
import torch

from kernels.activation import ACTIVATIONS, gated
from kernels.embedding import embedding
from kernels.layer_norm import layer_norm
from kernels.linear import linear, pack
from kernels.rms_norm import rms_norm, rms_norm_shared
from kernels.rope import rope_angles, rotate_


def near(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 7), (2, 3, 16)])
def test_rms_norm_equals_its_formula(shape):
    x, w = random(*shape), random(shape[-1], seed=1)
    wide = x.double()
    near(rms_norm(x, w, 1e-3), wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * w.double())


def test_rms_norm_sums_in_float32():
    """A sum of 8192 squares in bfloat16 would stall."""
    x = torch.ones(1, 8192, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, torch.ones(8192), 0.0), x)


def test_part_of_a_row_is_normalized_by_the_whole_row():
    x, w = random(3, 12), random(12, seed=1)
    square_sum = x.square().sum(-1, keepdim=True)
    pieces = [rms_norm_shared(x[:, at], w[at], 1e-5, square_sum, 12) for at in (slice(0, 8), slice(8, 12))]
    near(torch.cat(pieces, 1), rms_norm(x, w, 1e-5).double())


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 7), (2, 3, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_equals_its_formula(shape, has_bias):
    x, w, b = random(*shape), random(shape[-1], seed=1), random(shape[-1], seed=2)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * w.double()
    near(layer_norm(x, w, b if has_bias else None, 1e-3), want + b.double() if has_bias else want)


def test_heads_may_have_weights_of_their_own():
    x, w = random(4, 3, 6), random(3, 6, seed=1)
    for head in range(3):
        near(layer_norm(x, w, None, 1e-5)[:, head], layer_norm(x[:, head], w[head], None, 1e-5).double())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 8])
def test_rotation_is_a_complex_product(interleaved, dim):
    """Multiply pairs, as complex numbers, by e^(i · position · frequency); elements after dim are unchanged."""
    x, positions = random(5, 3, 8), torch.tensor([0, 1, 2, 7, 31])
    frequencies = random(dim // 2, seed=1).abs()
    got = x.clone()
    rotate_(got, *rope_angles(positions, frequencies, 1.5, interleaved), interleaved)
    wide = x.double()[..., :dim]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    angle = positions.double()[:, None, None] * frequencies.double()
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angle, 1.5), angle)
    stacked = (turned.real, turned.imag)
    want = torch.stack(stacked, -1).flatten(-2) if interleaved else torch.cat(stacked, -1)
    near(got[..., :dim], want)
    assert torch.equal(got[..., dim:], x[..., dim:])


def test_rotation_works_in_place_on_part_of_a_buffer_and_in_bfloat16():
    whole = random(4, 6, 8)
    angles = rope_angles(torch.arange(4), torch.tensor([1.0, 0.5, 0.25, 0.125]), 1.0, False)
    want, half = whole[:, :4].clone(), whole.bfloat16()
    rotate_(want, *angles, False)
    rotate_(half[:, :4], *angles, False)
    before = whole[:, 4:].clone()
    rotate_(whole[:, :4], *angles, False)
    assert torch.equal(whole[:, :4], want) and torch.equal(whole[:, 4:], before)
    near(half[:, :4], want.double(), 3e-2)


def test_activations_equal_their_formulas():
    x = torch.linspace(-4, 4, 33)
    wide = x.double()
    formulas = {
        "silu": wide / (1 + (-wide).exp()),
        "gelu": wide * (1 + torch.erf(wide / math.sqrt(2))) / 2,
        "gelu_tanh": wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) / 2,
        "quick_gelu": wide / (1 + (-1.702 * wide).exp()),
        "relu": wide.clamp(min=0),
        "relu2": wide.clamp(min=0) ** 2,
    }
    assert formulas.keys() == ACTIVATIONS.keys()
    for name, want in formulas.items():
        near(ACTIVATIONS[name](x), want)


def test_the_gate_comes_before_the_up_projection():
    x = random(3, 10)
    near(gated(ACTIVATIONS["relu"], x), x[:, :5].double().clamp(min=0) * x[:, 5:].double())


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (97, 48), (13, 5), (64, 257)])
def test_a_packed_weight_multiplies_like_the_plain_one(rows, outputs, inputs):
    x, w, b = random(rows, inputs), random(outputs, inputs, seed=1), random(outputs, seed=2)
    packed = pack(w)
    want = x.double() @ w.double().T
    near(linear(x, packed), want, 1e-4)
    near(linear(x, packed, b), want + b.double(), 1e-4)


def test_weights_of_other_types_are_not_packed():
    w = random(4, 3).bfloat16()
    assert pack(w) is w
    near(linear(torch.ones(2, 3, dtype=torch.bfloat16), w), w.double().sum(1).expand(2, 4), 3e-2)


def test_embedding_looks_up_casts_and_scales_rows():
    table = random(5, 4).bfloat16()
    got = embedding(torch.tensor([4, 0, 4]), table, torch.float32, 3.0)
    assert got.dtype == torch.float32 and torch.equal(got, table[[4, 0, 4]].float() * 3.0)


def test_the_factor_of_an_embedding_stays_on_the_host(monkeypatch):
    """A step that is captured as a graph cannot copy it to the device."""
    made, tensor = [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *values, **more: made.append(tensor(*values, **more)) or made[-1])
    ids, table = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(5, 8, device="meta")
    assert embedding(ids, table, torch.bfloat16, 3.3).shape == (3, 8)
    assert [one.device.type for one in made] == ["cpu"]
