"""Compiled kernels of blocks of ggml: compared with the values that the package gguf restores, times activations that
are quantized in the same way."""

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
from kernels.ggml_blocks import BlockWeight
from kernels.ggml_layout import LAYOUTS
from kernels.quantisation import rounded_rows

KINDS = tuple(LAYOUTS)
# Places of the float16 scales and minimums in a block.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
HALVES |= dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))


@pytest.fixture(scope="module", params=usable())
def team(request):
    team = Team(request.param, 2)
    yield team
    team.close()


def drawn(kind, outputs=19, inputs=512, seed=3):
    """Draw every byte: all codes, all scales of sub-blocks, and scales of units that have both signs."""
    size, count = GGML_QUANT_SIZES[Type[kind]]
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (outputs, inputs // size, count), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        scales = draw.uniform(-0.02, 0.03, (outputs, inputs // size)).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8).reshape(outputs, -1, 2)
    if kind == "MXFP4":
        blocks[:, :, 0] = draw.integers(110, 125, (outputs, inputs // size))
    return BlockWeight(torch.from_numpy(blocks.reshape(outputs, -1)), kind, inputs)


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
    packed, values = pack(weight, team.tiling), weight.restored().double()
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
    values, packed = weight.restored().double(), pack(weight, team.tiling)
    x = torch.ones(6, 512)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 256:] = -1
    x[4, 1::4] = x[4, ::4] = -1
    x[5, 2::4] = x[5, 3::4] = 0  # one half of a total alone
    exact = as_multiplied(x, kind)
    close(matmul(team, x, packed), exact @ values.T, exact.abs() @ values.abs().T + 1e-30, 2e-6)


@pytest.mark.parametrize("kind", ["MXFP4", "Q5_1", "IQ4_NL"])
def test_last_block_may_be_short(team, kind):
    weight = drawn(kind, inputs=96)
    short = BlockWeight(weight.blocks, kind, 77)
    values = weight.restored().double()[:, :77]
    for rows in (1, 5):
        x = torch.randn(rows, 80)[:, :77].contiguous()
        exact = as_multiplied(x, kind)
        close(matmul(team, x, pack(short, team.tiling)), exact @ values.T, exact.abs() @ values.abs().T, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up_and_restored(team, kind):
    weight = drawn(kind)
    values = weight.restored()
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


def test_nonfinite_rows_affect_no_other_rows(team):
    packed, x = pack(drawn("Q6_K"), team.tiling), activations(5, 512)
    whole = matmul(team, x, packed)
    x[2, 300] = float("nan")
    broken = matmul(team, x, packed)
    assert broken[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(broken[keep], whole[keep])
