"""Kernels that are wrong in ways which `python -m kernels.report --check` must find."""

import os

import torch

from kernels.jit import jit, launch, recorded, tl
from kernels.report import OpLaunch


@jit
def spilling_kernel(x, y, BLOCK: tl.constexpr):
    """512 numbers a thread, which are all needed once more after their sum."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at).to(tl.float32)
    tl.store(y + at, value * tl.sum(value, 0))


@jit
def large_kernel(x, y, z, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Many stages of large tiles."""
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK):
        left = tl.load(x + rows[:, None] * K + start + inner[None, :])
        right = tl.load(y + (start + inner[:, None]) * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(z + rows[:, None] * N + columns[None, :], total)


@jit
def wrong_kernel(x):
    tl.store(x + tl.arange(0, 3), 0.0)


@jit
def fatal_kernel(x, CRASH: tl.constexpr):
    tl.store(x, CRASH)


class Crash:
    """Ends the process that compiles a kernel which has it as a constant."""

    def __repr__(self):
        return "Crash()"

    def __hash__(self):
        os._exit(9)


def spilling(target, may_spill=False):
    x = torch.empty(1 << 16, device="meta", dtype=torch.bfloat16)
    with recorded() as launches:
        launch(spilling_kernel, (1,), x, x, BLOCK=1 << 16)
    return [OpLaunch("spilling", "planted", launches[0], may_spill)]


def allowed(target):
    return spilling(target, may_spill=True)


def large(target):
    x = torch.empty(128, 128, device="meta", dtype=torch.bfloat16)
    with recorded() as launches:
        launch(large_kernel, (1,), x, x, x, 4096, M=128, N=256, BLOCK=64, warps=8, stages=6)
    return [OpLaunch("large", "planted", launches[0])]


def broken(target):
    """Return three launches: one with a compile error, one that crashes the compiler process, and a valid one."""
    x = torch.empty(1 << 10, device="meta", dtype=torch.float32)
    with recorded() as launches:
        launch(wrong_kernel, (1,), x)
        launch(fatal_kernel, (1,), x, CRASH=Crash())
        launch(spilling_kernel, (1,), x, x, BLOCK=1 << 10)
    return [OpLaunch(name, "planted", one) for name, one in zip(("wrong", "fatal", "fine"), launches, strict=True)]


def several(target):
    """Return a launch that spills, one that may spill, and those of `broken`. A report finds three faults."""
    x = torch.empty(1 << 17, device="meta", dtype=torch.bfloat16)
    with recorded() as launches:
        launch(spilling_kernel, (1,), x, x, BLOCK=1 << 17, warps=8)
    return [*spilling(target), OpLaunch("permitted", "planted", launches[0], may_spill=True), *broken(target)]
