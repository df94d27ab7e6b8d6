"""Rules: the variables that they may read, invariants of all rules, and messages to operators."""

import ast
import itertools
import json
import math
import random
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.config import exits
from appliance.config.keys import find
from appliance.config.problems import Refused
from appliance.config.settings import Given, Option, load
from appliance.constraints import kernels as kernel_rules
from appliance.constraints.facts import ModelFacts, model_facts
from appliance.constraints.ranks import RULES as RANKS
from appliance.constraints.rule import Facts, Rule, Variable, View
from appliance.constraints.rules import RULES
from appliance.constraints.variables import LANES, VARIABLES
from appliance.hardware.machine import FP8_CAPABILITY, Gpu, Machine
from appliance.planning.kernels import resolve
from appliance.planning.plan import Plan, plan
from appliance.planning.ranks import RankBudgets
from appliance.planning.validate import validate
from engine.formats.gptq import Gptq
from engine.formats.native import FP8_BLOCK, Groups
from engine.models.checkpoint import Checkpoint
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, ResidualBlock, RMSNorm, Rope
from engine.models.quantized import Quantization
from engine.models.ranks import tensor_problem
from engine.models.sources import attention_linears, linear_paths, mlp_linears
from kernels.cpu.library import VARIANTS
from tests.appliance.constraints.test_solve import FACTS, PLAIN, pool, situations

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
CPU = Machine(2, "affinity", 8 * GIB, "MemAvailable", no_gpu="no driver", kernels=("avx512", "avx2", "base"))
H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0))
GPU = replace(CPU, gpus=(H100,), triton=True, no_gpu="")


class Watched:
    """Hands out a value's fields and notes which were read."""

    def __init__(self, value: Any, read: set[str], before: str = "") -> None:
        self._value, self._read, self._before = value, read, before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._value, name)
        if isinstance(value, Facts | ModelFacts | Machine):
            return Watched(value, self._read, "" if name == "facts" else f"{name}.")
        self._read.add(self._before + name)
        return value


MOST_VIEWS = 1000


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_reads_only_its_declared_keys_and_facts(rule: Rule) -> None:
    """The rule is evaluated with every combination of its own variables, or 1,000 of them: the solver would miss an
    undeclared variable."""
    read: set[str] = set()
    draw = random.Random(0)
    own = [one for one in VARIABLES if one.name in rule.keys]
    for facts in FACTS.values():
        pools = [pool(variable, facts) for variable in own]
        if math.prod(map(len, pools)) <= MOST_VIEWS:
            chosen = list(itertools.product(*pools))
        else:
            chosen = [tuple(map(draw.choice, pools)) for _ in range(MOST_VIEWS)]
        for values in chosen:
            view = replace(View(facts), **{one.name: value for one, value in zip(own, values, strict=True)})
            rule.holds(Watched(view, read))  # type: ignore[arg-type]
    told = {*rule.keys, *rule.facts}
    # what memory lacks is asked of the whole view, by a function that a plan brings
    assert read <= told and (rule.name == "memory" or set(rule.keys) <= read), (read, told)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_auto_reads_only_its_declared_variables_which_are_earlier(variable: Variable) -> None:
    """The solver does not try other values of the variables that a failure does not depend on."""
    read: set[str] = set()
    draw, names = random.Random(0), [one.name for one in VARIABLES]
    for facts in FACTS.values():
        pools = [pool(one, facts) for one in VARIABLES]
        for _ in range(50):
            variable.auto(Watched(View(facts, *map(draw.choice, pools)), read))  # type: ignore[arg-type]
    assert read.intersection(names) == set(variable.reads) <= set(names[: names.index(variable.name)])


def test_rules_have_names_of_their_own_and_tie_variables() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert {key for rule in RULES for key in rule.keys} <= {one.name for one in VARIABLES}
    assert not [rule.name for rule in RULES if rule.text.endswith((".", ";"))]


def test_every_rule_excludes_something_and_leaves_something() -> None:
    held: dict[str, set[bool]] = {rule.name: set() for rule in RULES}
    more = replace(
        PLAIN,
        heads=((66, 1),),
        intermediate_sizes=(100,),
        held=True,
        held_on_gpu=3,
        mixed_on_gpu=True,
        quantized="4 bits",
        vocab=2,
        cross_alibi=True,
        wrong_chunks=True,
        recurrent=((5, "groups of a mixer's heads"),),
        stateful=3,
        latent=520,
        adapter_groups=4096,
        pages=((2, 6),),
        speech=True,
    )
    foreign = replace(PLAIN, foreign="OtherForCausalLM")
    for facts in (*FACTS.values(), *(replace(FACTS["four GPUs"], model=model) for model in (more, foreign))):
        for situation in situations(facts, seed=6, count=2500):
            view = replace(View(facts), **situation.written)
            for rule in RULES:
                held[rule.name].add(rule.holds(view))
    assert not [name for name, answers in held.items() if answers != {True, False}]


def test_variables_are_keys_of_the_manifest_with_their_values() -> None:
    facts = FACTS["a CPU"]
    for variable in VARIABLES:
        key = find(tuple(variable.key.split(".")))
        assert key is not None, variable.key
        assert ("auto" in key.choices) != variable.sole, variable.key
        words = {variable.spelled(value) for value in variable.values(facts) if isinstance(value, str)}
        assert words <= {*key.choices, "auto"} and set(key.choices) <= {*words, "auto"}, variable.key


def test_rule_limits_match_the_kernels() -> None:
    """GPU kernels cannot be imported before launch, so the rules repeat their numbers."""
    common = (ROOT / "kernels" / "attention" / "common.py").read_text()
    assert f"PRODUCTS = {FP8_CAPABILITY}  #" in (ROOT / "kernels" / "fp8.py").read_text()
    assert f"GROUP = {FP8_BLOCK}  #" in (ROOT / "kernels" / "e4m3.py").read_text()
    assert f"MAX_GROUP_SIZE = {kernel_rules.MOST_IN_A_GROUP}\n" in common
    latent = (ROOT / "kernels" / "attention" / "latent.py").read_text()
    assert f"MAX_RANK = {kernel_rules.LATENT_MOST}\n" in latent
    assert "q.shape[-1] % 8" in common and kernel_rules.HEAD_MULTIPLE == 8
    simd = (ROOT / "kernels" / "cpu" / "simd.h").read_text()
    assert set(re.findall(r"constexpr int W = (\d+)", simd)) == {str(lanes) for lanes in LANES.values()}
    assert set(LANES) == {variant.name for variant in VARIANTS}


def test_rules_are_data_beside_their_subject() -> None:
    """Each file of rules has a tuple of them, and rules.py has all."""
    named = set()
    for path in (ROOT / "appliance" / "constraints").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rule":
                named |= {word.value.value for word in node.keywords if word.arg == "name"}  # type: ignore[attr-defined]
    assert named == {rule.name for rule in RULES}


# -- messages ----------------------------------------------------------------------------------------------------------


def checkpoint(**more: Any) -> Checkpoint:
    norm = RMSNorm(size=32, eps=1e-6)
    attention = Attention(hidden=32, heads=4, kv_heads=2, head_dim=8, rope=Rope(dim=8, theta=1e4))
    block = (
        ResidualBlock(body=attention, before=norm),
        ResidualBlock(body=MLP(hidden=32, intermediate_size=48), before=norm),
    )
    embed = Embedding(vocab=131, hidden=32)
    model = Model(embed=embed, blocks=(block,), norm=norm, head=Head(tied=True), max_context=1000)
    facts = {"path": Path("/models/tiny"), "architecture": "Tiny", "config": {}, "generation": {}, "model": model}
    return Checkpoint(**(facts | {"dtype": "bfloat16", "eos_token_ids": (1,), "tensors": {}} | more))


@dataclass
class Told:
    plan: Plan | None = None
    error: Refused | None = None


def tell(folder: Path, text: str, machine: Machine = CPU, facts: Checkpoint | None = None) -> Told:
    file = folder / "m.yaml"
    file.write_text("apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\n" + text)
    try:
        return Told(plan=plan(load(Given(file)), facts or checkpoint(), machine))
    except Refused as error:
        return Told(error=error)


@pytest.mark.parametrize(
    ("text", "machine", "words"),
    [
        (
            "hardware:\n  device: cpu\nquantization:\n  kv_cache: fp8\n",
            GPU,
            "m.yaml:6:13: quantization.kv_cache: fp8 cannot be combined with hardware.device: cpu (m.yaml:4:11): "
            "only Triton kernels support an fp8 KV cache; Triton kernels require a GPU; use auto, float32, "
            "bfloat16, float16, int8 or int4, or hardware.device: auto or cuda",
        ),
        (
            "quantization:\n  kv_cache: fp8\n",
            CPU,
            "m.yaml:4:13: quantization.kv_cache: fp8: only Triton kernels support an fp8 KV cache; Triton kernels "
            "require a GPU; there is no usable GPU here (no driver); use auto, float32, bfloat16, float16, int8 or "
            "int4",
        ),
        (
            "quantization:\n  weights: int4\nhardware:\n  kernels: torch\n  device: cpu\n",
            CPU,
            "m.yaml:6:12: hardware.kernels: torch cannot be combined with quantization.weights: int4 (m.yaml:4:12): "
            "only compiled CPU kernels and Triton kernels support weights that are quantized to int8 or int4; use "
            "auto, avx512, avx2 or base, or quantization.weights: auto",
        ),
        (
            "quantization:\n  weights: int6\nhardware:\n  kernels: torch\n  device: cpu\n",
            CPU,
            "m.yaml:6:12: hardware.kernels: torch cannot be combined with quantization.weights: int6 (m.yaml:4:12): "
            "only compiled CPU kernels support weights that are quantized to int6; use auto, avx512, avx2 or base, or "
            "quantization.weights: auto",
        ),
        (
            "hardware: {graphs: true}\n",
            CPU,
            "m.yaml:3:20: hardware.graphs: true: CUDA graphs require Triton kernels; Triton kernels require "
            "a GPU; there is no usable GPU here (no driver); use auto or false",
        ),
        (
            "hardware:\n  batch_invariant: true\n  device: cuda\n  kernels: torch\n",
            GPU,
            "m.yaml:4:20: hardware.batch_invariant: true cannot be combined with hardware.kernels: torch "
            "(m.yaml:6:12): the sums of torch depend on the size of the batch; use false, or hardware.kernels: auto "
            "or triton",
        ),
    ],
)
def test_a_refusal_names_the_least_conflict_with_places_reasons_and_ways_out(
    tmp_path: Path, text: str, machine: Machine, words: str
) -> None:
    error = tell(tmp_path, text, machine).error
    assert error is not None and error.cause == exits.MANIFEST
    assert str(error).replace(f"{tmp_path}/", "") == words


def test_several_conflicts_are_reported_together_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "hardware:\n  device: cpu\n  kernels: torch\n  graphs: true\nquantization:\n  weights: int8\n  kv_cache: fp8\n"
    )
    error = tell(tmp_path, text + "  keep: false\n").error
    assert error is not None
    assert [(one.place.line, one.key) for one in error.problems] == [
        (5, "hardware.kernels"),
        (6, "hardware.graphs"),
        (9, "quantization.kv_cache"),
    ]
    assert all("; use " in one.message for one in error.problems)


def test_suggested_values_are_allowed(tmp_path: Path) -> None:
    """Each way out of some conflicts, taken one at a time."""
    base = {"quantization.kv_cache": "fp8", "hardware.device": "cpu"}
    assert tell(tmp_path, written(base), GPU).error is not None
    for key, values in (
        ("quantization.kv_cache", ("auto", "float32", "bfloat16", "float16", "int8", "int4")),
        ("hardware.device", ("auto", "cuda")),
    ):
        for value in values:
            assert tell(tmp_path, written(base | {key: value}), GPU).plan is not None, (key, value)


def written(values: dict[str, str]) -> str:
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name}: {value}")
    return "".join(f"{name}: {{{', '.join(keys)}}}\n" for name, keys in sections.items())


def reasons(told: Told) -> dict[str, tuple[Any, str]]:
    assert told.plan is not None, told.error
    return {one.key: (one.resolved, one.reason) for one in told.plan.effective}


def test_every_auto_reports_its_value_and_reason(tmp_path: Path) -> None:
    on_cpu, on_gpu = reasons(tell(tmp_path, "")), reasons(tell(tmp_path, "", GPU))
    assert on_cpu["hardware.graphs"] == (False, "avx512 kernels have none")
    assert on_gpu["hardware.graphs"] == (True, "decode steps of Triton kernels")
    assert on_cpu["engine.cache.block_tokens"] == (16, "one vector of scores of avx512 kernels")
    assert "2 whole vectors" in reasons(tell(tmp_path, "hardware: {kernels: avx2}\n"))["engine.cache.block_tokens"][1]
    assert reasons(tell(tmp_path, "", replace(GPU, triton=False)))["hardware.kernels"] == (
        "torch",
        "Triton is not installed: install the release that this torch requires",
    )


def test_blocks_of_partial_vectors_work_and_are_reported_as_slower(tmp_path: Path) -> None:
    value, why = reasons(tell(tmp_path, "engine: {cache: {block_tokens: 24}}\n"))["engine.cache.block_tokens"]
    assert value == 24 and why == "slower: not a multiple of 16, the vector width of avx512 kernels"
    text = "engine: {cache: {block_tokens: 24}}\nhardware: {kernels: avx2}\n"
    assert reasons(tell(tmp_path, text))["engine.cache.block_tokens"] == (24, "")


def test_fewer_requests_run_where_their_logits_would_fill_the_memory(tmp_path: Path) -> None:
    wide = replace(checkpoint().model, embed=Embedding(vocab=225_000, hidden=32))
    facts = checkpoint(model=wide)
    assert reasons(tell(tmp_path, "", facts=facts))["engine.scheduling.max_running"][0] == 256
    small = replace(CPU, memory_free=4 * GIB)
    value, why = reasons(tell(tmp_path, "", small, facts))["engine.scheduling.max_running"]
    # 8 bytes a logit: 439 MiB for 256 rows, and an eighth of 0.85 · 4 GiB is 435 MiB
    assert (
        value == 128 and why == "logits of 256 would take 439.5 MiB, and 435.2 MiB are an eighth of the usable memory"
    )
    requested = tell(tmp_path, "engine: {scheduling: {max_running: 256}}\n", small, facts).plan
    assert requested is not None and requested.engines[0].scheduling.max_running == 256


def test_a_model_that_nothing_can_mend_is_refused_at_its_path(tmp_path: Path) -> None:
    norm = LayerNorm(size=8, eps=1e-6)
    attention = Attention(
        hidden=32, heads=4, kv_heads=2, head_dim=8, rope=Rope(dim=8, theta=1e4), qk_norm=norm, qk_norm_span="all"
    )
    facts = checkpoint(model=replace(checkpoint().model, blocks=((ResidualBlock(body=attention),),)))
    error = tell(tmp_path, "", facts=facts).error
    assert error is not None and "model.source.path: the model has a layer norm over all heads" in str(error)


def test_a_gpu_is_looked_for_before_a_refusal_that_it_might_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def read(*, gpus: bool = True) -> Machine:
        looked.append(gpus)
        return GPU if gpus else replace(CPU, no_gpu="not looked for")

    monkeypatch.setattr("appliance.planning.validate.read_machine", read)
    head = f"apiVersion: slipway/v2\nmodel: {{source: {{path: {ROOT / 'manifests' / 'demo'}}}}}\nhardware: {{device: cpu}}\n"  # noqa: E501
    (tmp_path / "m.yaml").write_text(head)
    assert validate(Given(tmp_path / "m.yaml")).engines[0].hardware.device == "cpu" and looked == [False]
    (tmp_path / "m.yaml").write_text(head + "quantization: {kv_cache: fp8}\n")
    with pytest.raises(
        Refused, match=r"fp8 cannot be combined with hardware.device: cpu .*or hardware.device: auto or cuda"
    ):
        validate(Given(tmp_path / "m.yaml"))
    assert looked == [False, False, True]


def test_scales_of_fp8_pages_that_cannot_be_read_are_refused_before_the_start(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    shutil.copytree(ROOT / "manifests" / "demo", demo)
    (demo / "kv_cache_scales.json").write_text('{"kv_cache": {"scaling_factor": {"0": {"0": 1.0}}}}')
    (tmp_path / "m.yaml").write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {demo}}}}}\n")
    plain = Option("--set", "quantization.kv_cache", "bfloat16")  # reads no scales
    assert validate(Given(tmp_path / "m.yaml", (plain,)), GPU).engines[0].quantization.kv_cache == "bfloat16"
    fp8 = Option("--set", "quantization.kv_cache", "fp8")
    for options in ((), (fp8,)):  # auto is the format of the scales
        with pytest.raises(
            Refused, match="quantization.kv_cache: .*kv_cache_scales.json: has scales for layers"
        ) as caught:
            validate(Given(tmp_path / "m.yaml", options), GPU)
        assert caught.value.cause == exits.CHECKPOINT


@pytest.mark.parametrize(
    ("stated", "machine", "want", "why"),
    [
        ("fp8", GPU, "fp8", "the format that the checkpoint states for its KV cache"),
        ("fp8", CPU, "bfloat16", "; not fp8, which the checkpoint states: only Triton kernels support an fp8 KV cache"),
        ("int8", GPU, "int8", "the format that the checkpoint states for its KV cache"),
        ("int8", CPU, "int8", "the format that the checkpoint states for its KV cache; a token takes"),
        ("int4", CPU, "int4", "the format that the checkpoint states for its KV cache; a token takes"),
        ("nvfp4", GPU, "bfloat16", "; not nvfp4, which the checkpoint states: a KV cache in nvfp4 is not supported"),
    ],
)
def test_pages_have_the_format_that_the_checkpoint_states(
    stated: str, machine: Machine, want: str, why: str, tmp_path: Path
) -> None:
    """kv_cache_scheme of compressed-tensors, or kv_cache_quant_algo of ModelOpt; see tests/engine/models."""
    demo = tmp_path / "demo"
    shutil.copytree(ROOT / "manifests" / "demo", demo)
    config = json.loads((demo / "config.json").read_text())
    settings = {"quant_method": "modelopt", "kv_cache_quant_algo": stated.upper()}
    (demo / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (tmp_path / "m.yaml").write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {demo}}}}}\n")
    found = validate(Given(tmp_path / "m.yaml"), machine)
    assert found.engines[0].quantization.kv_cache == want
    assert why in next(one.reason for one in found.effective if one.key == "quantization.kv_cache")


# -- ranks -------------------------------------------------------------------------------------------------------------


def broken(facts: Facts, **values: Any) -> set[str]:
    return {rule.name for rule in RANKS if not rule.holds(replace(View(facts), **values))}


@pytest.mark.parametrize(
    ("heads", "intermediate_sizes", "ranks", "names"),
    [
        ((32, 8), 96, 2, set()),
        ((32, 8), 96, 16, set()),  # each KV head is on two ranks
        ((32, 8), 96, 6, {"ranks-heads"}),
        ((12, 8), 96, 12, {"ranks-heads"}),  # 12 ranks neither divide 8 KV heads nor are a multiple of them
        ((32, 8), 100, 8, {"ranks-inner"}),
        ((32, 8), 100, 3, {"ranks-heads", "ranks-inner"}),
    ],
)
def test_ranks_share_heads_and_inner_sizes_evenly(
    heads: tuple[int, int], intermediate_sizes: int, ranks: int, names: set[str]
) -> None:
    facts = Facts(ModelFacts(heads=(heads,), intermediate_sizes=(intermediate_sizes,)), replace(GPU, gpus=(H100,) * 16))
    assert broken(facts, device="cuda", kernels="triton", tensor=ranks) == names


def test_each_rank_of_each_engine_has_a_gpu() -> None:
    facts = Facts(ModelFacts(heads=((32, 8),), intermediate_sizes=(96,)), replace(GPU, gpus=(H100,) * 4))
    assert broken(facts, device="cuda", kernels="triton", tensor=4) == set()
    assert broken(facts, device="cuda", kernels="triton", tensor=4, data=2) == {"ranks-gpus"}
    assert broken(facts, device="cuda", kernels="triton", data=8) == set()  # engines of one rank may share a GPU
    assert broken(facts, device="cpu", kernels="avx512", tensor=8, data=2) == set()


def test_rank_rules_match_the_layers_and_the_engine_check() -> None:
    """By building the tensor-parallel layers themselves, for every small number of ranks."""
    from engine.api.errors import ConfigError
    from engine.distributed.world import Single
    from engine.layers.linear import LinearLayer

    built = (LinearLayer, Single, ConfigError)
    for heads, kv_heads, intermediate_sizes in (
        (8, 2, 48),
        (6, 3, 36),
        (12, 4, 60),
        (4, 4, 30),
        (9, 3, 27),
        (24, 8, 48),
    ):
        attention = Attention(hidden=16, heads=heads, kv_heads=kv_heads, head_dim=8, rope=None)
        norm = RMSNorm(size=16, eps=1e-6)
        block = (
            ResidualBlock(body=attention, before=norm),
            ResidualBlock(body=MLP(hidden=16, intermediate_size=intermediate_sizes), before=norm),
        )
        made = checkpoint(model=replace(checkpoint().model, blocks=(block,)))
        facts = Facts(model_facts(made), GPU)
        for ranks in range(1, 13):
            told = not broken(facts, device="cpu", kernels="torch", tensor=ranks)
            sizes = (heads, kv_heads, intermediate_sizes, ranks)
            assert told == shares(attention, intermediate_sizes, ranks, built), sizes
            assert told == (tensor_problem(made.model, None, ranks) is None), sizes


def shares(attention: Attention, intermediate_sizes: int, ranks: int, of: tuple[Any, ...]) -> bool:
    """Return True if every rank's layers can be built, and if their shares are consistent and add up to the full
    layers."""
    linear_layer, single, refusal = of
    try:
        for rank in range(ranks):
            world = single(rank, ranks)
            qkv, out = (linear_layer(linear, "", world) for linear in attention_linears(attention))
            mlp = MLP(hidden=16, intermediate_size=intermediate_sizes)
            up, down = (linear_layer(linear, "", world) for linear in mlp_linears(mlp))
            heads, kv_heads, _ = (piece.rows // attention.head_dim for piece in qkv.slots.pieces)
            if heads * attention.head_dim != out.slots.inputs or heads % kv_heads:
                return False
            if up.slots.rows != 2 * down.slots.inputs:
                return False
    except refusal:
        return False
    return True


def test_whole_numbers_that_ranks_would_cut_within_a_group_are_restored_for_torch(tmp_path: Path) -> None:
    made = checkpoint()
    scheme = dict.fromkeys(linear_paths(made.model), Gptq.of(Groups(4, 32)))
    own = replace(made, quantization=Quantization("gptq", scheme))
    why = (
        "compiled kernels multiply by the checkpoint's 4 bits (gptq, groups of 32), which cannot be cut along inputs "
        "into so many ranks: within a group that shares a scale, or in act order"
    )
    found = tell(tmp_path, "parallelism:\n  tensor: 2\n", facts=own).plan
    assert found is not None and found.engines[0].hardware.kernels == "torch"
    assert next(one.reason for one in found.effective if one.key == "hardware.kernels") == why
    error = tell(tmp_path, "parallelism:\n  tensor: 2\nhardware:\n  kernels: avx512\n", facts=own).error
    assert error is not None and str(error).replace(f"{tmp_path}/", "") == (
        "m.yaml:4:11: parallelism.tensor: 2 cannot be combined with hardware.kernels: avx512 (m.yaml:6:12): "
        f"{why}; use auto or 1, or hardware.kernels: auto or torch"
    )


def test_memory_decides_the_number_of_ranks_where_it_is_open(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: tiny}}\nhardware: {memory_share: 1}\nparallelism: {tensor: auto}\n"  # noqa: E501
    )
    # weights, and a step of theirs, that take more than what ranks exchange their sums through
    block = (checkpoint().model.blocks[0][0], ResidualBlock(body=MLP(hidden=32, intermediate_size=1_000_000)))
    facts = checkpoint(model=replace(checkpoint().model, blocks=(block,)))
    settings = load(Given(tmp_path / "m.yaml"))

    def host(free: int) -> Machine:
        return replace(GPU, gpus=(replace(H100, free=free),) * 4, memory_free=64 * GIB)

    def needs(ranks: int) -> int:
        """Return the least GPU memory in which the model fits on `ranks` ranks, found by bisection."""
        low, high = 0, 64 * GIB
        while high - low > 1:
            middle = (low + high) // 2
            view = View(Facts(ModelFacts(), host(middle)), device="cuda", kernels="triton", graphs=True, tensor=ranks)
            view = replace(view, dtype="bfloat16", kv_cache="bfloat16")
            low, high = (low, middle) if not RankBudgets(settings, facts, host(middle)).lacks(view) else (middle, high)
        return high

    one, two, four = needs(1), needs(2), needs(4)
    assert one > two > four
    for free, ranks in ((one, 1), (one - 1, 2), (two, 2), (two - 1, 4), (four, 4)):
        found = resolve(settings, facts, host(free))
        assert found.view.tensor == ranks, (free, one, two, four)
    assert found.choices["parallelism.tensor"].reason.startswith("fewer ranks have too little memory")
    with pytest.raises(Refused, match="no memory for one block of cache|a request of 2 tokens needs") as caught:
        plan(settings, facts, host(four - 1))
    assert caught.value.cause == exits.MEMORY
