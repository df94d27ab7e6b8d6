"""Pooling models: the plan matches the engines' memory, and the gateway's configuration matches the model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from appliance.config.problems import Refused
from appliance.config.settings import Given, Option
from appliance.hardware.described import hardware
from appliance.planning.plan import Plan
from appliance.planning.validate import validate
from engine.lowering.footprint import PARTS
from engine.lowering.lower import lower
from engine.lowering.measures import buffer_widths
from engine.lowering.rewrites import compiled_ops
from engine.models.checkpoint import read_checkpoint
from tests.appliance.planned_engines.test_reality import HOST, SMALL, built
from tests.engine.configs import with_arguments
from tests.engine.layers.pooled_cases import CASES, SIZES, WHOLE, save
from tests.engine.test_pooling import late

TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"no": 5, "yes": 9}, "merges": []}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp("pooled") / name)
            (made[name] / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        return made[name]

    return get


def planned(tmp_path: Path, checkpoint: Path, *sets: str) -> Plan:
    path = tmp_path / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {checkpoint}}}}}\n")
    return validate(Given(path, tuple(Option("--set", *one.split("=", 1)) for one in sets), {}), HOST)


def refused(tmp_path: Path, checkpoint: Path, *sets: str) -> str:
    with pytest.raises(Refused) as found:
        planned(tmp_path, checkpoint, *sets)
    return "\n".join(map(str, found.value.problems))


def compare(made: Plan) -> None:
    held, mapped = built(made.engines[0])
    assert made.engines[0].memory.ranks == (held,)
    assert made.memory.mapped == mapped
    assert sum(held[part] for part in PARTS if part in held) == made.memory.weights
    assert held["kv"] <= made.memory.cache <= held["kv"] + made.memory.block_bytes


@pytest.mark.parametrize("name", [name for name in CASES if "odd" not in name and "-" in name or name in WHOLE])
def test_an_engine_of_every_architecture_holds_what_was_planned(tmp_path: Path, folder: Callable, name: str) -> None:
    compare(planned(tmp_path, folder(name), *SMALL, "model.max_context=16"))
    compare(planned(tmp_path, folder(name), *SMALL, "model.max_context=13", "hardware.kernels=torch"))


@pytest.mark.parametrize("name", WHOLE)
def test_what_reads_both_ways_keeps_nothing(tmp_path: Path, folder: Callable, name: str) -> None:
    made = planned(tmp_path, folder(name))
    engine = made.engines[0]
    assert (engine.memory.kv_cache, made.memory.cache, made.memory.block_bytes, made.memory.state) == (0, 0, 0, ())
    assert engine.model.max_context <= engine.scheduling.max_step_tokens and built(engine)[0]["kv"] == 0


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3-both-ways", "qwen3"])
def test_buffers_of_a_step_are_as_wide_as_planned(folder: Callable, name: str) -> None:
    from tests.engine.layers.test_footprint import loaded

    checkpoint = read_checkpoint(folder(name))
    model = loaded(checkpoint, "base")
    assert model.compiled is not None
    assert model.compiled.buffers.widths == buffer_widths(compiled_ops(lower(checkpoint.model)))


def test_a_long_prompt_of_an_encoder_makes_a_long_step(tmp_path: Path, folder: Callable) -> None:
    path = tmp_path / "long"
    path.mkdir()
    for file in folder("modernbert").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2000}))
    engine = planned(tmp_path, path).engines[0]
    assert (engine.scheduling.max_step_tokens, engine.model.max_context) == (2000, 2000)
    engine = planned(tmp_path, path, "engine.scheduling.max_step_tokens=700").engines[0]
    assert (engine.scheduling.max_step_tokens, engine.model.max_context) == (700, 700)
    told = refused(tmp_path, path, "engine.scheduling.max_step_tokens=700", "model.max_context=701")
    assert "model.max_context: 701: the model has bidirectional attention and reads a prompt in one step" in told
    assert "use at most 700, or raise max_step_tokens to 701" in told


def test_memory_for_a_cache_that_is_not_there_is_refused(tmp_path: Path, folder: Callable) -> None:
    told = refused(tmp_path, folder("bert"), "hardware.kv_cache_memory=1GiB")
    assert "hardware.kv_cache_memory" in told and "no KV cache; leave it out" in told


def on_gpu(tmp_path: Path, checkpoint: Path, *sets: str) -> Plan:
    path = tmp_path / "m.yaml"
    path.write_text(f"apiVersion: slipway/v2\nmodel: {{source: {{path: {checkpoint}}}}}\n")
    options = tuple(Option("--set", *one.split("=", 1)) for one in sets)
    return validate(Given(path, options, {}), hardware("h200x1"))


@pytest.mark.parametrize("name", ["bert", "modernbert-tokens", "qwen3-score"])
def test_a_gpu_pools_by_triton_kernels_and_captures_nothing(tmp_path: Path, folder: Callable, name: str) -> None:
    engine = on_gpu(tmp_path, folder(name)).engines[0]
    assert (engine.hardware.device, engine.hardware.kernels, engine.hardware.graph_sizes, engine.memory.graphs) == (
        "cuda",
        "triton",
        (),
        0,
    )
    assert (engine.memory.kv_cache == 0, engine.memory.kv_cache_measured) == ((name in WHOLE), name not in WHOLE)


def test_graphs_that_a_shared_file_asks_for_take_nothing(tmp_path: Path, folder: Callable) -> None:
    (tmp_path / "site.yaml").write_text("hardware: {graphs: true}\n")
    path = tmp_path / "own.yaml"
    path.write_text(
        f"apiVersion: slipway/v2\nextends: site.yaml\nmodel: {{source: {{path: {folder('qwen3-score')}}}}}\n"
    )
    made = validate(Given(path, (), {}), hardware("h200x1"))
    assert (made.engines[0].hardware.graph_sizes, made.memory.graphs) == ((), 0)
    assert [problem.key for problem in made.notices] == ["hardware.graphs"]


def test_heads_that_triton_kernels_do_not_serve_are_left_to_torch(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SIZES, "hidden_size": 36, "num_attention_heads": 3})
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert on_gpu(tmp_path, tmp_path / "bert").engines[0].hardware.kernels == "torch"
    with pytest.raises(Refused, match="the model has the head size 12: Triton kernels support multiples of 8"):
        on_gpu(tmp_path, tmp_path / "bert", "hardware.kernels=triton")


def test_what_reads_both_ways_has_no_pages_of_any_type(tmp_path: Path, folder: Callable) -> None:
    with pytest.raises(Refused, match="kv_cache: .fp8. has no effect: .* no KV cache; leave it out"):
        on_gpu(tmp_path, folder("bert"), "quantization.kv_cache=fp8")
    assert on_gpu(tmp_path, folder("qwen3"), "quantization.kv_cache=fp8").engines[0].quantization.kv_cache == "fp8"


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "qwen3", "gemma3-classifier"])
def test_a_gpus_table_is_as_large_as_planned(tmp_path: Path, folder: Callable, name: str) -> None:
    from engine.worker.precompile import parts_on
    from kernels.fp8 import Fp8Products

    made = on_gpu(tmp_path, folder(name), "engine.scheduling={max_running: 7, max_step_tokens: 64}")
    engine = with_arguments(made.engines[0], load="random")
    rows = next(step for account in made.memory.accounts for step in account.steps if step.name.startswith("rows of a"))
    parts, _ = parts_on(torch.device("meta"), engine, Fp8Products())
    assert parts.table_bytes == made.memory.tables - rows.value


@pytest.mark.parametrize(
    ("name", "tasks", "labels", "activation", "pairs"),
    [
        ("bert", ("embed", "token_embed", "score"), 0, "normalize", "none"),
        ("bert-classifier", ("classify",), 3, "softmax", "none"),
        ("xlm-roberta-score", ("classify", "score"), 1, "sigmoid", "tokenizer"),
        ("modernbert-tokens", ("token_classify",), 3, "softmax", "none"),
        ("qwen3-score", ("classify", "score"), 1, "sigmoid", "reranker"),
    ],
)
def test_the_gateway_is_told_what_can_be_asked_for(
    tmp_path: Path, folder: Callable, name: str, tasks: tuple[str, ...], labels: int, activation: str, pairs: str
) -> None:
    gateway = planned(tmp_path, folder(name)).gateway
    assert gateway.tasks == tasks and gateway.pooled is not None
    assert len(gateway.pooled.labels) == labels
    assert (gateway.pooled.activation, gateway.pooled.pairs) == (activation, pairs)
    assert gateway.pooled.width == (labels or 48)


def test_a_model_of_late_interaction_serves_tokens_and_scores(tmp_path: Path) -> None:
    late(tmp_path / "late")
    (tmp_path / "late" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    made = planned(tmp_path, tmp_path / "late", *SMALL)
    compare(made)
    pooled = made.gateway.pooled
    assert made.gateway.tasks == ("token_embed", "score") and pooled is not None and pooled.late is not None
    assert (pooled.late.markers, pooled.late.lengths, pooled.late.skipped) == (("[Q] ", "[D] "), (12, 40), (".",))
    assert (pooled.width, pooled.activation, pooled.pairs) == (16, "normalize", "none")
    told = refused(tmp_path, tmp_path / "late", "model.pooling.pool=mean")
    assert "model.pooling.pool: mean: this checkpoint returns vectors of tokens" in told
    assert "model.pooling.max_input: 99 has no effect" in refused(
        tmp_path, tmp_path / "late", "model.pooling.max_input=99"
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.layers.conftest import random_model

    path = tmp_path_factory.mktemp("decoder") / "qwen3"
    random_model("qwen3").save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return path


def test_a_decoder_is_served_to_what_the_manifest_asks_for(tmp_path: Path, decoder: Path) -> None:
    assert planned(tmp_path, decoder).gateway.tasks == ("generate",)
    for task, tasks in (("embed", ("embed", "token_embed", "score")), ("score", ("classify", "score"))):
        made = planned(tmp_path, decoder, *SMALL, f"model.task={task}")
        assert made.gateway.tasks == tasks and made.memory.cache > 0
        compare(made)
    pooled = planned(tmp_path, decoder, "model.task=embed", "model.pooling.dimensions=[8, 16]").gateway.pooled
    assert pooled is not None and pooled.dimensions == (8, 16)


@pytest.mark.parametrize(
    ("name", "sets", "told"),
    [
        ("bert", ("model.task=generate",), "model.task: generate: this checkpoint supports embed"),
        ("bert-tokens", ("model.task=embed",), "model.task: embed: this checkpoint supports classify"),
        ("", ("model.task=classify",), "supports generate or embed or score"),
        ("", ("model.pooling.pool=mean",), "model.pooling: only for embedding"),
        ("bert", ("model.pooling.dimensions=[49]",), "model.pooling.dimensions: 49: vectors have 1 to 48 numbers"),
        ("", ("model.task=score", "model.pooling.score_tokens=[maybe, 'yes']"), "'maybe' is not one token of"),
    ],
)
def test_what_a_checkpoint_cannot_be_is_refused_at_its_key(
    tmp_path: Path, folder: Callable, decoder: Path, name: str, sets: tuple[str, ...], told: str
) -> None:
    assert told in refused(tmp_path, folder(name) if name else decoder, *sets)


def test_the_plan_says_what_auto_has_come_to(tmp_path: Path, folder: Callable) -> None:
    values = {one.key: (one.resolved, one.reason) for one in planned(tmp_path, folder("bert")).effective}
    assert values["model.task"] == ("embed", "BertModel")
    assert values["model.pooling.pool"] == ("mean", "not set by the checkpoint")
    assert values["model.pooling.normalize"] == (True, "not set by the checkpoint")
