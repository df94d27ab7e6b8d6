"""Rewritten lists of operations against the reference executor on the original list."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.api.errors import ConfigError
from engine.distributed.world import SINGLE
from engine.kv.layout import layout
from engine.layers.kv import kv_layers
from engine.layers.model import TextModel, make_pages
from engine.layers.reference import executor as reference
from engine.layers.reference.run import Run
from engine.layers.step import plan_step
from engine.lowering.lower import lower
from engine.lowering.measures import buffer_widths
from engine.lowering.operations import (
    Activation,
    Add,
    AddNormalize,
    AllReduce,
    Attend,
    Combine,
    Linear,
    Matrix,
    Normalize,
    PrepareKV,
    QKNorm,
    Quantized,
    Rotate,
    WriteKV,
)
from engine.lowering.program import Op, values_read, values_written
from engine.lowering.rewrites import (
    compiled_ops,
    fuse_add_normalize,
    fuse_prepare_kv,
    last_uses,
    quantize_outputs,
    reduce_sums,
)
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import Model
from engine.models.sources import sources
from tests.engine.layers.conftest import CASES, random_model
from tests.engine.layers.families import random_family
from tests.engine.lowering.batches import prompt

MODELS = ("llama-odd-heads-biases", "gemma2", "qwen3", "cohere-qk-norm", "olmo2", "glm4", "qwen2-moe", "mixtral")
FAMILIES = ("bloom",)
IDS = [5, 9, 40, 41, 3, 80, 7]


@pytest.fixture(scope="module", params=MODELS + FAMILIES)
def loaded(request, tmp_path_factory) -> TextModel:
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    (random_family if request.param in FAMILIES else random_model)(request.param).save_pretrained(path)
    checkpoint = read_checkpoint(path)
    form = layout(checkpoint.model, block_tokens=4, element_bytes=4)
    model = TextModel(checkpoint.model, form, SINGLE, torch.float32, "cpu")
    model.load(checkpoint)
    return model


def states(loaded: TextModel, ops: tuple[Op, ...], world=SINGLE, forget: bool = False) -> torch.Tensor:
    """Return the hidden states of a prompt. forget: buffers are deleted after their last use."""
    pages = make_pages(loaded.layout, 40, torch.float32, torch.device("cpu"))
    batch = prompt(IDS, loaded.layout)
    step = plan_step(batch, pages, loaded.layout, loaded.program.ropes)
    kv = kv_layers(loaded.layout)
    run = Run(loaded.weights, world, kv, torch.float32, step, batch.ids, batch.positions)
    with torch.inference_mode():
        for op, unused in zip(ops, last_uses(ops, loaded.program.out), strict=True):
            reference.execute([op], run)
            for name in unused if forget else ():
                del run.values[name]
    return run[loaded.program.out]


REWRITES: dict[str, Callable[[tuple[Op, ...]], tuple[Op, ...]]] = {
    "prepare kv": lambda ops: fuse_prepare_kv(ops, norms=False),
    "prepare kv and norms": lambda ops: fuse_prepare_kv(ops, norms=True),
    "add and norm": fuse_add_normalize,
    "all": lambda ops: fuse_add_normalize(fuse_prepare_kv(ops, norms=True)),
}


@pytest.mark.parametrize("rewrite", REWRITES)
def test_rewritten_operations_compute_the_same(rewrite, loaded):
    ops = loaded.program.ops
    rewritten = REWRITES[rewrite](ops)
    assert rewritten != ops
    # BLOOM has neither rotation nor norms of q and k, so there is nothing to join with its WriteKV.
    assert len(rewritten) < len(ops) or not any(isinstance(op, Rotate | QKNorm) for op in ops)
    assert torch.equal(states(loaded, rewritten), states(loaded, ops))


def test_fused_lists_have_no_operation_left_that_a_kernel_joins(loaded):
    ops = fuse_add_normalize(fuse_prepare_kv(loaded.program.ops, norms=True))
    assert not any(isinstance(op, Rotate | WriteKV) for op in ops)
    assert not any(isinstance(op, QKNorm) and op.separate for op in ops)
    for add, after in zip(ops, ops[1:], strict=False):
        assert not (isinstance(add, Add) and isinstance(after, Normalize) and after.x == add.x)
    attends = [op for op in ops if isinstance(op, Attend)]
    prepared = [op for op in ops if isinstance(op, PrepareKV)]
    assert [(op.layer, op.part.rope, op.heads) for op in attends] == [(op.layer, op.rope, op.heads) for op in prepared]


def test_values_that_nothing_reads_may_be_deleted(loaded):
    for ops in (loaded.program.ops, fuse_add_normalize(fuse_prepare_kv(loaded.program.ops, norms=True))):
        assert torch.equal(states(loaded, ops, forget=True), states(loaded, loaded.program.ops))
        unused = last_uses(ops, loaded.program.out)
        assert sum(map(len, unused)) > len(loaded.model.blocks), "most buffers are deleted in every layer"


class Doubled:
    """A rank of two whose products are equal, so a sum of both is twice its own."""

    size = 2

    def __init__(self) -> None:
        self.count = 0

    def all_reduce(self, x):
        self.count += 1
        return x * 2


def reducing(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the operations of a rank, which adds the products of projections and experts with divided inputs."""
    divided = [
        replace(op, reduce=True)
        if isinstance(op, Combine) or (isinstance(op, Linear) and op.weight.linear.split == "inputs" and not op.partial)
        else op
        for op in ops
    ]
    return tuple(divided)


def test_sums_are_reduced_once_per_residual_block(loaded, monkeypatch):
    ops = reducing(loaded.program.ops)
    once = reduce_sums(ops)
    assert not any(isinstance(op, Linear | Combine) and op.reduce for op in once)
    blocks = sum(len(block) for block in loaded.model.blocks)
    assert sum(isinstance(op, AllReduce) for op in once) == blocks

    def linear(op, run):
        plain(op, run)
        if op.reduce:
            run[op.y] = run.world.all_reduce(run[op.y])

    plain = reference.FUNCTIONS[Linear]
    monkeypatch.setitem(reference.FUNCTIONS, Linear, linear)
    each, joined = Doubled(), Doubled()
    torch.testing.assert_close(states(loaded, once, joined), states(loaded, ops, each), atol=1e-4, rtol=1e-4)
    assert joined.count == blocks <= each.count


def test_outputs_are_quantized_only_if_all_readers_are_matrices(loaded):
    asked: list[tuple[Op, list[str]]] = []

    def possible(op, matrices):
        asked.append((op, [matrix.name for matrix in matrices]))
        return True

    ops = fuse_add_normalize(fuse_prepare_kv(loaded.program.ops, norms=True))
    made = quantize_outputs(ops, possible)
    assert len(made) == len(ops)
    for at, (op, before) in enumerate(zip(made, ops, strict=True)):
        if isinstance(op, Quantized):
            assert op.op == before and all(isinstance(matrix, Matrix) for matrix in op.matrices)
            readers = _readers_by_hand(ops, at, before.y.name)
            assert [one.weight for one in readers] == list(op.matrices)
        elif isinstance(before, Normalize | AddNormalize | Activation):
            readers = _readers_by_hand(ops, at, before.y.name)
            assert not readers or any(not isinstance(one, Linear) for one in readers)
    assert any(isinstance(op, Quantized) for op in made) and asked


def _readers_by_hand(ops, at, name):
    found = []
    for op in ops[at + 1 :]:
        found += [op] if name in {value.name for value in values_read(op)} else []
        if name in {value.name for value in values_written(op)}:
            break
    return found


def test_buffers_have_room_for_every_value(loaded):
    ops = compiled_ops(loaded.program)
    widths = buffer_widths(ops)
    for op in ops:
        for value in (*values_read(op), *values_written(op)):
            assert value.elements <= widths[value.name]
    assert set(widths) == {value.name for op in ops for value in (*values_read(op), *values_written(op))}


@pytest.mark.parametrize("name", ["llama", "cohere", "qwen3-moe", "gemma2"])
def test_lowering_for_ranks_divides_heads_and_inner_values(name, tmp_path):
    random_model(name).save_pretrained(tmp_path)
    model: Model = read_checkpoint(tmp_path).model
    whole, half = lower(model), lower(model, 2)
    assert [type(op) for op in whole.ops] == [type(op) for op in half.ops]
    for one, two in zip(whole.ops, half.ops, strict=True):
        match one:
            case Attend():
                assert (one.heads, one.y.width) == (2 * two.heads, 2 * two.y.width)
            case Activation():
                assert one.y.width == 2 * two.y.width
            case Linear() if one.weight.linear.split == "inputs" and not one.partial:
                assert two.reduce and not one.reduce and one.y == two.y
    assert [weight.name for weight in whole.weights] == [weight.name for weight in half.weights]
    with pytest.raises(ConfigError, match="5 ranks cannot share 6 heads; use one of 1, 2, 3, 6 ranks"):
        lower(model, 5)


def test_weights_of_a_program_are_the_tensors_of_the_declaration(loaded):
    """The declaration's list of tensors is written separately."""
    wanted = {name.rpartition(".")[0] for name in sources(loaded.model)}
    matrices = {f"{one.path}.{row.source}" for one in loaded.program.weights if isinstance(one, Matrix)
                for row in one.linear.rows}  # fmt: skip
    others = {one.name for one in loaded.program.weights if not isinstance(one, Matrix)}
    unnamed = {name for name in wanted - matrices if name not in others}
    assert matrices <= wanted
    assert {name.rpartition(".")[2] for name in unnamed} <= {"q_norm", "k_norm", "lm_head"}


def test_cases_exist():
    assert set(MODELS) <= set(CASES)
