"""Faults planted in declarations and in operations of families. The comparison with transformers must notice each.

A fault changes a declared part, or the operations of the program that is executed. The prompt is longer than all
windows and is computed in two steps, so that states and pages of the first step are read.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.api.errors import EngineError
from engine.layers.reference import executor as reference
from engine.lowering import operations as ops
from engine.models import parts
from engine.models.checkpoint import read_checkpoint
from engine.models.parts import all_bodies
from tests.engine.layers import conftest
from tests.engine.layers.families import VOCAB
from tests.engine.layers.test_families import TOLERANCE, Family

Change = Callable[[Any], Any]


def of(kind: type | tuple[type, ...], change: Change) -> Change:
    """Return a change of a model that changes each body of a kind."""

    def body(one: Any) -> Any:
        if isinstance(one, parts.Parallel):
            return replace(one, bodies=tuple(map(body, one.bodies)))
        return change(one) if isinstance(one, kind) else one

    def block(one: Any) -> Any:
        return replace(one, body=body(one.body), shortcut=body(one.shortcut))

    return lambda model: replace(model, blocks=tuple(tuple(map(block, blocks)) for blocks in model.blocks))


def sets(kind: type | tuple[type, ...], **values: Any) -> Change:
    """Return a change of the fields of all bodies of a kind. A function gets the body."""
    return of(
        kind, lambda one: replace(one, **{key: new(one) if callable(new) else new for key, new in values.items()})
    )


def inside(name: str, **values: Any) -> Callable[[Any], Any]:
    """Return a function that changes the fields of a part of a body. A function gets the value of the field."""

    def changed(one: Any) -> Any:
        part = getattr(one, name)
        if part is None:
            return None
        return replace(part, **{key: new(getattr(part, key)) if callable(new) else new for key, new in values.items()})

    return changed


def whole(**values: Any) -> Change:
    return lambda model: replace(model, **{key: new(model) if callable(new) else new for key, new in values.items()})


def blocks(**values: Any) -> Change:
    return lambda model: replace(
        model, blocks=tuple(tuple(replace(one, **values) for one in block) for block in model.blocks)
    )


ATTENTION, EXPERTS, LATENT, MLP = parts.Attention, parts.Experts, parts.LatentAttention, parts.MLP
MAMBA, DELTA = parts.Mamba2, parts.DeltaNet

# Fault → family, change of its model.
DECLARED: dict[str, tuple[str, Change]] = {
    "gate and up of experts swapped": ("deepseek-v3", sets(EXPERTS, gate="up_proj", up="gate_proj")),
    "correction bias omitted": ("deepseek-v3", sets(EXPERTS, correction="")),
    "one group too few": ("deepseek-v3", sets(EXPERTS, groups_kept=lambda one: one.groups_kept - 1)),
    "groups ranked by their largest score": ("deepseek-v3", sets(EXPERTS, group_score="max")),
    "groups ranked by two scores": ("deepseek-v2", sets(EXPERTS, group_score="top_two")),
    "one expert too few": ("glm4-moe", sets(EXPERTS, top_k=lambda one: one.top_k - 1)),
    "weights not normalised": ("bailing2", sets(EXPERTS, normalized=False)),
    "weights normalised": ("glm4-moe-groups", sets(EXPERTS, normalized=True)),
    "routed scaling factor omitted": ("lfm2-moe", sets(EXPERTS, weight_scale=1.0)),
    "softmax over all experts": ("granite-moe", sets(EXPERTS, scores="softmax")),
    "softmax scores instead of sigmoid": ("minimax-m2", sets(EXPERTS, scores="softmax")),
    "shared expert omitted": ("afmoe-odd", sets(EXPERTS, shared=None)),
    "limit of gates omitted": ("gpt-oss", sets(EXPERTS, limit=1e9)),
    "offset of up omitted": ("gpt-oss", sets(EXPERTS, up_offset=0.0)),
    "weights on outputs instead of inputs": ("llama4-odd", sets(EXPERTS, scales_inputs=False)),
    "jitter of SparseMixer omitted": ("phimoe", sets(EXPERTS, jitter=0.0)),
    "experts read the input of the attention": ("arctic", blocks(shortcut_norm=None)),
    "norm of latents without its weight": (
        "deepseek-v3",
        sets(LATENT, latent_norm=inside("latent_norm", weight=False)),
    ),
    "norm of query latents without its weight": ("deepseek-v3", sets(LATENT, q_norm=inside("q_norm", weight=False))),
    "mscale of YaRN omitted": ("deepseek-v3", sets(LATENT, scale=lambda one: one.query_dim**-0.5)),
    "latent keys rotated in halves": ("deepseek-v3", sets(LATENT, rope=inside("rope", interleaved=False))),
    "scale of latents omitted": ("longcat", sets(LATENT, latent_norm=inside("latent_norm", scale=1.0))),
    "one selected key too few": ("deepseek-v32", sets(LATENT, indexer=inside("indexer", top_k=lambda k: k - 1))),
    "RoPE on half as many dimensions": ("neox", sets(ATTENTION, rope=inside("rope", dim=lambda dim: dim // 2))),
    "RoPE in halves instead of pairs": ("glm", sets(ATTENTION, rope=inside("rope", interleaved=False))),
    "RoPE in layers without positions": (
        "smollm3",
        sets(ATTENTION, rope=lambda one: one.rope or parts.Rope(dim=one.head_dim, theta=10000.0)),
    ),
    "QK norms before the rotation": ("hunyuan", sets(ATTENTION, qk_norm_last=False)),
    "QK norms of each head": ("olmo3", sets(ATTENTION, qk_norm=None)),
    "window one token longer": ("cwm", sets(ATTENTION, window=lambda one: one.window and one.window + 1)),
    "window one token shorter": ("gpt-oss", sets(ATTENTION, window=lambda one: one.window and one.window - 1)),
    "chunk one token longer": ("llama4", sets(ATTENTION, chunk=lambda one: one.chunk and one.chunk + 1)),
    "sinks omitted": ("gpt-oss", sets(ATTENTION, sinks=False)),
    "queries not scaled by position": ("ministral3", sets(ATTENTION, query_scale=None)),
    "values not scaled": ("mimo-v2", sets(ATTENTION, value_scale=1.0)),
    "steeper slopes of ALiBi": ("bloom", sets(ATTENTION, alibi=parts.Alibi(max_bias=7.0))),
    "scale of scores of another size": ("granite-moe", sets(ATTENTION, scale=None)),
    "up and gate of another half": ("glm", sets(MLP, up_first=True)),
    "residual multiplier omitted": ("granite-moe", blocks(scale=1.0)),
    "embedding multiplier omitted": ("granite-moe", whole(embed=inside("embed", scale=1.0))),
    "logits multiplier omitted": ("granite-moe", whole(head=inside("head", scale=1.0))),
    "decays of lightning attention of a larger factor": (
        "minimax",
        sets(parts.LightningAttention, slopes=inside("slopes", factor=lambda factor: 1.1 * factor)),
    ),
    "per-layer embedding of the layer before": (
        "gemma3n",
        sets(parts.LayerInput, layer=lambda one: max(0, one.layer - 1)),
    ),
}


def shifted(field: str) -> Change:
    """Return a change of an operation: the buffer in a field is that of the token before."""

    def change(op: Any, run: Any) -> None:
        value = getattr(op, field)
        value = value.value if isinstance(value, ops.Columns) else value
        run[value] = run[value].roll(1, 0)
        reference_functions[type(op)](op, run)

    return change  # type: ignore[return-value]


def after(work: Callable[[Any, Any], None]) -> Change:
    """Return a change of an operation: `work` follows it."""

    def change(op: Any, run: Any) -> None:
        reference_functions[type(op)](op, run)
        work(op, run)

    return change  # type: ignore[return-value]


def state_lost(op: Any, run: Any) -> None:
    run.step.states[op.layer][-1].zero_()


def next_expert(op: Any, run: Any) -> None:
    run[op.chosen] = (run[op.chosen] + 1) % op.part.num_experts


def corrected_weights(op: Any, run: Any) -> None:
    run[op.weights] = run[op.weights] + run.weights.correction(op.correction)[run[op.chosen]]


reference_functions = dict(reference.FUNCTIONS)
# Fault → family, kind of operation, change of it.
EXECUTED: dict[str, tuple[str, type, Any]] = {
    "experts swapped": ("minimax-m2", ops.Route, after(next_expert)),
    "correction bias used as weight": ("deepseek-v3", ops.Route, after(corrected_weights)),
    "input of a convolution shifted by one token": ("lfm2-moe", ops.CausalConv, shifted("x")),
    "state of a scan lost between steps": ("mamba2", ops.SelectiveScan, after(state_lost)),
    "state of a scan shifted by one token": ("mamba2", ops.SelectiveScan, shifted("x")),
    "state of a delta rule lost between steps": ("qwen3_5", ops.DeltaRule, after(state_lost)),
    "decays of a delta rule shifted by one token": ("qwen3_5", ops.DeltaRule, shifted("a")),
    "state of RG-LRU lost between steps": ("recurrent-gemma", ops.GatedRecurrence, after(state_lost)),
    "values of another head": (
        "deepseek-v2",
        ops.ExpandValues,
        after(lambda op, run: run.__setitem__(op.y, run[op.y].roll(1, 1))),
    ),
    "gate of another token": ("afmoe-odd", ops.Gate, shifted("gate")),
    "selection of another token": ("deepseek-v32", ops.SelectKeys, shifted("q")),
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp("planted") / name)
        return made[name]

    return get


def differs(one: Family) -> bool:
    """Return whether the comparison with transformers fails, or the engine refuses the model."""
    ids = torch.randint(3, VOCAB, (31,), generator=torch.Generator().manual_seed(3)).tolist()
    with suppress(EngineError):
        got = conftest.Driver(one.path).run(ids, 17)
        return not torch.allclose(got, one.logits(ids), atol=TOLERANCE, rtol=0)
    return True


@pytest.mark.parametrize("fault", DECLARED)
def test_faults_of_a_declaration_are_noticed(
    fault: str, family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = DECLARED[fault]
    one = family(name)
    checkpoint = read_checkpoint(one.path)
    changed = change(checkpoint.model)
    assert changed != checkpoint.model, "the fault changes nothing"
    monkeypatch.setattr(conftest, "read_checkpoint", lambda path: replace(checkpoint, model=changed))
    assert differs(one)


@pytest.mark.parametrize("fault", EXECUTED)
def test_faults_of_an_operation_are_noticed(
    fault: str, family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kind, change = EXECUTED[fault]
    monkeypatch.setitem(reference.FUNCTIONS, kind, change)
    assert differs(family(name))


@pytest.mark.parametrize("name", sorted({name for name, *_ in (*DECLARED.values(), *EXECUTED.values())}))
def test_families_without_a_fault_equal_transformers(name: str, family: Callable[[str], Family]) -> None:
    assert all_bodies(read_checkpoint(family(name).path).model)
    assert not differs(family(name))
