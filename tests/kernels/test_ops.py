"""Compare the Triton body of every operation with its torch reference.

Inputs include poisoned memory with guarded ends, strided rows and single rows. On a CPU the interpreter runs the
kernels; on a GPU the same tests also cover every type and serving sizes."""

import math

import pytest
import torch

from kernels.cpu.library import usable
from kernels.cpu.program import Team
from kernels.jit import installed
from kernels.op import Case, Make, Op, tensors
from kernels.ops import OPS
from kernels.page_codes import decode, is_coded
from tests.tiers import NIGHTLY

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    # kernels rely on intermediate infinities; numpy warns about them in the interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
GUARD = 64  # elements of poison before and after each output


def poison(tensor):
    return (
        tensor.fill_(float("nan"))
        if tensor.is_floating_point()
        else tensor.fill_(-1 if tensor.dtype.is_signed else 255)
    )


class Memory:
    """torch.empty with poison inside and around each tensor, so that what no program writes shows, and what one writes
    outside."""

    def __init__(self, monkeypatch):
        self.given = []
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", lambda x, **k: self.empty(x.shape, dtype=x.dtype, device=x.device))

    def empty(self, *shape, dtype=None, device=None, **rest):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if dtype is not None and dtype.itemsize == 1 and dtype.is_floating_point:
            return self._empty(shape, dtype=dtype, device=device, **rest)  # no poison in 8-bit floats
        count = math.prod(shape)
        whole = poison(self._empty(count + 2 * GUARD, dtype=dtype, device=device, **rest))
        self.given.append(whole)
        return whole[GUARD : GUARD + count].view(tuple(shape))

    def check(self):
        for whole in self.given:
            for end in (whole[:GUARD], whole[-GUARD:]):
                same = end.isnan() if end.is_floating_point() else end == poison(end.clone())
                assert same.all(), "a program wrote outside its output"


@pytest.fixture
def memory(monkeypatch):
    made = Memory(monkeypatch)
    yield made
    made.given.clear()
    if ON_GPU:
        torch.cuda.empty_cache()  # other test processes share the device's memory


def runs():
    """Each operation, case and type; on a CPU the small cases, and bf16 only where no product is taken in it."""
    for op in OPS:
        for case in op.cases:
            if case.bench and not ON_GPU:
                continue
            for dtype in op.tolerance:
                if ON_GPU or dtype != torch.bfloat16:
                    marks = [pytest.mark.gpu] if ON_GPU else []
                    name = f"{op.name}-{case.id}-{str(dtype).removeprefix('torch.')}"
                    yield pytest.param(op, case, dtype, id=name, marks=marks)


def cases(chosen=lambda op, case: True, *, kept=None):
    """Parametrize a test by operation, case and type. kept: number of cases of an operation that `make test` runs, each
    in its first type."""
    chosen_runs = [run for run in runs() if chosen(*run.values[:2])]
    if kept is not None:
        first = {(run.values[0].name, run.values[1].id): run.id for run in reversed(chosen_runs)}
        ids = {op: [id for (own, _), id in reversed(first.items()) if own == op][:kept] for op, _ in first}
        chosen_runs = [
            pytest.param(*run.values, id=run.id, marks=run.marks if run.id in ids[run.values[0].name] else
                         [*run.marks, NIGHTLY])
            for run in chosen_runs
        ]  # fmt: skip
    return pytest.mark.parametrize(("op", "case", "dtype"), chosen_runs)


def inputs(op: Op, case: Case, dtype, seed=0):
    return op.inputs(Make(DEVICE, dtype, seed), **case.sizes)


def copied(args):
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def same(want, got):
    """Bit for bit; any NaN is any other."""
    want, got = want.float(), got.float()  # e4m3 has no isnan
    return want.shape == got.shape and bool(((want == got) | (want.isnan() & got.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float32])
def test_any_nan_is_the_same_but_not_zero(dtype):
    nan, zero = (torch.tensor([value]).to(dtype) for value in (math.nan, 0.0))
    assert same(nan, nan) and not same(nan, zero) and not same(zero, nan)


def error(want, got):
    """Largest difference, relative to the reference's own size and to its root mean square."""
    if want.numel() == 0:
        return 0.0
    want, got = want.double(), got.double()
    equal = (want == got) | (want.isnan() & got.isnan())  # infinities are equal or wrong
    size = want[want.isfinite()].square().mean().sqrt() if want.isfinite().any() else want.new_tensor(1.0)
    difference = torch.where(equal, 0.0, (want - got).abs() / want.abs().maximum(size).clamp(min=1e-30))
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def same_codes(want, got):
    """Pages of 8 or 4 bits: a few codes may be off by one step, where sums of a norm differ in their last bits."""
    want, got = decode(want), decode(got)
    step = (want.amax(-1, keepdim=True) - want.amin(-1, keepdim=True)) / 15
    off = (want - got).abs()
    return bool((off <= 1.01 * step).all()) and float((off > 1e-3 * step).float().mean()) < 0.02


def compare(op, case, dtype, wanted, given):
    assert len(wanted) == len(given)
    for number, (want, got) in enumerate(zip(wanted, given, strict=True)):
        where = f"{op.name}, case {case.id}, output {number}"
        assert want.shape == got.shape and want.dtype == got.dtype, where
        if want.ndim == 6 and is_coded(want.dtype):
            assert same_codes(want, got), where
        elif not want.is_floating_point():
            assert torch.equal(want, got), where
        elif (
            want.element_size() == 1
        ):  # e4m3: a step, as a tie may fall either way, and the interpreter cuts subnormals
            want, got = want.float(), got.float()
            near = (want - got).abs() <= (want.abs() / 8).clamp(min=2.0**-9)
            assert (near | (want.isnan() & got.isnan())).all(), where
        else:
            found = error(want, got)
            assert found <= op.tolerance[dtype], f"{where}: error {found:.2g}"


@cases()
@pytest.mark.sampled(3)
def test_triton_body_equals_the_reference(op, case, dtype, memory):
    args = inputs(op, case, dtype)
    wanted = tensors(op.reference(*copied(args)))
    memory.given.clear()
    given = tensors(op(*copied(args)))
    memory.check()
    compare(op, case, dtype, wanted, given)


@cases(lambda op, case: op.single_row is not None and case.id != "empty", kept=2)
def test_row_does_not_depend_on_other_rows(op, case, dtype, memory):
    args = inputs(op, case, dtype, seed=1)
    whole = tensors(op(*copied(args)))
    rows = op.rows(args)
    for row in sorted({0, rows // 2, rows - 1}):
        own, pick = op.single_row(copied(args), row)
        single = tensors(op(*own))
        for number, (want, got) in enumerate(zip(pick(whole), single, strict=True)):
            assert same(want, got), f"{op.name}, case {case.id}: row {row} of output {number} depends on its neighbours"


@cases(lambda op, case: bool(op.strided), kept=2)
def test_rows_may_be_strided(op, case, dtype, memory):
    args = inputs(op, case, dtype, seed=2)
    apart = tuple(spread(arg) if at in op.strided and arg is not None else arg for at, arg in enumerate(args))
    for want, got in zip(tensors(op(*copied(args))), tensors(op(*apart)), strict=True):
        assert same(want, got), f"{op.name}, case {case.id}: strides matter"


def spread(tensor):
    """Return a copy of the tensor with poison between the rows."""
    if tensor.ndim < 2:
        return tensor.clone()
    size = math.prod(tensor.shape[1:])
    wide = poison(torch.zeros(tensor.shape[0], size + 7, dtype=tensor.dtype, device=tensor.device))
    view = wide[:, :size].unflatten(1, tensor.shape[1:])
    view.copy_(tensor)
    return view


COMPILED = [
    pytest.param(op, case, id=f"{op.name}-{case.id}")
    for op in OPS
    if op.compiled is not None
    for case in op.cases
    if not case.bench and case.id not in op.compiled_lacks
]


@pytest.fixture(scope="module", params=usable())
def team(request):
    """Compiled kernels of a CPU, in every variant that this one runs."""
    made = Team(request.param, 2)
    yield made
    made.close()


@pytest.mark.parametrize(("op", "case"), COMPILED)
def test_compiled_body_equals_the_reference(op, case, team, memory):
    args = op.inputs(Make(torch.device("cpu"), torch.float32), **case.sizes)
    wanted = tensors(op.reference(*copied(args)))
    memory.given.clear()
    given = tensors(op.compiled(team, *copied(args)))
    memory.check()
    compare(op, case, torch.float32, wanted, given)


@pytest.mark.parametrize(
    ("op", "case"), [run for run in COMPILED if run.values[0].single_row and run.values[1].id != "empty"]
)
def test_row_of_the_compiled_body_does_not_depend_on_other_rows(op, case, team):
    args = op.inputs(Make(torch.device("cpu"), torch.float32, 1), **case.sizes)
    whole = tensors(op.compiled(team, *copied(args)))
    for row in sorted({0, op.rows(args) // 2, op.rows(args) - 1}):
        own, pick = op.single_row(copied(args), row)
        for want, got in zip(pick(whole), tensors(op.compiled(team, *own)), strict=True):
            assert same(want, got), f"{op.name}, case {case.id}: row {row} depends on its neighbours"


@pytest.mark.parametrize("op", [op for op in OPS if op.compiled_lacks], ids=lambda op: op.name)
def test_compiled_body_rejects_unsupported_cases(op, team):
    for case in op.cases:
        if case.id in op.compiled_lacks:
            with pytest.raises(NotImplementedError):
                op.compiled(team, *op.inputs(Make(torch.device("cpu"), torch.float32), **case.sizes))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_op_is_fully_declared(op):
    ids = [case.id for case in op.cases]
    assert len(ids) == len(set(ids))
    assert "empty" in ids, "an operation says what it does with no rows"
    assert any(case.bench for case in op.cases), "an operation has a size at which it is measured"
    assert torch.float32 in op.tolerance and torch.bfloat16 in op.tolerance
    for case in op.cases:
        if case.bench:
            args = op.inputs(Make(torch.device("meta"), torch.bfloat16), **case.sizes)
            assert op.traffic(*args) > 0


def test_names_are_unique():
    assert len({op.name for op in OPS}) == len(OPS)
