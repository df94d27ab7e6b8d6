"""Compiled kernels of blocks of ggml and of INT6: compared with the values that the package gguf restores (INT6: with
the formula), times activations that are quantized in the same way."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from kernels.cpu import program as cpu
from kernels.cpu.bodies import matmul
from kernels.cpu.library import usable
from kernels.cpu.packing import BLOCK_FORMS, FORMS, pack, restore_blocks
from kernels.cpu.program import Program, StepData, Team
from kernels.ggml_blocks import BlockWeight, to_int6
from kernels.ggml_layout import LAYOUTS, row_bytes
from kernels.quantisation import rounded_rows

KINDS = tuple(LAYOUTS)
# Places of the float16 scales and minimums in a block.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "INT6": (48,)}
HALVES |= dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))


@pytest.fixture(scope="module", params=usable())
def team(request):
    team = Team(request.param, 2)
    yield team
    team.close()


def drawn(kind, outputs=19, inputs=512, seed=3):
    """Draw every byte: all codes, all scales of sub-blocks, and scales of units that have both signs."""
    size, count = (64, 50) if kind == "INT6" else GGML_QUANT_SIZES[Type[kind]]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (outputs, inputs // size, count), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = draw.uniform(-0.02, 0.03, (outputs, inputs // size)).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8).reshape(outputs, -1, 2)
    if kind == "MXFP4":
        blocks[:, :, 0] = draw.integers(110, 125, (outputs, inputs // size))
    return BlockWeight(torch.from_numpy(blocks.reshape(outputs, -1)), kind, inputs)


def values_of(weight):
    """Return the values by the package; INT6 is Slipway's own."""
    if weight.kind == "INT6":
        return weight.restored()
    values = torch.from_numpy(gguf.quants.dequantize(weight.blocks.numpy(), Type[weight.kind]))
    return values[:, : weight.inputs]


def activations(rows, inputs, seed=5):
    """Draw blocks without outliers, with one and with two, a block of zeros, and blocks of large numbers."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 40
    x[0, 70], x[0, 71] = 90, -300
    x[-1, 64:128] = 0
    x[:, 128:160] *= 100
    return x


def as_multiplied(x, kind):
    values, scales, outliers = rounded_rows(x, LAYOUTS[kind].activation_block, LAYOUTS[kind].outlier_ratio)
    return values.double() * scales.double() + outliers.double()


def close(got, want, size, tolerance):
    """Compare with the sum of the sizes of all products, because products of both signs cancel."""
    error = (got.double() - want).abs() / size
    assert error.max() <= tolerance, error.max()


@pytest.mark.parametrize("kind", KINDS)
def test_product_equals_the_values_of_the_package(team, kind):
    weight = drawn(kind)
    packed, values = pack(weight, team.tiling), values_of(weight).double()
    assert packed.nbytes == -(-19 // team.tiling.width) * team.tiling.width * weight.blocks.shape[1]
    for rows in (1, 2, 3, 4, 7, 21):
        x = activations(rows, weight.inputs)
        got, exact = matmul(team, x, packed), as_multiplied(x, kind)
        close(got, exact @ values.T, exact.abs() @ values.abs().T, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(team, kind):
    packed, x = pack(drawn(kind), team.tiling), activations(37, 512)
    whole = matmul(team, x, packed)
    for rows in (slice(0, 1), slice(0, 2), slice(4, 7), slice(30, 37)):
        assert torch.equal(matmul(team, x[rows].contiguous(), packed), whole[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_codes_do_not_overflow(team, kind):
    """All bits of the codes and scales are set, and activations are ±127 times their scale."""
    weight = drawn(kind, 8)
    size = LAYOUTS[kind].bytes
    blocks = torch.full_like(weight.blocks, 255).view(8, -1, size)
    blocks[4:] = 0
    for at in HALVES.get(kind, (0,)):
        blocks[:, :, at : at + 2] = torch.tensor([0, 36], dtype=torch.uint8)  # 2^-6
    if kind == "MXFP4":
        blocks[:, :, 0] = 127
        blocks[:2, :, 1:] = 0x77
    weight = BlockWeight(blocks.flatten(1), kind, weight.inputs)
    values, packed = values_of(weight).double(), pack(weight, team.tiling)
    x = torch.ones(6, 512)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 256:] = -1
    x[4, 1::4] = x[4, ::4] = -1
    x[5, 2::4] = x[5, 3::4] = 0  # one half of a total alone
    exact = as_multiplied(x, kind)
    close(matmul(team, x, packed), exact @ values.T, exact.abs() @ values.abs().T + 1e-30, 2e-6)


@pytest.mark.parametrize("kind", ["MXFP4", "Q5_1", "IQ4_NL", "INT6"])
def test_last_block_may_be_short(team, kind):
    weight = drawn(kind, inputs=128)
    short = BlockWeight(weight.blocks, kind, 109)
    values = values_of(weight).double()[:, :109]
    for rows in (1, 5):
        x = torch.randn(rows, 112)[:, :109].contiguous()
        exact = as_multiplied(x, kind)
        close(matmul(team, x, pack(short, team.tiling)), exact @ values.T, exact.abs() @ values.abs().T, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up_and_restored(team, kind):
    weight = drawn(kind)
    values = values_of(weight)
    torch.testing.assert_close(restore_blocks(weight, team.variant), values, rtol=3e-7, atol=1e-6)
    ids, out = torch.tensor([18, 0, 7]), torch.empty(3, weight.inputs)
    table = weight.blocks.contiguous()
    embed = cpu.Embed(
        table=table.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        size=weight.inputs,
        type=cpu.EMBED_BLOCKS + FORMS.index(BLOCK_FORMS[kind]),
        scale=3.0,
    )
    team.run(Program([embed], (table, out)), StepData(3, ids=ids))
    torch.testing.assert_close(out, 3 * values[ids], rtol=3e-7, atol=3e-6)


def test_6_bits_are_the_nearest_with_a_searched_scale():
    weight = torch.randn(5, 150, generator=torch.Generator().manual_seed(2))
    weight[1, 64:128] = 0.0
    weight[2, 140] = 30.0  # in the short last block
    made = to_int6(weight)
    assert made.blocks.shape == (5, row_bytes("INT6", 150)) and made.inputs == 150
    codes = made.blocks.view(5, 3, 50)
    scales = (
        codes[:, :, 48:].contiguous().view(torch.float16).float().abs().flatten(1).repeat_interleave(64, 1)[:, :150]
    )
    error, inside = (made.restored() - weight).abs(), weight.abs() < scales * 31
    assert (error[inside] <= scales[inside] * 0.5001).all()
    assert (made.restored()[1, 64:128] == 0).all()
    plain = torch.nn.functional.pad(weight, (0, 42)).unflatten(1, (-1, 64)).abs().amax(2) / 31
    wide = plain.repeat_interleave(64, 1)[:, :150]
    naive = (weight / wide).nan_to_num().round() * wide
    assert error.square().sum() < (naive - weight).square().sum()


@pytest.mark.parametrize("inputs", [64, 65, 127, 576])
def test_every_block_of_6_bits_has_its_own_scale(team, inputs):
    """Bit for bit: integers times powers of two, and x whose blocks have scales that are powers of two, too."""
    dice = torch.Generator().manual_seed(inputs)
    blocks = -(-inputs // 64)
    powers = torch.exp2(torch.randint(-1, 2, (21, blocks), generator=dice).float())
    values = torch.randint(-32, 32, (21, inputs), generator=dice).float()
    values[:, ::64] = -32.0
    weight = values * powers.repeat_interleave(64, 1)[:, :inputs]
    made = to_int6(weight)
    assert torch.equal(made.restored(), weight)
    x = torch.randint(-127, 128, (9, inputs), generator=dice).float()
    for at in range(1, 4):
        x[:, at::64] = 127.0
    x = x * torch.exp2(torch.randint(-1, 2, (9, blocks), generator=dice).float()).repeat_interleave(64, 1)[:, :inputs]
    x[4, :64] = 0.0
    want = (x.double() @ weight.double().T).float()
    packed = pack(made, team.tiling)
    for rows in (1, 2, 3, 5, 9):
        assert torch.equal(matmul(team, x[:rows].contiguous(), packed), want[:rows]), rows


def test_nonfinite_rows_affect_no_other_rows(team):
    packed, x = pack(drawn("Q6_K"), team.tiling), activations(5, 512)
    whole = matmul(team, x, packed)
    x[2, 300] = float("nan")
    broken = matmul(team, x, packed)
    assert broken[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(broken[keep], whole[keep])
