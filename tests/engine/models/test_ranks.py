"""By how many ranks a declaration can be shared, and what one of them holds: held against the layers that load it."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from engine.api.errors import ConfigError
from engine.formats.native import Groups
from engine.kv.layout import layout
from engine.layers.model import TextModel
from engine.lowering.footprint import Holder, footprint
from engine.models.parts import (
    MLP,
    Attention,
    Embedding,
    Experts,
    Head,
    LayerNorm,
    Mamba,
    Model,
    Parallel,
    ResidualBlock,
    RMSNorm,
    Rope,
)
from engine.models.ranks import tensor_problem, tensor_sizes
from engine.models.sources import sources
from engine.weights.random import RandomWeights

HIDDEN = 24


@dataclass(frozen=True)
class Rank:
    """A world without communication."""

    rank: int
    size: int


def norm(name):
    return RMSNorm(size=HIDDEN, eps=1e-6, name=name)


def attention(heads=6, kv_heads=2, **more):
    return Attention(hidden=HIDDEN, heads=heads, kv_heads=kv_heads, head_dim=8, rope=Rope(dim=8, theta=1e4), **more)


def model(*branches, vocab=97, tied=False, **head):
    return Model(
        embed=Embedding(vocab=vocab, hidden=HIDDEN),
        blocks=(branches,) * 2,
        norm=norm("norm"),
        head=Head(tied=tied, **head),
        max_context=64,
    )


def plain(inner=36, **more):
    return model(
        ResidualBlock(body=attention(**more), before=norm("one")),
        ResidualBlock(body=MLP(hidden=HIDDEN, intermediate_size=inner), before=norm("two")),
    )


EXPERTS = Experts(hidden=HIDDEN, intermediate_size=12, num_experts=3, top_k=1, scores="softmax")
CASES = {
    "plain": plain(),
    "biases": model(
        ResidualBlock(body=attention(bias=(True, True)), before=LayerNorm(size=HIDDEN, eps=1e-6, name="one")),
        ResidualBlock(body=MLP(hidden=HIDDEN, intermediate_size=36, bias=True, gate=None)),
        bias=True,
    ),
    "norms": plain(qk_norm=RMSNorm(size=8, eps=1e-6), qk_norm_span="all"),
    "parallel": model(
        ResidualBlock(
            body=Parallel(bodies=(attention(), MLP(hidden=HIDDEN, intermediate_size=18))), before=norm("one")
        ),
        tied=True,
    ),
    "experts": model(
        ResidualBlock(body=attention(), before=norm("one"), after=norm("three")),
        ResidualBlock(
            body=replace(EXPERTS, shared=MLP(hidden=HIDDEN, intermediate_size=30, name="shared"), shared_gate="open")
        ),
    ),
}


def built(declared, rank, size):
    form = layout(declared, block_tokens=4, element_bytes=4, ranks=size)
    return TextModel(declared, form, Rank(rank, size), torch.float32, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_divisible_models_load_on_ranks(name):
    """For up to 13 ranks, the check and the layers agree on the sizes that can be split."""
    declared = CASES[name]
    for size in range(1, 14):
        problem = tensor_problem(declared, None, size)
        if problem is None:
            for rank in range(size):
                built(declared, rank, size)
        elif size <= 6:  # of more ranks than heads the layers would hold some twice, and sum them twice
            with pytest.raises(ConfigError, match=f"{size} ranks cannot share"):
                built(declared, 0, size)


@pytest.mark.parametrize("name", CASES)
def test_planned_share_of_a_rank_equals_its_memory(name):
    """Compare bytes exactly, for the first and the last rank, whose vocabulary shards differ.

    Weights that a checkpoint would memory-map are random here and allocated."""
    declared = CASES[name]
    for size in tensor_sizes(declared, None):
        for rank in (0, size - 1):
            one = built(declared, rank, size)
            one.fill(RandomWeights(sources(declared), torch.float32, torch.device("cpu")))
            told = footprint(declared, {}, None, Holder(dtype="float32", rank=rank, ranks=size))
            assert sum(holding.bytes for holding in told) == one.weight_bytes, (size, rank)


def test_matrices_that_a_gpu_dequantizes_may_be_divided_within_groups():
    """x_proj of Mamba is exact: Triton kernels multiply by it in the type of the activations."""
    mixer = Mamba(hidden=HIDDEN, channels=48, state=4, dt_rank=3, conv=4)
    declared = model(ResidualBlock(body=mixer))
    groups = SimpleNamespace(native=lambda paths, executor: Groups(4, 32) if paths[0].endswith("x_proj") else None)
    assert tensor_problem(declared, groups, 2, "triton") is None
    assert "x_proj" in tensor_problem(declared, groups, 2, "compiled")


def test_heads_kv_heads_inner_sizes_and_vocabulary_are_named():
    assert tensor_sizes(plain(), None) == (1, 2, 6)
    assert tensor_problem(plain(), None, 4) == "4 ranks cannot share 6 heads"
    assert tensor_problem(plain(kv_heads=3), None, 2) == "2 ranks cannot share 3 KV heads"
    assert tensor_problem(plain(inner=35), None, 2) == "2 ranks cannot share 35 inner values of an MLP"
    uneven = model(ResidualBlock(body=attention()), ResidualBlock(body=replace(EXPERTS, intermediate_size=7)))
    assert "7 inner values of an expert" in tensor_problem(uneven, None, 2)
    tiny = model(ResidualBlock(body=attention(heads=6, kv_heads=6)), vocab=4)
    assert "a vocabulary of 4" in tensor_problem(tiny, None, 6)
