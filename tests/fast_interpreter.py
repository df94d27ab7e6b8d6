"""Triton's interpreter with less work per operation, for tests. No result depends on it, bit for bit.

The shipped interpreter spends nearly all of its time around numpy. Each operation builds and validates types, expands
both operands to one shape, compares type names, and repeats an integer operation in 64 bits to find overflows, which it
reports only with its option `debug`. `save_time` replaces the frequent operations of the usual types by functions that
compute the result type once for each pair of operand types and let numpy expand the operands. Everything else, and
every error, is left to the shipped operation. tests/kernels/test_interpreter.py compares both.
"""

import linecache
import math
import threading
from collections.abc import Iterator
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
        from tests.fast_operations import Operations, replace_operations
        from tests.fast_programs import replace_programs

        _save_types()
        operations = Operations()
        _save_patches(replace_programs(operations))
        replace_operations(operations)
        _parse_alone()


def _parse_alone() -> None:
    """CPython 3.11 counts the depth of `ast.parse` for all threads together and fails if two of them parse. Find the
    line of a function without making a JITFunction of it."""
    from triton.runtime import interpreter

    lock, shipped = threading.Lock(), interpreter.FunctionRewriter.rewrite_ast

    def rewrite_ast(self: Any) -> Any:
        with lock:
            return shipped(self)

    def file_and_line(self: Any) -> tuple[str, int]:
        file, line = self.fn.__code__.co_filename, self.fn.__code__.co_firstlineno
        lines = enumerate(linecache.getlines(file)[line - 1 :], line)
        return file, next((number for number, text in lines if text.lstrip().startswith("def ")), line)

    replace(interpreter.FunctionRewriter, "rewrite_ast", rewrite_ast)
    replace(interpreter.FunctionRewriter, "_get_jit_fn_file_line", file_and_line)


def _save_types() -> None:
    """Validate each shape once, compare types by identity first, and convert numbers of 8 and 16 bits by tables."""
    from triton.language import core
    from triton.runtime import interpreter

    sizes: dict[tuple[int, ...], int] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, np.dtype] = {}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}
    tables: dict[tuple[str, ...], np.ndarray] = {}  # of all numbers of 8 or 16 bits
    slow_np_dtype, slow_equal, slow_convert = interpreter._get_np_dtype, core.dtype.__eq__, interpreter._convert_float

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

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source.primitive_bitwidth > 16:
            bits = data.view(np.uint32) if (source.name, target.name, rounding) == ("fp32", "bf16", None) else None
            if bits is None or (((bits << 1) - np.uint32(1)) < np.uint32(0xFFFFFF)).any():  # some are subnormal
                return slow_convert(data, source, target, rounding)
            return (bits >> 16).astype(np.uint16)
        key = (source.name, target.name, str(rounding))
        unsigned = np.dtype(f"uint{source.primitive_bitwidth}")
        if key not in tables:
            every = np.arange(1 << source.primitive_bitwidth, dtype=unsigned)
            tables[key] = slow_convert(every, source, target, rounding)
        return np.take(tables[key], data.view(unsigned))

    def equal(type_: Any, other: Any) -> bool:
        return type_ is other or slow_equal(type_, other)

    replace(interpreter, "_get_np_dtype", np_dtype)
    replace(core.tensor, "__init__", init_tensor)
    replace(core.block_type, "__init__", init_block)
    replace(core.block_type, "with_element_ty", with_element_ty)
    replace(core.dtype, "__eq__", equal)
    replace(interpreter, "_convert_float", convert_float)


def _save_patches(builtins: dict[Any, Any]) -> None:
    """Replace the builtins of triton.language once instead of for every launch and every call between kernels.
    builtins: faster ones for some of them."""
    from triton.language import core
    from triton.runtime import interpreter

    slow_patch, semantic = interpreter._patch_lang, interpreter.interpreter_semantic
    nothing = interpreter._LangPatchScope()

    known: dict[Any, tuple[bool, bool]] = {}  # by function

    def patch(function: Any) -> Any:
        if function not in known:
            values = function.__globals__.values()
            known[function] = any(value is interpreter.tl for value in values), any(value is core for value in values)
        modules = known[function]
        if modules not in _PATCHED:
            _PATCHED[modules] = slow_patch(function)
        return nothing

    def patch_attribute(thing: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that `_semantic` is given
        function = builtins.get(function, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(thing, name, call)

    replace(interpreter, "_patch_lang", patch)
    replace(interpreter, "_patch_attr", patch_attribute)
