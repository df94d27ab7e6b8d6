"""NVFP4, MXFP8, NF4 and FP4 as Triton kernels have them, compared with the numbers of the formats' definitions."""

import math
from dataclasses import replace

import pytest
import torch

from engine.api.errors import CheckpointError
from engine.formats.native import GgmlBlocks
from kernels.block_weights import pack_blocks
from kernels.ggml_blocks import BlockWeight
from kernels.jit import installed
from tests.engine.formats.test_planted_faults import CPU, INPUTS, ROWS, Matrix, close, declared, written

KINDS = {
    "nvfp4": "NVFP4",
    "modelopt-nvfp4": "NVFP4",
    "mxfp8": "MXFP8",
    "modelopt-mxfp8": "MXFP8",
    "quark-mxfp8": "MXFP8",
    "bnb-nf4": "NF4",
    "bnb-nf4-double": "NF4",
    "bnb-fp4": "FP4",
}
BITS = {"NVFP4": 4.625, "MXFP8": 8.25, "NF4": 4.5, "FP4": 4.5}  # of a number, with its scales


@pytest.mark.parametrize("name", KINDS)
def test_blocks_have_the_numbers_of_the_checkpoint(name: str) -> None:
    matrix, kind = written(name), KINDS[name]
    assert matrix.format.on("triton") == GgmlBlocks(kind) and matrix.format.on("compiled") is None
    blocks = matrix.format.blocks(matrix)
    packed = pack_blocks(blocks, CPU)
    assert close(blocks.restored(), matrix.values) and close(packed.restored(), matrix.values)
    share = BlockWeight.joined([blocks.cut(slice(5, 9), 64, 128), blocks.cut(slice(0, 2), 64, 128)])
    assert close(pack_blocks(share, CPU).restored(), matrix.values[[5, 6, 7, 8, 0, 1], 64:192])
    planned = GgmlBlocks(kind).pieces(ROWS, INPUTS, 0, 2, ())
    taken = sum(one.nbytes for one in packed.tensors)
    assert sum(math.prod(one.factors) for one in planned) == taken == ROWS * INPUTS * BITS[kind] / 8


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "bnb-nf4", "bnb-fp4"])
def test_product_equals_the_values_of_the_checkpoint(name: str) -> None:
    """The error is relative to the sum of the sizes of all products, because products of both signs cancel."""
    matrix = written(name)
    weight = matrix.format.blocks(matrix).cut(slice(0, 37), 0, 192)
    values, packed = matrix.values[:37, :192].double(), pack_blocks(weight, CPU)
    for rows, by_size in ((1, True), (18, False)):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
        got = packed.multiply(x, None, torch.float32, by_size=by_size)
        error = (got.double() - x.double() @ values.T).abs() / (x.double().abs() @ values.abs().T)
        assert error.max() < 2e-6


def test_factors_of_inputs_need_dequantized_weights() -> None:
    """AWQ multiplies activations by them, which no kernel does."""
    whole = declared("modelopt-nvfp4-awq")
    assert whole.on("triton") is None
    named = whole.named("m", {"m.weight", "m.weight_scale"})
    assert named is not None and named.on("triton") == GgmlBlocks("NVFP4")


def test_blocks_that_cross_rows_are_refused() -> None:
    one = written("bnb-nf4")
    turned = Matrix(one.format, one.tensors, one.values)
    turned.rows, turned.inputs = ROWS * INPUTS // 96, 96
    state = one.tensors["weight.quant_state.bitsandbytes__nf4"]
    text = bytes(state.tolist()).replace(b"[192, 256]", b"[512, 96]")
    turned.tensors = {
        **one.tensors,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    assert torch.equal(one.format.dequantize(turned).flatten(), one.format.dequantize(one).flatten())
    with pytest.raises(CheckpointError, match="m has blocks of 64 numbers and 96 inputs, .* hardware.kernels to torch"):
        one.format.blocks(turned)


def test_other_codes_are_refused() -> None:
    one = written("bnb-nf4")
    changed = replace(one, tensors={**one.tensors, "weight.quant_map": torch.linspace(-1, 1, 16)})
    with pytest.raises(CheckpointError, match="m has other numbers than those of nf4 in quant_map"):
        one.format.blocks(changed)
