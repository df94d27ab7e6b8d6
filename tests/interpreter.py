"""Matrix products of Triton's interpreter with a fixed order of additions.

The interpreter computes `tl.dot` with `numpy.matmul`, and OpenBLAS chooses the order of additions by CPU and by shape:
on some CPUs a row of a product has other bits when its tile has more rows or columns. A GPU's matrix instructions add
the products of an output in one order, whatever the other outputs are. `fix_dot_order` gives the interpreter that
property, so that tests that compare bit for bit test the kernels and not the BLAS of the machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def fixed_order_matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a @ b, with the products of each output added in `dtype` from the first to the last.

    a: [..., m, k], b: [..., k, n]; the result is [..., m, n]. Products and sums are separate elementwise operations,
    which IEEE 754 defines exactly, so the bits depend neither on the shape nor on the CPU.
    """
    dtype = np.dtype(dtype)
    if dtype.kind not in "fc":
        return np.matmul(a, b, dtype=dtype)  # sums of integers are exact in any order
    left = a.transpose(a.ndim - 1, *range(a.ndim - 1))[..., :, None]  # [k, ..., m, 1]
    right = b.transpose(b.ndim - 2, *range(b.ndim - 2), b.ndim - 1)[..., None, :]  # [k, ..., 1, n]
    # the axis of k outermost, which numpy adds row after row
    products = np.multiply(left.astype(dtype), right.astype(dtype), order="C")
    if products[0].size > 1:
        return np.add.reduce(products, axis=0)
    # numpy adds the elements of a single column pairwise; accumulate adds them one after another
    return np.add.accumulate(products, axis=0)[-1]


def fix_dot_order() -> None:
    """Make `tl.dot` of the interpreter use `fixed_order_matmul` in this process."""
    from triton.runtime.interpreter import InterpreterBuilder

    if InterpreterBuilder.create_dot is not _create_dot:
        InterpreterBuilder.create_dot_as_shipped = InterpreterBuilder.create_dot
        InterpreterBuilder.create_dot = _create_dot


@contextmanager
def interpreter_as_shipped() -> Iterator[None]:
    """Run kernels inside the context with the `tl.dot` of numpy."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_dot = InterpreterBuilder.create_dot_as_shipped
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = _create_dot


def _create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    product = fixed_order_matmul(_operand(a), _operand(b), d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


def _operand(x: Any) -> np.ndarray:
    """Elements of a factor as numbers; the interpreter stores 8-bit floats as bytes and multiplies them as float16."""
    from triton.runtime import interpreter

    if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
        return interpreter._convert_float(x.data, x.dtype, interpreter.tl.float16, None).view(np.float16)
    return x.data
