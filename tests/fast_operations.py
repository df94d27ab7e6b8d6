"""Faster operations on tensors for Triton's interpreter (fast_interpreter.py): arithmetic, comparisons, selection and
conversion of the usual types."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fast_interpreter import replace

# Operation of the semantics: numpy's function, whether the result is boolean, whether integers may overflow.
_ARITHMETIC = {
    "add": (np.add, False, True),
    "sub": (np.subtract, False, True),
    "mul": (np.multiply, False, True),
    "truediv": (np.divide, False, False),
    "floordiv": (lambda x, y: (x - np.fmod(x, y)) // y, False, False),
    "mod": (np.fmod, False, False),
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
    "__floordiv__": "floordiv",
    "__mod__": "mod",
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


def replace_operations(fast: "Operations") -> None:
    """Replace the operators of tensors, `where`, conversions and new axes."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    calls = {name: fast.operation(name) for name in _ARITHMETIC}
    for name, call in calls.items():
        replace(semantic, name, call)

    def unwrap(value: Any) -> Any:
        return value.value if value.__class__ is core.constexpr else value

    for operator, name in _OPERATORS.items():
        more = (True,) if _ARITHMETIC[name][2] else ()
        replace(core.tensor, operator, lambda x, y, call=calls[name], more=more, **_: call(x, unwrap(y), *more))
    for operator, name in _REFLECTED.items():
        more = (True,) if _ARITHMETIC[name][2] else ()
        replace(core.tensor, operator, lambda x, y, call=calls[name], more=more, **_: call(unwrap(y), x, *more))
    for name in ("maximum", "minimum"):
        replace(semantic, name, fast.extreme(name))
    replace(semantic, "where", fast.where)
    replace(semantic, "broadcast_impl_value", fast.broadcast)
    replace(semantic, "cast", fast.cast)
    replace(semantic, "expand_dims", fast.expand_dims)


class Operations:
    """Operations on tensors of the usual types. They call the shipped operation for all others and for every error."""

    def __init__(self) -> None:
        from triton.language import core
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter

        self.semantic, self.shipped = interpreter.interpreter_semantic, TritonSemantic
        self.tensor, self.handle = core.tensor, interpreter.TensorHandle
        self.block_type, self.pointer_type = core.block_type, core.pointer_type
        self.int1, self.float16, self.float32 = core.int1, core.float16, core.float32
        self.usual = {
            core.int1: np.dtype(bool),
            core.float16: np.dtype(np.float16),
            core.float32: np.dtype(np.float32),
            **{getattr(core, f"int{bits}"): np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
            **{getattr(core, f"uint{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
        }
        self.numbers = {"i32": core.int32, "f32": core.float32, "bool": core.int1}
        self.known: dict[tuple[str, tuple[int, ...]], Any] = {}  # type, shape and number of elements
        self.arrays: dict[tuple[Any, str], np.ndarray] = {}  # of one number
        self.no_nan = core.PropagateNan.NONE
        self.selected: dict[Any, Any] = {}  # plans of `where`

    def made(self, data: np.ndarray, scalar: Any, is_block: bool) -> Any:
        """Return a tensor as the interpreter makes it."""
        handle, result = self.handle.__new__(self.handle), self.tensor.__new__(self.tensor)
        handle.data, handle.dtype, handle.attr = data, scalar, {}
        key = (scalar.name, data.shape if is_block else ())
        if key not in self.known:
            type_ = self.block_type(scalar, data.shape) if is_block else scalar
            model = self.tensor(handle, type_)
            self.known[key] = type_, model.shape, model.numel
        result.type, result.shape, result.numel = self.known[key]
        result.handle, result.dtype = handle, scalar
        return result

    def is_block(self, value: Any) -> bool:
        return value.__class__ is self.tensor and value.type.__class__ is self.block_type

    def types(self, left: Any, right: Any, division: bool) -> Any:
        """Return the types of both operands, the type of the computation and its range, or None for a type that is not
        usual."""
        if any(one is None or one.__class__ is self.pointer_type for one in (left, right)):
            return None
        numbers = [one.__class__ is str for one in (left, right)]
        kinds = [self.numbers[one] if one.__class__ is str else one for one in (left, right)]
        if kinds[0] not in self.usual or kinds[1] not in self.usual:
            return None
        try:
            common = self.semantic.computation_type_impl(kinds[0], numbers[0], kinds[1], numbers[1], division)
        except TypeError:
            return None
        if common not in self.usual:
            return None
        form = self.usual[common]
        limits = np.iinfo(form) if form.kind in "iu" else None
        most = (int(limits.min), int(limits.max)) if limits else (-math.inf, math.inf)
        return self.usual[kinds[0]], self.usual[kinds[1]], form, common, *most

    def number(self, value: Any, common: np.dtype, least: float, most: float) -> np.ndarray | None:
        """Return a number in the type of the computation, or None if it is out of range."""
        if not least <= value <= most:
            return None
        if value == 0:  # it may be -0.0
            return np.array([value], dtype=common)
        key = value, common.char
        if key not in self.arrays:
            self.arrays[key] = np.array([value], dtype=common)
        return self.arrays[key]

    def operands(self, left: Any, right: Any, plans: dict[Any, Any], division: bool) -> Any:
        """Return the elements of both operands in the type of the computation, that type, and whether it is a block;
        None if the shipped operation must compute."""
        left_is_tensor, right_is_tensor = left.__class__ is self.tensor, right.__class__ is self.tensor
        key = (
            left.dtype.name if left_is_tensor else _number_type(left),
            right.dtype.name if right_is_tensor else _number_type(right),
            left_is_tensor,
        )
        if key not in plans:
            left_key, right_key = (
                one.dtype if one.__class__ is self.tensor else _number_type(one) for one in (left, right)
            )
            plans[key] = self.types(left_key, right_key, division)
        plan = plans[key]
        if plan is None:
            return None
        left_type, right_type, common_type, common, least, most = plan
        left_block = right_block = False
        if left_is_tensor:
            x, left_block = left.handle.data, left.type.__class__ is self.block_type
            if x.dtype is not left_type and x.dtype != left_type:
                return None
            x = x if left_type is common_type else x.astype(common_type)
        else:
            x = self.number(left, common_type, least, most)
        if right_is_tensor:
            y, right_block = right.handle.data, right.type.__class__ is self.block_type
            if y.dtype is not right_type and y.dtype != right_type:
                return None
            y = y if right_type is common_type else y.astype(common_type)
        else:
            y = self.number(right, common_type, least, most)
        if x is None or y is None:
            return None
        if left_block is not right_block:  # the order of the result's elements follows the expanded operand
            if left_block and not x.flags.c_contiguous:
                y = np.full(x.shape, y)
            elif right_block and not y.flags.c_contiguous:
                x = np.full(y.shape, x)
        return x, y, common, left_block or right_block

    def operation(self, name: str) -> Callable[..., Any]:
        """Return the fast form of an operation of _ARITHMETIC."""
        function, boolean, overflows = _ARITHMETIC[name]
        slow, plans = getattr(self.shipped, name), dict[Any, Any]()
        divides = name in ("truediv", "floordiv", "mod")
        floats = {self.float16, self.float32}
        integers = self.usual.keys() - floats
        kinds = {"truediv": floats, **dict.fromkeys(("and_", "or_", "floordiv", "mod"), integers)}.get(name, self.usual)
        allowed = {one.name for one in kinds}
        wraps = overflows or name in ("floordiv", "mod")  # a number of one bit has its own rules

        def computed(left: Any, right: Any) -> Any:
            if overflows and left.__class__ is self.tensor and left.dtype.__class__ is self.pointer_type:
                return self.offset_pointer(left, right) if name == "add" else None
            found = self.operands(left, right, plans, divides)
            if found is None or found[2].name not in allowed:
                return None
            x, y, common, is_block = found
            if wraps and x.dtype.kind == "b":
                return None
            return self.made(function(x, y), self.int1 if boolean else common, is_block)

        def call(left: Any, right: Any, sanitize_overflow: Any = None) -> Any:
            try:
                result = computed(left, right)
            except ValueError:  # shapes that do not match
                result = None
            if result is not None:
                return result
            more = (sanitize_overflow,) if overflows else ()
            return slow(self.semantic, left, right, *more)

        return call

    def extreme(self, name: str) -> Callable[..., Any]:
        """Return the fast form of maximum or minimum of tensors, which propagates no NaN."""
        function, plans = {"maximum": np.fmax, "minimum": np.fmin}[name], dict[Any, Any]()
        slow, none = getattr(self.shipped, name), self.no_nan

        def call(left: Any, right: Any, propagate_nan: Any) -> Any:
            try:
                found = self.operands(left, right, plans, False) if propagate_nan == none else None
            except ValueError:
                found = None
            if found is None or found[2] is self.int1:
                return slow(self.semantic, left, right, propagate_nan)
            try:
                return self.made(function(found[0], found[1]), found[2], found[3])
            except ValueError:  # shapes that do not match
                return slow(self.semantic, left, right, propagate_nan)

        return call

    def offset_pointer(self, pointer: Any, offset: Any) -> Any:
        """Return a pointer plus an offset, or None if the shipped operation must compute."""
        if offset.__class__ is self.tensor:
            offsets = offset.handle.data
            if offsets.dtype.kind not in "iu" or offset.dtype.__class__ is self.pointer_type:
                return None
        elif _number_type(offset) == "i32":
            offsets = np.array([offset], np.int32)
        else:
            return None
        width = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        data = pointer.handle.data + width * offsets.astype(np.uint64)
        return self.made(data, pointer.dtype, self.is_block(pointer) or self.is_block(offset))

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        data = condition.handle.data
        if condition.dtype is self.int1 and data.dtype == bool:
            found = self.operands(x, y, self.selected, False)
            chosen = self.is_block(condition)
            if found is not None and (chosen is found[3] or (chosen and data.flags.c_contiguous)):
                try:
                    return self.made(np.where(data, found[0], found[1]), found[2], chosen or found[3])
                except ValueError:  # shapes that do not match
                    pass
        return self.shipped.where(self.semantic, condition, x, y)

    def broadcast(self, left: Any, right: Any) -> Any:
        """Expand two tensors to one shape."""
        if left.type is right.type or (
            self.is_block(left) and self.is_block(right) and left.type.shape == right.type.shape
        ):
            return left, right
        return self.shipped.broadcast_impl_value(self.semantic, left, right)

    def cast(self, value: Any, type_: Any, rounding: Any = None) -> Any:
        source, target = value.dtype, type_.scalar
        if source == target:
            return value
        known = rounding is None and source.__class__ is not self.pointer_type and source in self.usual
        if known and target.__class__ is not self.pointer_type and target in self.usual:
            data, expands = value.handle.data, source is not self.float16 or target is self.float32
            if target is not self.int1 and expands and data.dtype == self.usual[source]:
                return self.made(data.astype(self.usual[target]), target, self.is_block(value))
        return self.shipped.cast(self.semantic, value, type_, rounding)

    def expand_dims(self, value: Any, axis: int) -> Any:
        data = value.handle.data
        if self.is_block(value) and 0 <= axis <= data.ndim:
            return self.made(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), value.dtype, True)
        return self.shipped.expand_dims(self.semantic, value, axis)
