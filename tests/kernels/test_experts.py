"""Tests of the expert operations: memory that they must not read or write, and rejected arguments."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.routes import EXPERT_ROUTES, Routing
from kernels.experts.schedule import EXPERT_SCHEDULE, TILES, max_tiles, tile_rows
from kernels.experts.sum import EXPERT_SUM
from kernels.jit import installed, interpreted

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.skipif(not installed(), reason="Triton is not installed")]

# The matrices of all experts but two are unreadable: the process crashes if a kernel reads them.
SCRIPT = """
import ctypes, mmap, os
import torch
from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.schedule import EXPERT_SCHEDULE

EXPERTS, OUTPUTS, INPUTS = 6, 64, 64  # 4 pages each
each = OUTPUTS * INPUTS * 4
memory = mmap.mmap(-1, EXPERTS * each)
weight = torch.frombuffer(memory, dtype=torch.float32).view(EXPERTS, OUTPUTS, INPUTS).fill_(0.5)
free = (1, 4)
libc = ctypes.CDLL(None, use_errno=True)
for expert in set(range(EXPERTS)) - set(free):
    place = ctypes.c_void_p(weight[expert].data_ptr())
    assert libc.mprotect(place, each, 0) == 0, ctypes.get_errno()
for tokens in (1, 3, 40):
    expert_ids = torch.tensor([free] * tokens, dtype=torch.int32)
    schedule = EXPERT_SCHEDULE(expert_ids, EXPERTS, 16)
    y = EXPERT_MATMUL(torch.ones(tokens, INPUTS), weight, *schedule, 2, 16)
    assert (y == 32.0).all()
child = os.fork()
if child == 0:
    print(float(weight[0, 0, 0]))
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def run():
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = os.environ | {"PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not interpreted(), reason="memory that a process may not read is the host's")
def test_weights_of_unused_experts_are_not_read():
    done = run()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == -signal.SIGSEGV, "memory that may not be read is not read"


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (128, 8), (60, 4), (512, 10), (3, 3), (1, 1)])
def test_tiles_grow_with_the_tokens_and_each_size_serves_a_power_of_two_of_them(count, chosen):
    """By which a start makes a step of every size (engine/worker/warm.py)."""
    sizes = [tile_rows(tokens, chosen, count) for tokens in range(1, 20_000)]
    assert sizes == sorted(sizes) and sizes[0] == (16 if chosen * TILES[0][0] >= chosen * chosen / count else 64)
    assert set(sizes) == {tile_rows(1 << power, chosen, count) for power in range(15)}


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_tile_capacity_is_exact_for_any_routing(rows):
    """Brute force over how 11 pairs can be spread over 3 experts."""
    for pairs in range(12):
        spread = [(a, b, pairs - a - b) for a in range(pairs + 1) for b in range(pairs + 1 - a)]
        needed = max(sum(-(-own // rows) for own in one) for one in spread)
        assert max_tiles(pairs, 3, rows) == needed


def test_inconsistent_arguments_are_rejected():
    logits, x = torch.zeros(2, 4), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="top_k=5, num_experts=4, 4 logits"):
        EXPERT_ROUTES(logits, 4, Routing(5, "softmax"), None)
    with pytest.raises(ValueError, match="top_k=2, num_experts=5, 4 logits"):
        EXPERT_ROUTES(logits, 5, Routing(2, "softmax"), None)
    with pytest.raises(ValueError, match="4 experts in 3 groups"):
        EXPERT_ROUTES(logits, 4, Routing(2, "sigmoid", 3, 2), None)
    with pytest.raises(ValueError, match="4 experts in 2 groups, of which 1 are kept: no 3 experts"):
        EXPERT_ROUTES(logits, 4, Routing(3, "sigmoid", 2, 1), None)
    with pytest.raises(ValueError, match="softmax_chosen"):
        EXPERT_ROUTES(logits, 4, Routing(2, "softmax_chosen"), torch.zeros(4))
    expert_ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="expert_ids"):
        EXPERT_SCHEDULE(expert_ids.t(), 4, 16)
    pairs, tiles = EXPERT_SCHEDULE(expert_ids, 4, 16)
    with pytest.raises(ValueError, match="the matrices of the experts must be contiguous"):
        EXPERT_MATMUL(x, torch.zeros(4, 8, 6).transpose(1, 2), pairs, tiles, 2, 16)
    with pytest.raises(ValueError, match=r"x of \[2, 8\]: 4 pairs, 1 per row, need rows of 8 inputs"):
        EXPERT_MATMUL(x, torch.zeros(4, 6, 8), pairs, tiles, 1, 16)
    with pytest.raises(ValueError, match=r"y of \[3, 8\]: must be contiguous, with 4 rows"):
        EXPERT_SUM(torch.zeros(3, 8), torch.zeros(2, 2), expert_ids)
