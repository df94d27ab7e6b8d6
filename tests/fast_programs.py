"""Faster launches, loads, stores, reductions and products for Triton's interpreter (fast_interpreter.py).

At each launch the shipped interpreter inspects the kernel's signature and copies all storages. In each load it checks
types and shapes. The functions here do this once per type. They leave unusual operands and all errors to the shipped
operation.
"""

import builtins
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.fast_interpreter import replace
from tests.fast_operations import Operations

NOTHING = slice(None)


def replace_programs(operations: Operations) -> dict[Any, Any]:
    """Replace launches and operations. Return the replacements of builtins of triton.language."""
    from triton.language import core

    memory, blocks = _Memory(operations), _Blocks(operations)
    _replace_launches()
    blocks.replace_semantics()
    loads = {core.load.__wrapped__: memory.load, core.store.__wrapped__: memory.store}
    return {**loads, core.tensor.__getitem__.__wrapped__: blocks.item}


class _Memory:
    """Loads and stores through pointers."""

    def __init__(self, operations: Operations) -> None:
        from triton.language import core
        from triton.runtime import interpreter

        self.operations, self.memory = operations, interpreter._interpreter
        self.semantic, self.numpy_type = interpreter.interpreter_semantic, interpreter._get_np_dtype
        self.slow_load, self.slow_store = core.load.__wrapped__, core.store.__wrapped__
        self.scalar, self.constexpr = core.dtype, core.constexpr
        self.numbers: dict[Any, np.ndarray] = {}

    def element(self, pointer: Any) -> Any:
        """Return the type that a pointer refers to, or None if it is not usual."""
        made = self.operations
        if pointer.__class__ is not made.tensor or pointer.dtype.__class__ is not made.pointer_type:
            return None
        element = pointer.dtype.element_ty
        return element if element.__class__ is self.scalar and element.name != "int1" else None

    def masks(self, mask: Any, is_block: bool, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return the elements of a mask, or None if it is not usual."""
        if mask is None:
            return np.ones(shape, bool)
        made = self.operations
        if mask.__class__ is not made.tensor or (made.is_block(mask) and not is_block):
            return None
        data = mask.handle.data
        return data if data.dtype == bool and mask.dtype is made.int1 else None

    def values(self, value: Any, element: Any, is_block: bool) -> np.ndarray | None:
        """Return a number or a tensor in the type of an element, or None if it is not usual."""
        value = value.value if value.__class__ is self.constexpr else value
        if value.__class__ is self.operations.tensor:
            if self.operations.is_block(value) and not is_block:
                return None
            return self.semantic.cast(value, element).handle.data
        if value.__class__ not in (int, float, bool) or value != value:
            return None
        key = value.__class__, value, math.copysign(1.0, value), element.name
        if key not in self.numbers:
            self.numbers[key] = self.semantic.cast(self.semantic.to_tensor(value), element).handle.data
        return self.numbers[key]

    def load(self, pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        try:
            loaded = self.loaded(pointer, mask, other)
        except ValueError:  # shapes that do not match
            loaded = None
        return self.slow_load(pointer, mask, other, **options) if loaded is None else loaded

    def loaded(self, pointer: Any, mask: Any, other: Any) -> Any:
        element = self.element(pointer)
        if element is None or (mask is None and other is not None):
            return None
        addresses, is_block = pointer.handle.data, self.operations.is_block(pointer)
        masks = self.masks(mask, is_block, addresses.shape)
        if masks is None:
            return None
        if masks.shape != addresses.shape:
            shape = np.broadcast_shapes(masks.shape, addresses.shape)
            addresses, masks = np.broadcast_to(addresses, shape), np.broadcast_to(masks, shape)
        numpy_type = self.numpy_type(element)
        if other is None:
            others = np.zeros(addresses.shape, numpy_type)
        else:
            others = self.values(other, element, is_block)
            if others is None:
                return None
            if others.size == 1:
                number, others = others, np.empty(addresses.shape, numpy_type)
                others.fill(number.flat[0])
            elif others.shape != addresses.shape:
                others = np.broadcast_to(others, addresses.shape)
        return self.operations.made(self.memory.load(addresses, masks, others, numpy_type), element, is_block)

    def store(self, pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        try:
            stored = self.stored(pointer, value, mask)
        except ValueError:  # shapes that do not match
            stored = False
        return None if stored else self.slow_store(pointer, value, mask, **options)

    def stored(self, pointer: Any, value: Any, mask: Any) -> bool:
        element = self.element(pointer)
        if element is None or pointer.dtype.const:
            return False
        addresses, is_block = pointer.handle.data, self.operations.is_block(pointer)
        masks = self.masks(mask, is_block, addresses.shape)
        values = self.values(value, element, is_block)
        if masks is None or values is None:
            return False
        if masks.shape != addresses.shape:
            masks = np.broadcast_to(masks, addresses.shape)
        if values.shape != addresses.shape:
            values = np.broadcast_to(values, addresses.shape)
        self.memory.store(addresses, values, masks)
        return True


class _Blocks:
    """Reductions, products, and new blocks."""

    def __init__(self, operations: Operations) -> None:
        from triton.language import core, standard
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter

        self.operations, self.shipped = operations, TritonSemantic
        self.interpreter, self.semantic = interpreter, interpreter.interpreter_semantic
        self.reductions = {
            standard._sum_combine: (np.add, False),
            standard._elementwise_max: (np.fmax, True),
            standard._elementwise_min: (np.fmin, True),
        }
        self.slow_item = core.tensor.__getitem__.__wrapped__
        self.ranges: dict[tuple[int, int], Any] = {}
        self.products: dict[tuple[Any, ...], Any] = {}
        self.upcast = {"fp8e4b15", "fp8e4b8", "fp8e5b16"}

    def replace_semantics(self) -> None:
        replace(self.semantic, "arange", self.arange)
        replace(self.semantic, "full", self.full)
        replace(self.semantic, "dot", self.dot)
        slow = self.interpreter.ReduceOps.apply
        replace(self.interpreter.ReduceOps, "apply", lambda reduction, x: self.reduced(reduction, x, slow))

    def item(self, x: Any, indices: Any, **options: Any) -> Any:
        """Return x[:, None] and the like."""
        data, shape, at = x.handle.data, [], 0
        if indices.__class__ is builtins.tuple and self.operations.is_block(x):
            for one in indices:
                if one is None:
                    shape.append(1)
                elif one.__class__ is slice and one == NOTHING and at < data.ndim:
                    shape.append(data.shape[at])
                    at += 1
                else:
                    break
            else:
                return self.operations.made(data.reshape(*shape, *data.shape[at:]), x.dtype, True)
        return self.slow_item(x, indices, **options)

    def arange(self, start: int, end: int, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return self.shipped.arange(self.semantic, start, end, ret_ty=ret_ty)
        if (start, end) not in self.ranges:
            self.ranges[start, end] = self.shipped.arange(self.semantic, start, end)
        known = self.ranges[start, end]
        return self.operations.made(known.handle.data, known.dtype, True)

    def full(self, shape: Any, value: Any, dtype: Any) -> Any:
        scalar = self.semantic.make_scalar(value, dtype)
        if not shape or self.operations.is_block(scalar):
            return self.shipped.full(self.semantic, shape, value, dtype)
        return self.operations.made(np.full(shape, scalar.handle.data), scalar.dtype, True)

    def reduced(self, reduction: Any, x: Any, slow: Callable[..., Any]) -> Any:
        found = self.reductions.get(reduction.combine_fn)
        axis = reduction.axis
        if x.__class__ is not self.operations.tensor or found is None or axis.__class__ is not int:
            return slow(reduction, x)
        data, (function, skips_nan) = x.handle.data, found
        if not self.operations.is_block(x) or not 0 <= axis < data.ndim:
            return slow(reduction, x)
        result = function.reduce(data, axis=axis, keepdims=bool(reduction.keep_dims))
        if skips_nan and result.dtype.kind == "f" and np.isnan(result).any():  # numpy warns of it
            return slow(reduction, x)
        kind = self.interpreter._get_np_dtype(x.dtype)
        if result.shape:
            return self.operations.made(result.astype(kind), x.dtype, True)
        return self.operations.made(np.array([result]).astype(kind), x.dtype, False)

    def dot(self, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any, out: Any) -> Any:
        shapes = a.type.name, b.type.name, None if acc is None else acc.type.name
        key = *shapes, precision, imprecise, None if out is None else out.name
        result = self.products.get(key)
        if result is None:
            made = self.shipped.dot(self.semantic, a, b, acc, precision, imprecise, out)
            if not self.upcast & {a.dtype.name, b.dtype.name}:
                options = self.semantic.builder.options
                rounds = self.semantic._str_to_dot_input_precision(precision or options.default_dot_input_precision)
                zeros = self.operations.made(np.zeros_like(made.handle.data), made.dtype, True)
                self.products[key] = made.dtype, rounds, zeros.handle
            return made
        scalar, rounds, zeros = result
        start = zeros if acc is None else acc.handle
        handle = self.semantic.builder.create_dot(a.handle, b.handle, start, rounds, imprecise)
        return self.operations.made(handle.data, scalar, True)


def _replace_launches() -> None:
    """Inspect the signature of a kernel once, and pass the addresses of tensors that are already on the CPU."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    slow_init, slow_call, builder = executor.__init__, executor.__call__, interpreter.interpreter_builder
    constants: dict[Any, Any] = {}
    signatures: dict[Any, inspect.Signature] = {}
    types: dict[torch.dtype, Any] = {}
    made, handle_type = interpreter.tl.tensor, interpreter.TensorHandle
    int32 = interpreter.tl.int32

    def init(launch: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        if fn not in constants:
            slow_init(launch, fn, arg_names, grid, pre_run_hooks)
            constants[fn] = launch.constexprs
        launch.fn, launch.arg_names, launch.grid, launch.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        launch.constexprs = constants[fn]

    def converted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype not in types:
                types[value.dtype] = interpreter._implicit_cvt(value).dtype
            scalar, data = types[value.dtype], np.array([value.data_ptr()], np.uint64)
        elif value.__class__ is int and -(2**31) <= value < 2**31:
            scalar, data = int32, np.array([value], np.int32)
        else:
            return interpreter._implicit_cvt(value)
        handle = handle_type.__new__(handle_type)
        handle.data, handle.dtype, handle.attr = data, scalar, {}
        return made(handle, scalar)

    def call(launch: Any, *args: Any, **kwargs: Any) -> None:
        fn = launch.fn
        if launch.pre_run_hooks or callable(launch.grid) or not all(map(_is_here, (*args, *kwargs.values()))):
            slow_call(launch, *args, **kwargs)
            return
        if fn not in signatures:
            signatures[fn] = inspect.signature(fn)
        known = signatures[fn]
        bound = known.bind(*args, **{name: one for name, one in kwargs.items() if name in known.parameters})
        bound.apply_defaults()
        given = {name: one if name in launch.constexprs else converted(one) for name, one in bound.arguments.items()}
        interpreter._patch_lang(fn)
        grid = (*launch.grid, 1, 1)[:3]
        builder.set_grid_dim(*grid)
        try:
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        builder.set_grid_idx(x, y, z)
                        fn(**given)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    replace(executor, "__init__", init)
    replace(executor, "__call__", call)


def _is_here(value: Any) -> bool:
    """Return whether an argument needs no copy to the CPU and back."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return (
        value is None
        or value.__class__ in (int, float, bool)
        or not (hasattr(value, "data_ptr") or isinstance(value, tuple) or hasattr(value, "block_shape"))
    )
