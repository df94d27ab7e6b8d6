"""Activation functions of MLPs, and act(gate) · up of a fused projection (source: arXiv:2002.05202).

silu x · sigmoid(x); gelu x · Φ(x); gelu_tanh its tanh approximation; quick_gelu x · sigmoid(1.702 x); relu max(x, 0);
relu2 its square (arXiv:2109.08668). xielu has numbers α_p, α_n, β and ε: α_p x² + β x for x > 0, else
α_n (exp(min(x, ε)) - 1 - x) + β x (arXiv:2411.13010). With a limit l and an offset o, as some models were trained:
act(min(gate, l)) · (clamp(up, -l, l) + o). Source: transformers modeling_gpt_oss.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def xielu_numbers(alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return α_p, α_n, β and ε, [4] fp32, of the numbers that a checkpoint stores, which are scalars. Source:
    transformers activations.py, XIELUActivation."""
    return torch.stack((functional.softplus(alpha_p), beta + functional.softplus(alpha_n), beta, eps)).float()


def xielu(numbers: Tensor, x: Tensor) -> Tensor:
    alpha_p, alpha_n, beta, eps = numbers.to(x.dtype)
    negative = (torch.expm1(torch.minimum(x, eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, negative) + beta * x


def function(act: str, numbers: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return an activation. numbers: of xielu, [4]."""
    return ACTIVATIONS[act] if numbers is None else partial(xielu, numbers)


def gated(act: Callable[[Tensor], Tensor], x: Tensor, limit: float | None = None, up_offset: float = 0.0) -> Tensor:
    """x: [tokens, 2 · inner], gate rows first, then up rows → [tokens, inner]."""
    gate, up = x.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate).mul_(up + up_offset if up_offset else up)


def _reference(
    x: Tensor,
    act: str,
    has_gate: bool,
    limit: float | None = None,
    up_offset: float = 0.0,
    numbers: Tensor | None = None,
) -> Tensor:
    """x: [tokens, 2 · inner] with a gate, else [tokens, inner] → [tokens, inner]; computed in fp32. up_offset: only
    with a gate. numbers: of xielu, [4] fp32, else None."""
    wide, compute = x.float(), function(act, numbers)
    if not has_gate:
        return compute(wide if limit is None else wide.clamp(max=limit)).to(x.dtype)
    return gated(compute, wide, limit, up_offset).to(x.dtype)


@jit
def activated(value, ACT: tl.constexpr):
    """Apply the function to each number, in float32."""
    if ACT == "silu":
        result = value / (1.0 + tl.exp(-value))
    elif ACT == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2u)
        inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        result = value / (1.0 + tl.exp(-inner))
    elif ACT == "quick_gelu":
        result = value / (1.0 + tl.exp(-1.702 * value))
    else:
        result = tl.maximum(value, 0.0)
        if ACT == "relu2":
            result *= result
    return result


@jit
def xielu_of(value, numbers):
    """Apply xielu to each number, in float32."""
    alpha_p = tl.load(numbers)
    alpha_n = tl.load(numbers + 1)
    negative = (tl.exp(tl.minimum(value, tl.load(numbers + 3))) - 1.0 - value) * alpha_n
    return tl.where(value > 0.0, alpha_p * value * value, negative) + tl.load(numbers + 2) * value


@jit
def activation_kernel(
    x,
    y,
    numbers,
    x_row,
    limit,
    INNER: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < INNER
    value = tl.load(x + row * x_row + at, keep, 0.0).to(tl.float32)
    if LIMITED:
        value = tl.minimum(value, limit)
    result = xielu_of(value, numbers) if ACT == "xielu" else activated(value, ACT)
    if GATED:
        up = tl.load(x + row * x_row + INNER + at, keep, 0.0).to(tl.float32)
        if LIMITED:
            up = tl.minimum(tl.maximum(up, -limit), limit)
        if UP_OFFSET != 0.0:
            up += UP_OFFSET
        result *= up
    tl.store(y + row * INNER + at, result.to(y.dtype.element_ty), keep)


def _triton(
    x: Tensor,
    act: str,
    has_gate: bool,
    limit: float | None = None,
    up_offset: float = 0.0,
    numbers: Tensor | None = None,
) -> Tensor:
    if act not in ACTIVATIONS and (act != "xielu" or numbers is None):
        raise ValueError(f"activation {act!r}: there are {', '.join(ACTIVATIONS)}, and xielu with its numbers")
    rows = x.shape[0]
    inner = x.shape[1] // 2 if has_gate else x.shape[1]
    y = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    block = min(1024, power_of_2(inner))
    launch(
        activation_kernel,
        (rows, -(-inner // block)),
        x,
        y,
        x if numbers is None else numbers,
        row_stride(x, "x"),
        0.0 if limit is None else limit,
        INNER=inner,
        ACT=act,
        GATED=has_gate,
        LIMITED=limit is not None,
        UP_OFFSET=float(up_offset),
        BLOCK=block,
        warps=4 if block >= 512 else 1,
    )
    return y


def _inputs(
    make: Make,
    rows: int,
    inner: int,
    act: str,
    has_gate: bool = True,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Args:
    numbers = make.tensor([0.9, 1.3, 0.5, -1e-6], dtype=torch.float32) if act == "xielu" else None
    return make.normal(rows, inner * (1 + has_gate), scale=3.0), act, has_gate, limit, up_offset, numbers


GPT_OSS: dict[str, Any] = {"act": "quick_gelu", "limit": 7.0, "up_offset": 1.0}


ACTIVATION = Op(
    name="activation",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        *(Case(f"{act}-odd", {"rows": 3, "inner": 77, "act": act}) for act in ACTIVATIONS),
        *(Case(f"{act}-plain", {"rows": 2, "inner": 40, "act": act, "has_gate": False}) for act in ACTIVATIONS),
        Case("long", {"rows": 2, "inner": 1100, "act": "silu"}),
        Case("limited", {"rows": 4, "inner": 64, "act": "silu", "limit": 1.5}),
        Case("offset", {"rows": 4, "inner": 77, "act": "quick_gelu", "limit": 1.5, "up_offset": 1.0}),
        Case("xielu", {"rows": 3, "inner": 77, "act": "xielu", "has_gate": False}),
        Case("empty", {"rows": 0, "inner": 64, "act": "silu"}),
        Case("decode-32x14336", {"rows": 32, "inner": 14336, "act": "silu"}, bench=True),
        Case("4096x4096", {"rows": 4096, "inner": 4096, "act": "silu"}, bench=True),
        Case("gelu_tanh-4096x14336", {"rows": 4096, "inner": 14336, "act": "gelu_tanh"}, bench=True),
        Case("gelu-4096x4096", {"rows": 4096, "inner": 4096, "act": "gelu", "has_gate": False}, bench=True),
        Case("xielu-4096x21504", {"rows": 4096, "inner": 21504, "act": "xielu", "has_gate": False}, bench=True),
        Case("limited-4096x4096", {"rows": 4096, "inner": 4096, "act": "silu", "limit": 7.0}, bench=True),
        Case("gpt-oss-4096x2880", {"rows": 4096, "inner": 2880, **GPT_OSS}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, act, has_gate, *options: x.nbytes + x.nbytes // (1 + has_gate),
    compiled=bodies.activation,
    cpu_cases=(
        Case("8x3072", {"rows": 8, "inner": 3072, "act": "silu"}),
        Case("512x3072", {"rows": 512, "inner": 3072, "act": "silu"}),
    ),
    compiled_lacks=("relu2-odd", "relu2-plain", "xielu"),
    single_row=independent_rows(0),
    strided=(0,),
    peer=lambda x, act, has_gate, limit, up_offset, numbers: (
        gated(function(act, numbers), x, limit, up_offset) if has_gate else function(act, numbers)(x)
    ),
)
