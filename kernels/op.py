"""Definition of an operation: its reference in torch, its Triton body, and the cases that test and measure both.

Each file of an operation ends with its `Op`; `kernels/ops.py` lists them. One test file runs all of
them (tests/kernels/test_ops.py), `python -m benchmarks.kernels` times them, `python -m kernels.report` compiles them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Args = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """Sizes of one call."""

    id: str  # name in tests and tables
    sizes: Mapping[str, Any]
    bench: bool = False
    """A size that is served on a GPU: timed and compiled ahead of time, too large for the interpreter. Tests run the
    other cases."""
    needs: Literal["fp8"] | None = None  # a type that some GPUs lack


@dataclass(frozen=True)
class Make:
    """Random inputs of one type on one device, from a seed. The `meta` device draws and allocates nothing."""

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
        """Draw normally distributed numbers of this `dtype` (default: the inputs')."""
        wanted = dtype or self.dtype
        if self.device.type != "cpu":
            if self.meta:
                return torch.empty(shape, dtype=wanted, device="meta")
            draw = torch.Generator(self.device).manual_seed(int(torch.randint(2**31, (), generator=self._draw)))
            return torch.randn(shape, generator=draw, device=self.device).mul_(scale).to(wanted)
        return torch.randn(shape, generator=self._draw).mul_(scale).to(wanted)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Draw integers from [low, high)."""
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
SingleRow = Callable[[Args, int], tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]]


@dataclass(frozen=True)
class Op:
    """An operation. `op(*args)` launches the Triton body.

    All bodies have the same signature and return a tensor or a tuple of tensors, which include the tensors that they
    change in place.
    """

    name: str
    reference: Callable[..., Any]  # body in torch
    triton: Callable[..., Any]
    inputs: Inputs
    cases: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, float]
    """Maximum error relative to the root mean square of the reference, by type of the inputs."""
    traffic: Callable[..., int]  # bytes that a perfect kernel moves
    flops: Callable[..., int] = lambda *args: 0  # of matrix products, 0 if there are none
    single_row: SingleRow | None = None
    """single_row(args, i) returns the arguments that compute row i by itself, and a function that selects the same row
    from the outputs for all rows."""
    rows: Callable[[Args], int] = lambda args: args[0].shape[0]  # number of rows
    strided: tuple[int, ...] = ()  # arguments whose rows need not be contiguous
    peer: Callable[..., Any] | None = None  # torch's own operation for the same arguments, for benchmarks
    compiled: Callable[..., Any] | None = None
    """Body for a CPU, with a team of threads as an additional first argument (kernels/cpu/bodies.py)."""
    compiled_lacks: tuple[str, ...] = ()  # cases that `compiled` does not support
    cpu_cases: tuple[Case, ...] = ()  # cases at which `compiled` is timed
    native_layout: Callable[[Any, Args], Args] = lambda team, args: args
    """native_layout(team, args) returns the arguments in the native layout of `compiled`, with packed weights and
    arranged pages, as in a model. They are also the arguments that are timed."""
    tunable: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings of the Triton body (see kernels/tuning.py) and the values to try."""
    nearest: tuple[str, ...] = ()
    """Sizes in the query of the Triton body that may differ from a tuned entry. All other sizes must be equal."""
    may_spill: bool = False  # whether registers may spill to memory on sm_90 and sm_100

    def __call__(self, *args: Any) -> Any:
        return self.triton(*args)


def tensors(result: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a body as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def independent_rows(*positions: int) -> SingleRow:
    """Return `single_row` for operations on independent rows. The arguments at these positions and all outputs have one
    row each along their first axis."""

    def single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
        own = tuple(
            arg[row : row + 1] if at in positions and isinstance(arg, Tensor) else arg for at, arg in enumerate(args)
        )
        return own, lambda outputs: tuple(output[row : row + 1] for output in outputs)

    return single_row


def nbytes(*values: Any) -> int:
    """Return the bytes of all tensors among the values, each counted once."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
