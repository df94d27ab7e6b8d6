"""Compiled kernels against float64 formulas, in every variant that this CPU runs: results, guards, and rows that do not
depend on their neighbours, bit for bit."""

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.api.messages import Sampling
from engine.sampling import pipeline
from engine.sampling.columns import Columns
from engine.sampling.draw import draw
from engine.sampling.noise import Noise, row_keys
from engine.sampling.rows import Rows
from kernels.activation import ACTIVATIONS
from kernels.cpu import library, program
from kernels.cpu.library import MissingKernels, Tiling, usable
from kernels.cpu.packing import FORMS, pack
from kernels.cpu.pages import from_native, to_native
from kernels.cpu.program import Activate, Add, Attend, Cap, Embed, Norm, Program, RopeKV, StepData, Team
from kernels.paged_kv import write_kv, write_rows
from kernels.quantisation import (
    Int4Weight,
    Int8Weight,
    activation_block,
    outlier_ratio,
    rounded_rows,
    to_int4,
    to_int8,
)
from kernels.rope import rope_angles, rotate_

POISON = 12345.0


@pytest.fixture(scope="module", params=usable())
def team(request):
    made = Team(request.param, 2)
    yield made
    made.close()


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forms_of(team):
    """Return the packed forms of weights that are not quantized."""
    own = {"amx": ("amx_bf16", "pairs_bf16"), "avx512bf16": ("pairs_bf16",)}
    return (*FORMS[:2], *own.get(team.variant, ()))


def activations(form, x):
    """The numbers that this form multiplies by bf16 weights, in float64."""
    return (x.bfloat16() if form == "pairs_bf16" else x).double()


def multiply(team, weight, x, form=None, bias=None, *, margin=3):
    """x Wᵀ (+ b) into a poisoned buffer whose margin must stay as it was."""
    packed = pack(weight, team.tiling, form)
    rows, outputs = len(x), packed.outputs
    wide = torch.full((rows, x.shape[1] + margin), math.nan)
    wide[:, : x.shape[1]] = x
    y = torch.full((rows + margin, outputs + margin), POISON)
    team.run(Program([program.linear(packed, bias, wide, y)], (packed.data, wide, y)), StepData(rows))
    assert (y[rows:] == POISON).all() and (y[:, outputs:] == POISON).all()
    return y[:rows, :outputs].clone()


def near(got, want, tolerance=1e-5):
    """Relative to the largest number that is wanted."""
    scale = want.double().abs().max().clamp(min=1e-30)
    assert (got.double() - want.double()).abs().max() / scale < tolerance


ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 16, 17, 33, 70, 200)
SIZES = ((1, 1), (7, 5), (33, 31), (100, 48), (64, 300), (130, 1100))


@pytest.mark.parametrize("size", SIZES)
def test_linear_equals_the_matrix_product_for_any_number_of_rows(team, size):
    weight, bias = random(*size, dtype=torch.bfloat16), random(size[0], seed=2)
    for form in forms_of(team):
        for rows in ROWS:
            x = random(rows, size[1], seed=rows)
            near(multiply(team, weight, x, form), activations(form, x) @ weight.double().T)
        near(multiply(team, weight, x, form, bias), activations(form, x) @ weight.double().T + bias.double())


def test_row_of_a_linear_does_not_depend_on_other_rows(team):
    weight, x = random(130, 1100, dtype=torch.bfloat16), random(200, 1100, seed=1)
    for form in forms_of(team):
        alone = multiply(team, weight, x[:1], form)
        for rows in ROWS:
            assert torch.equal(multiply(team, weight, x[:rows], form)[:1], alone), rows
        last = multiply(team, weight, x[-1:], form)
        assert torch.equal(multiply(team, weight, x, form)[-1:], last)


@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e-37])
def test_row_with_subnormal_digits_does_not_depend_on_other_rows(team, size):
    weight, x = random(40, 96, dtype=torch.bfloat16), random(20, 96, seed=1) * size
    for form in forms_of(team):
        together = multiply(team, weight, x, form)
        for rows in (1, 2, 3):
            assert torch.equal(multiply(team, weight, x[:rows], form), together[:rows]), rows


@pytest.mark.parametrize("inputs", [1, 2, 31, 33, 97, 448, 1153])
def test_bf16_product_multiplies_each_input_by_its_own_weight(team, inputs):
    """Whole numbers below 2^24 are added exactly, and powers of 2 are not rounded, so the result is exact."""
    weight = torch.randint(-8, 9, (50, inputs), generator=torch.Generator().manual_seed(inputs)).bfloat16()
    x = 2.0 ** torch.randint(0, 8, (200, inputs), generator=torch.Generator().manual_seed(1)).float()
    for form in forms_of(team):
        for rows in ROWS:
            assert torch.equal(multiply(team, weight, x[:rows], form).double(), x[:rows].double() @ weight.double().T)


def test_bf16_activations_are_rounded_to_nearest_ties_to_even(team):
    """A weight of ones on the diagonal returns the activations as they are multiplied."""
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 1 - 2**-9 - 2**-20, 3e38, -1e-30, 0])
    x = torch.cat((ties.repeat(200, 1), random(200, 33, seed=1) * torch.logspace(-20, 30, 33)), 1)
    for form in forms_of(team):
        for rows in ROWS:
            found = multiply(team, torch.eye(x.shape[1]).bfloat16(), x[:rows], form)
            if form == "pairs_bf16":
                assert torch.equal(found, x[:rows].bfloat16().float()), rows
            else:
                near(found / x[:rows].abs().clamp(min=1e-38), x[:rows].sign(), 1e-6)


@pytest.mark.parametrize("variant", library.BF16_VARIANTS)
def test_bf16_arithmetic_packs_every_unquantized_type_as_pairs(variant):
    tiling = library.tiling(variant, bf16=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = random(20, 40).to(dtype)
        packed, own = pack(weight, tiling), pack(weight, tiling.exact)
        assert packed.form == "pairs_bf16" and own.form != "pairs_bf16"
        assert torch.equal(packed.data, pack(weight.bfloat16(), tiling, "amx_bf16").data)
    assert pack(to_int8(random(20, 64), 64), tiling).form == "tiles_int8"


def test_variants_without_the_instructions_refuse_bf16_arithmetic(team):
    if team.variant in library.BF16_VARIANTS:
        made = Team(team.variant, 1, bf16=True)
        assert made.tiling == team.tiling._replace(bf16=True) == library.tiling(team.variant, bf16=True)
        made.close()
    else:
        with pytest.raises(ValueError, match="kernels have no bf16 arithmetic; amx and avx512bf16 kernels have"):
            Team(team.variant, 1, bf16=True)


def test_float32_weights_keep_all_their_digits(team):
    weight, x = random(40, 64), random(9, 64, seed=1)
    near(multiply(team, weight, x), x.double() @ weight.double().T, 1e-6)


@pytest.mark.parametrize("variant", ["amx", "avx2"])
def test_the_form_keeps_every_number_of_the_checkpoint(variant):
    weight = random(20, 40, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        packed = pack(weight.to(dtype), Tiling(variant, 8, 4, 4))
        assert sorted(packed.data.double().unique().tolist()) == sorted({*weight.double().unique().tolist(), 0.0})


@pytest.mark.parametrize("word", [4, 1])
def test_integers_in_any_order_of_memory_are_packed_alike(word):
    weight, tiling = random(32, 64), Tiling("avx2", 8, word, word)
    for one in (to_int8(weight, 32), to_int4(weight, 32)):
        turned = replace(one, values=one.values.T.contiguous().T)
        assert torch.equal(pack(turned, tiling).data, pack(one, tiling).data)


def eight_bit_groups(weight, group):
    """Each group by its own largest number, which becomes -128: the whole range is used."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    farthest = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    scales = (farthest / -128).half()
    values = (padded / scales.float()).nan_to_num().round().clamp(-128, 127).to(torch.int8)
    return Int8Weight(values.flatten(1)[:, : weight.shape[1]], scales[:, :, 0], group)


def rounded(bits, weight):
    """The weight in 8 bits as quantized at load, or in 4 with groups of this size, with zero points if it is negative;
    above 1000 in 8 bits with the groups of a checkpoint."""
    if bits == 8:
        return to_int8(weight, 64)
    if bits > 1000:
        return eight_bit_groups(weight, bits - 1000)
    made = to_int4(weight, abs(bits))
    if bits > 0:
        return made
    zeros = torch.randint(0, 17, made.scales.shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    return replace(made, zeros=zeros)


BITS = (8, 32, 64, 96, 128, -32, -128, 1032, 1096, 1128)


def block_of(weight):
    """The inputs that share a scale of the activations: 64, or 32 where groups are not whole blocks of 64."""
    return 64 if weight.group % 64 == 0 else 32


def ratio_of(weight):
    return 2.5 if isinstance(weight, Int4Weight) else 1.5


def block_as_multiplied(block, ratio):
    """One block of a row with all but its outliers rounded to 8 bits, in float64."""
    order = block.abs().argsort(descending=True)
    sizes = [*block.abs()[order].tolist(), 0.0, 0.0, 0.0]
    count = 2 if sizes[1] > ratio * sizes[2] else 1 if sizes[0] > ratio * sizes[1] else 0
    scale = torch.tensor(sizes[count]) / 127
    found = (block * (1 / scale if scale > 0 else 0.0)).round().double() * scale.double()
    found[order[:count]] = block[order[:count]].double()
    return found


def product_of(weight, x):
    """x Wᵀ in float64 with the activations rounded to 8 bits block by block, in the order of the weight's columns."""
    order = getattr(weight, "order", None)
    columns = x if order is None else x[:, order.long()]
    found = torch.stack(
        [
            torch.cat([block_as_multiplied(block, ratio_of(weight)) for block in row.split(block_of(weight))])
            for row in columns
        ]
    )
    plain = weight if order is None else replace(weight, order=None)
    return found @ plain.restored().double().T


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.sampled(11)
def test_quantized_linear_equals_the_product_of_quantized_values(team, bits, size):
    """Weights restored from their bits, activations rounded block by block: the rest is exact."""
    weight, bias = rounded(bits, random(*size)), random(size[0], seed=2)
    for rows in ROWS:
        x = random(rows, size[1], seed=rows)
        x[:, ::19] *= 40.0  # outliers, so that blocks have very different scales
        want = product_of(weight, x)
        near(multiply(team, weight, x), want, 1e-6)
    near(multiply(team, weight, x, bias=bias), want + bias.double(), 1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 96, 128])
def test_quantization_formula_equals_the_kernels(group, bits):
    weight = (to_int4 if bits == 4 else to_int8)(random(2, 256), group)
    assert activation_block(group) == block_of(weight)
    x = random(7, 300, seed=group) * torch.logspace(-3, 3, 300)
    x[2], x[3, 64:128], x[4] = 0.0, 0.0, 1e-45
    x[5, 7], x[5, 9], x[6, 299] = 1e5, -9e4, 1e6
    assert outlier_ratio(bits) == ratio_of(weight)
    values, scales, outliers = rounded_rows(x, block_of(weight), ratio_of(weight))
    assert values.abs().max() == 127 and torch.equal(values, values.round())
    assert ((values * scales + outliers - x).abs() <= scales * 0.5001 + 1e-44).all()
    assert outliers[5].nonzero()[:2, 0].tolist() == [7, 9] and outliers[6].nonzero()[-1].tolist() == [299]
    assert torch.equal(torch.where(outliers != 0, x, 0.0), outliers) and not (values * outliers).any()
    found = values.double() * scales.double() + outliers.double()
    for row, got in zip(x, found, strict=True):
        want = torch.cat([block_as_multiplied(block, ratio_of(weight)) for block in row.split(block_of(weight))])
        assert torch.equal(got, want)


def blocks_of_their_own(inputs, block):
    """[rows, inputs]: every block of every row has integers up to 127 times a power of two of its own, so that products
    and sums are exact in float32 and any other block's scale gives another result. Zero blocks among them. The largest
    number occurs three times, so no block has outliers."""
    dice = torch.Generator().manual_seed(inputs)
    values = torch.randint(-127, 128, (17, inputs), generator=dice).float()
    for at in range(3):
        values[:, at::block] = 127.0
    powers = torch.randint(0, 2, (17, -(-inputs // block)), generator=dice).float() * 2
    powers[:, 1::2] = 1.0  # between neighbours of 0 or 2
    scales = torch.exp2(powers).repeat_interleave(block, 1)[:, :inputs]
    values[5, :block] = values[6, block : 2 * block] = values[7, -(inputs % block or block) :] = 0.0
    return values * scales


def exact_weight(bits, inputs):
    """37 outputs of random integers, with scales that are powers of two."""
    dice = torch.Generator().manual_seed(3)
    like = rounded(bits, random(37, inputs))
    scales = torch.exp2(torch.randint(0, 2, like.scales.shape, generator=dice).float()).to(like.scales.dtype)
    if isinstance(like, Int8Weight):
        values = torch.randint(-128, 128, (37, inputs), generator=dice).to(torch.int8)
        return Int8Weight(values, scales, like.group)
    values = torch.randint(0, 16, (37, inputs), generator=dice).to(torch.uint8)
    zeros = torch.randint(0, 17, scales.shape, generator=dice).to(torch.uint8) if bits < 0 else None
    return Int4Weight(values, scales, zeros, like.group)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [64, 65, 96, 127, 128, 200, 576, 1153])
@pytest.mark.sampled(7)
def test_every_block_of_a_row_has_its_own_scale(team, bits, inputs):
    """Bit for bit, alone and in company: the neighbour's scale, a block begun one input early or late, a short last
    block or a zero block taken wrongly would each change an exact result."""
    weight = exact_weight(bits, inputs)
    x = blocks_of_their_own(inputs, block_of(weight))
    want = (x.double() @ weight.restored().double().T).float()
    for rows in (1, 2, 3, 7, 11, 17):
        assert torch.equal(multiply(team, weight, x[:rows]), want[:rows]), rows


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [64, 65, 127, 200, 576])
def test_outliers_are_multiplied_without_rounding(team, bits, inputs):
    """Bit for bit: every other product is exact, and an outlier that is rounded, scales its block, stays among the
    integers or meets its neighbour's weight would change the result."""
    weight = exact_weight(bits, inputs)
    block = block_of(weight)
    dice = torch.Generator().manual_seed(inputs)
    x = torch.randint(-127, 128, (23, inputs), generator=dice).float()
    for at in range(3, 6):
        x[:, at::block] = 127.0
    for row, at in enumerate(torch.randint(0, inputs, (20,), generator=dice).tolist()):
        x[row, at] = 1001.0 + 2 * row
        if row % 3:
            x[row, (at + row) % inputs] = -777.0 - 2 * row  # of the same word, of the same block, or of another one
    x[20, 0], x[21, inputs - 1], x[22, min(block, inputs) - 1] = 999.0, 1003.0, -1005.0
    want = (x.double() @ weight.restored().double().T).float()
    for rows in (1, 2, 3, 7, 11, 23):
        assert torch.equal(multiply(team, weight, x[:rows]), want[:rows]), rows


def hostile_rows(inputs):
    """Numbers that byte products saturate with: neighbours that are both large, in one pair, in many, in all; of either
    sign, and of two. The largest number of each 32 is 127."""
    words = -(-inputs // 4)
    dice = torch.Generator().manual_seed(9)
    rows = [torch.randint(-127, 128, (inputs,), generator=dice).float() for _ in range(3)]
    for count in (1, words // 2, inputs // 2):
        for signs in ((1, 1), (-1, -1), (1, -1)):
            row = torch.randint(-40, 41, (inputs,), generator=dice).float()
            places = torch.randperm(inputs // 2, generator=dice)[:count] * 2
            row[places] = signs[0] * torch.randint(65, 128, (len(places),), generator=dice).float()
            row[places + 1] = signs[1] * torch.randint(65, 128, (len(places),), generator=dice).float()
            rows.append(row)
    for row in rows:
        for at in range(3):  # three of the largest, so that none is an outlier
            row[at::32] = 127.0
    return torch.stack([*rows, torch.full((inputs,), 127.0), torch.full((inputs,), -127.0), torch.zeros(inputs)])


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("inputs", [3, 8, 66, 200, 897, 2050])
@pytest.mark.parametrize("largest", [False, True], ids=["weights at random", "weights at their ends"])
def test_sums_of_bytes_are_exact(team, inputs, largest, group):
    """Bit for bit what whole numbers of any size give, in every number of rows and every mixture of them."""
    values = torch.randint(-128, 128, (39, inputs), generator=torch.Generator().manual_seed(inputs)).to(torch.int8)
    if largest:
        values = torch.where(values < 0, -128, 127).to(torch.int8)
        values[:9], values[9:18] = 127, -128
    scales = torch.exp2(torch.arange(39) % 5 - 2.0)
    weight = Int8Weight(values, scales[:, None].expand(-1, -(-inputs // group)).contiguous(), group)
    hostile = hostile_rows(inputs)
    order = torch.randperm(len(hostile), generator=torch.Generator().manual_seed(4))
    for rows in ([[each] for each in range(len(hostile))], order.split(2), order.split(4), order.split(7), [order]):
        for some in rows:
            x = hostile[some]
            whole = (x.long() @ values.long().T).float()  # below 2^24 in each block, and so exact
            if inputs > 200:
                near(multiply(team, weight, x), whole * scales, 1e-6)
            else:
                assert torch.equal(multiply(team, weight, x), whole * scales)


@pytest.mark.parametrize("bits", [32, -64, 1032])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_group_scales_are_used_unchanged(team, bits, dtype):
    """Numbers that only their own type holds: digits that bf16 has not, sizes that fp16 has not."""
    weight = rounded(bits, random(70, 200))
    scales = random(*weight.scales.shape, seed=3) * (1.0 if dtype == torch.float16 else 1e-7)
    weight, x = replace(weight, scales=scales.to(dtype)), random(13, 200, seed=4)
    near(multiply(team, weight, x), product_of(weight, x), 2e-6)


@pytest.mark.parametrize("bits", [32, -64, 1032])
def test_permuted_columns_multiply_their_own_inputs(team, bits):
    inputs = 200
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    plain = rounded(bits, random(70, inputs))
    ordered = replace(plain, order=order)
    want = torch.empty(70, inputs)
    for column, place in enumerate(order.tolist()):
        want[:, place] = plain.restored()[:, column]
    assert torch.equal(ordered.restored(), want)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows)
        near(multiply(team, ordered, x), product_of(ordered, x), 2e-6)


@pytest.mark.parametrize("bits", BITS)
def test_row_of_a_quantized_linear_does_not_depend_on_other_rows(team, bits):
    weight, x = rounded(bits, random(130, 1100)), random(200, 1100, seed=1)
    x[7] *= 1e6  # a neighbour with another scale
    alone = multiply(team, weight, x[:1])
    for rows in ROWS:
        assert torch.equal(multiply(team, weight, x[:rows])[:1], alone), rows
    assert torch.equal(multiply(team, weight, x)[-1:], multiply(team, weight, x[-1:]))


@pytest.mark.parametrize("bits", (8, 32, 1032))
def test_nonfinite_quantized_row_does_not_affect_other_rows(team, bits):
    weight, every = rounded(bits, random(20, 64)), random(13, 64, seed=1)
    for clean in (every[:5], every):  # few rows and many go different ways
        x = clean.clone()
        x[1], x[2, 7], x[3, 9] = 0.0, math.nan, -math.inf
        got, want = multiply(team, weight, x), multiply(team, weight, clean)
        assert not got[2].isfinite().any() and not got[3].isfinite().any()
        assert torch.equal(got[4:], want[4:]) and torch.equal(got[0], want[0]) and (got[1] == 0).all()


def test_activations_too_small_for_a_scale_are_zero(team):
    """The inverse of a subnormal scale is infinite."""
    for bits in (8, 32, 1032):
        weight, x = rounded(bits, random(20, 192)), random(5, 192, seed=1)
        x[1] = 1e-40
        x[2, 64:128] = torch.finfo(torch.float32).tiny
        clean = torch.where(x.abs() < 1e-37, 0.0, x)
        assert torch.equal(multiply(team, weight, x), multiply(team, weight, clean))
        assert (multiply(team, weight, x)[1] == 0).all()


@pytest.mark.parametrize("outputs", [5024, 5030])
def test_outputs_larger_than_a_cache_are_those_of_few_rows(team, outputs):
    """They are written past the cache if their rows begin at cache lines."""
    x, weight, bias = random(211, 64), random(outputs, 64, seed=1), random(outputs, seed=2)
    made = [(rounded(bits, weight), None) for bits in (8, 32)] + [(weight.bfloat16(), form) for form in forms_of(team)]
    for one, form in made:
        few = torch.cat([multiply(team, one, part, form, bias, margin=16) for part in x[:6].split(3)])
        assert torch.equal(multiply(team, one, x, form, bias, margin=16)[:6], few)
        assert torch.equal(multiply(team, one, x.flip(0), form, bias, margin=16)[-6:].flip(0), few)


def test_extreme_8_bit_values_do_not_overflow(team):
    """All weights and activations as large as they get, over more inputs than 16 bits could sum."""
    for weight in (torch.ones(40, 5000), -torch.ones(40, 5000)):
        for bits in (8, 32, -32, 1032):
            made = rounded(bits, weight)
            want = made.restored().double().sum(1).expand(14, -1)
            near(multiply(team, made, torch.ones(14, 5000)), want, 1e-6)


def test_activations_of_every_magnitude_keep_their_precision(team):
    """Rows of huge, tiny and mixed numbers, and zeros."""
    weight = random(50, 96, dtype=torch.bfloat16)
    x = random(6, 96, seed=3) * torch.tensor([1e20, 1e-20, 1.0, 0.0, 1e5, 1e-5])[:, None]
    x[2, ::2] *= 1e6
    for form in forms_of(team):
        got = multiply(team, weight, x, form)
        for row in range(6):
            near(got[row], activations(form, x[row]) @ weight.double().T, 2e-6)


def test_nonfinite_row_does_not_affect_other_rows(team):
    weight, x = random(20, 64, dtype=torch.bfloat16), random(5, 64, seed=1)
    clean = x.clone()
    x[2, 7], x[3, 9] = math.nan, math.inf
    for form in forms_of(team):
        got, want = multiply(team, weight, x, form), multiply(team, weight, clean, form)
        assert not got[2].isfinite().any() and not got[3].isfinite().any()
        assert torch.equal(got[[0, 1, 4]], want[[0, 1, 4]])


@pytest.mark.parametrize("size", [1, 3, 16, 37, 128])
@pytest.mark.parametrize("kind", [program.RMS, program.LAYER])
def test_norms_of_pieces(team, size, kind):
    rows, groups = 5, 3
    x, weight, bias = random(rows, groups, size) + 0.5, random(groups, size, seed=1), random(size, seed=2)
    y = torch.full((rows, groups * size + 2), POISON)
    op = Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=bias.data_ptr() if kind == program.LAYER else None,
        y=y.data_ptr(),
        x_stride=groups * size,
        y_stride=groups * size + 2,
        groups=groups,
        size=size,
        weight_stride=size,
        norm=kind,
        eps=1e-3,
    )
    team.run(Program([op], ()), StepData(rows))
    wide = x.double()
    if kind == program.LAYER:
        wide = wide - wide.mean(-1, keepdim=True)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    if kind == program.LAYER:
        want = want + bias.double()
    near(y[:, :-2].view(rows, groups, size), want, 1e-6)
    assert (y[:, -2:] == POISON).all()


@pytest.mark.parametrize("act", program.ACTS)
@pytest.mark.parametrize("gated", [True, False])
def test_activations(team, act, gated):
    inner = 53
    x = random(4, inner * (2 if gated else 1), seed=1) * 4
    x[0, :12] = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 20.0, -20.0, 100.0, -100.0, 3e4, -3e4, 0.09, 0.11])
    y = torch.full((4, inner + 1), POISON)
    op = Activate(
        limit=math.inf,
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.shape[1],
        y_stride=inner + 1,
        inner=inner,
        groups=1,
        act=program.ACTS[act],
        gated=gated,
    )
    team.run(Program([op], ()), StepData(4))
    want = ACTIVATIONS[act](x[:, :inner].double())
    if gated:
        want = want * x[:, inner:].double()
    torch.testing.assert_close(y[:, :-1].double(), want, atol=5e-6, rtol=1e-5)
    assert (y[:, -1] == POISON).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_adding_and_capping(team, dtype):
    table, ids = random(11, 19, dtype=dtype), torch.tensor([3, 0, 10, 3])
    out, more = torch.zeros(4, 19), random(4, 19, seed=5)
    ops = [
        Embed(table=table.data_ptr(), out=out.data_ptr(), out_stride=19, size=19, type=program.TYPES[dtype], scale=1.5),
        Add(y=more.data_ptr(), x=out.data_ptr(), y_stride=19, x_stride=19, size=19, alpha=0.25),
        Cap(x=out.data_ptr(), stride=19, size=19, scale=2.0, cap=3.0),
    ]
    team.run(Program(ops, ()), StepData(4, ids=ids))
    want = (table[ids].double() * 1.5 + more.double() * 0.25) * 2.0
    near(out, 3.0 * torch.tanh(want / 3.0), 1e-6)


def test_half_precision_is_read_exactly(team):
    """Every fp16 number, infinities and NaN apart."""
    bits = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16)
    table = bits.view(torch.float16).view(1024, 64)
    ids, out = torch.arange(1024), torch.zeros(1024, 64)
    op = Embed(table=table.data_ptr(), out=out.data_ptr(), out_stride=64, size=64, type=2, scale=1.0)
    team.run(Program([op], ()), StepData(1024, ids=ids))
    finite = table.isfinite()
    assert torch.equal(out[finite], table.float()[finite])


class Pages:
    """Rows of (first, count) of one layer: q, k and v of all their positions, and pages of what came before."""

    LAYERS, LAYER = 3, 1

    def __init__(self, rows, *, heads=6, kv_heads=2, dim=8, window=0, dtype=torch.float32, block=4, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.rows, self.heads, self.kv_heads, self.dim, self.window = rows, heads, kv_heads, dim, window
        self.width = max(-(-(first + count) // block) for first, count in rows)
        self.block, total = block, len(rows) * self.width + 1
        self.table = (torch.randperm(total - 1, generator=draw) + 1).view(len(rows), self.width)
        # Bytes that are read but were never written must not change the result.
        self.pages = torch.full((total, self.LAYERS, 2, block, kv_heads, dim), 50.0).to(dtype)
        self.qkv = [  # of its number and length alone, so that a row is the same in any company
            random(first + count, heads + 2 * kv_heads, dim, seed=row, dtype=dtype).float()
            for row, (first, count) in enumerate(rows)
        ]
        for row, (first, _) in enumerate(rows):
            for position in range(first):
                at = self.pages[self.table[row, position // block], self.LAYER, :, position % block]
                at[:] = self.qkv[row][position, heads:].view(2, kv_heads, dim).to(dtype)
            if window:
                self.table[row, : max(0, first - window + 1) // block] = 0

    def attend(self, team, *, scale=0.3, softcap=0.0, turned=0, interleaved=False):
        """[tokens, heads, dim] of all rows, q and k turned by the positions first."""
        new = [qkv[first:] for qkv, (first, _) in zip(self.qkv, self.rows, strict=True)]
        qkv = torch.cat(new).flatten(1).contiguous()
        first, count = torch.tensor(self.rows).T.contiguous()
        positions = torch.cat([torch.arange(a, a + n) for a, n in self.rows])
        owner = torch.repeat_interleave(torch.arange(len(self.rows)), count)
        slot_mapping = self.table[owner, positions // self.block] * self.block + positions % self.block
        out = torch.full((len(qkv) + 1, self.heads * self.dim + 2), POISON)
        angles = [
            tuple(x.contiguous() for x in rope_angles(positions, 0.1 ** torch.arange(turned // 2), 1.0, interleaved))
        ]
        shared = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "group": 0, "layer": self.LAYER}
        ops = [
            RopeKV(
                qkv=qkv.data_ptr(), stride=qkv.shape[1], rotary_dim=turned, rope=0, interleaved=interleaved, **shared
            ),
            Attend(
                q=qkv.data_ptr(),
                out=out.data_ptr(),
                q_stride=qkv.shape[1],
                out_stride=out.shape[1],
                value_dim=self.dim,
                window=self.window,
                scale=scale,
                softcap=softcap,
                causal=True,
                **shared,
            ),
            Add(y=out.data_ptr(), x=out.data_ptr(), y_stride=out.shape[1], x_stride=out.shape[1], size=0, alpha=1.0),
        ]
        data = StepData(
            len(qkv),
            first=first.contiguous(),
            count=count.contiguous(),
            angles=angles,
            tables=[self.table],
            slot_mapping=[slot_mapping],
            pages=(pages := to_native(self.pages)),
        )
        team.run(Program(ops, (qkv, out)), data)
        self.pages = from_native(pages)
        assert (out[-1] == POISON).all() and (out[:, -2:] == POISON).all()
        return out[:-1, :-2].reshape(-1, self.heads, self.dim)

    def brute_force(self, *, scale=0.3, softcap=0.0, turned=0, interleaved=False):
        found = []
        for qkv, (first, count) in zip(self.qkv, self.rows, strict=True):
            qkv = qkv.clone()
            if turned:
                # Earlier positions were written without changes.
                cos, sin = rope_angles(
                    torch.arange(first, first + count), 0.1 ** torch.arange(turned // 2), 1.0, interleaved
                )
                rotate_(qkv[first:, : self.heads + self.kv_heads], cos, sin, interleaved)
            q, k, v = qkv.double().split([self.heads, self.kv_heads, self.kv_heads], 1)
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
            for position in range(first, first + count):
                low = max(0, position - self.window + 1) if self.window else 0
                scores = torch.einsum("hd,jhd->hj", q[position], k[low : position + 1]) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                found.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), v[low : position + 1]))
        return torch.stack(found)


RAGGED = [(0, 1), (0, 9), (5, 1), (63, 1), (64, 3), (30, 40), (130, 1)]


@pytest.mark.parametrize("window", [0, 1, 7, 64, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 8), (5, 1, 12), (3, 3, 20), (14, 2, 64), (8, 4, 80)])
def test_attention_of_ragged_rows(team, window, heads, kv_heads, dim):
    pages = Pages(RAGGED, heads=heads, kv_heads=kv_heads, dim=dim, window=window)
    near(pages.attend(team, scale=dim**-0.5), pages.brute_force(scale=dim**-0.5), 2e-6)


@pytest.mark.parametrize(
    "options", [{"softcap": 0.7}, {"turned": 8}, {"turned": 4}, {"turned": 8, "interleaved": True}]
)
def test_attention_with_caps_and_positions(team, options):
    pages = Pages(RAGGED)
    near(pages.attend(team, **options), pages.brute_force(**options), 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 16, 24])
def test_attention_over_narrow_pages(team, dtype, block):
    pages = Pages(RAGGED, dtype=dtype, block=block)
    near(pages.attend(team), pages.brute_force(), 2e-6)
    found = pages.attend(team, turned=8)  # keys are rounded after they are turned
    near(found, pages.brute_force(turned=8), 2e-2)


@pytest.mark.parametrize("window", [0, 600])
def test_long_row_is_identical_alone_in_batches_and_in_chunks(team, window):
    """Its splits go to several threads if it has one query; a chunk of queries goes through all of them itself."""
    whole = Pages([(0, 1600)], window=window, heads=4, kv_heads=1, block=16).attend(team)
    pages = Pages([(1599, 1)], window=window, heads=4, kv_heads=1, block=16)
    alone = pages.attend(team)
    near(alone, pages.brute_force(), 2e-6)
    assert torch.equal(alone[0], whole[-1])
    for rows in ([(1599, 1), (0, 3), (700, 1)], [(1590, 10)], [(1599, 1), (40, 60)]):
        company = Pages([(1599, 1), *rows], window=window, heads=4, kv_heads=1, block=16)
        assert torch.equal(company.attend(team)[0], alone[0])
    assert torch.equal(Pages([(1590, 10)], window=window, heads=4, kv_heads=1, block=16).attend(team)[-1], alone[0])


def test_number_of_threads_does_not_change_the_result(team):
    pages = Pages([(1100, 1), (0, 40), (7, 1)])
    want = pages.attend(team)
    for threads in (1, 3):
        other = Team(team.variant, threads)
        assert torch.equal(pages.attend(other), want)
        other.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_hold_the_bits_that_torch_writes(team, dtype):
    """Rounding is to nearest, ties to even: halves of both parities, subnormals and the edge of float16's range."""
    pages = Pages([(0, 40)], dtype=dtype)
    qkv = pages.qkv[0].mul_(1.0013)  # no longer numbers of the pages' type
    edges = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519.0, 65520.0]
    qkv[1, pages.heads :] = torch.tensor(edges)
    qkv[2, pages.heads :] = -torch.tensor(edges)
    want = pages.pages.clone()
    slots = pages.table[0, torch.arange(40) // pages.block] * pages.block + torch.arange(40) % pages.block
    rows = write_rows(slots, want.shape[1], pages.block)[pages.LAYER]
    k, v = qkv[:, pages.heads :].split(pages.kv_heads, 1)
    write_kv(want, rows, k, v)
    pages.attend(team)
    assert torch.equal(pages.pages.view(torch.int16), want.view(torch.int16))


def test_values_that_are_not_finite_are_written_as_zero(team):
    pages = Pages([(0, 3)], dtype=torch.float16)
    pages.qkv[0][1, pages.heads :] = torch.tensor([math.nan, math.inf, -math.inf, 1e9, 1.0, 2.0, 3.0, 4.0])
    pages.attend(team)
    written = pages.pages[pages.table[0, 0], pages.LAYER, :, 1]
    assert torch.equal(written, torch.tensor([0, 0, 0, 0, 1.0, 2.0, 3.0, 4.0]).half().expand_as(written))


def test_step_without_tokens_does_nothing(team):
    y = torch.full((1, 4), POISON)
    team.run(Program([Add(y=y.data_ptr(), x=y.data_ptr(), y_stride=4, x_stride=4, size=4, alpha=1.0)], ()), StepData(0))
    assert (y == POISON).all()


def noisy(logits, keys):
    return Noise(logits.shape[1], torch.device("cpu")).all_tokens(keys) + logits


@pytest.mark.parametrize("vocab", [1, 7, 16, 1000, 50021])
def test_best_token_equals_torch_with_and_without_noise(team, vocab):
    logits, rows = random(9, vocab) * 3, torch.tensor([4, 0, 8, 8, 1])
    keys = torch.from_numpy(row_keys(np.arange(5, dtype=np.uint64) * 77, np.arange(5)))
    tokens, scores = team.best(logits, rows)
    assert torch.equal(tokens, logits[rows].argmax(1)) and torch.equal(scores, logits[rows].amax(1))
    tokens, scores = team.best(logits, rows, keys)
    want = noisy(logits[rows], keys)
    near(scores, want.amax(1), 1e-6)
    # The token may differ if its logit is equal up to rounding.
    near(want.gather(1, tokens[:, None])[:, 0], want.amax(1), 1e-6)


def test_noise_equals_torch_including_its_tails(team):
    """With one possible token the score is its noise; 200,000 keys reach far into both tails."""
    keys = torch.from_numpy(row_keys(np.arange(200_000, dtype=np.uint64), np.zeros(200_000)))
    _, scores = team.best(torch.zeros(1, 1), torch.zeros(200_000, dtype=torch.int64), keys)
    want = noisy(torch.zeros(1, 1), keys)[:, 0].double()
    assert want.min() < -2.4 and want.max() > 11
    torch.testing.assert_close(scores.double(), want, atol=2e-6, rtol=1e-6)


def test_equal_impossible_and_broken_logits(team):
    logits = torch.zeros(5, 100)
    logits[1, [30, 70]] = 1.0
    logits[2] = -math.inf
    logits[3, 42] = math.nan
    logits[4, 99] = math.inf
    tokens, scores = team.best(logits, torch.arange(5))
    assert tokens.tolist() == [0, 30, 0, 42, 99]
    assert scores[:3].tolist() == [0.0, 1.0, -math.inf] and scores[3].isnan() and scores[4] == math.inf
    keys = torch.from_numpy(row_keys(np.arange(5, dtype=np.uint64), np.arange(5)))
    _, scores = team.best(logits, torch.arange(5), keys)
    assert scores[2] == -math.inf and scores[3].isnan() and scores[4] == math.inf
    only = torch.full((1, 100), -math.inf)
    only[0, 77] = -5.0
    assert team.best(only, torch.zeros(20, dtype=torch.int64), keys[:1].repeat(20, 1))[0].eq(77).all()


def test_compiled_kernels_are_installed():
    """The suite runs where there is a compiler: otherwise most of this file would test nothing."""
    assert "base" in usable()


def cpu(tmp_path, monkeypatch, text):
    file = tmp_path / f"cpuinfo-{len(list(tmp_path.iterdir()))}"  # a new one, because each is read once
    file.write_text(text)
    monkeypatch.setattr(library, "CPU_FACTS", file)


def test_only_variants_that_the_cpu_supports_are_usable(tmp_path, monkeypatch):
    for name in ("avx512", "avxvnni", "avx2", "base"):
        (tmp_path / f"_{name}.so").touch()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    cpu(tmp_path, monkeypatch, "processor : 0\nflags\t\t: fpu sse2 avx2 fma f16c\n")
    assert usable() == ("avx2", "base")
    cpu(tmp_path, monkeypatch, "processor : 0\nflags\t\t: fpu sse2 avx2 fma f16c avx_vnni\n")
    assert usable() == ("avxvnni", "avx2", "base")
    cpu(tmp_path, monkeypatch, "processor : 0\nFeatures : asimd\n")
    assert usable() == ("base",)
    monkeypatch.setattr(library, "CPU_FACTS", tmp_path / "nothing")
    assert usable() == ("base",)
    with pytest.raises(MissingKernels, match=r"'avx2': usable here are base; reinstall .* or set hardware.kernels to"):
        library.load("avx2")


def test_flags_are_read_on_arm(tmp_path, monkeypatch):
    for name in ("neon", "base"):
        (tmp_path / f"_{name}.so").touch()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    cpu(tmp_path, monkeypatch, "processor : 0\nFeatures\t: fp asimd fphp asimdhp asimddp\n")
    assert usable() == ("neon", "base")
    cpu(tmp_path, monkeypatch, "processor : 0\nFeatures\t: fp asimd\n")
    assert usable() == ("base",)


def test_without_compiled_files_torch_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    assert usable() == () and library.best() == "torch"
    with pytest.raises(MissingKernels, match="usable here are none"):
        library.load("base")


def test_a_library_of_another_version_is_refused(monkeypatch):
    class Other(ctypes.Structure):
        _fields_ = [("more", ctypes.c_int64)]

    monkeypatch.setattr(program, "MIRRORED", (*program.MIRRORED[:-1], Other))
    with pytest.raises(MissingKernels, match="do not match this version"):
        Team("base", 1)


def test_packed_weights_report_their_size():
    packed = pack(random(5, 7), Tiling("base", 4, 1, 1))
    assert (packed.outputs, packed.inputs, packed.data.shape) == (5, 7, (1, 7, 8, 1))
    assert packed.form == "tiles_f32" and packed.nbytes == 7 * 8 * 4
    with pytest.raises(ValueError, match="groups of 24 inputs"):
        pack(to_int4(random(5, 48), 24), Tiling("base", 4, 1, 1))


def sampled(seed, **cuts):
    return Sampling(seed=seed, temperature=1.0, **cuts)


CUTS = (
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 400},
    {"top_p": 0.1},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.6},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 1e-9},
)


@pytest.mark.parametrize("vocab", [1, 7, 97, 1000, 5003])
@pytest.mark.parametrize("shape", ["normal", "flat", "ties", "peaked"])
@pytest.mark.sampled(3)
def test_truncated_sampling_equals_sorted_candidates(team, vocab, shape):
    logits = random(len(CUTS), vocab, seed=vocab)
    if shape == "flat":
        logits *= 1e-3
    elif shape == "ties":
        logits = (logits * 2).round() / 2
        logits[:, ::3] = -0.0
    elif shape == "peaked":
        logits *= 12
        logits[:, ::5] = -math.inf
        logits[:, -1] = 1.0
    columns = Columns(len(CUTS), vocab)
    for slot, cuts in enumerate(CUTS):
        columns.write(slot, sampled(slot, **cuts), prompt_tokens=1, stop_ids=())
    rows = Rows(np.arange(len(CUTS)), np.full(len(CUTS), 9), columns, np.zeros((len(CUTS), 10), np.int32))
    wanted = draw(logits, rows, Noise(vocab, logits.device), pipeline.TRUNCATION)
    given = draw(logits, rows, Noise(vocab, logits.device, team), pipeline.TRUNCATION)
    assert given.truncated == () and wanted.truncated
    assert torch.equal(given.ids, wanted.ids)
    near(given.score, wanted.score)
    explained = draw(logits, rows, Noise(vocab, logits.device, team), pipeline.TRUNCATION, {0, 4})
    assert torch.equal(explained.ids, wanted.ids) and given.threshold is None and explained.threshold is not None
    left = explained.threshold.applied(logits) == logits
    for part, found, keep in wanted.truncated:
        for row, ids, count in zip(part.tolist(), found.ids.tolist(), keep.tolist(), strict=True):
            possible = {token for token in ids[:count] if logits[row, token] > -math.inf}
            assert {t for t in left[row].nonzero()[:, 0].tolist() if logits[row, t] > -math.inf} == possible


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_row_without_a_possible_token_has_no_finite_score(team, value):
    logits = torch.full((2, 50), value)
    logits[1] = 0.0
    one = torch.ones(2)
    tokens, scores, *_ = team.best_truncated(logits, torch.arange(2), torch.zeros(2, 2), one * 3, one * 0.5, one * 0.0)
    assert not scores[0].isfinite() and scores[1].isfinite() and 0 <= tokens[1] < 3


def test_truncated_sampling_has_the_renormalized_distribution(team):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5]).repeat(4000, 1)
    keys = torch.from_numpy(row_keys(np.arange(4000, dtype=np.uint64), np.full(4000, 3)))
    cuts = torch.full((4000,), 3), torch.ones(4000), torch.zeros(4000)
    tokens, *_ = team.best_truncated(logits, torch.arange(4000), keys, *cuts)
    left = torch.tensor([2.0, 1.0, -math.inf, -math.inf, 1.5]).softmax(0)
    assert (torch.bincount(tokens, minlength=5) / 4000 - left).abs().max() < 0.03


@pytest.mark.parametrize("vocab", [1, 6, 97, 5003])
def test_logprobs_equal_a_sorted_softmax(team, vocab):
    logits = random(6, vocab, seed=vocab) * 4
    logits[1] = (logits[1] / 2).round()
    logits[2, 1:] = -math.inf
    chosen = torch.arange(6) * 31 % vocab
    for count in sorted({0, 1, min(5, vocab), min(vocab, 200)}):
        own, ranks, tokens, values = team.logprobs(logits, chosen, count)
        table = logits.double().log_softmax(1)
        best, order = logits.sort(dim=1, descending=True, stable=True)
        assert torch.equal(tokens, order[:, :count])
        known = table.gather(1, order[:, :count])
        torch.testing.assert_close(values.double(), known, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own.double(), table.gather(1, chosen[:, None])[:, 0], rtol=1e-6, atol=1e-6)
        assert ranks.tolist() == [1 + int((row > row[token]).sum()) for row, token in zip(logits, chosen, strict=True)]


def test_logprobs_of_a_row_with_nan_are_nan(team):
    logits = random(3, 70)
    logits[1, 33] = math.nan
    own, _, _, values = team.logprobs(logits, torch.zeros(3, dtype=torch.int64), 2)
    assert own.isnan().tolist() == [False, True, False] and values[1].isnan().all()
