"""Planes of blocks of ggml: packed, restored and multiplied, compared with the values of the package gguf."""

import math

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.formats.native import GgmlBlocks
from kernels.block_weights import PlaneWeight, pack_blocks
from kernels.ggml_blocks import BlockWeight
from kernels.jit import installed
from kernels.plane_layout import GGML_PLANES as PLANES
from tests.kernels.test_blocks import drawn

CPU = torch.device("cpu")


def package_values(weight: BlockWeight) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(weight.blocks.numpy(), Type[weight.kind]))


def extreme(kind: str) -> BlockWeight:
    """Blocks whose codes and scales have all bits set, or none."""
    weight = drawn(kind, 8)
    count = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    blocks, kept = weight.blocks.view(8, -1, count).clone(), weight.blocks.view(8, -1, count)
    blocks[:4], blocks[4:] = 255, 0
    places = {"Q2_K": range(80, 84), "Q3_K": range(108, 110), "Q6_K": range(208, 210), "MXFP4": range(1)}
    for at in places.get(kind, range(4 if kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1") else 2)):
        blocks[:, :, at] = kept[:, :, at]
    return BlockWeight(blocks.flatten(1), kind, weight.inputs)


@pytest.mark.parametrize("make", [drawn, extreme])
@pytest.mark.parametrize("kind", PLANES)
def test_planes_have_the_values_of_the_package_bit_for_bit(kind, make):
    weight = make(kind)
    want = package_values(weight)
    assert torch.equal(weight.restored(), want)
    packed = pack_blocks(weight, CPU)
    assert torch.equal(packed.restored(), want)
    planned = GgmlBlocks(kind).pieces(len(want), weight.inputs, 0, 2, ())
    assert sum(math.prod(one.factors) for one in planned) == sum(one.nbytes for one in packed.tensors)


@pytest.mark.parametrize("kind", PLANES)
def test_values_need_no_copy_from_the_host_after_the_first_time(kind, monkeypatch):
    """A step that is captured as a graph looks up rows of an embedding. It was computed once before."""
    weight = drawn(kind)
    want = weight.restored()

    def refuse(*arguments, **more):
        raise RuntimeError("cannot copy between CPU and CUDA tensors during the capture of a graph")

    for name in ("tensor", "as_tensor", "from_numpy", "frombuffer"):
        monkeypatch.setattr(torch, name, refuse)
    assert torch.equal(weight.restored(), want)


def test_every_power_of_two_is_exact():
    blocks = np.zeros((255, 17), np.uint8)
    blocks[:, 0], blocks[:, 1:] = np.arange(255), np.arange(16) * 17
    weight = BlockWeight(torch.from_numpy(blocks), "MXFP4", 32)
    assert torch.equal(weight.restored(), package_values(weight))


@pytest.mark.parametrize(("kind", "inputs"), [("MXFP4", 109), ("Q5_1", 97), ("IQ4_NL", 32), ("Q5_0", 160)])
def test_last_block_may_be_short_and_a_row_any_number_of_blocks(kind, inputs):
    weight = drawn(kind, inputs=-(-inputs // 32) * 32)
    packed = pack_blocks(BlockWeight(weight.blocks, kind, inputs), CPU)
    assert torch.equal(packed.restored(), package_values(weight)[:, :inputs])
    planned = GgmlBlocks(kind).pieces(len(weight.blocks), inputs, 0, 2, ())
    assert sum(math.prod(one.factors) for one in planned) == sum(one.nbytes for one in packed.tensors)


# Bits of a number: those of the file, plus a byte instead of 6 bits for each scale, and padding of short rows.
@pytest.mark.parametrize("kind", PLANES)
def test_planes_take_the_bytes_of_the_file_and_whole_bytes_for_scales(kind):
    more = {"Q3_K": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}
    outputs, inputs = 7, 512
    taken = sum(math.prod(one.factors) for one in GgmlBlocks(kind).pieces(outputs, inputs, 0, 2, ()))
    count, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    assert taken == outputs * inputs // count * (size + more.get(kind, 0))


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
@pytest.mark.parametrize("kind", PLANES)
def test_product_equals_the_values_of_the_package(kind):
    """The error is relative to the sum of the sizes of all products, because products of both signs cancel."""
    weight = drawn(kind, 37, 256)
    values, packed = package_values(weight).double(), pack_blocks(weight, CPU)
    for rows, by_size in ((1, True), (16, False), (18, True)):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        got = packed.multiply(x, None, torch.float32, by_size=by_size)
        error = (got.double() - x.double() @ values.T).abs() / (x.double().abs() @ values.abs().T)
        assert error.max() < 2e-6


def test_matrices_of_another_kind_do_not_join_a_stack():
    one = pack_blocks(drawn("Q5_1", 3, 64), CPU)
    stack = one.empty_stack(2)
    assert torch.equal(stack.put(1, one).restored(), one.restored())
    assert isinstance(stack, PlaneWeight) and stack.put(0, pack_blocks(drawn("Q5_0", 3, 64), CPU)) is None
