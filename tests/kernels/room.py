"""Launches with the extreme supported tile sizes: attention with the smallest and largest heads, and matmuls."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels.attention.decode import DECODE_ATTENTION
from kernels.attention.encoder import ENCODER_ATTENTION
from kernels.attention.prefill import PREFILL_ATTENTION
from kernels.jit import recorded
from kernels.linear import MATMUL
from kernels.op import Make, Op
from kernels.report import OpLaunch
from kernels.tools.aot import TARGETS, Target

SIZES = (8, 128, 256)
TYPES = (torch.bfloat16, torch.float32)


def largest(target: Target) -> list[OpLaunch]:
    """Return the largest launches for a target.

    If an earlier target has the same shared memory, only the largest head size is included."""
    calls = []
    alike = next(one for one in TARGETS.values() if one.shared == target.shared)
    for dim, dtype in product(SIZES if alike == target else SIZES[-1:], TYPES):
        make = Make(torch.device("meta"), dtype)
        for op, rows in ((PREFILL_ATTENTION, ((512, 512),)), (DECODE_ATTENTION, ((1, 512),))):
            types = (torch.int8, torch.uint8, *((torch.float8_e4m3fn,) if target.fp8 else ()))
            pages = [{}, {"window": 128}, *({"kept": one} for one in types)]
            for more in pages:
                inputs = partial(op.inputs, make, rows=rows, heads=8, kv_heads=1, dim=dim, **more)
                calls.append((op, f"{dim} {dtype} {more}", inputs))
        inputs = partial(ENCODER_ATTENTION.inputs, make, lengths=(512,), heads=2, kv_heads=2, dim=dim)
        calls.append((ENCODER_ATTENTION, f"{dim} {dtype}", inputs))
    for rows, outputs, dtype in product((32, 256), (1024, 4096), TYPES):
        inputs = partial(MATMUL.inputs, Make(torch.device("meta"), dtype), rows=rows, inputs=4096, outputs=outputs)
        calls.append((MATMUL, f"{rows} {outputs} {dtype}", inputs))
    return [launch for call in calls for launch in launches(*call)]


EXTREME_OPS = (DECODE_ATTENTION, MATMUL)


def extreme(target: Target) -> list[OpLaunch]:
    """Return the largest launches of two operations. The other operations of `largest` take several times as long to
    compile."""
    make = Make(torch.device("meta"), torch.float32)
    heads = {"heads": 8, "kv_heads": 1, "dim": SIZES[-1]}
    calls: list[tuple[Op, Callable[[], tuple[Any, ...]]]] = [
        (DECODE_ATTENTION, partial(DECODE_ATTENTION.inputs, make, rows=((1, 512),), **heads)),
        (MATMUL, partial(MATMUL.inputs, make, rows=256, inputs=4096, outputs=4096)),
    ]
    return [launch for op, inputs in calls for launch in launches(op, "extreme", inputs)]


def launches(op: Op, case: str, inputs: Callable[[], tuple[Any, ...]]) -> list[OpLaunch]:
    with recorded() as found:
        op(*inputs())
    return [OpLaunch(op.name, case, launch, may_spill=True) for launch in found]
