"""Tests of the all-reduce that is fused with residual and norm, on memory that threads share."""

import threading
from dataclasses import dataclass

import pytest
import torch

from engine.distributed.symmetric import FusedReduce, TorchSymmetricMemory, open_symmetric
from engine.lowering.lower import lower
from engine.lowering.operations import AddNormalize, Linear
from engine.lowering.rewrites import fuse_add_normalize, fuse_prepare_kv, sums_for_norms
from kernels.jit import interpreted
from kernels.rms_norm import RMS_NORM
from tests.engine.distributed.test_group import brought, groups  # noqa: F401

interpreter = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here, or Triton is not installed")
BYTES = 1 << 12


@dataclass
class ThreadMemory:
    """Memory of a rank that is a thread."""

    own: torch.Tensor
    addresses: torch.Tensor
    meeting: threading.Barrier
    fails: bool = False
    closed: int = 0

    def barrier(self):
        self.meeting.wait(timeout=100)

    def close(self):
        self.closed += 1
        if self.fails:
            raise RuntimeError("the peer has exited")


def memories(size):
    owned = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(size)]
    addresses = torch.tensor([one.data_ptr() for one in owned])
    meeting = threading.Barrier(size)
    return [ThreadMemory(own, addresses, meeting) for own in owned]


@interpreter
@pytest.mark.parametrize("size", [2, 3])
def test_fused_sum_and_norm_equal_those_of_the_group(size, groups):  # noqa: F811
    shared = memories(size)
    weight = torch.rand(24)

    def work(world):
        fused, results = FusedReduce(shared[world.rank]), []
        for step in range(3):  # each writes to the same memory
            x, residual = brought(world.rank, 5 + step, 24), brought(9, 5 + step, 24)
            assert fused.takes(x)
            y, changed = fused.reduce_norm(x, weight, 1e-6, residual.clone(), 0.5)
            results.append((y, changed, *RMS_NORM.reference(world.all_reduce(x), weight, 1e-6, residual, 0.5)))
        return results

    for results in groups(size, work):
        for y, changed, want, want_changed in results:
            assert torch.equal(changed, want_changed)
            torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def test_memory_is_opened_and_closed_again_also_if_that_fails():
    for fails in (False, True, False):
        (memory,) = memories(1)
        memory.fails = fails
        fused = open_symmetric(lambda memory=memory: memory)
        assert fused.takes(torch.zeros(2, 8))
        fused.close()
        fused.close()
        assert memory.closed == 1 and not fused.takes(torch.zeros(2, 8))


def test_sums_that_do_not_fit_and_empty_ones_are_left_to_the_group():
    fused = FusedReduce(memories(1)[0])
    assert fused.takes(torch.zeros(1, BYTES // 4)) and not fused.takes(torch.zeros(2, BYTES // 4))
    assert not fused.takes(torch.zeros(0, 8))


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError])
def test_without_symmetric_memory_sums_are_not_fused(error):
    def missing():
        raise error("no symmetric memory")

    assert open_symmetric(missing) is None


def test_a_cpu_has_no_symmetric_memory():
    assert open_symmetric(lambda: TorchSymmetricMemory("no group", torch.device("cpu"))) is None


def test_every_sum_of_a_rank_that_a_norm_reads_is_left_to_it(tiny_model):
    ops = fuse_add_normalize(fuse_prepare_kv(lower(tiny_model, 2).ops, norms=True))
    found = sums_for_norms(ops)
    sums = [op for op in ops if isinstance(op, Linear) and op.reduce]
    assert len(sums) == 4 and found == {id(op) for op in sums}
    assert sum(isinstance(op, AddNormalize) for op in ops) == 4
    assert not sums_for_norms(lower(tiny_model, 2).ops), "separate adds and norms"


@pytest.fixture
def tiny_model():
    from engine.models.families import declaration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-6}
    return declaration("LlamaForCausalLM")({"architectures": ["LlamaForCausalLM"], **sizes, **heads})
