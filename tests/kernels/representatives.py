"""Bench cases of the operations that together launch every kernel: `make test` compiles these, `make test-all` all."""

import torch

from kernels.jit import recorded
from kernels.op import Case, Make, Op
from kernels.ops import OPS
from kernels.report import OpLaunch
from kernels.tools.aot import Target
from tests.kernels.room import extreme


def bench_cases(target: Target) -> list[tuple[Op, Case]]:
    return [(op, case) for op in OPS for case in op.cases if case.bench and (target.fp8 or case.needs != "fp8")]


def representatives(target: Target) -> list[tuple[Op, Case]]:
    """Return the first bench case of each operation, and every later case with a new kernel, without those that launch
    only kernels of later ones."""
    found: dict[str, list[tuple[Op, Case, set[object]]]] = {}
    kernels: set[object] = set()
    for op, case in bench_cases(target):
        launched = {one.launch.kernel for one in case_launches(op, case)}
        if op.name not in found or launched - kernels:
            earlier = [one for one in found.get(op.name, ()) if not one[2] <= launched]
            found[op.name] = [*earlier, (op, case, launched)]
            kernels |= launched
    return [(op, case) for chosen in found.values() for op, case, _ in chosen]


def case_launches(op: Op, case: Case) -> list[OpLaunch]:
    with recorded() as launches:
        op(*op.inputs(Make(torch.device("meta"), torch.bfloat16), **case.sizes))
    return [OpLaunch(op.name, case.id, one, op.may_spill) for one in launches]


# Operations that `make test` compiles for other targets than sm_90. `kernels.report` compiles everything for all.
ELSEWHERE = {
    "gfx942": ("rms_norm", "matmul"),  # HIP: a reduction and a matrix product
    "sm_80": ("fp8_matmul",),  # has no products of fp8
    "sm_89": ("fp8_matmul",),
}
FEW = ("rms_norm", "matmul", "rope_angles")
"""Operations whose first launch `make test` tests."""


def compiled_cases(target: Target) -> list[tuple[Op, Case]]:
    """Return the cases that `make test` compiles. `make test-all` compiles all bench cases for all targets."""
    chosen = representatives(target)
    return [(op, case) for op, case in chosen if target.gated or op.name in ELSEWHERE.get(target.name, ())]


def few_cases(target: Target) -> list[tuple[Op, Case]]:
    return [(op, case) for op, case in representatives(target) if op.name in FEW]


def launches(target: Target) -> list[OpLaunch]:
    """Return the launches that `make test` compiles, for `kernels.report --launches`: each kernel of an operation at
    one of its cases."""
    found: list[OpLaunch] = []
    for op, case in compiled_cases(target):
        known = {one.launch.kernel for one in found if one.op == op.name}
        found += [one for one in case_launches(op, case) if one.launch.kernel not in known]
    return found + (extreme(target) if target.name == "sm_86" else [])


def few(target: Target) -> list[OpLaunch]:
    return [one for op, case in few_cases(target) for one in case_launches(op, case)]
