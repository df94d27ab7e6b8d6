"""Tests of experts in arrangements that no model family has yet.

For example layers of several sizes, a shared expert without a gate, and experts in parallel with attention. The tests
compare compiled and fused kernels with torch, and torch with an explicit sum."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from appliance.planning.derivation import summed
from appliance.planning.workspace import PROCESS_BYTES, StepSize, workspace
from engine.api.errors import CheckpointError
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.fused.model import execute as execute_fused
from engine.layers.fused.run import Run as FusedRun
from engine.layers.linear import ExpertStack, Target
from engine.layers.loaded import LoadedWeights, unloaded
from engine.layers.lora import NO_ADAPTERS
from engine.layers.model import TextModel, make_pages
from engine.layers.reference.executor import execute
from engine.layers.reference.run import Run
from engine.layers.vocabulary import Vocabulary
from engine.lowering.lower import lower
from engine.lowering.operations import Combine, Linear, Route
from engine.lowering.program import Op
from engine.lowering.rewrites import last_uses
from engine.lowering.segments import segments
from engine.models.parts import (
    MLP,
    Attention,
    Embedding,
    Experts,
    Head,
    Model,
    Parallel,
    ResidualBlock,
    RMSNorm,
    Rope,
    named,
)
from engine.models.sources import sources
from engine.weights.random import RandomWeights
from engine.weights.slot import Slot, Slots
from engine.worker.batch import build_batch
from kernels.block_weights import pack_blocks
from kernels.cpu.program import Team
from kernels.ggml_blocks import BlockWeight
from kernels.jit import installed, recorded

HIDDEN, VOCAB, TOKENS = 40, 51, 70
SMALL = Experts(hidden=HIDDEN, intermediate_size=6, num_experts=9, top_k=5, scores="softmax", act="gelu")
LARGE = Experts(
    hidden=HIDDEN,
    intermediate_size=38,
    num_experts=3,
    top_k=1,
    scores="softmax_chosen",
    act="relu",
    shared=MLP(hidden=HIDDEN, intermediate_size=12, act="relu", name="shared"),
)


def declared():
    norm = RMSNorm(size=HIDDEN, eps=1e-6)
    attention = Attention(hidden=HIDDEN, heads=5, kv_heads=1, head_dim=8, rope=Rope(dim=8, theta=1e4))
    one, two = named(norm, "one"), named(norm, "two")
    blocks = (
        (ResidualBlock(before=one, body=attention), ResidualBlock(before=two, body=SMALL)),
        (ResidualBlock(before=one, body=attention), ResidualBlock(before=two, body=LARGE)),
        (ResidualBlock(before=one, body=Parallel(bodies=(SMALL, attention))),),
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


class ExpertsLayer:
    """The operations of one layer of experts, with loaded weights."""

    def __init__(self, ops: list[Op], weights: LoadedWeights, world) -> None:
        self.ops, self.weights, self.world = ops, weights, world
        router, self.route, ups, _, downs, *_, self.combine = ops
        self.router = weights.matrix(router.weight)
        self.ups, self.downs = ([weights.matrix(one) for one in op.matrices] for op in (ups, downs))
        self.stacks = [weights.stacks[op.stack].whole for op in (ups, downs)]
        self.shared = [weights.matrix(op.weight) for op in ops[1:] if isinstance(op, Linear)]
        self.linears = [self.router, *self.ups, *self.downs, *self.shared]

    def torch(self, x):
        run = Run(self.weights, self.world, (), x.dtype, None, None, None)
        run.values[self.ops[0].x.name] = x
        execute(self.ops, run)
        return run[self.combine.y]

    def fused(self, x):
        run = object.__new__(FusedRun)
        vocabulary = SimpleNamespace(world=self.world)
        run.weights = self.weights
        run.model = SimpleNamespace(vocabulary=vocabulary, fused_reduce=None, reduced_by_norm=set())
        run.adapters = NO_ADAPTERS
        run.values = {self.ops[0].x.name: x}
        execute_fused(segments(self.ops, last_uses(self.ops, self.combine.y), "triton"), run)
        return run[self.combine.y]


def expert_layers(program, weights, world=SINGLE):
    """Return the layers of experts of a program, in order."""
    found, ops = [], list(program.ops)
    for at, op in enumerate(ops):
        if isinstance(op, Route):
            last = next(at for at in range(at, len(ops)) if isinstance(ops[at], Combine))
            found.append(ExpertsLayer(ops[at - 1 : last + 1], weights, world))
    return found


@pytest.mark.parametrize("block", [0, 1])
def test_torch_experts_sum_routed_and_shared_outputs(block):
    model = filled("torch")
    layer = expert_layers(model.program, model.weights)[block]
    part = layer.route.part
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(1))
    act = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}[part.act]

    def mlp(up, down, row):
        gate, up = (up.weight.double() @ row).chunk(2)
        return down.weight.double() @ (act(gate) * up)

    for row, got in zip(x.double(), layer.torch(x), strict=True):
        scores = layer.router.weight.double() @ row
        best = scores.topk(part.top_k).indices
        shares = scores.softmax(0)[best] if block == 0 else scores[best].softmax(0)
        chosen = zip(shares, best.tolist(), strict=True)
        want = sum(share * mlp(layer.ups[e], layer.downs[e], row) for share, e in chosen)
        if layer.shared:
            want += mlp(*layer.shared, row)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


# -- fused kernels, for a GPU ------------------------------------------------------------------------------------------

fused = pytest.mark.skipif(not installed(), reason="Triton is not installed")


class Rank:
    """One of several simulated ranks in one thread; it records its inputs to all-reduce."""

    def __init__(self, rank, size):
        self.rank, self.size, self.brought = rank, size, []

    def all_reduce(self, x):
        self.brought.append(x)
        return x


def layer_of(part, world=SINGLE, dtype=torch.float32, device="cpu", hidden=HIDDEN):
    """Return a layer of experts with random, stacked weights."""
    model = with_layers(part, hidden=hidden)
    program = lower(model, world.size)
    loaded = unloaded(program, Vocabulary(model, world), world)
    kind = dtype if device == "meta" else torch.float32
    weights = RandomWeights(sources(model), kind, torch.device(device))
    for name, one in loaded.by_name.items():
        if name.startswith("layers."):
            one.load(weights.read, Target(dtype, torch.device(device), invariant=device == "cpu", stacked=True))
    (layer,) = expert_layers(program, loaded, world)
    return layer


def with_layers(*parts, hidden=HIDDEN):
    blocks = tuple((ResidualBlock(body=part),) for part in parts)
    embed = Embedding(vocab=VOCAB, hidden=hidden)
    return Model(embed=embed, blocks=blocks, norm=None, head=None, max_context=TOKENS, root="")


GATED = Experts(
    hidden=HIDDEN,
    intermediate_size=20,
    num_experts=6,
    top_k=4,
    scores="softmax",
    shared=MLP(hidden=HIDDEN, intermediate_size=28, name="shared"),
    shared_gate="opened",
)


@fused
@pytest.mark.parametrize("part", [SMALL, LARGE, GATED], ids=["many", "one", "gated"])
@pytest.mark.parametrize("tokens", [1, 2, 30, 131])
def test_fused_experts_equal_torch(part, tokens):
    """Test few tokens, so that most experts have none, and more tokens than a tile."""
    layer = layer_of(part)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(layer.fused(x), layer.torch(x), atol=2e-6, rtol=1e-5)


@fused
def test_extreme_routing():
    layer = layer_of(GATED)
    layer.router.weight[3] = 4 * layer.router.weight[:6].abs().sum(0)
    x = torch.rand(90, HIDDEN, generator=torch.Generator().manual_seed(1))
    layer.router.weight[[0, 5]] = -layer.router.weight[3]
    assert (layer.router.in_fp32(x)[:, :6].argmax(1) == 3).all()
    torch.testing.assert_close(layer.fused(x), layer.torch(x), atol=2e-6, rtol=1e-5)


@fused
@pytest.mark.parametrize("part", [SMALL, GATED], ids=["many", "gated"])
def test_a_row_of_experts_is_the_same_in_tiles_of_any_size_bit_for_bit(part):
    layer = layer_of(part)
    x = torch.randn(150, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole = layer.fused(x)
    for row in (0, 1, 77, 149):
        assert torch.equal(layer.fused(x[row : row + 1])[0], whole[row])
    assert torch.equal(layer.fused(x[40:60]), whole[40:60])


@fused
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_ranks_sum_expert_outputs_in_float32(dtype, tolerance):
    x = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    ranks = [Rank(number, 2) for number in range(2)]
    for world in ranks:
        assert layer_of(GATED, world, dtype).fused(x).dtype == dtype
    (first,), (second,) = (world.brought for world in ranks)
    assert first.dtype == second.dtype == torch.float32
    whole = layer_of(GATED, dtype=dtype).fused(x).float()
    torch.testing.assert_close(first + second, whole, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("plain_first", [True, False])
def test_experts_of_one_stack_have_one_form(plain_first):
    """A kernel takes all of them, and would read memory that no expert has filled."""
    stack, slots = ExpertStack(2), Slots((Slot("w", 0, 3, 0),), 3, 0, 64)
    planes = pack_blocks(BlockWeight(torch.zeros(3, 40, dtype=torch.uint8), "Q4_1", 64), torch.device("cpu"))
    puts = [
        lambda: stack.place(0, slots, Target(torch.float32, torch.device("cpu"))),
        lambda: stack.put_blocks(1, planes),
    ]
    first, second = puts if plain_first else puts[::-1]
    first()
    with pytest.raises(CheckpointError, match="experts of a layer are quantized differently"):
        second()


def test_expert_matrices_are_stored_once_and_stacked():
    layer = layer_of(SMALL)
    for stack, linears in zip(layer.stacks, (layer.ups, layer.downs), strict=True):
        assert len(stack) == len(linears) == SMALL.num_experts and stack.is_contiguous()
        for number, linear in enumerate(linears):
            assert linear.weight.data_ptr() == stack[number].data_ptr() and linear.weight.shape == stack[number].shape
    stacks = filled("torch").weights.stacks.values()
    assert stacks and all(stack.whole is None for stack in stacks), "torch has each by itself"


class Live(TorchDispatchMode):
    """The most bytes that tensors had at once, but for those that were there before."""

    def __init__(self, *before):
        super().__init__()
        self.count, self.now, self.most = {}, 0, 0
        self.before = {tensor.untyped_storage()._cdata for tensor in before}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor):
                self.seen(one)
        return made

    def seen(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.before:
            return
        if key not in self.count:
            self.count[key] = 0
            self.now += size
            self.most = max(self.most, self.now)
        self.count[key] += 1
        weakref.finalize(tensor, self.gone, key, size)

    def gone(self, key, size):
        self.count[key] -= 1
        if not self.count[key]:
            del self.count[key]
            self.now -= size


@fused
@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("shared", [0, 5632])
@pytest.mark.parametrize("inner", [768, 4096])
def test_a_step_takes_no_more_than_the_plan_counts(tokens, shared, inner):
    """Check layers of production width on meta tensors."""
    hidden = 2048
    beside = MLP(hidden=hidden, intermediate_size=shared, name="shared") if shared else None
    gate = "opened" if shared else None
    sizes = {"hidden": hidden, "intermediate_size": inner, "num_experts": 128, "top_k": 8}
    part = Experts(scores="softmax", shared=beside, shared_gate=gate, **sizes)
    model = with_layers(part, hidden=hidden)
    layer = layer_of(part, dtype=torch.bfloat16, device="meta", hidden=hidden)
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    with recorded(), Live(*(one.weight for one in layer.linears)) as live:
        layer.fused(x)
    steps = workspace(model, device="cuda", kernels="triton", size=StepSize(tokens, 1), element_bytes=2)
    counted = summed(steps) - PROCESS_BYTES["cuda"]
    assert live.most <= counted <= 2 * live.most + 10 * x.nbytes
