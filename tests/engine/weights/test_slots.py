"""How a fused, divided matrix is put together from the tensors of a checkpoint."""

from dataclasses import dataclass, replace

import pytest
import torch

from engine.api.errors import ConfigError
from engine.distributed.world import SINGLE, share
from engine.models.parts import MLP, Attention
from engine.models.sources import attention_linears, linear_sources, mlp_linears
from engine.weights.slot import fused, slots


@dataclass(frozen=True)
class Rank:
    """A World that only has a rank and a size."""

    rank: int
    size: int


ATTENTION = Attention(hidden=5, heads=4, kv_heads=2, head_dim=3, rope=None, bias=(True, False))
PACKED = Attention(hidden=5, heads=4, kv_heads=2, head_dim=3, rope=None, sources=("qkv", "qkv", "qkv", "o"))


def numbered(part, path=""):
    """A checkpoint whose numbers are all different."""
    tensors, at = {}, 0
    for name, shape in linear_sources(part, path).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(at, at + count).float().view(shape)
        at += count
    return tensors


def matrix(part, tensors, world, suffix="weight"):
    return fused(tensors.__getitem__, "", suffix, slots(part, world), torch.float32, torch.device("cpu"))


def test_one_rank_has_all_sources_one_after_another():
    qkv, _ = attention_linears(ATTENTION)
    tensors = numbered(qkv)
    names = ("q_proj", "k_proj", "v_proj")
    for suffix in ("weight", "bias"):
        want = torch.cat([tensors[f"{name}.{suffix}"] for name in names])
        assert torch.equal(matrix(qkv, tensors, SINGLE, suffix), want)


def test_sources_packed_in_one_tensor_give_the_same_matrix():
    separate, packed = attention_linears(ATTENTION)[0], attention_linears(PACKED)[0]
    tensors = numbered(separate)
    joined = {"qkv.weight": torch.cat([tensors[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")])}
    for rank in range(2):
        assert torch.equal(matrix(packed, joined, Rank(rank, 2)), matrix(separate, tensors, Rank(rank, 2)))


@pytest.mark.parametrize(("groups", "order"), [(2, "qkv"), (2, "qvk"), (1, "qvk")])
def test_sources_in_groups_of_heads_give_the_same_matrix(groups, order):
    """Check the layouts of InternLM2 and CodeGen: in each group rows of q, then of k and v, or of v and k."""
    separate = attention_linears(ATTENTION)[0]
    fused_part = replace(ATTENTION, sources=("qkv", "qkv", "qkv", "o"), groups=groups, order=order)
    grouped = attention_linears(fused_part)[0]
    tensors, joined = numbered(separate), {}
    for suffix in ("weight", "bias"):
        pieces = {name: tensors[f"{name}_proj.{suffix}"].unflatten(0, (groups, -1)) for name in "qkv"}
        joined[f"qkv.{suffix}"] = torch.cat([pieces[name] for name in order], 1).flatten(0, 1)
    for world in (SINGLE, Rank(0, 2), Rank(1, 2), Rank(2, 4)):
        for suffix in ("weight", "bias"):
            assert torch.equal(matrix(grouped, joined, world, suffix), matrix(separate, tensors, world, suffix))


def test_the_shares_of_two_ranks_put_together_are_the_checkpoint():
    qkv, out = attention_linears(ATTENTION)
    tensors = numbered(qkv)
    q, k, v = zip(*(matrix(qkv, tensors, Rank(rank, 2)).split([6, 3, 3]) for rank in range(2)), strict=True)
    for name, pieces in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        assert torch.equal(torch.cat(pieces), tensors[f"{name}.weight"])
    tensors = numbered(out)
    halves = [matrix(out, tensors, Rank(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), tensors["o_proj.weight"])


def test_kv_heads_fewer_than_ranks_are_held_by_the_ranks_of_their_query_heads():
    qkv, _ = attention_linears(ATTENTION)
    tensors = numbered(qkv)
    for rank in range(4):
        _, k, _ = matrix(qkv, tensors, Rank(rank, 4)).split([3, 3, 3])
        head = rank // 2  # query heads 0 and 1 read KV head 0, query heads 2 and 3 KV head 1
        assert torch.equal(k, tensors["k_proj.weight"][3 * head : 3 * head + 3])


def test_gate_and_up_are_divided_separately():
    up, _ = mlp_linears(MLP(hidden=2, intermediate_size=4))
    tensors = numbered(up)
    gate, half = matrix(up, tensors, Rank(1, 2)).split([2, 2])
    assert torch.equal(gate, tensors["gate_proj.weight"][2:])
    assert torch.equal(half, tensors["up_proj.weight"][2:])


@pytest.mark.parametrize(("units", "size"), [(7, 2), (6, 4), (2, 3), (8, 12)])
def test_indivisible_sizes_are_rejected_with_valid_ones(units, size):
    fitting = [n for n in range(1, units + 1) if units % n == 0]
    with pytest.raises(
        ConfigError, match=rf"{size} ranks cannot share {units} heads; use one of {fitting[0]}, .*{units}"
    ):
        share(units, Rank(0, size), "heads")
