"""The interpreter's `tl.dot` in tests: additions in a fixed order, and kernels that also hold with the one of numpy."""

import inspect
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from kernels.jit import installed, interpreted, jit, launch, tl
from kernels.op import tensors
from kernels.ops import OPS
from tests.fast_interpreter import without_saving_time
from tests.interpreter import fixed_order_matmul, interpreter_as_shipped
from tests.kernels.test_ops import compare, copied, inputs, same

pytestmark = pytest.mark.skipif(not (installed() and interpreted()), reason="kernels are compiled here")
VECTORS = [(1, 1, 1), (1, 2, 1), (1, 129, 1), (2, 33, 1), (2, 300, 1), (1, 300, 2)]
SHAPES = [*VECTORS, (1, 64, 3), (16, 16, 16), (7, 130, 5), (3, 64, 64)]


@jit
def _multiply(a, b, out, rows: tl.constexpr, inner: tl.constexpr, columns: tl.constexpr):
    row, column, k = tl.arange(0, rows), tl.arange(0, columns), tl.arange(0, inner)
    left = tl.load(a + row[:, None] * inner + k[None, :])
    right = tl.load(b + k[:, None] * columns + column[None, :])
    tl.store(out + row[:, None] * columns + column[None, :], tl.dot(left, right))


def multiply(a, b):
    out = torch.empty(a.shape[0], b.shape[1])
    launch(_multiply, (1,), a.contiguous(), b.contiguous(), out, rows=a.shape[0], inner=a.shape[1], columns=b.shape[1])
    return out


def drawn(*shape, seed=5):
    """Numbers whose sum depends on the order of additions."""
    spread = np.random.default_rng(seed)
    return (spread.standard_normal(shape) * 10.0 ** spread.integers(-3, 4, shape)).astype(np.float32)


def one_by_one(a, b):
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        for i in range(a.shape[0]):
            for j in range(b.shape[1]):
                product = np.float32(a[i, k] * b[k, j])
                out[i, j] = product if k == 0 else np.float32(out[i, j] + product)
    return out


def blocked_by_shape(a, b, dtype=None, **_):
    """A matmul that adds in blocks whose size depends on the shape, as a BLAS may."""
    block = 4 if a.shape[-2] * b.shape[-1] >= 256 else 16
    parts = [one_by_one(a[:, at : at + block], b[at : at + block]).astype(dtype) for at in range(0, a.shape[-1], block)]
    return sum(parts[1:], start=parts[0])


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products_are_added_from_the_first_to_the_last(rows, inner, columns):
    a, b = drawn(rows, inner), drawn(inner, columns, seed=6)
    assert np.array_equal(fixed_order_matmul(a, b, np.float32), one_by_one(a, b))


def test_batches_of_matrices_are_multiplied_one_by_one():
    a, b = drawn(3, 4, 20), drawn(3, 20, 5, seed=6)
    want = np.stack([one_by_one(*pair) for pair in zip(a, b, strict=True)])
    assert np.array_equal(fixed_order_matmul(a, b, np.float32), want)


def test_integers_are_multiplied_exactly():
    a = np.random.default_rng(1).integers(-128, 128, (16, 64), dtype=np.int8)
    assert np.array_equal(fixed_order_matmul(a, a.T, np.int32), a.astype(np.int64) @ a.T.astype(np.int64))


def test_a_row_of_a_dot_does_not_depend_on_the_number_of_rows_and_columns(monkeypatch):
    monkeypatch.setattr(np, "matmul", blocked_by_shape)
    a, b = torch.from_numpy(drawn(16, 64)), torch.from_numpy(drawn(64, 16, seed=6))
    assert torch.equal(multiply(a, b)[:2, :4], multiply(a[:2], b[:, :4]))
    with interpreter_as_shipped():
        assert not torch.equal(multiply(a, b)[:2, :4], multiply(a[:2], b[:, :4])), "the fault is not reproduced"


def with_dots():
    for op in OPS:
        if "tl.dot(" in inspect.getsource(sys.modules[op.triton.__module__]):
            case = next(case for case in op.cases if not case.bench and case.id != "empty")
            yield pytest.param(op, case, id=f"{op.name}-{case.id}")


@pytest.mark.parametrize(("op", "case"), list(with_dots()))
def test_kernels_with_dots_hold_their_tolerance_with_the_dot_of_numpy(op, case):
    args = inputs(op, case, torch.float32, seed=3)
    wanted = tensors(op.reference(*copied(args)))
    with interpreter_as_shipped():
        compare(op, case, torch.float32, wanted, tensors(op(*copied(args))))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.sampled(2)
def test_an_interpreter_that_saves_time_computes_the_same_bits(op):
    case = next(case for case in op.cases if not case.sizes.get("pad"))  # rows of padding are not written
    given = inputs(op, case, torch.float32)  # kept, because an operation may read addresses of it
    fast = tensors(op(*copied(given)))
    with without_saving_time():
        slow = tensors(op(*copied(given)))
    assert len(fast) == len(slow) and all(map(same, slow, fast))


@jit
def _wrong(out, size: tl.constexpr):
    tl.store(out + tl.arange(0, size), 1.0)


def test_an_interpreter_that_saves_time_refuses_what_the_shipped_one_refuses():
    for _ in range(2):
        with pytest.raises(Exception, match="power of 2"):
            launch(_wrong, (1,), torch.empty(8), size=3)
    launch(_wrong, (1,), torch.empty(8), size=4)


@jit
def _sum(a, b, out, left: tl.constexpr, right: tl.constexpr):
    total = tl.load(a + tl.arange(0, left)) + tl.load(b + tl.arange(0, right))
    tl.store(out + tl.arange(0, left), total)


@pytest.mark.parametrize("shipped", [False, True])
def test_integers_wrap_around_and_shapes_that_do_not_match_are_refused(shipped):
    most, one = torch.full((4,), 2**31 - 1, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32)
    with without_saving_time() if shipped else nullcontext():
        with pytest.raises(Exception, match="incompatible dimensions"):
            launch(_sum, (1,), one, one, out, left=4, right=2)
        launch(_sum, (1,), most, one, out, left=4, right=4)
    assert out.tolist() == [-(2**31)] * 4


@jit
def _operations(a, b, keep, out, size: tl.constexpr, whole: tl.constexpr):
    at = tl.arange(0, size)
    mask = tl.load(keep + at) > 0
    x, y = tl.load(a + at), tl.load(b + at, mask, -1)
    tl.store(out + at, x + y)
    tl.store(out + size + at, x - y, mask)
    tl.store(out + 2 * size + at, (x * y)[:, None].reshape(size), mask)
    tl.store(out + 3 * size + at, tl.where(mask, x, y))
    tl.store(out + 4 * size + at, tl.maximum(x, y))
    tl.store(out + 5 * size + at, tl.minimum(x, 2))
    tl.store(out + 6 * size + at, tl.where((x < y) & (y != 1) | mask, 1.0, 0.0))
    tl.store(out + 7 * size + at, x.to(tl.float32) - 0.5)
    tl.store(out + 8 * size, tl.sum(x, 0))
    tl.store(out + 8 * size + 1, tl.max(tl.where(mask, x, y), 0))
    tl.store(out + 8 * size + 2, tl.min(y, 0))
    if whole:
        tl.store(out + 9 * size + at, x // 3, mask)
        tl.store(out + 10 * size + at, (x % 3) & y)
    else:
        tl.store(out + 9 * size + at, x / 3, mask)
        tl.store(out + 10 * size + at, 1.0 / y)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def special(kind, count, shift):
    """Return numbers of a type, with its limits and all kinds of unusual ones."""
    draw = np.random.default_rng(shift)
    if kind in FLOATS:
        values = draw.standard_normal(count) * 10.0 ** draw.integers(-6, 5, count)
        values[:8] = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 65504.0, 1 + 2**-8)
    else:
        limits = torch.iinfo(kind)
        values = draw.integers(max(limits.min, -(2**40)), min(limits.max, 2**40), count, endpoint=True)
        values[:4] = limits.min, limits.max, 0, 1
    return torch.from_numpy(np.roll(values, shift)).to(kind)


def bits(tensor):
    """Return the bits of numbers. All NaNs are equal, because it is not defined which of two a sum has."""
    if tensor.is_floating_point():
        tensor = tensor.where(~tensor.isnan(), 12345)
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for unusual numbers
@pytest.mark.parametrize("out", [*FLOATS, torch.int32])
@pytest.mark.parametrize("left", TYPES)
@pytest.mark.parametrize("right", TYPES)
@pytest.mark.sampled(3)
def test_operations_on_all_types_have_the_same_bits(left, right, out):
    size, whole = 16, left not in FLOATS and right not in FLOATS
    a, b, keep = special(left, size, 1), special(right, size, 4), special(torch.int8, size, 7)
    found = []
    for shipped in (False, True):
        result = torch.full((11 * size,), 7, dtype=out)
        with without_saving_time() if shipped else nullcontext():
            launch(_operations, (1,), a, b, keep, result, size=size, whole=whole)
        found.append(bits(result).tolist())
    assert found[0] == found[1]
