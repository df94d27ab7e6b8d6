"""Products whose tiles are loaded by descriptors: equality with pointers, and the report of both."""

import pytest
import torch

from benchmarks.kernels import descriptors
from kernels.jit import interpreted, recorded
from kernels.linear import LOADS, descriptor_matmul_kernel, matmul, matmul_kernel
from kernels.tuning import forced

interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")


@interpreter
@pytest.mark.parametrize("loads", LOADS[1:])
def test_descriptors_give_the_sums_of_pointers_bit_for_bit(loads):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((19, 200), (70, 200), (70,)))
    found = []
    for one in (LOADS[0], loads):
        with forced("matmul", {"rows": 16, "columns": 64, "loads": one}):
            found.append(matmul(x[:, :136], weight[:, :136].contiguous(), bias))
    assert torch.equal(*found) and found[0].abs().sum() > 0


def test_rows_that_descriptors_cannot_address_are_loaded_by_pointers():
    kernels = []
    for inputs in (72, 70):
        x, weight = (torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta") for rows in (16, 64))
        with recorded() as made, forced("matmul", {"loads": "descriptors"}):
            matmul(x, weight)
        kernels.append(made[0].kernel)
    assert kernels == [descriptor_matmul_kernel, matmul_kernel]


def test_each_variant_is_a_launch_and_instructions_are_counted():
    found = descriptors.launches("NVIDIA H100", 227 << 10)
    assert len(found) == len(descriptors.VARIANTS)
    assert {one.kernel for _, one in found} == {matmul_kernel, descriptor_matmul_kernel}
    ptx = "wgmma.mma_async.sync\ncp.async.cg.shared\ncp.async.bulk.tensor.2d\nsetmaxnreg.dec\nsetmaxnreg.inc"
    assert descriptors.counted(ptx) == ("1", "", "1", "1", "2")
