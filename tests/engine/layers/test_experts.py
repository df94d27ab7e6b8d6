"""Experts in arrangements that no family has yet: layers of several sizes, a shared expert without a gate, experts and
attention beside each other. Compiled kernels against torch, and torch against a sum that is written out."""

import numpy as np
import pytest
import torch

from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.mlp import ExpertsLayer
from engine.layers.model import TextModel, make_pages
from engine.models.parts import (
    MLP,
    Attention,
    Branch,
    Embedding,
    Experts,
    Head,
    Model,
    Parallel,
    RMSNorm,
    Rope,
    named,
)
from engine.models.sources import sources
from engine.weights.random import RandomWeights
from engine.worker.batch import build_batch
from kernels.cpu.program import Team

HIDDEN, VOCAB, TOKENS = 40, 51, 70
SMALL = Experts(hidden=HIDDEN, inner=6, count=9, chosen=5, scores="softmax", act="gelu")
LARGE = Experts(
    hidden=HIDDEN,
    inner=38,
    count=3,
    chosen=1,
    scores="softmax_chosen",
    act="relu",
    shared=MLP(hidden=HIDDEN, inner=12, act="relu", name="shared"),
)


def declared():
    norm = RMSNorm(size=HIDDEN, eps=1e-6)
    attention = Attention(hidden=HIDDEN, heads=5, kv_heads=1, head_dim=8, rope=Rope(dim=8, theta=1e4))
    one, two = named(norm, "one"), named(norm, "two")
    blocks = (
        (Branch(before=one, body=attention), Branch(before=two, body=SMALL)),
        (Branch(before=one, body=attention), Branch(before=two, body=LARGE)),
        (Branch(before=one, body=Parallel(bodies=(SMALL, attention))),),
    )
    embed = Embedding(vocab=VOCAB, hidden=HIDDEN)
    return Model(embed=embed, blocks=blocks, norm=named(norm, "norm"), head=Head(tied=True), max_context=TOKENS)


def filled(kernels):
    model = declared()
    form = layout(model, block_tokens=4, element_bytes=4)
    team = None if kernels == "torch" else Team(kernels, 2)
    made = TextModel(model, form, SINGLE, torch.float32, "cpu", team)
    made.fill(RandomWeights(sources(model), torch.float32, torch.device("cpu")))
    return made


def logits(model):
    blocks = -(-TOKENS // 4)
    batch = build_batch(
        np.array([0]),
        np.array([0]),
        np.array([TOKENS]),
        tokens=np.arange(TOKENS, dtype=np.int32)[None] * 7 % VOCAB,
        rope_lengths=np.array([TOKENS]),
        tables=[np.arange(1, blocks + 1, dtype=np.int32)[None] for _ in model.layout.groups],
        block_tokens=4,
    )
    pages = make_pages(model.layout, 3 * blocks, torch.float32, torch.device("cpu"))
    return model.logits(model.forward(batch, pages))


def test_layers_of_several_sizes_share_the_working_memory(compiled):
    torch.testing.assert_close(logits(filled(compiled)), logits(filled("torch")), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block", [0, 1])
def test_torch_adds_what_the_chosen_experts_give_and_the_shared_one(block):
    model = filled("torch")
    layer = next(body for body in model.branches[2 * block + 1].bodies if isinstance(body, ExpertsLayer))
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(1))
    act = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}[layer.part.act]

    def mlp(which, row):
        gate, up = (which.up.weight.double() @ row).chunk(2)
        return which.down.weight.double() @ (act(gate) * up)

    for row, got in zip(x.double(), layer(x, None), strict=True):
        scores = layer.router.weight.double() @ row
        best = scores.topk(layer.part.chosen).indices
        shares = scores.softmax(0)[best] if block == 0 else scores[best].softmax(0)
        want = sum(share * mlp(layer.experts[e], row) for share, e in zip(shares, best.tolist(), strict=True))
        if layer.shared is not None:
            want += mlp(layer.shared, row)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
