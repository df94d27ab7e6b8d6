"""Triton's interpreter with less work per operation, for tests. No result depends on it, bit for bit.

The shipped interpreter spends nearly all of its time around numpy. Each operation builds and validates types, expands
both operands to one shape, compares type names, and repeats an integer operation in 64 bits with tensor operations to
find overflows. `save_time` replaces the frequent operations of the usual types by functions that compute the result
type once for each pair of operand types and let numpy expand the operands. Everything else, and every error, is left to
the shipped operation. tests/kernels/test_interpreter.py compares both.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_REPLACED: list[tuple[Any, str, Any]] = []
"""Object, name and original of each replacement of `save_time`."""

_PATCHED: dict[tuple[bool, bool], Any] = {}
"""Changes of triton.language that stay between launches, by the modules that a function refers to."""


@contextmanager
def without_saving_time() -> Iterator[None]:
    """Run kernels inside the context with the unchanged interpreter, except `tl.dot`."""
    for scope in reversed(_PATCHED.values()):
        scope.restore()
    _PATCHED.clear()
    fast = [(thing, name, getattr(thing, name)) for thing, name, _ in _REPLACED]
    for thing, name, original in _REPLACED:
        setattr(thing, name, original)
    try:
        yield
    finally:
        for thing, name, value in fast:
            setattr(thing, name, value)


def replace(thing: Any, name: str, value: Any) -> None:
    _REPLACED.append((thing, name, getattr(thing, name)))
    setattr(thing, name, value)


def save_time() -> None:
    """Make the interpreter of this process faster."""
    if not _REPLACED:
        _save_types()
        _save_patches()
        _save_operations()


def _save_types() -> None:
    """Validate each shape once, and compare types by identity first."""
    from triton.language import core
    from triton.runtime import interpreter

    sizes: dict[tuple[int, ...], int] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, np.dtype] = {}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    slow_np_dtype, slow_equal = interpreter._get_np_dtype, core.dtype.__eq__

    def init_tensor(tensor: Any, handle: Any, type_: Any) -> None:
        shape = type_.shape if type_.__class__ is core.block_type else ()
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])
        tensor.numel, tensor.shape = shapes[shape]
        tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar

    def init_block(block: Any, element_ty: Any, shape: Any) -> None:
        block.element_ty = element_ty
        block.shape = tuple([size.value if size.__class__ is core.constexpr else size for size in shape])
        if not block.shape:
            raise TypeError("0d block_type is forbidden")
        if block.shape not in sizes:
            sizes[block.shape] = core.validate_block_shape(block.shape)
        block.numel = sizes[block.shape]
        block.name = f"<{block.shape}, {element_ty}>"

    def with_element_ty(block: Any, scalar: Any) -> Any:
        key = (scalar.name, block.shape)
        if key not in blocks:
            blocks[key] = core.block_type(scalar, block.shape)
        return blocks[key]

    def np_dtype(type_: Any) -> np.dtype:
        scalar = type_.element_ty if isinstance(type_, core.block_type) else type_
        if isinstance(scalar, core.pointer_type):
            return slow_np_dtype(scalar)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = slow_np_dtype(scalar)
        return numpy_types[scalar.name]

    def equal(type_: Any, other: Any) -> bool:
        return type_ is other or slow_equal(type_, other)

    replace(interpreter, "_get_np_dtype", np_dtype)
    replace(core.tensor, "__init__", init_tensor)
    replace(core.block_type, "__init__", init_block)
    replace(core.block_type, "with_element_ty", with_element_ty)
    replace(core.dtype, "__eq__", equal)


def _save_patches() -> None:
    """Replace the builtins of triton.language once instead of for every launch and every call between kernels."""
    from triton.language import core
    from triton.runtime import interpreter

    slow_patch, semantic = interpreter._patch_lang, interpreter.interpreter_semantic
    nothing = interpreter._LangPatchScope()

    def patch(function: Any) -> Any:
        values = function.__globals__.values()
        modules = any(value is interpreter.tl for value in values), any(value is core for value in values)
        if modules not in _PATCHED:
            _PATCHED[modules] = slow_patch(function)
        return nothing

    def patch_attribute(thing: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that `_semantic` is given

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(thing, name, call)

    replace(interpreter, "_patch_lang", patch)
    replace(interpreter, "_patch_attr", patch_attribute)


# Operation of the semantics: numpy's function, whether the result is boolean, whether integers may overflow.
_ARITHMETIC = {
    "add": (np.add, False, True),
    "sub": (np.subtract, False, True),
    "mul": (np.multiply, False, True),
    "truediv": (np.divide, False, False),
    "and_": (np.bitwise_and, False, False),
    "or_": (np.bitwise_or, False, False),
    "less_than": (np.less, True, False),
    "less_equal": (np.less_equal, True, False),
    "greater_than": (np.greater, True, False),
    "greater_equal": (np.greater_equal, True, False),
    "equal": (np.equal, True, False),
    "not_equal": (np.not_equal, True, False),
}
_OPERATORS = {
    "__add__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__truediv__": "truediv",
    "__and__": "and_",
    "__or__": "or_",
    "__lt__": "less_than",
    "__le__": "less_equal",
    "__gt__": "greater_than",
    "__ge__": "greater_equal",
    "__eq__": "equal",
    "__ne__": "not_equal",
}
_REFLECTED = {"__radd__": "add", "__rsub__": "sub", "__rmul__": "mul", "__rtruediv__": "truediv"}


def _number_type(value: Any) -> str | None:
    """Return the type name of a Python number as an operand; None if its value needs a wider type than usual."""
    if value.__class__ is int:
        return "i32" if -(2**31) <= value < 2**31 else None
    if value.__class__ is float:
        size = abs(value)
        return "f32" if 1e-37 < size < 1e38 or size in (0.0, math.inf) else None
    return "bool" if value.__class__ is bool else None


def _save_operations() -> None:
    """Replace the binary operations, `where`, conversions and loads of the usual types."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic, tensor, block_type = interpreter.interpreter_semantic, core.tensor, core.block_type
    handle_type, pointer_type = interpreter.TensorHandle, core.pointer_type
    usual = {
        core.int1: np.dtype(bool),
        core.float16: np.dtype(np.float16),
        core.float32: np.dtype(np.float32),
        **{getattr(core, f"int{bits}"): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
        **{getattr(core, f"uint{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    }
    numbers = {"i32": core.int32, "f32": core.float32, "bool": core.int1}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    def made(data: np.ndarray, scalar: Any, is_block: bool) -> Any:
        """Return a tensor as the interpreter makes it."""
        handle = handle_type.__new__(handle_type)
        handle.data, handle.dtype, handle.attr = data, scalar, {}
        if not is_block:
            return tensor(handle, scalar)
        key = (scalar.name, data.shape)
        if key not in blocks:
            blocks[key] = block_type(scalar, data.shape)
        return tensor(handle, blocks[key])

    def types(left: Any, right: Any, division: bool) -> Any:
        """Return the types of two operands and of the computation, or None if one of them is not usual."""
        if any(one is None or one.__class__ is pointer_type for one in (left, right)):
            return None
        left_type, right_type = (numbers[one] if one.__class__ is str else one for one in (left, right))
        if left_type not in usual or right_type not in usual:
            return None
        try:
            common = semantic.computation_type_impl(left_type, left.__class__ is str, right_type, right.__class__ is str, division)
        except TypeError:
            return None
        return (usual[left_type], usual[right_type], usual[common], common) if common in usual else None

    def number(value: Any, dtype: np.dtype) -> np.ndarray | None:
        """Return a Python number as an operand, or None if it is out of range."""
        if dtype.kind in "iu" and not (limits := np.iinfo(dtype)).min <= value <= limits.max:
            return None
        return np.array([value], dtype=dtype)

    def operands(left: Any, right: Any, plans: dict[Any, Any], division: bool) -> Any:
        """Return the elements of both operands in the type of the computation, that type, and whether it is a block;
        None if the shipped operation must compute."""
        left_is, right_is = left.__class__ is tensor, right.__class__ is tensor
        left_key = left.dtype if left_is else _number_type(left)
        right_key = right.dtype if right_is else _number_type(right)
        key = left_key.name if left_is else left_key, right_key.name if right_is else right_key
        if key not in plans:
            plans[key] = types(left_key, right_key, division)
        plan = plans[key]
        if plan is None:
            return None
        left_np, right_np, common_np, common = plan
        if left_is:
            left_data = left.handle.data
            if left_data.dtype != left_np:
                return None
            if left_np != common_np:
                left_data = left_data.astype(common_np)
        elif (left_data := number(left, common_np)) is None:
            return None
        if right_is:
            right_data = right.handle.data
            if right_data.dtype != right_np:
                return None
            if right_np != common_np:
                right_data = right_data.astype(common_np)
        elif (right_data := number(right, common_np)) is None:
            return None
        left_block = left_is and left.type.__class__ is block_type
        right_block = right_is and right.type.__class__ is block_type
        if left_block is not right_block:  # the order of the result's elements follows the expanded operand
            if left_block:
                if not left_data.flags.c_contiguous:
                    right_data = np.full(left_data.shape, right_data)
            elif not right_data.flags.c_contiguous:
                left_data = np.full(right_data.shape, left_data)
        return left_data, right_data, common, left_block or right_block

    def checked(function: Any, left: np.ndarray, right: np.ndarray) -> np.ndarray | None:
        """Return the result of an operation of integers, or None if it overflows."""
        wide = function(left, right, dtype=np.int64)
        result = wide.astype(left.dtype)
        return result if (result == wide).all() else None

    def offset_pointer(pointer: Any, offset: Any) -> Any:
        """Return a pointer plus an offset, or None if the shipped operation must compute."""
        if offset.__class__ is tensor:
            offsets, kind = offset.handle.data, offset.type.__class__
            if offsets.dtype.kind not in "iu" or offset.dtype.__class__ is pointer_type:
                return None
        elif _number_type(offset) == "i32":
            offsets, kind = np.array([offset], np.int32), None
        else:
            return None
        scalar = pointer.dtype
        width = max(1, scalar.element_ty.primitive_bitwidth // 8)
        data = pointer.handle.data + width * offsets.astype(np.uint64)
        return made(data, scalar, kind is block_type or pointer.type.__class__ is block_type)

    def operation(name: str) -> Callable[..., Any]:
        function, boolean, overflows = _ARITHMETIC[name]
        slow = getattr(type(semantic), name)
        floats = {core.float16, core.float32}
        allowed = {"truediv": floats, "and_": usual.keys() - floats, "or_": usual.keys() - floats}.get(name, usual)
        plans: dict[Any, Any] = {}

        def call(left: Any, right: Any, sanitize_overflow: Any = None) -> Any:
            result = None
            try:
                if overflows and left.__class__ is tensor and left.dtype.__class__ is pointer_type:
                    result = offset_pointer(left, right) if name == "add" else None
                elif found := operands(left, right, plans, name == "truediv"):
                    left_data, right_data, common, is_block = found
                    if common in allowed:
                        kind = left_data.dtype.kind
                        if not overflows or kind == "f":
                            data = function(left_data, right_data)
                        elif kind == "b" or left_data.dtype.itemsize == 8 or sanitize_overflow is not True:
                            data = None
                        else:
                            data = checked(function, left_data, right_data)
                        if data is not None:
                            return made(data, core.int1 if boolean else common, is_block)
            except ValueError:  # shapes that do not match
                pass
            if result is not None:
                return result
            return slow(semantic, left, right, sanitize_overflow) if overflows else slow(semantic, left, right)

        return call

    fast = {name: operation(name) for name in _ARITHMETIC}
    for name, call in fast.items():
        replace(semantic, name, call)

    def unwrap(value: Any) -> Any:
        return value.value if value.__class__ is core.constexpr else value

    sanitized = {"add", "sub", "mul"}
    for operator, name in _OPERATORS.items():
        extra = (True,) if name in sanitized else ()
        replace(
            tensor, operator, lambda self, other, call=fast[name], extra=extra, **_: call(self, unwrap(other), *extra)
        )
    for operator, name in _REFLECTED.items():
        extra = (True,) if name in sanitized else ()
        replace(
            tensor, operator, lambda self, other, call=fast[name], extra=extra, **_: call(unwrap(other), self, *extra)
        )

    slow_where = type(semantic).where
    where_plans: dict[Any, Any] = {}

    def where(condition: Any, x: Any, y: Any) -> Any:
        data = condition.handle.data
        if condition.dtype is core.int1 and data.dtype == bool and (found := operands(x, y, where_plans, False)):
            left, right, common, is_block = found
            condition_block = condition.type.__class__ is block_type
            try:
                if condition_block is is_block or (condition_block and data.flags.c_contiguous):
                    return made(np.where(data, left, right), common, is_block or condition_block)
            except ValueError:  # shapes that do not match
                pass
        return slow_where(semantic, condition, x, y)

    slow_broadcast = type(semantic).broadcast_impl_value

    def broadcast(left: Any, right: Any) -> Any:
        """Expand two tensors to one shape; the frequent cases need nothing."""
        if left.type is right.type or (
            left.type.__class__ is block_type
            and right.type.__class__ is block_type
            and left.type.shape == right.type.shape
        ):
            return left, right
        return slow_broadcast(semantic, left, right)

    slow_cast = type(semantic).cast

    def cast(value: Any, type_: Any, rounding: Any = None) -> Any:
        source, target = value.dtype, type_.scalar
        if source is target or source == target:
            return value
        data = value.handle.data
        if rounding is None and source in usual and target in usual and data.dtype == usual[source]:
            if target is not core.int1 and not (source is core.float16 and target is not core.float32):
                return made(data.astype(usual[target]), target, value.type.__class__ is block_type)
        return slow_cast(semantic, value, type_, rounding)

    def expand_dims(value: Any, axis: int) -> Any:
        data = value.handle.data
        if value.type.__class__ is block_type and 0 <= axis <= data.ndim:
            return made(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), value.dtype, True)
        return slow_expand(semantic, value, axis)

    slow_expand = type(semantic).expand_dims
    replace(semantic, "where", where)
    replace(semantic, "broadcast_impl_value", broadcast)
    replace(semantic, "cast", cast)
    replace(semantic, "expand_dims", expand_dims)
