"""An operation: what it means (torch), what makes it fast (Triton), and how both are checked and measured.

Each file of an operation ends with its `Op`; `kernels/ops.py` lists them. One test file runs all of
them (tests/kernels/test_ops.py), `python -m kernels.bench` times them, `python -m kernels.report` compiles them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """Sizes of one call. `id` names it in tests and tables. `bench`: of the size that is served on a GPU, timed and
    compiled ahead of time, too large for the interpreter; the others are run by the tests. `needs`: a type that not
    every GPU has."""

    id: str
    sizes: Mapping[str, Any]
    bench: bool = False
    needs: Literal["fp8"] | None = None


@dataclass(frozen=True)
class Make:
    """Random inputs of one type on one device, from a seed. On the `meta` device nothing is drawn or allocated."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    _draw: torch.Generator = field(default_factory=torch.Generator, repr=False)

    def __post_init__(self) -> None:
        self._draw.manual_seed(self.seed)

    @property
    def meta(self) -> bool:
        return self.device.type == "meta"

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Of this `dtype` (default: the inputs')."""
        wanted = dtype or self.dtype
        if self.device.type != "cpu":
            if self.meta:
                return torch.empty(shape, dtype=wanted, device="meta")
            draw = torch.Generator(self.device).manual_seed(int(torch.randint(2**31, (), generator=self._draw)))
            return torch.randn(shape, generator=draw, device=self.device).mul_(scale).to(wanted)
        return torch.randn(shape, generator=self._draw).mul_(scale).to(wanted)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """From [low, high)."""
        if self.meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randint(low, high, shape, generator=self._draw).to(self.device, dtype)

    def permutation(self, n: int, dtype: torch.dtype = torch.int32) -> Tensor:
        if self.meta:
            return torch.empty(n, dtype=dtype, device="meta")
        return torch.randperm(n, generator=self._draw).to(self.device, dtype)

    def tensor(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)


Inputs = Callable[..., Args]  # (make, **sizes) -> arguments
Alone = Callable[[Args, int], tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]]


@dataclass(frozen=True)
class Op:
    """`op(*args)` launches the Triton body. Bodies have one signature and give a tensor or a tuple of tensors; what
    they change in place is among these.

    tolerance: by type of the inputs, the largest error allowed relative to the root mean square of the reference.
    alone(args, i): the arguments that compute row i by itself, and what picks the same row out of the whole result.
    rows(args): how many rows there are. strided: arguments whose rows may lie apart. traffic: bytes a perfect kernel
    moves; flops: of matrix products, 0 where there are none. peer: torch's own operation for the same arguments, for
    benchmarks. compiled: the body for a CPU, which takes a team of threads first (kernels/cpu/bodies.py), and the
    cases that it does not serve; cpu_cases: those that it is timed at; at_home(team, args): its arguments in the order
    in which a model keeps them, weights packed and pages arranged, as they are timed. tunable: settings of the Triton
    body (see kernels/tuning.py) and the values worth trying; near: which of the sizes that the body asks with may
    differ from those of a tuned entry, which must equal all others. may_spill: registers of a thread may go to memory
    on sm_90 and sm_100.
    """

    name: str
    reference: Callable[..., Any]
    triton: Callable[..., Any]
    inputs: Inputs
    cases: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, float]
    traffic: Callable[..., int]
    flops: Callable[..., int] = lambda *args: 0
    alone: Alone | None = None
    rows: Callable[[Args], int] = lambda args: args[0].shape[0]
    strided: tuple[int, ...] = ()
    peer: Callable[..., Any] | None = None
    compiled: Callable[..., Any] | None = None
    compiled_lacks: tuple[str, ...] = ()
    cpu_cases: tuple[Case, ...] = ()
    at_home: Callable[[Any, Args], Args] = lambda team, args: args
    tunable: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    near: tuple[str, ...] = ()
    may_spill: bool = False

    def __call__(self, *args: Any) -> Any:
        return self.triton(*args)


def tensors(result: Any) -> tuple[Tensor, ...]:
    """The outputs of a body as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def sliced(*positions: int) -> Alone:
    """For operations on independent rows: these arguments have one row each along their first axis, and so have all
    outputs."""

    def alone(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
        own = tuple(
            arg[row : row + 1] if at in positions and isinstance(arg, Tensor) else arg for at, arg in enumerate(args)
        )
        return own, lambda outputs: tuple(output[row : row + 1] for output in outputs)

    return alone


def nbytes(*values: Any) -> int:
    """Bytes of all tensors among the values, each counted once."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
