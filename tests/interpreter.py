"""Matrix products of Triton's interpreter with a fixed order of additions.

The interpreter computes `tl.dot` with `numpy.matmul`, and OpenBLAS chooses the order of additions by CPU and by shape:
on some CPUs a row of a product has other bits when its tile has more rows or columns. A GPU's matrix instructions add
the products of an output in one order, whatever the other outputs are. `fix_dot_order` gives the interpreter that
property, so that tests that compare bit for bit test the kernels and not the BLAS of the machine.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def fixed_order_matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a @ b, with the products of each output added in `dtype` from the first to the last.

    a: [..., m, k], b: [..., k, n]; the result is [..., m, n]. Products and sums are separate elementwise operations,
    which IEEE 754 defines exactly, so the bits depend neither on the shape nor on the CPU.
    """
    if not np.issubdtype(dtype, np.inexact):
        return np.matmul(a, b, dtype=dtype)  # sums of integers are exact in any order
    left = np.moveaxis(a, -1, 0).astype(dtype)[..., :, None]  # [k, ..., m, 1]
    right = np.moveaxis(b, -2, 0).astype(dtype)[..., None, :]  # [k, ..., 1, n]
    products = np.multiply(left, right, order="C")  # the axis of k outermost, which numpy adds row after row
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


_REPLACED: list[tuple[Any, str, Any]] = []
"""Object, name and original of each replacement of `save_time`."""


@contextmanager
def without_saving_time() -> Iterator[None]:
    """Run kernels inside the context with the unchanged interpreter, except `tl.dot`."""
    fast = [(thing, name, getattr(thing, name)) for thing, name, _ in _REPLACED]
    for thing, name, original in _REPLACED:
        setattr(thing, name, original)
    try:
        yield
    finally:
        for thing, name, value in fast:
            setattr(thing, name, value)


def save_time() -> None:
    """Make the interpreter do some work once instead of for every operation, in this process. No result depends on it.

    Every call of one kernel function by another searched triton.language for builtins to replace, although the same
    launch had replaced them. Each tensor and each type converted and validated its shape again, and each conversion of
    a type built a table of all types.
    """
    from triton.language import core
    from triton.runtime import interpreter

    sizes: dict[tuple[int, ...], int] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, np.dtype] = {}
    replaced: set[tuple[bool, bool]] = set()  # in the current launch, by the modules that a function refers to
    slow_np_dtype, slow_patch, slow_launch = (
        interpreter._get_np_dtype,
        interpreter._patch_lang,
        interpreter.GridExecutor.__call__,
    )

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        slow_launch(executor, *args, **kwargs)

    def patch(function: Any) -> Any:
        values = function.__globals__.values()
        modules = any(value is interpreter.tl for value in values), any(value is core for value in values)
        if modules in replaced:
            return interpreter._LangPatchScope()
        replaced.add(modules)
        return slow_patch(function)

    def init_tensor(tensor: Any, handle: Any, type_: Any) -> None:
        shape = type_.shape if type_.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])
        tensor.numel, tensor.shape = shapes[shape]
        tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar

    def init_block(block: Any, element_ty: Any, shape: Any) -> None:
        block.element_ty = element_ty
        block.shape = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if not block.shape:
            raise TypeError("0d block_type is forbidden")
        if block.shape not in sizes:
            sizes[block.shape] = core.validate_block_shape(block.shape)
        block.numel = sizes[block.shape]
        block.name = f"<{block.shape}, {element_ty}>"

    def np_dtype(type_: Any) -> np.dtype:
        scalar = type_.element_ty if isinstance(type_, core.block_type) else type_
        if isinstance(scalar, core.pointer_type):
            return slow_np_dtype(scalar)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = slow_np_dtype(scalar)
        return numpy_types[scalar.name]

    for thing, name, value in (
        (interpreter.GridExecutor, "__call__", launch),
        (interpreter, "_patch_lang", patch),
        (interpreter, "_get_np_dtype", np_dtype),
        (core.tensor, "__init__", init_tensor),
        (core.block_type, "__init__", init_block),
    ):
        _REPLACED.append((thing, name, getattr(thing, name)))
        setattr(thing, name, value)
